"""CIS and CPE as decode operators: the setting of PrHS's Table IV, and 32K beyond it.

32 heads of 128 channels, all with keys of their own, in bfloat16; an eighth of the keys is read. A batch of sequences
of one length is one sequence with as many times the heads: the same keys, lists and launches. Of 16 steps one retrieves
and the others resemble it, the least that CIS-16 can retrieve; CPE hides what PSAW does in the last quarter of 32
layers. Prices of both kinds of step and of the dense kernels, by replays of captured graphs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from harness import DTYPE, HEAD_DIM, Results, graph_ms
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.kv.view import KVView
from saccade.methods.cis import CIS, triton_sharing
from saccade.methods.cis.anchors import Anchors
from saccade.methods.prehoc import PSAW, depth_share
from saccade.ops.triton import candidates, dispatch
from saccade.ops.triton import weights as weights_of
from saccade.selection import Candidates, Dense, Shape

HEADS, LAYERS, STEPS = 32, 32, 16
SCALE = HEAD_DIM**-0.5
CASES = ((8, 1024), (8, 2048), (8, 4096), (16, 1024), (16, 2048), (16, 4096), (8, 32768))


class Case:
    """``batch`` sequences of ``n`` random keys, and a query that resembles the one before."""

    def __init__(self, batch: int, n: int) -> None:
        self.batch, self.n, heads = batch, n, batch * HEADS
        self.k, self.v = (torch.empty(heads, n, HEAD_DIM, dtype=DTYPE, device="cuda").normal_() for _ in range(2))
        self.view = KVView.from_tensors(self.k, self.v, shuffle_seed=0)
        self.q = torch.randn(heads, 1, HEAD_DIM, device="cuda").to(DTYPE)
        self.next = (self.q + 0.1 * torch.randn_like(self.q)).to(DTYPE)
        self.shape = Shape.suffix(heads, heads, 1, n)
        self.method = CIS(s=STEPS, k=n // 8 - 80)

    def dense(self) -> dict[str, float]:
        q, k, v = (part.view(self.batch, HEADS, -1, HEAD_DIM) for part in (self.q, self.k, self.v))

        def sdpa(backend: SDPBackend) -> Any:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v)

        calls = {
            "sdpa flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
            "sdpa cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
            "saccade dense": lambda: dispatch.attend(self.q, self.view, Dense(self.shape), scale=SCALE),
        }
        return {name: graph_ms([call] * 2) for name, call in calls.items()}

    def steps(self, hidden: int) -> tuple[float, float]:
        """Milliseconds of a step that retrieves, and of one that shares, with the first ``hidden`` keys but the sinks
        out of sight."""
        method, n = self.method, self.n
        room = method.budget(n) + method.sinks + method.local + 2 * method.r * (method.budget(n) // 3) + STEPS
        anchors = Anchors.empty(self.shape.heads, HEAD_DIM, capacity=room)
        for name in ("directions", "has", "counts", "keys", "positions"):
            setattr(anchors, name, torch.cat([getattr(anchors, name).cuda()] * 2))
        first = (method.sinks, max(method.sinks, hidden))

        def step(q: torch.Tensor, anchored: int) -> None:
            anchors.count = anchored
            offsets, shared, searching = triton_sharing.share(anchors, q[:, 0], method.tau, method.local, n, True)
            k = torch.where(searching, method.budget(n), n)
            full = None if anchored else searching
            chosen = Candidates(self.shape, offsets, shared, k, method.sinks, method.local, full, hidden=first)
            read = candidates.choose(q, self.view, chosen, scale=SCALE, room=room)
            _, lse = dispatch.attend(q, self.view, read, scale=SCALE)
            if not anchored:
                weights = weights_of.read_weights(q, self.view, read, lse, scale=SCALE)
                anchors.has[0].copy_(searching)
                anchors.positions[0].fill_(n - 1)
                middle = (method.sinks, n - method.local)
                triton_sharing.keep(anchors, 0, searching, read, weights, middle, method.budget(n) // 3, method.r)

        anchors.first = n - 1
        retrieving = graph_ms([lambda: step(self.q, 0)] * 2)
        anchors.count = 1
        offsets, _, searching = triton_sharing.share(anchors, self.next[:, 0], method.tau, method.local, n, True)
        if bool(searching.any()):
            raise RuntimeError("the second query does not resemble the first")
        self.shared = float(offsets.diff().double().mean()) + method.sinks + method.local
        return retrieving, graph_ms([lambda: step(self.next, 1)] * 2)


def main() -> None:
    results = Results("sharing")
    results.facts = {"heads": HEADS, "kv_heads": HEADS, "head_dim": HEAD_DIM, "steps in a block": STEPS}
    shares = [depth_share(PSAW().phi, PSAW().alpha, layer, LAYERS, None) for layer in range(LAYERS)]
    deep = [share for share in shares if share > 0]

    def measure(batch: int, n: int) -> None:
        case = Case(batch, n)
        dense = case.dense()
        best = min(dense[name] for name in ("sdpa flash", "sdpa cudnn"))
        for name, ms in dense.items():
            results.add(batch=batch, context=n, what=name, us=1000 * ms, speedup=best / ms)
        whole, few = case.steps(0), case.steps(int(n * sum(deep) / len(deep)))
        mean = [(one + (STEPS - 1) * other) / STEPS for one, other in (whole, few)]
        cpe = (mean[0] * (LAYERS - len(deep)) + mean[1] * len(deep)) / LAYERS
        for name, ms, both in (("CIS-16", mean[0], whole), ("CPE-16", cpe, few)):
            results.add(
                batch=batch,
                context=n,
                what=name,
                us=1000 * ms,
                speedup=best / ms,
                retrieving_us=1000 * both[0],
                sharing_us=1000 * both[1],
                keys_shared=case.shared,
            )
        torch.cuda.empty_cache()

    torch.manual_seed(0)
    with torch.inference_mode():
        for batch, n in CASES:
            results.attempt(f"batch {batch} context {n}", lambda b=batch, c=n: measure(b, c))


if __name__ == "__main__":
    main()
