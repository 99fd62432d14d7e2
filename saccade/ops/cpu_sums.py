"""C++ kernels that selections are decided from: sums over sampled rows, greedy lines, block scores and shares."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops import cpu
from saccade.selection import Shape

_MAX_TILE = 4096  # channels of a tile's rows together


def line_sums(
    q: Tensor, kv: KVView, shape: Shape, rows: int, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax weights of the last ``rows`` rows, summed by key and by distance: two fp32 [heads, k_len].

    What ``scores.line_sums`` means, for calls that :func:`reads` allows.
    """
    call = cpu._Call(q, kv, shape, scale, softcap, None)
    sums = torch.zeros(2, shape.heads, shape.k_len)
    sample = torch.arange(shape.q_len - rows, shape.q_len, dtype=torch.int32)
    cpu._kernels.line_sums(
        *call.geometry(0, shape.q_len), sample.data_ptr(), rows, shape.k_len, sums[0].data_ptr(), sums[1].data_ptr()
    )
    return sums[0], sums[1]


def cover_rows(
    q: Tensor, kv: KVView, shape: Shape, rows: Tensor, scale: float, softcap: float | None, share: float
) -> list[tuple[Tensor, Tensor]]:
    """For every query head the lines, (columns, distances) int32 as they were added, that recover ``share`` of the
    softmax weights of ``rows`` (int64, rising numbers within the call): ``line_cover.cover_lines`` of each head with
    exact overlaps, for calls that :func:`reads` allows and whose rows are the last positions."""
    call = cpu._Call(q, kv, shape, scale, softcap, None)
    numbers, positions = rows.int().contiguous(), shape.q_start + rows.long()
    lines = torch.empty(2, shape.heads, shape.k_len, dtype=torch.int32)
    counts = torch.empty(shape.heads, 2, dtype=torch.int64)
    cpu._kernels.cover_rows(
        *call.geometry(0, shape.q_len),
        numbers.data_ptr(),
        numbers.numel(),
        shape.k_len,
        positions.data_ptr(),
        share,
        lines[0].data_ptr(),
        lines[1].data_ptr(),
        counts.data_ptr(),
    )
    return [
        (lines[0, head, :columns].clone(), lines[1, head, :distances].clone())
        for head, (columns, distances) in enumerate(counts.tolist())
    ]


def antidiagonals(
    q: Tensor, kv: KVView, shape: Shape, stride: int, block_size: int, scale: float, softcap: float | None = None
) -> Tensor | None:
    """``scores.antidiagonal_shares`` before blocks are brought to a sum of 1, or None where there is no kernel: for
    calls that :func:`reads` refuses, tiles that straddle pages or that are too large for the scratch of a core."""
    if not cpu.reads(q, kv) or kv.block_size % stride or block_size > 64 * stride or stride * q.shape[-1] > _MAX_TILE:
        return None
    call = cpu._Call(q, kv, shape, scale, softcap, None)
    q_blocks = (shape.q_start + shape.q_len - 1) // block_size - shape.q_start // block_size + 1
    shares = torch.zeros(shape.heads, q_blocks, -(-shape.k_len // block_size))
    cpu._kernels.antidiagonals(*call.geometry(0, shape.q_len), shape.k_len, stride, block_size, shares.data_ptr())
    return shares


def cover(weights: Tensor, positions: Tensor, first: int, share: float) -> tuple[Tensor, Tensor, float]:
    """``line_cover.cover_lines`` with exact overlaps, to the last bit: (columns, distances, recovered)."""
    count, keys = weights.shape
    by_key, positions = weights.float().T.contiguous(), positions.long().contiguous()
    if by_key.data_ptr() == weights.data_ptr():
        by_key = by_key.clone()  # one row: its transpose is itself, and the kernel writes over it
    lines = torch.empty(2, keys, dtype=torch.int32, device="cpu")  # whatever device is the default
    counts = torch.empty(2, dtype=torch.int64, device="cpu")
    recovered = cpu._kernels.cover(
        cpu._isa_index(),
        by_key.data_ptr(),
        positions.data_ptr(),
        count,
        keys,
        first,
        share,
        lines[0].data_ptr(),
        lines[1].data_ptr(),
        counts.data_ptr(),
    )
    columns, distances = counts.tolist()
    return lines[0, :columns].long(), lines[1, :distances].long(), recovered


def shares(mass: Tensor) -> bool:
    """Whether :func:`needed_shares` can take ``mass``."""
    return hasattr(cpu._kernels, "needed_shares") and mass.dtype == torch.float32 and mass.device.type == "cpu"


def needed_shares(mass: Tensor) -> Tensor:
    """``scores.needed_shares`` of fp32 [..., n], for what :func:`shares` allows: a task is a row, sorted by digits."""
    mass = mass.contiguous()
    out, n = torch.empty(mass.shape, dtype=torch.float64), mass.shape[-1]
    rows = mass.numel() // n if n else 0
    cpu._kernels.needed_shares(torch.get_num_threads(), mass.data_ptr(), rows, n, out.data_ptr())
    return out
