"""FlashAttention-4 (the extra ``fa4``) through our adapter beside our own kernel and torch's cuDNN: whole prompts, and
chunks at a prompt's end. Keys lie in pages; laying them out and writing the lists are in its time.

    python benchmarks/gpu/fa4.py [context ...]
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from harness import DTYPE, HEAD_DIM, HEADS, KV_HEADS, Results, random_blocks, time_ms
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.kv.view import KVView
from saccade.ops import Call, fa4, run
from saccade.selection import Blocks, Dense, Selection, Shape

CHUNKS = 1024, 2048, 4096, 8192, 16384
DENSITIES = 1.0, 0.25, 0.1, 0.05


def lists(shape: Shape, size: int, density: float) -> Selection:
    """Everything, or about ``density`` of the blocks of every head at random, and the diagonal."""
    if density == 1:
        return Dense(shape)
    if shape.q_len == shape.k_len:
        return random_blocks(shape, size, density)
    first, blocks = shape.q_start // size, -(-shape.k_len // size)
    row, column = first + torch.arange(blocks - first, device="cuda")[:, None], torch.arange(blocks, device="cuda")
    taken = torch.rand(HEADS, blocks - first, blocks, device="cuda") < density
    return Blocks.from_block_mask(shape, size, taken | (row == column))


def compare(results: Results, q: torch.Tensor, view: KVView, size: int, density: float, cudnn: float | None) -> None:
    """Both kernels on one call, held against each other, then timed."""
    shape = Shape.suffix(HEADS, KV_HEADS, q.shape[1], view.length, q.device)
    selection = lists(shape, size, density)
    call = Call.of(q, view, selection)
    theirs, ours = run(call, "fa4"), run(call, "triton")
    assert theirs.backend == "fa4", fa4.why_not(q.device)
    error = float((theirs.out.float() - ours.out.float()).norm() / ours.out.float().norm())
    assert error < 1e-2, error
    assert float((theirs.lse - ours.lse).abs().max()) < 2e-2
    del theirs, ours
    share = float(selection.unit_pairs().double().mean()) / shape.causal_pairs
    times = {name: time_ms(lambda name=name: run(call, name), 150) for name in ("fa4", "triton")}
    over = {} if cudnn is None else {f"{name}_over": ms / share / cudnn for name, ms in times.items()}
    results.add(
        context=view.length,
        rows=q.shape[1],
        size=size,
        density=share,
        **times,
        **over,
        gain=times["triton"] / times["fa4"],
    )


def context(results: Results, n: int) -> None:
    q = torch.randn(HEADS, n, HEAD_DIM, device="cuda", dtype=DTYPE)
    k, v = torch.randn(2, KV_HEADS, n, HEAD_DIM, device="cuda", dtype=DTYPE)

    def dense() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)

    cudnn = time_ms(dense)
    results.add(context=n, what="cuDNN dense", ms=cudnn)
    view = KVView.from_tensors(k, v, shuffle_seed=1)
    for density in DENSITIES:
        compare(results, q, view, 128, density, cudnn)
    compare(results, q, view, 64, 0.1, cudnn)
    for rows in CHUNKS:
        for density in (1.0, 0.1):
            compare(results, q[:, -rows:], view, 128, density, None)


def main() -> None:
    torch.manual_seed(0)
    fa4.LEAST = {Dense: (1, 1), Blocks: (1, 1)}  # what they should be is to be seen
    results = Results("fa4")
    with torch.inference_mode():
        for n in [int(text) for text in sys.argv[1:]] or [32768, 131072]:
            context(results, n)


if __name__ == "__main__":
    main()
