"""What the GPU tests share: data on the device, and agreement with float64."""

from __future__ import annotations

import torch
from helpers import brute_force, planted_heads

from saccade.kv.view import KVView
from saccade.ops import Call, run
from saccade.selection import Blocks, Selection, Shape

BOUND = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


def data(heads, kv_heads, q_len, n, head_dim, dtype=torch.bfloat16, structured=False, seed=0):
    if structured:
        q, k, v = planted_heads(heads, kv_heads, n, head_dim, seed)
        q = q[:, -q_len:]
    else:
        rng = torch.Generator().manual_seed(seed)
        q = torch.randn(heads, q_len, head_dim, generator=rng)
        k, v = torch.randn(2, kv_heads, n, head_dim, generator=rng)
    q, k, v = (part.to("cuda", dtype) for part in (q, k, v))
    return q, k, v, KVView.from_tensors(k, v, shuffle_seed=seed), Shape.suffix(heads, kv_heads, q_len, n)


def notes_of(output) -> list[str]:
    """What a report says, but for who waited while kernels were compiled: the first that needs one does."""
    return [note for note in output.report["notes"] if "kernels were compiled" not in note]


def agrees(q, k, v, view, selection: Selection, **options) -> None:
    ran = run(Call.of(q, view, selection, **options))
    out, lse = ran.out, ran.lse
    assert ran.backend == "triton"
    expected, expected_lse = brute_force(q.cpu(), k.cpu(), v.cpu(), selection.mask(), **options)
    assert torch.isfinite(out).all()
    error = (out.cpu().double() - expected).norm() / expected.norm()
    assert float(error) < BOUND[q.dtype]
    torch.testing.assert_close(lse.cpu().double(), expected_lse, atol=2e-2, rtol=1e-2)


def random_blocks(shape: Shape, size: int, units: int, share: float = 0.4) -> Blocks:
    rng = torch.Generator().manual_seed(units)
    q_blocks = (shape.k_len - 1) // size - shape.q_start // size + 1
    taken = torch.rand(units, q_blocks, -(-shape.k_len // size), generator=rng) < share
    taken[:, torch.arange(q_blocks), shape.q_start // size + torch.arange(q_blocks)] = True
    return Blocks.from_block_mask(shape, size, taken)
