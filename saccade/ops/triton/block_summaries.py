"""Summaries of many full blocks of one sequence at once, read where its keys lie: what a prompt leaves to be made
before the first step that chooses blocks. By torch that is a copy of all keys and several passes over it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.paged import Paged
from saccade.kv.summaries import PARTS, kept_dtype
from saccade.ops.triton.common import pad, pool_rows
from saccade.ops.triton.readers import load_keys

MEANS = ("mean", "stored_mean", "mean_value")
LONGEST = 128  # keys of a block: more do not fit a program
MOST_CHANNELS, CHANNELS = 256, 64  # of rows that a program takes whole, and of wider ones: these are independent


def summarize(paged: Paged, kind: str, block_size: int, first: int, last: int) -> Tensor | None:
    """Summaries of full blocks ``first .. last - 1``, whose keys and values are resident: [last - first, parts,
    kv_heads, head_dim] of the dtype that they are kept in (see kv.summaries). None for what no kernel makes."""
    if kind not in PARTS or not 1 < block_size <= LONGEST or block_size & (block_size - 1):
        return None
    layout, pool = paged.format, paged.v if kind == "mean_value" else paged.k
    heads, dim = layout.kv_heads, layout.head_dim
    made = torch.empty(last - first, PARTS[kind], heads, dim, dtype=kept_dtype(kind, pool.dtype), device=pool.device)
    if last > first:
        channels = pad(dim, 1) if dim <= MOST_CHANNELS else CHANNELS
        _summarize[(last - first, heads, triton.cdiv(dim, channels))](
            pool, paged.block_table, made, first, paged.head_stride, HEADS=heads, D=dim, D_PAD=channels,
            PAGE=layout.block_size, SIZE=block_size, CUBOID=kind == "cuboid", MEAN=kind in MEANS,
            MOMENTS=kind == "moments", num_warps=4,
        )  # fmt: skip
    return made


@triton.jit
def parts(keys, SIZE: tl.constexpr, CUBOID: tl.constexpr, MEAN: tl.constexpr, MOMENTS: tl.constexpr):
    """The two parts of a block's summary, fp32 [head_dim] each, of its ``keys`` fp32 [SIZE, head_dim]; of MEAN the
    first alone counts."""
    high, low = tl.max(keys, 0), tl.min(keys, 0)
    if MEAN or MOMENTS:
        high = tl.sum(keys, 0) / SIZE
        low = tl.sum((keys - high[None, :]) * (keys - high[None, :]), 0) / SIZE
    if CUBOID:
        center = (high + low) / 2
        spread = tl.sum(tl.abs(center[None, :] - keys), 0) / SIZE
        high, low = center + spread, center - spread
    broken = tl.max((keys != keys).to(tl.int32), 0) > 0  # which max and min pass over
    return tl.where(broken, float("nan"), high), tl.where(broken, float("nan"), low)


@triton.jit(do_not_specialize=["first", "table_head"])
def _summarize(
    k_pool, table, made, first, table_head,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
    CUBOID: tl.constexpr, MEAN: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """One block of one head, or some channels of it."""
    PARTS: tl.constexpr = 1 if MEAN else 2
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = (first + block) * SIZE + tl.arange(0, SIZE)
    channel = tl.program_id(2) * D_PAD + tl.arange(0, D_PAD)
    real = channel < D
    place = pool_rows(table + head * table_head, key, key >= 0, head, HEADS, PAGE)[:, None]
    keys = load_keys(k_pool, place, channel[None, :], (key >= 0)[:, None] & real[None, :], D).to(tl.float32)
    high, low = parts(keys, SIZE, CUBOID, MEAN, MOMENTS)
    to = made + (block * PARTS * HEADS + head) * D + channel
    tl.store(to, high.to(made.dtype.element_ty), mask=real)
    if not MEAN:
        tl.store(to + HEADS * D, low.to(made.dtype.element_ty), mask=real)
