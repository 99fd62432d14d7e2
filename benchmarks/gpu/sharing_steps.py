"""CIS and CPE inside the engine's recorded step: the cells of PrHS's Table IV, and one of 32K beyond it.

32 heads of 128 channels, all with keys of their own, in bfloat16; an eighth of the keys is read. The engine plans,
records and replays a step of a batch of requests as it does for any model; what a layer projects is put in its place,
so that the step is its attention alone: new keys stored, anchors compared, keys chosen or shared, read and kept, and
what was done counted. A query resembles the one before: of 16 steps one searches. Times are replays of the step, of one
that searches and of one that shares, a layer, and of a step without attention, whose time (the queries put in place,
tables, sampling) is in the others too. CPE hides what PSAW does in the last quarter of the layers.

``CELLS`` names other cells than these seven ("8x1024 8x32768"), ``LAYERS`` another number of layers.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from engine_steps import Bench
from harness import DTYPE, HEAD_DIM, graph_ms, time_ms
from random_llama import random_llama
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.engine.request import Request
from saccade.models.interface import AttentionContext, LayerAttention, ModelSpec

HEADS, STEPS = 32, 16
CASES = ((8, 1024), (8, 2048), (8, 4096), (16, 1024), (16, 2048), (16, 4096), (8, 32768))
LAYERS = int(os.environ.get("LAYERS", "16"))
VOCAB = 256
WANTED = [tuple(map(int, cell.split("x"))) for cell in os.environ.get("CELLS", "").split()] or CASES


def peers_us(batch: int, n: int) -> dict[str, float]:
    """Microseconds of torch's sdpa over random keys, by its flash and its cuDNN kernels."""
    q = torch.randn(batch, HEADS, 1, HEAD_DIM, device="cuda").to(DTYPE)
    k, v = (torch.empty(batch, HEADS, n, HEAD_DIM, dtype=DTYPE, device="cuda").normal_() for _ in range(2))

    def sdpa(backend: SDPBackend) -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    backends = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
    return {name: 1000 * graph_ms([lambda b=backend: sdpa(b)] * 2) for name, backend in backends.items()}


class Projected:
    """In the place of a model: every layer asks for attention, with queries that resemble those of the step before;
    ``attends=False``: none does."""

    serves = True

    def __init__(self, rows: int, attends: bool = True) -> None:
        self.attends = attends
        shape = HEADS, rows, HEAD_DIM
        self.q, self.k, self.v = torch.randn(3, LAYERS, *shape, device="cuda").to(torch.bfloat16).unbind(0)
        self.noise = 0.1 * torch.randn(64, HEADS, HEAD_DIM, device="cuda")
        self.spec = LayerAttention(HEAD_DIM**-0.5)

    @torch.inference_mode()
    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        ctx: AttentionContext,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        moved = (self.q + self.noise[positions % 64].transpose(0, 1)).to(torch.bfloat16)  # no layer's own time
        for layer in range(LAYERS if self.attends else 0):
            ctx.run(layer, moved[layer], self.k[layer], self.v[layer], self.spec)
        return torch.zeros(len(token_ids if wanted is None else wanted), VOCAB, device="cuda")


def small() -> tuple[Any, ModelSpec]:
    """A model that computes the ends of prompts: methods begin with what they see there."""
    return random_llama(
        layers=LAYERS,
        hidden=256,
        inner=256,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        max_position=1 << 18,
    )


class SharingSteps(Bench):
    def __init__(self) -> None:
        super().__init__("sharing_steps", small())
        self.results.facts = {"heads": HEADS, "kv_heads": HEADS, "layers": LAYERS, "steps in a block": STEPS}
        self.priced: set[int] = set()

    def measure(self, batch: int, n: int) -> None:
        self.room(batch * (n + 200))
        peers = peers_us(batch, n)
        for name, us in peers.items():
            self.results.add(batch=batch, context=n, what=name, us=us)
        cis = f"cis(s={STEPS}, k={n // 8 - 80}, follow=none)"
        cells = [("dense", "dense"), ("CIS-16", cis), ("CPE-16", f"{cis}+psaw+etf")]
        if batch not in self.priced:  # whatever the context
            self.priced.add(batch)
            cells.insert(0, ("nothing", "dense"))
        for name, policy in cells:
            self.results.attempt(f"{name} {batch} x {n}", lambda p=policy, w=name: self.cell(batch, n, w, p, peers))

    def cell(self, batch: int, n: int, what: str, policy: str, peers: dict[str, float]) -> None:
        with self.begun(n, batch, policy, 3 * STEPS) as requests:
            device = self.worker.device
            assert device is not None
            forward, device._forward = device._forward, Projected(batch, what != "nothing")
            device.kinds.clear()  # recordings know the model
            try:
                for _ in range(STEPS if policy != "dense" else 4):
                    self.decode_step(requests)
                times, shares, density = [], [], 0.0
                for _ in range(2):  # the next block's first step, which searches, and its second
                    share, density = self.searched(requests)
                    shares.append(share)
                    if [one.graph is None for one in device.kinds._kinds.values()] != [False]:
                        raise RuntimeError("the step was not recorded, or more than one was")
                    (kind,) = device.kinds._kinds.values()
                    times.append(1000 * time_ms(kind.graph.replay) / LAYERS)
            finally:
                device._forward = forward
                device.kinds.clear()
        shared = policy != "dense"
        if shared and shares != [1.0, 0.0]:
            raise RuntimeError(f"of the heads {shares} searched, not all and then none")
        us = (times[0] + (STEPS - 1) * times[1]) / STEPS if shared else times[0]
        self.results.add(
            batch=batch,
            context=n,
            what=what,
            us=us,
            to_flash=peers["sdpa flash"] / us,
            to_cudnn=peers["sdpa cudnn"] / us,
            searching_us=times[0] if shared else None,
            sharing_us=times[1] if shared else None,
            density_sharing=density,
        )

    def searched(self, requests: list[Request]) -> tuple[float | None, float]:
        """Run a step; the share of the heads that searched in it, and of the keys that it read."""
        before = requests[0].report.as_dict()["decode"]
        self.decode_step(requests)
        after = requests[0].report.as_dict()["decode"]
        done = {name: after[name] - before[name] for name in ("searches", "searchable", "keys_attended", "keys_causal")}
        share = done["searches"] / done["searchable"] if done["searchable"] else None
        return share, done["keys_attended"] / done["keys_causal"]

    def run(self) -> None:
        for batch, n in WANTED:
            self.results.attempt(f"batch {batch} context {n}", lambda b=batch, c=n: self.measure(b, c))


def main() -> None:
    torch.manual_seed(0)
    SharingSteps().run()


if __name__ == "__main__":
    main()
