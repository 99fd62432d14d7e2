"""LFPS as its paper runs it: a random model of the 8B shape on the GPU; keys beyond the first few, tables, selection
and attention in host memory on the CPU (docs/tiers.md).

    python benchmarks/gpu/hosted.py [--tokens 131072 4096] [--candidates 0.017 0.06] [--sequences 1] [--threads 1 8]
        [--steps 6] [--policies ...] [--others ...] [--as-served]

One sequence alone, and all ``--sequences`` together, as one batch and as two sub-batches, for each number of CPU
threads (sub-batches have one more that launches what the device does). ``LAYERS=8``: so many layers, and beside what
was measured what 32 would take, which is computed. KV is made up, of every sequence its own.

``--candidates``: of each context, the share of keys that are candidates of each head in each step. Made-up KV leaves
nearly flat attention, and so many candidates as no trained model has: the tables are planted by hand, as those of
``saccade bench ops`` with ``@``, and laid again between two steps, untimed, so that what a step learns moves nothing.
``scored`` and ``attended`` are keys of a query head in a step, as counted.

``--others``: policies whose decode rows run over the same host memory by the same kernels, all on the CPU
(``{budget}``: a fiftieth of the context). ``--as-served``: those of one sequence first as the engine has them under
``kv_compute="host"``, which chooses blocks on the device and calls the CPU layer by layer. ``blocks_a_layer``: blocks
that the CPU read keys in; ``fetched``: parts that went to the device, in all steps that count. ``--profile``: where the
host's time goes in a step. Timings want a host with nothing else to do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from harness import say
from tiered_steps import Tiered, functions

from saccade.bench.decode import planted_tables
from saccade.engine.memory.hosted import HostedMemory
from saccade.engine.request import Request
from saccade.kv.host import HostTier
from saccade.kv.tier import TierCounts
from saccade.kv.tiers import Tiers
from saccade.methods.lfps.tables import ScoreTables
from saccade.methods.policy import Policy

PAPER = "lfps(blocks=0,least=1,rest=none)"
PLANTED = "lfps(a=0.02,epsilon=1,blocks=0,least=1,rest=none)"  # all that planted tables hold exceeds its threshold
OTHERS = ("quest(budget={budget},block_size=16,dense_layers=0)", "topk(k=0.02,unit=q_head)", "dense")
WHOLE = 32  # layers of the 8B shape
SPARE = 1024  # steps that there is room for
WARM = 2  # steps of a row that do not count
KINDS = 4  # of planted tables: a layer has what the fourth before it has
LARGE = 1 << 26  # numbers, more than a cache holds


class Tables:
    """Planted tables of the layers of ``requests``, which live on the host under LFPS: ``share`` of the keys."""

    @torch.inference_mode()
    def __init__(self, requests: Sequence[Request], share: float) -> None:
        self._states = [state for one in requests for state in _hosted(one).states]
        own = self._states[0].tables
        keys = requests[0].sequence.computed - own.first
        self._kinds = [planted_tables(own, keys, share, seed) for seed in range(KINDS)]
        self._large = torch.zeros(LARGE)

    @torch.inference_mode()
    def lay(self) -> None:
        """Make all tables what was planted, where they are, and leave none of them in the caches."""
        for number, state in enumerate(self._states):
            lay(self._kinds[number % KINDS], state.tables)
        self._large += 1


def lay(source: ScoreTables, target: ScoreTables) -> None:
    """Have ``target``, of as many units, hold what ``source`` does. Kernels know where it lies: nothing moves."""
    for name in ("vertical", "slash", "vertical_max", "slash_max"):
        have, wanted = getattr(target, name), getattr(source, name)
        width = min(have.shape[1], wanted.shape[1])
        have[:, :width] = wanted[:, :width]
        have[:, width:] = 0.0
    target.sums.copy_(source.sums)
    target.scale.copy_(source.scale)


class Hosted(Tiered):
    """Steps over sequences that live in host memory."""

    part = "hosted"
    computed = 32  # that tables begin with
    summaries = (("minmax", 16), ("stored_mean", 8))

    @property
    def tiers(self) -> Tiers:
        """Those of the pool."""
        assert self.pool is not None
        assert isinstance(self.pool.tiers, Tiers)
        return self.pool.tiers

    @torch.inference_mode()
    def lodge(self, requests: Sequence[Request], policy: str, all_there: bool) -> None:
        """Have ``requests`` begin anew under ``policy``: over host memory, or as the engine serves them."""
        tier = self.tiers.tier
        assert isinstance(tier, HostTier)
        tier.compute.lodges_all = all_there
        plan = Policy.parse(policy).decode.device_plan(self.spec)
        blocks = None if plan is None else plan.blocks
        for request in requests:
            memory = request.sequence.memories[request.sequence.id]
            memory.forget_method()
            if all_there:  # with the summaries that the device has made
                memory.hosted = HostedMemory(memory, blocks)

    def run(
        self,
        what: str,
        requests: list[Request],
        policy: str,
        threads: int,
        steps: int,
        profiled: bool = False,
        tables: Tables | None = None,
    ) -> None:
        """Measure ``steps`` steps of ``requests`` under ``policy``."""
        tiers = self.tiers
        torch.set_num_threads(threads)
        for request in requests:
            request.policy = Policy.parse(policy)
            request.sequence.spans[-1] = replace(request.sequence.spans[-1], policy=request.policy)
        taken: list[float] = []
        moved: list[TierCounts] = []
        read: list[tuple[float, float]] = []

        def told() -> dict[str, Any]:
            return requests[0].report.as_dict()["decode"]

        def step() -> None:
            if tables is not None:
                tables.lay()
            start, before = told(), tiers.counts.copy()
            self.wait()
            began = time.perf_counter()
            for request in requests:
                request.sequence.kv.reserve(len(request.sequence.tokens))
            found = self.step(requests)
            self.wait()
            taken.append(1e3 * (time.perf_counter() - began))
            moved.append(tiers.counts.since(before))
            for request in requests:
                own = found[request.id]
                token = own.tokens[-1] if own.tokens is not None else int(own.logits[-1].argmax())
                request.sequence.extend([token], "decode", request.policy)
            end = told()
            attended, scored = (end[name] - start[name] for name in ("keys_attended", "keys_scored"))
            read.append((attended / self.spec.layers, scored / self.spec.layers))

        known, before = len(requests[0].report.as_dict()["notes"]), told()["backends"]
        for _ in range(steps):
            step()
        late = slice(min(WARM, steps - 1), None)
        ms, layers, after = statistics.median(taken[late]), self.spec.layers, told()["backends"]
        keys = len(requests[0].sequence.tokens) - 1
        attended, scored = zip(*read[late])

        def mean(name: str) -> float:
            return statistics.mean(getattr(one, name) for one in moved[late])

        longer = {} if layers == WHOLE else {f"computed_tokens_per_second_of_{WHOLE}": _rate(len(requests), ms, layers)}
        self.results.add(
            what=what,
            policy=policy,
            context=keys,
            sequences=len(requests),
            threads=threads,
            layers=layers,
            ms_per_step=ms,
            ms_a_layer=ms / layers,
            tokens_per_second=1e3 * len(requests) / ms,
            **longer,
            all_ms=str([round(one, 1) for one in taken]),
            scored=statistics.mean(scored),
            scored_share=statistics.mean(scored) / keys,
            scored_least=min(scored),
            scored_most=max(scored),
            attended=statistics.mean(attended),
            blocks_a_layer=mean("attended_on_host") / layers / len(requests),
            fetched=sum(one.misses for one in moved[late]),
            bytes_fetched=sum(one.bytes_read for one in moved[late]),
            down=mean("bytes_down"),
            up=mean("bytes_up"),
            backends=str([name for name, count in after.items() if count > before.get(name, 0)]),
            notes=str(requests[0].report.as_dict()["notes"][known:])[:200],
        )
        if profiled:
            functions(step, 4)

    def wait(self) -> None:
        """Until the device has done all that it was asked to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def compare(self, tokens: int, share: float | None, options: argparse.Namespace) -> None:
        """All rows of one context."""
        many, most = options.sequences, max(options.threads)
        policies = options.policies or ([PLANTED] if share else ["lfps", PAPER])
        others = [text.replace("{budget}", str(round(0.02 * tokens))) for text in options.others]
        blocks = self.spec.layers * self.layout.blocks(tokens + SPARE) * many + 64
        block_bytes = self.layout.block_bytes
        slots = int(options.device_gib * 2**30) // block_bytes
        self.pool_of(slots, blocks * block_bytes, compute="host")
        torch.set_num_threads(most)
        requests = []
        for number in range(many):
            requests.append(self.filled(tokens, policies[0]))
            self.wait()
            say(f"sequence {number} of {tokens} tokens is there")
        self.run(f"{tokens}: moves to the host", requests, policies[0], most, 1)
        tables = alone = None
        if share:
            tables = Tables(requests, share)
            alone = tables if many == 1 else Tables(requests[:1], share)
            say(f"tables of {share:.1%} of the keys are planted")
        for policy in policies:
            for threads in options.threads:
                self.run(f"{tokens}: one", requests[:1], policy, threads, options.steps, options.profile, alone)
                self._together(tokens, requests, policy, threads, options, tables)
        few = min(options.steps, WARM + 2)
        for policy in others if options.as_served else ():
            self.lodge(requests[:1], policy, False)
            for threads in options.threads:
                self.run(f"{tokens}: one, as served", requests[:1], policy, threads, few)
        for policy in others:
            torch.set_num_threads(most)
            self.lodge(requests, policy, True)
            for threads in options.threads:
                self.run(f"{tokens}: one", requests[:1], policy, threads, few)
                self._together(tokens, requests, policy, threads, options, None)
        for request in requests:
            request.sequence.memories[request.sequence.id].drop()

    def _together(
        self,
        tokens: int,
        requests: list[Request],
        policy: str,
        threads: int,
        options: argparse.Namespace,
        tables: Tables | None,
    ) -> None:
        for most in (1, 2) if len(requests) > 1 else ():
            self.worker.host._hosting.most_parts = most
            what = f"{tokens}: all, parts: {most}"
            self.run(what, requests, policy, threads, options.steps, options.profile, tables)


def _hosted(request: Request) -> HostedMemory:
    held = request.sequence.memories[request.sequence.id].hosted
    assert held is not None, "the sequence does not live on the host"
    return held


def _rate(sequences: int, ms: float, layers: int) -> float:
    return 1e3 * sequences / (ms * WHOLE / layers)


def main(make: Callable[[], Hosted] = Hosted) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[131072])
    parser.add_argument("--candidates", nargs="+", type=float, help="one for each of --tokens, or for all")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--policies", nargs="+", help="of LFPS")
    parser.add_argument("--others", nargs="*", default=list(OTHERS))
    parser.add_argument("--as-served", action="store_true")
    parser.add_argument("--device-gib", type=float, default=24)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    shares: list[float | None] = options.candidates or [None]
    shares = shares * len(options.tokens) if len(shares) == 1 else shares
    if len(shares) != len(options.tokens):
        parser.error("--candidates: one share for each of --tokens, or one for all")
    bench = make()
    for tokens, share in zip(options.tokens, shares):
        bench.compare(tokens, share, options)


if __name__ == "__main__":
    main()
