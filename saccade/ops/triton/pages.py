"""Rows into slots and out of them on a GPU, in one launch and one pass: the host knows no slots there, and torch's
indexing takes a pass for the index and one for the order of the axes. This module is a kv.rows.RowMover."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.paged import Paged
from saccade.ops.triton.common import pad


def store(paged: Paged, start: int, k: Tensor, v: Tensor) -> None:
    """Write ``k``, ``v`` [kv_heads, t, head_dim], of any strides, to positions ``start ..`` of ``paged``."""
    heads, count, head_dim = k.shape
    size = paged.format.block_size
    k, v = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (k, v))
    if count:
        _move[(-(-(start + count) // size) - start // size, heads, 2)](
            paged.k, paged.v, paged.block_table, k, v, start, count, paged.head_stride, *k.stride()[:2],
            *v.stride()[:2],
            HEADS=heads, SIZE=size, D=head_dim, WIDTH=pad(head_dim, 1), STORES=True, num_warps=4,
        )  # fmt: skip


def gather(pool: Tensor, block_table: Tensor, start: int, stop: int) -> Tensor:
    """Positions ``start .. stop - 1`` of ``pool`` [slots, kv_heads, block_size, head_dim], whose block b of head g lies
    in slot ``block_table[g, b]`` (int32 [kv_heads or 1, blocks]), in one piece: [kv_heads, stop - start, head_dim]."""
    _, heads, size, head_dim = pool.shape
    out = torch.empty(heads, stop - start, head_dim, dtype=pool.dtype, device=pool.device)
    if stop > start:
        table_head = 0 if block_table.shape[0] == 1 else block_table.stride(0)
        _move[(-(-stop // size) - start // size, heads, 1)](
            pool, pool, block_table, out, out, start, stop - start, table_head, *out.stride()[:2], *out.stride()[:2],
            HEADS=heads, SIZE=size, D=head_dim, WIDTH=pad(head_dim, 1), STORES=False, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["start", "count", "table_head"])
def _move(
    k_pool, v_pool, table, k, v, start, count, table_head, k_head, k_row, v_head, v_row,
    HEADS: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """One block of one head, of the keys or of the values."""
    block, head = start // SIZE + tl.program_id(0), tl.program_id(1).to(tl.int64)
    pool, rows, head_stride, row_stride = k_pool, k, k_head, k_row
    if tl.program_id(2) == 1:
        pool, rows, head_stride, row_stride = v_pool, v, v_head, v_row
    slot = tl.load(table + head * table_head + block).to(tl.int64)
    within = tl.arange(0, SIZE)[:, None]
    channel = tl.arange(0, WIDTH)[None, :]
    row = block.to(tl.int64) * SIZE + within - start
    real = (row >= 0) & (row < count) & (channel < D)
    paged = pool + ((slot * HEADS + head) * SIZE + within) * D + channel
    plain = rows + head * head_stride + row * row_stride + channel
    if STORES:
        tl.store(paged, tl.load(plain, mask=real, other=0.0).to(pool.dtype.element_ty), mask=real)
    else:
        tl.store(plain, tl.load(paged, mask=real, other=0.0), mask=real)
