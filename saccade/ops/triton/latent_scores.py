"""Scores of blocks of latents. One KV head serves all query heads, and a block's score is the mean over these. A mean
of products with one summary is the product with the queries' mean: heads are averaged first, in a launch of its own,
and each summary is read once for a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.common import begin, launched, pad

CHANNELS = 64  # that a program averages
TILE, WIDE, WARPS = 16, 256, 4  # blocks of a program, and channels that it reads at a time


def score_latents(
    q: Tensor, lengths: Tensor, pointers: Tensor, blocks: int, size: int, first: int, last: int, after_full: bool
) -> Tensor:
    """``q`` [rows, heads, width] and ``pointers`` to each row's summaries -> float32 [rows, 1, blocks]: see
    ``batched_decode.score_blocks``."""
    rows, heads, width = q.shape
    means = torch.empty(rows, 2, width, dtype=torch.float32, device=q.device)
    _mean[(triton.cdiv(width, CHANNELS), rows)](
        q, means, q.stride(0), q.stride(1), HEADS=heads, HEADS_PAD=pad(heads, 1), D=width, CHANNELS=CHANNELS,
        num_warps=4, **launched(q.device),
    )  # fmt: skip
    scores = torch.empty(rows, 1, blocks, dtype=torch.float32, device=q.device)
    _score[(triton.cdiv(blocks, TILE), rows)](
        q, means, lengths, pointers, scores, blocks, D=width, SIZE=size, FIRST=first, LAST=last, AFTER_FULL=after_full,
        TILE=TILE, WIDE=WIDE, num_warps=WARPS, **launched(q.device),
    )  # fmt: skip
    return scores


@triton.jit
def _mean(
    q_ptr, means, q_row, q_head, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, D: tl.constexpr, CHANNELS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """What lies above zero, and what lies below it, of some channels of a row's queries, averaged over its heads."""
    begin(EARLY)
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    head = tl.arange(0, HEADS_PAD)
    there = (head < HEADS)[:, None] & (channel < D)[None, :]
    at = q_ptr + row * q_row + head[:, None] * q_head + channel[None, :]
    q = tl.load(at, mask=there, other=0.0).to(tl.float32)
    tl.store(means + row * 2 * D + channel, tl.sum(tl.maximum(q, 0.0), 0) / HEADS, mask=channel < D)
    tl.store(means + row * 2 * D + D + channel, tl.sum(tl.minimum(q, 0.0), 0) / HEADS, mask=channel < D)


@triton.jit(do_not_specialize=["blocks"])
def _score(
    q_ptr, means, lengths, pointers, scores, blocks,
    D: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, AFTER_FULL: tl.constexpr,
    TILE: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A block's two parts follow each other, as the two means do: one product of twice the channels."""
    begin(EARLY)
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row)
    stop = tl.cdiv(length, SIZE) - LAST
    if AFTER_FULL:
        stop = length // SIZE - LAST
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    wanted = (block >= FIRST) & (block < stop)
    out = scores + row * blocks + block
    if (tl.program_id(0) * TILE < stop) & (length > 0):
        base = tl.multiple_of(tl.load(pointers + row).to(tl.pointer_type(q_ptr.dtype.element_ty)), 16)
        total = tl.zeros([TILE, WIDE], tl.float32)
        for first in tl.static_range(0, 2 * D, WIDE):
            channel = first + tl.arange(0, WIDE)
            real = channel < 2 * D
            at = base + block[:, None].to(tl.int64) * (2 * D) + channel[None, :]
            part = tl.load(at, mask=wanted[:, None] & real[None, :], other=0.0).to(tl.float32)
            total += part * tl.load(means + row * 2 * D + channel, mask=real, other=0.0)[None, :]
        tl.store(out, tl.where(wanted, tl.sum(total, 1), float("-inf")), mask=block < blocks)
    else:
        tl.store(out, tl.full([TILE], float("-inf"), tl.float32), mask=block < blocks)
