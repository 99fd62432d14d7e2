"""Cache behaviour on what a trained model really selects: traces of decode steps, replayed under small caches.

    python benchmarks/tier_traces.py [--tokens 30000] [--tasks span_copy table_copy multiquery] [--samples 2]
        [--policies ...] [--caps 0.1 0.25 0.5] [--save traces.json | --load traces.json]
    python benchmarks/tier_traces.py -m qwen2.5-coder --text novel.txt --tokens 4096 --samples 2

The model answers questions of the suite over long contexts, or goes on with stretches of a text; of every decode step
and layer the trace has the 32-token blocks that any head read. A replay has a cache of a share of all parts (layer and
block), at first the latest ones, as a prefill leaves them, and kv/replacement.py's rules; ``best``, Belady's, knows
what comes: whoever is wanted last leaves. Layers share the cache (PSA's unified
pool), or, behind the stroke, have an equal share each. Hits are of the parts that steps wanted; MB a step is what would
come in at the 8B shape (32 layers, 128 KiB a part; clock, unified), and ms what that takes at 51 GB/s, which is what
the copy kernel reaches (docs/tiers.md). The last column: of those misses the ones that the step before wanted, which is
all that fetching its hits ahead could save.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from saccade import LLM, SamplingParams
from saccade.engine.observing import observing
from saccade.engine.watch.observe import AttentionCall
from saccade.eval.suite import make
from saccade.kv.replacement import POLICIES, Replacement
from saccade.selection.pieces import read_blocks

SIZE = 32  # tokens of a block
LAYERS, PART, LINK = 32, 128 * 1024, 51e9  # of the 8B shape; bytes a second
CHOSEN = ("quest(budget=768, block_size=32, dense_layers=0)", "psa(epsilon=0.9)", "topk(k=0.02)")
Trace = list[list[list[int]]]  # steps, layers, blocks
Counts = tuple[int, int, int, int]


def prompt(llm: LLM, task: str, index: int, tokens: int) -> list[int]:
    turn = make(task, tokens, index).turns[0]
    return llm.encode(" ".join(turn.context) + turn.question)


def stretch(llm: LLM, text: str, index: int, tokens: int) -> list[int]:
    """``tokens`` of a text, each ``index`` of another place."""
    first = (index + 1) * len(text) // 8
    return llm.encode(text[first : first + 8 * tokens])[:tokens]


def record(llm: LLM, ids: list[int], task: str, policy: str, most: int) -> dict[str, Any]:
    """The blocks that each decode step of an answer read in each layer."""
    steps: Trace = []

    def see(call: AttentionCall) -> None:
        if call.q.shape[1] > 1:
            return
        if call.layer == 0:
            steps.append([])
        steps[-1].append(np.nonzero(read_blocks(call.selection, SIZE).numpy())[0].tolist())

    with observing(llm.engine, see):
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        llm.generate([ids], params, policy=policy)
    return {"task": task, "policy": policy, "blocks": -(-(len(ids) + most) // SIZE), "steps": steps}


class Best:
    """Belady's rule over a known ``steps``, in place of a Replacement."""

    def __init__(self, slots: int, steps: list[list[np.ndarray[Any, Any]]], parts: int) -> None:
        self._held = np.full(slots, -1, dtype=np.int64)
        self._uses: list[list[int]] = [[] for _ in range(parts)]
        for now, wanted in enumerate(one for step in steps for one in step):
            for part in wanted.tolist():
                self._uses[part].append(now)
        for uses in self._uses:
            uses.reverse()
        self.now = 0

    def place(self, slots: Any, held: Any) -> None:
        self._held[slots] = held

    def touch(self, slots: Any) -> None:
        pass

    def _next(self, part: int) -> int:
        uses = self._uses[part]
        while uses and uses[-1] <= self.now:
            uses.pop()
        return uses[-1] if uses else 1 << 60

    def victims(self, count: int, allowed: Any) -> Any:
        slots = np.nonzero(allowed(np.arange(len(self._held)), self._held))[0]
        after = np.array([self._next(part) for part in self._held[slots].tolist()])
        return self._held[slots[np.argsort(-after, kind="stable")[:count]]]


def replayed(trace: dict[str, Any], cap: float, rule: str, apart: bool) -> Counts:
    """See :func:`replay`; with layers ``apart`` each of them has as many slots."""
    if not apart:
        return replay(trace, cap, rule)
    layers = range(len(trace["steps"][0]))
    own = [{**trace, "steps": [[step[layer]] for step in trace["steps"]]} for layer in layers]
    done = [replay(one, cap, rule) for one in own]
    hits, misses, again = (sum(one[at] for one in done) for at in range(3))
    return hits, misses, again, done[0][3]


def replay(trace: dict[str, Any], cap: float, rule: str) -> Counts:
    """Hits, misses, misses of what the step before wanted, and steps, with a cache of the share ``cap`` of all parts.
    The first step warms up."""
    blocks, steps = trace["blocks"], trace["steps"]
    layers = len(steps[0])
    slots = max(8, int(cap * blocks * layers))
    cache: Any = None
    if rule == "best":
        known = [[layer * blocks + np.array(own, dtype=np.int64) for layer, own in enumerate(step)] for step in steps]
        cache = Best(slots, known, layers * blocks)
    else:
        cache = Replacement(slots, rule)
    slot_of = np.full(layers * blocks, -1, dtype=np.int64)
    latest = np.array([layer * blocks + block for block in range(blocks) for layer in range(layers)])[-slots:]
    slot_of[latest] = np.arange(len(latest))
    cache.place(np.arange(len(latest)), latest)
    hits = misses = again = 0
    last = [np.zeros(0, dtype=np.int64)] * layers
    for number, step in enumerate(steps):
        for layer, wanted in enumerate(step):
            if rule == "best":
                cache.now = number * layers + layer
            else:
                cache.turn(layer)
            parts = layer * blocks + np.array(wanted, dtype=np.int64)
            found = slot_of[parts] >= 0
            cache.touch(slot_of[parts[found]])
            missing = parts[~found]
            if number:
                hits, misses = hits + int(found.sum()), misses + len(missing)
                again += int(np.isin(missing, last[layer]).sum())
            last[layer] = parts
            missing = missing[max(0, len(parts) - slots) :]  # what no cache of this size holds passes through
            if not len(missing):
                continue
            held = np.zeros(layers * blocks, dtype=bool)
            held[parts] = True
            leaving = cache.victims(len(missing), lambda slots, inside, held=held: ~held[inside])
            places = slot_of[leaving]
            slot_of[leaving] = -1
            slot_of[missing] = places
            cache.place(places, missing)
    return hits, misses, again, len(steps) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="reference")
    parser.add_argument("--text", type=Path, help="goes on with stretches of this file, in place of tasks")
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--tasks", nargs="+", default=["span_copy", "table_copy", "multiquery"])
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--policies", nargs="+", default=list(CHOSEN))
    parser.add_argument("--caps", nargs="+", type=float, default=[0.1, 0.25, 0.5])
    parser.add_argument("--rules", nargs="+", default=[*POLICIES, "best"])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    options = parser.parse_args()
    if options.load:
        traces = json.loads(options.load.read_text())
    else:
        traces = []
        text = options.text.read_text(errors="replace") if options.text else ""
        with LLM(options.model, dtype="bfloat16", enable_prefix_caching=False) as llm:
            for policy in options.policies:
                for task in ["text"] if options.text else options.tasks:
                    for index in range(options.samples):
                        given = text or task
                        ids = (stretch if options.text else prompt)(llm, given, index, options.tokens)
                        traces.append(record(llm, ids, task, policy, options.steps))
    if options.save:
        options.save.write_text(json.dumps(traces))
    rules = tuple(options.rules)
    print(
        "| policy | read | cap |",
        " | ".join(rules),
        "| MB a step at 8B (clock) | ms at 51 GB/s | wanted the step before |",
    )
    print("|---" * (6 + len(rules)) + "|")
    for policy in dict.fromkeys(one["policy"] for one in traces):
        mine = [one for one in traces if one["policy"] == policy]
        wanted = sum(len(some) for one in mine for step in one["steps"] for some in step)
        all_parts = sum(one["blocks"] * len(step) for one in mine for step in one["steps"])
        for cap in options.caps:
            shares, megabytes, known = [], 0.0, 0.0
            for rule in rules:
                both = []
                for apart in (True, False):
                    counts = [replayed(one, cap, rule, apart) for one in mine]
                    hits, misses, again, steps = np.sum(counts, axis=0).tolist()
                    both.append(f"{hits / max(1, hits + misses):.1%}")
                shares.append(" / ".join(reversed(both)))
                if rule == "clock":
                    layers = len(mine[0]["steps"][0])
                    known = again / max(1, misses)
                    megabytes = misses / steps * LAYERS / layers * PART / 1e6
            print(
                f"| `{policy}` | {wanted / all_parts:.1%} | {cap:.0%} | {' | '.join(shares)} | {megabytes:.1f} | "
                f"{megabytes * 1e6 / LINK * 1e3:.2f} | {known:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
