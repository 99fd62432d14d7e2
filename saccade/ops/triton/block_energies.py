"""FlashPrefill's estimate on a GPU: one program a query block and head, which passes the mean keys once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.layout import rows as in_rows
from saccade.ops.triton.common import LOG2E, cap_logits, pad, precision
from saccade.selection import Shape

TILE = 64  # mean keys at a time


def energies(
    q: Tensor, kv: KVView, shape: Shape, block_size: int, scale: float, softcap: float | None = None
) -> Tensor:
    """:func:`saccade.ops.block_energies.block_energies`; the mean keys are multiplied in the dtype of ``q``."""
    means = kv.summary("mean", block_size)[: kv.length // block_size, 0].to(q.dtype).contiguous()
    given = in_rows(q)
    first = shape.q_start // block_size
    q_blocks = (shape.q_start + shape.q_len - 1) // block_size - first + 1
    k_blocks = -(-shape.k_len // block_size)
    out = torch.empty(shape.heads, q_blocks, k_blocks, dtype=torch.float32, device=q.device)
    _energies[(q_blocks, shape.heads)](
        given, means, out, given.stride(0), given.stride(1), shape.q_start, shape.q_len, first, means.shape[0],
        k_blocks, scale * LOG2E, softcap or 0.0, GROUP=shape.group, KV_HEADS=kv.kv_heads, D=q.shape[2],
        D_PAD=pad(q.shape[2]), SIZE=block_size, TILE=TILE, CAPPED=softcap is not None, PRECISION=precision(q.dtype),
        num_warps=4 if block_size == 64 else 8,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["q_start", "q_len", "first", "whole", "k_blocks"])
def _energies(
    q, means, out, q_head, q_row, q_start, q_len, first, whole, k_blocks, scale_log2, softcap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SIZE: tl.constexpr,
    TILE: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    q_block, head = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, D_PAD)
    position = (first + q_block) * SIZE + tl.arange(0, SIZE)
    row = position - q_start
    given = (row >= 0) & (row < q_len)
    rows = tl.load(
        q + head.to(tl.int64) * q_head + row[:, None].to(tl.int64) * q_row + channel[None, :],
        mask=given[:, None] & (channel[None, :] < D),
        other=0.0,
    )
    mine = out + (head.to(tl.int64) * tl.num_programs(0) + q_block) * k_blocks
    seen = tl.minimum(whole, first + q_block + 1)
    for start in tl.range(0, k_blocks, TILE):
        block = start + tl.arange(0, TILE)
        energy = tl.full([TILE], float("-inf"), tl.float32)
        if start < seen:
            mean = tl.load(
                means + (block[:, None].to(tl.int64) * KV_HEADS + head // GROUP) * D + channel[None, :],
                mask=(block < seen)[:, None] & (channel[None, :] < D),
                other=0.0,
            )
            score = tl.dot(rows, tl.trans(mean), input_precision=PRECISION)
            score = cap_logits(score, scale_log2, softcap, CAPPED)
            visible = given[:, None] & (position[:, None] >= (block[None, :] + 1) * SIZE - 1) & (block < seen)[None, :]
            score = tl.where(visible, score, float("-inf"))
            top = tl.max(score, 0)
            anchor = tl.where(top == float("-inf"), 0.0, top)
            total = tl.sum(tl.exp2(score - anchor[None, :]), 0)
            energy = tl.where(
                total > 0.0, (anchor + tl.log2(tl.where(total > 0.0, total, 1.0))) / 1.4426950408889634, energy
            )
        tl.store(mine + block, energy, mask=block < k_blocks)
