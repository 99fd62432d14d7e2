"""LFPS's system on a pretrained model, end to end through the engine: keys, tables, selection and attention of decode
rows in host memory on the CPU, everything else on the GPU (docs/tiers.md); and its peers in the same frame.

    python benchmarks/gpu/hosted_models.py --model FILE.gguf [--lengths 4096 8192 16384 32000] [--threads 1 8]
        [--sequences 8] [--together 8192] [--steps 24] [--policies ...] [--haystack file:TEXT] [--device cpu]

Prompts are prose with facts in it (``natural:facts``), one of which is asked for, so that answers have a score; of as
many tokens as ``--lengths`` says, and every sequence has its own. They are prefilled densely on the device and answered
greedily under each policy. By length and number of CPU threads one sequence alone (the paper's Fig. 5a); of
``--together`` tokens, on the most threads, 1, 2, 4, ... ``--sequences`` (Fig. 5b), as one batch and as two sub-batches,
of which the CPU attends one while the GPU computes the other's next layer. ``dense, on the device`` has its keys there;
``LFPS to the letter``, chosen for by torch, runs alone.

``foresee``: what finding candidates takes before the query is there; ``attend``: choosing, attending and learning;
``wait``: for queries; ``other``: all else, most of it the model's products and launching them; milliseconds of a step.
``read``, ``scored``: keys of those that a head sees. ``like dense``: leading tokens that are those of dense on the
device. With ``--device cpu`` CPU tensors stand for the device: that tests all of this; what it times is the CPU twice.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Results, say

from saccade import LLM, SamplingParams
from saccade.engine.rows.hosted import HostedRows
from saccade.engine.settings.config import CHUNK
from saccade.eval.metrics import score
from saccade.eval.render import render
from saccade.eval.samples import Turn
from saccade.eval.sources import Given, find_tasks
from saccade.kv.format import KVFormat
from saccade.kv.host import HostTier
from saccade.methods.policy import Policy
from saccade.ops.down import Lane

ON_DEVICE, LETTER = "dense, on the device", "LFPS to the letter"
POLICIES = {
    ON_DEVICE: "dense",
    "dense": "dense",
    "exact top-k": "topk(k=0.02, unit=q_head)",
    "Quest, a list a head": "quest(budget={budget}, block_size=16, dense_layers=0, unit=q_head)",
    "Quest, a list a KV head": "quest(budget={budget}, block_size=16, dense_layers=0)",
    "MagicPIG": "magicpig",
    "StreamingLLM": "streaming(sinks=4, window={window})",
    "LFPS": "lfps(blocks=0, least=1, rest=none)",
    "LFPS, a list a KV head": "lfps(blocks=0, least=1, rest=none, unit=kv_head)",
    "LFPS, defaults": "lfps",
    LETTER: "lfps(blocks=0, least=1, rest=none, slash_shift_on_read=false, bypass=mean, "
    "bypass_shift=false, read_local=false)",
}
WARM = 4  # steps of a row that do not count
SPARE = 64  # tokens that there is room for beside prompts and answers
PARTS = {"foresee": HostedRows, "attend": HostedRows, "wait": Lane}  # methods that are timed


@dataclass
class Asked:
    """Prompts of about ``length`` tokens each, and what is right."""

    length: int
    ids: list[list[int]]
    turns: list[Turn]

    def first(self, count: int) -> Asked:
        return Asked(self.length, self.ids[:count], self.turns[:count])


@contextmanager
def timed_parts(seconds: dict[str, float]) -> Iterator[None]:
    """Add to ``seconds`` what the PARTS of steps take; waiting is a part of attending."""

    def timed(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(*given)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

        return call

    kept = {name: getattr(owner, name) for name, owner in PARTS.items()}
    for name, owner in PARTS.items():
        setattr(owner, name, timed(name, kept[name]))
    try:
        yield
    finally:
        for name, owner in PARTS.items():
            setattr(owner, name, kept[name])


class Frame:
    """One model over a pool with a host tier, and the rows of its runs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.results = options, Results("hosted_models")
        self.seconds: dict[str, float] = {}
        self.dense: dict[tuple[int, int], list[list[int]]] = {}  # answers by length and sequences
        self.llm = LLM(
            options.model,
            dtype=options.dtype,
            device=options.device,
            kv_compute="host",
            **self._memory(),
            enable_prefix_caching=False,
        )
        self.results.facts = {
            "model": Path(options.model).name,
            "device": torch.cuda.get_device_name() if self.llm.model.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
        }

    def _memory(self) -> dict[str, Any]:
        """Room for all sequences of a row, on either side."""
        options = self.options
        many = options.sequences
        more = options.steps + SPARE + self._meanwhile(options.together, many)
        longest = max(*options.lengths, options.together) + more
        with LLM(
            options.model,
            dtype=options.dtype,
            device="cpu",
            kv_memory="64MiB",
            max_model_len=1024,
            enable_prefix_caching=False,
        ) as llm:
            spec = llm.model.spec
        if longest > spec.max_position:
            raise SystemExit(
                f"prompts of {longest - more} tokens with {more} more are beyond the {spec.max_position} positions of "
                f"{options.model}; give shorter ones"
            )
        layout = KVFormat(spec.dtype, spec.kv_heads, spec.head_dim)
        blocks = max(layout.blocks(longest), many * layout.blocks(options.together + more))
        size = spec.layers * (blocks + 8) * layout.block_bytes
        say(f"{size / 2**30:.2f} GiB of keys and values")
        return {"kv_memory": size, "kv_host": size, "max_requests": many, "max_model_len": longest}

    def _meanwhile(self, length: int, count: int) -> int:
        """Tokens that the first of ``count`` requests may have decoded when the last one is prefilled."""
        return (count - 1) * -(-length // CHUNK)

    def asked(self, length: int, count: int) -> Asked:
        tokenizer = self.llm.tokenizer
        given = Given(lambda text: len(tokenizer.encode(text)), lambda: tokenizer, haystack=self.options.haystack)
        (task,) = find_tasks(["natural:facts"], given)
        turns = [task.sample(length, number, 0).turns[0] for number in range(count)]
        return Asked(length, [render(tokenizer, [], turn).ids for turn in turns], turns)

    @torch.inference_mode()
    def run(self, name: str, asked: Asked, threads: int, parts: int = 1) -> None:
        """One row; ``parts``: sub-batches at most."""
        engine, steps, count = self.llm.engine, self.options.steps, len(asked.ids)
        tiers = engine.pool.tiers
        assert tiers is not None
        assert isinstance(tiers.tier, HostTier)
        compute = tiers.tier.compute
        compute.mode, compute.lodges_all = ("device", False) if name == ON_DEVICE else ("host", True)
        engine.worker.host._hosting.most_parts = parts
        torch.set_num_threads(threads)
        policy = budgeted(POLICIES[name], asked.length)
        # Who was prefilled first goes on meanwhile: steps count once all are.
        params = SamplingParams(temperature=0, max_tokens=steps + self._meanwhile(asked.length, count), ignore_eos=True)
        began, taken = time.perf_counter(), []
        requests = [engine.add(ids, params, Policy.parse(policy)) for ids in asked.ids]
        while not all(request.output_ids for request in requests):
            engine.step()
            if any(request.error for request in requests):
                raise SystemExit(f"{name}: {next(request.error for request in requests if request.error)}")
        prefill, before = time.perf_counter() - began, tiers.counts.copy()
        while len(taken) < steps - 1 and not any(request.finished for request in requests):
            if len(taken) == WARM:
                before = tiers.counts.copy()
                self.seconds.clear()
            start = time.perf_counter()
            engine.step()
            taken.append(1e3 * (time.perf_counter() - start))
        answers = [list(request.final_ids or request.output_ids)[:steps] for request in requests]
        told = [request.report.as_dict()["decode"] for request in requests]
        for request in requests:
            if not request.finished:
                engine.cancel(request)
        counted = len(taken) - WARM
        moved, ms = tiers.counts.since(before), statistics.median(taken[WARM:])
        dense = self.dense.setdefault((asked.length, count), answers)
        causal = sum(one["keys_causal"] for one in told)
        spent = {part: 1e3 * self.seconds.get(part, 0.0) / counted for part in PARTS}
        spent["attend"] -= spent["wait"]
        self.results.add(
            name=name,
            policy=policy,
            length=asked.length,
            sequences=count,
            parts=min(parts, count),
            threads=threads,
            prefill_s=prefill,
            ms=ms,
            tokens_per_second=1e3 * count / ms,
            **{f"{part}_ms": value for part, value in spent.items()},
            other_ms=ms - sum(spent.values()) if min(parts, count) == 1 else None,  # else at the same time
            read=sum(one["keys_attended"] for one in told) / causal,
            scored=sum(one["keys_scored"] for one in told) / causal,
            right=statistics.mean(map(self._right, asked.turns, answers)),
            like_dense=statistics.mean(map(alike, answers, dense)),
            down=moved.bytes_down / counted,
            up=moved.bytes_up / counted,
            fetched=moved.bytes_read / counted,
            paths=str(sorted({path["path"] for one in told for path in one["paths"]})),
            all_ms=str([round(one, 1) for one in taken]),
        )

    def _right(self, turn: Turn, ids: list[int]) -> float:
        text = self.llm.tokenizer.decode(ids[: turn.max_new_tokens])
        return score(turn.metric, text, list(turn.answers))

    def compare(self) -> None:
        """All rows."""
        options = self.options
        names = [name for name in POLICIES if name == ON_DEVICE or not options.policies or name in options.policies]
        with timed_parts(self.seconds):
            for length in options.lengths:
                alone = self.asked(length, 1)
                for threads in options.threads:
                    for name in names:
                        self.run(name, alone, threads)
            counts = [2**power for power in range(10) if 2**power <= options.sequences] if options.sequences > 1 else []
            together = self.asked(options.together, max(counts, default=0))
            for count in counts:
                for name in names:
                    if name == LETTER and count > 1:
                        continue
                    for parts in (1, 2) if count > 1 and name != ON_DEVICE else (1,):
                        self.run(name, together.first(count), max(options.threads), parts)


def budgeted(policy: str, length: int) -> str:
    """``policy`` with a fiftieth of ``length`` tokens for its budget."""
    budget = max(32, round(0.02 * length))
    return policy.replace("{budget}", str(budget)).replace("{window}", str(budget - 4))


def alike(answer: Sequence[int], other: Sequence[int]) -> int:
    """Leading tokens that both have."""
    return next((at for at, pair in enumerate(zip(answer, other)) if pair[0] != pair[1]), len(answer))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of all rows; factors are over dense in host memory, of the same keys, sequences and threads."""
    lines = [
        "| keys | sequences | threads | policy | ms a step | tokens/s | x dense | foresee | attend | wait | other "
        "| read | scored | right | like dense |",
        "|---:|---:|---:|---|" + "---:|" * 11,
    ]
    cases = list(dict.fromkeys((row["length"], row["sequences"], row["threads"]) for row in rows))
    for case in cases:
        own = [row for row in rows if (row["length"], row["sequences"], row["threads"]) == case]
        dense = min((row["ms"] for row in own if row["name"] == "dense"), default=None)
        for row in own:
            name = row["name"] + (", two sub-batches" if row["parts"] == 2 else "")
            times = [f"{row[f'{part}_ms']:.2f}" for part in PARTS]
            cells = [
                *(f"{one:,}" for one in case), name, f"{row['ms']:.2f}", f"{row['tokens_per_second']:.2f}",
                "" if dense is None else f"{dense / row['ms']:.2f}", *times,
                "" if row["other_ms"] is None else f"{row['other_ms']:.2f}", f"{row['read']:.3f}",
                f"{row['scored']:.3f}", f"{row['right']:.2f}", f"{row['like_dense']:.1f}",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint, a .gguf file, or a name that is fetched")
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096])
    parser.add_argument("--sequences", type=int, default=1, help="the most that run together")
    parser.add_argument("--together", type=int, help="their length; the first of --lengths by default")
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=24, help=f"tokens of an answer, more than {WARM + 2}")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, help="all by default")
    parser.add_argument("--haystack", default="prose", help="prose, or file:TEXT")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    options.together = options.together or options.lengths[0]
    if options.steps < WARM + 2:
        parser.error(f"--steps {options.steps}: {WARM} steps do not count; give at least {WARM + 2}")
    frame = Frame(options)
    frame.compare()
    print(table(frame.results.rows), flush=True)


if __name__ == "__main__":
    main()
