"""Whole model: time to first token and decode rate of a random 8B-shaped Llama, beside transformers.

The weights are random, so attention is nearly uniform and no share of it lets blocks be skipped: densities are set by
budgets (``max_budget``, ``epsilon``) and reported as measured. Nothing here says anything about answers.
"""

from __future__ import annotations

import os

import torch
import transformers_peer
from engine_steps import PROFILED, STEPS, Bench

from saccade.ops.triton import common

PREFILL = os.environ.get(
    "PREFILL", "dense; flexprefill(lines=block, max_budget=16384); flexprefill(lines=block, max_budget=8192)"
).split("; ")
DECODE = os.environ.get(
    "DECODE",
    "dense arkvale(budget=8192) arkvale(budget=2048) quest(budget=2048) psa(epsilon=0.125) psa(epsilon=0.02)",
).split()
# Context and batch; eight of 128K do not fit.
SIZES = tuple(
    (int(context), int(batch))
    for context, batch in (
        one.split("x") for one in os.environ.get("SIZES", "65536x8 98304x8 131072x1 131072x4").split()
    )
)
PREFILL_SIZES = tuple(int(one) for one in os.environ.get("PREFILL_SIZES", "32768 131072").split())
# The same rows again with other weights, beside the dense of before: "fp8", "int4" and "int8" (head too), or a format
# of blocks, "Q4_K" say, of random codes, whose head is Q6_K.
QUANTIZE = os.environ.get("QUANTIZE")
WANTED = os.environ.get("WANTED", "prefill decode transformers").split()


class EndToEnd(Bench):
    """The model's prompts and decode steps under every policy, beside transformers'."""

    def __init__(self) -> None:
        super().__init__("endtoend")

    def run(self) -> None:
        dense: dict[tuple[str, int, int], float | None] = {}
        if "prefill" in WANTED:
            self.run_prefill(dense)
        if "decode" in WANTED:
            self.run_decode(dense)
        for tokens, batch in SIZES if "transformers" in WANTED else ():
            for static in (False, True):
                self.results.attempt(
                    f"transformers decode {tokens} x {batch}",
                    lambda n=tokens, b=batch, s=static: transformers_peer.decode(self, n, b, "sdpa", s),
                )
        if QUANTIZE:  # last: transformers' modules do not run any more
            self.pool = None
            self.serve(QUANTIZE)
            if "prefill" in WANTED:
                self.run_prefill(dense)
            if "decode" in WANTED:
                self.run_decode(dense)

    def run_decode(self, dense: dict[tuple[str, int, int], float | None]) -> None:
        """``dense``: what dense takes by products of the model's own type, by phase, context and batch."""
        for tokens, batch in SIZES:
            self.room(batch * (tokens + STEPS + 40))
            key = "decode", tokens, batch
            for policy in DECODE:
                taken = self.results.attempt(
                    f"decode {tokens} x {batch} {policy}",
                    lambda p=policy, n=tokens, b=batch, k=key: self.decode(n, b, p, dense.get(k)),
                )
                if policy == "dense":
                    dense.setdefault(key, taken)

    def run_prefill(self, dense: dict[tuple[str, int, int], float | None]) -> None:
        attempt = self.results.attempt
        self.room(max(PREFILL_SIZES) + 64)
        for policy in (PREFILL[0], PREFILL[-1]):  # budgets are numbers to the same kernels
            attempt(
                f"warm up {policy}", lambda p=policy: self.warm_up(p, 20000 if p == "dense" else max(PREFILL_SIZES))
            )
        for tokens in PREFILL_SIZES:
            key = "prefill", tokens, 1
            for policy in PREFILL:
                taken = attempt(
                    f"prefill {tokens} {policy}",
                    lambda p=policy, n=tokens, k=key: self.first_token(n, p, dense.get(k)),
                )
                if policy == "dense":
                    dense.setdefault(key, taken)
            if self.quantize:
                continue
            for kernel in transformers_peer.PEERS if tokens == min(PREFILL_SIZES) else ("",):
                attempt(
                    f"transformers {tokens}{kernel}",
                    lambda n=tokens, k=kernel: transformers_peer.first_token(self, n, k),
                )


def main() -> None:
    torch.manual_seed(0)
    if PROFILED:
        common.is_hopper = lambda device: False
    EndToEnd().run()


if __name__ == "__main__":
    main()
