"""LFPS as its paper runs it: a random model of the 8B shape on the GPU; keys beyond the first few, tables, selection
and attention in host memory on the CPU (docs/tiers.md).

    python benchmarks/gpu/hosted.py [--tokens 4096 131072] [--sequences 1] [--threads 1 8] [--steps 6]
        [--policies ...] [--others ...]

One sequence alone, and all ``--sequences`` together, as one batch and as two sub-batches, for each number of CPU
threads; ``LAYERS=8``: so many layers. KV is made up, of every sequence its own. ``--others``: policies of one sequence
under the same ``kv_compute="host"``, whose absent keys the CPU attends likewise. ``parts_a_step``: blocks, of one layer
each, in which the CPU read keys; ``down``, ``up``: bytes that crossed the link. ``--profile``: where the host's time
goes in a step. Timings want a host with nothing else to do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from harness import say
from tiers import LAYOUT, Tiered, functions

from saccade.engine.request import Request
from saccade.kv.tier import TierCounts
from saccade.methods.policy import Policy

PAPER = "lfps(blocks=0,least=1,rest=none)"
OTHERS = ("topk(k=0.02,unit=q_head)", "quest(budget=8192,block_size=32,dense_layers=0)", "dense")


class Hosted(Tiered):
    """Steps over sequences that live in host memory."""

    computed = 32  # that tables begin with
    summaries = (("minmax", LAYOUT.block_size), ("stored_mean", 8))

    def run(self, what: str, requests: list[Request], policy: str, threads: int, steps: int, profiled: bool) -> None:
        """Measure ``steps`` steps of ``requests`` under ``policy``."""
        assert self.pool is not None
        tiers = self.pool.tiers
        assert tiers is not None
        torch.set_num_threads(threads)
        for request in requests:
            request.policy = Policy.parse(policy)
            request.sequence.spans[-1] = replace(request.sequence.spans[-1], policy=request.policy)
        taken: list[float] = []
        moved: list[TierCounts] = []

        def step() -> None:
            before, began = tiers.counts.copy(), time.perf_counter()
            for request in requests:
                request.sequence.memory.kv.reserve(len(request.sequence.tokens))
            found = self.step(requests)
            torch.cuda.synchronize()
            taken.append(1e3 * (time.perf_counter() - began))
            moved.append(tiers.counts.since(before))
            for request in requests:
                own = found[request.id]
                token = own.tokens[-1] if own.tokens is not None else int(own.logits[-1].argmax())
                request.sequence.extend([token], "decode", request.policy)

        def keys() -> tuple[int, int]:
            told = requests[0].report.as_dict()["decode"]
            return told["keys_attended"], told["keys_scored"]

        before = keys()
        for _ in range(steps):
            step()
        late = slice(min(2, steps - 1), None)
        after = keys()
        ms, report = statistics.median(taken[late]), requests[0].report.as_dict()

        def mean(name: str) -> float:
            return statistics.mean(getattr(one, name) for one in moved[late])

        self.rows.add(
            what=what,
            policy=policy,
            sequences=len(requests),
            threads=threads,
            ms_per_step=ms,
            tokens_per_second=1e3 * len(requests) / ms,
            all_ms=str([round(one, 1) for one in taken]),
            parts_a_step=mean("attended_on_host"),
            down=mean("bytes_down"),
            up=mean("bytes_up"),
            misses=mean("misses"),
            keys_of_a_head=(after[0] - before[0]) / (steps * self.spec.layers),
            scored_of_a_head=(after[1] - before[1]) / (steps * self.spec.layers),
            notes=str(report["notes"])[:200],
        )
        if profiled:
            functions(step, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[131072])
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--policies", nargs="+", default=["lfps", PAPER])
    parser.add_argument("--others", nargs="*", default=list(OTHERS))
    parser.add_argument("--device-gib", type=float, default=24)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    bench: Any = Hosted()
    for tokens in options.tokens:
        measure(bench, tokens, options)


def measure(bench: Hosted, tokens: int, options: argparse.Namespace) -> None:
    """All rows of one context."""
    many = options.sequences
    room = tokens + 64 * (len(options.policies) + 1) * options.steps
    parts = bench.spec.layers * LAYOUT.blocks(room) * many + 64
    bench.pool_of(int(options.device_gib * 2**30) // LAYOUT.block_bytes, parts * LAYOUT.block_bytes, compute="host")
    requests = []
    for number in range(many):
        requests.append(bench.filled(tokens, options.policies[0]))
        torch.cuda.synchronize()
        say(f"sequence {number} of {tokens} tokens is there")
    bench.run(f"{tokens}: moves to the host", requests, options.policies[0], max(options.threads), 1, False)
    for policy in options.policies:
        for threads in options.threads:
            bench.run(f"{tokens}: one", requests[:1], policy, threads, options.steps, options.profile)
            for most in (1, 2) if many > 1 else ():
                bench.worker.host._hosting.most_parts = most
                bench.run(f"{tokens}: all, parts: {most}", requests, policy, threads, options.steps, options.profile)
    for policy in options.others:
        for threads in options.threads:
            bench.run(f"{tokens}: one", requests[:1], policy, threads, 2, False)
    for request in requests:
        request.sequence.memory.drop()


if __name__ == "__main__":
    main()
