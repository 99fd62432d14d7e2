"""Block means in place of blocks that are not read (``tail=mean``), on the device: within a prefill's own loop, or by
a kernel of its own for one row. Means are multiplied in the dtype of the queries."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.layout import rows as in_rows
from saccade.ops.triton.common import LN2, LOG2E, cap_logits, pad, precision, processors
from saccade.ops.triton.lines import line_marks
from saccade.selection import Blocks


@dataclass(frozen=True)
class Means:
    """What may stand for unread blocks of ``size`` keys: ``keys`` and ``values`` [full, kv_heads, head_dim] of all that
    the last row sees whole; ``marks`` int8 [units * query blocks, full]: those that are read. ``tile``: means that a
    kernel takes at once."""

    keys: Tensor
    values: Tensor
    marks: Tensor
    size: int

    @classmethod
    def of(cls, kv: KVView, used: Blocks, dtype: torch.dtype) -> Means | None:
        """Beside ``used``; None where no row sees a block whole."""
        shape, size = used.shape, used.block_size
        full = (shape.q_start + shape.q_len) // size
        if full == 0:
            return None
        keys, values = (kv.summary(kind, size)[:full, 0].to(dtype).contiguous() for kind in ("mean", "mean_value"))
        width = -(-shape.k_len // size)
        marks = line_marks(used.offsets, used.indices, used.units * used.q_blocks, width)
        return cls(keys, values, marks[:, :full].contiguous(), size)

    @property
    def full(self) -> int:
        return self.keys.shape[0]

    @property
    def tile(self) -> int:
        """What fits shared memory beside the queries."""
        row_bytes = pad(self.keys.shape[2]) * self.keys.element_size()
        return 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16


def attend_means(
    q: Tensor, kv: KVView, used: Blocks, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """``ops.mean_tail.mean_tail`` for one row, ``q`` [heads, 1, head_dim], beside the blocks ``used``, whose units
    divide the query heads and are a multiple or a part of the KV heads."""
    heads, _, head_dim = q.shape
    means = Means.of(kv, used, q.dtype)
    if means is None:
        return torch.zeros(q.shape, dtype=torch.float32, device=q.device), torch.full_like(
            q[..., 0], -torch.inf, dtype=torch.float32
        )
    given, lists = in_rows(q), max(used.units, kv.kv_heads)
    splits = max(1, min(2 * processors(q.device) // lists, -(-means.full // 256), 64))
    out = torch.empty(splits, heads, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(splits, heads, dtype=torch.float32, device=q.device)
    _means[(lists, splits)](
        given, means.keys, means.values, means.marks, out, lse, given.stride(0), means.full, heads, scale * LOG2E,
        softcap or 0.0, EACH=heads // lists, LISTS=lists, UNITS=used.units, KV_HEADS=kv.kv_heads, D=head_dim,
        D_PAD=pad(head_dim), ROWS=pad(heads // lists), TILE=means.tile, LOG_SIZE=math.log2(means.size), LN2=LN2,
        CAPPED=softcap is not None, PRECISION=precision(q.dtype), num_warps=4,
    )  # fmt: skip
    weight = torch.softmax(lse, 0).nan_to_num(0.0)  # heads that nothing stands for
    return (weight[..., None] * out).sum(0)[:, None], torch.logsumexp(lse, 0)[:, None]


@triton.jit
def mean_steps(
    acc, weight, top, q, position, marks, keys, values, kv_head, begin, end, scale_log2, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    LOG_SIZE: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The means of blocks ``begin .. end - 1`` that ``marks`` leaves unmarked and rows at ``position`` see whole, each
    with the weight of SIZE keys: online softmax."""
    channel = tl.arange(0, D_PAD)
    for start in tl.range(begin, end, TILE, num_stages=1):
        block = start + tl.arange(0, TILE)
        inside = block < end
        unread = tl.load(marks + block, mask=inside, other=1) == 0
        if tl.max(unread.to(tl.int32), 0) > 0:
            at = (block.to(tl.int64) * KV_HEADS + kv_head)[:, None] * D + channel[None, :]
            there = inside[:, None] & (channel < D)[None, :]
            k = tl.load(keys + at, mask=there, other=0.0)
            scores = cap_logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale_log2, softcap, CAPPED)
            stands = unread[None, :] & (position[:, None] >= (block[None, :] + 1) * SIZE - 1)
            scores = tl.where(stands, scores + LOG_SIZE, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp2(top - anchor)
            p = tl.exp2(scores - anchor[:, None])
            v = tl.load(values + at, mask=there, other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
            weight = weight * shrink + tl.sum(p, 1)
            top = higher
    return acc, weight, top


@triton.jit(do_not_specialize=["full", "heads"])
def _means(
    q_ptr, keys, values, marks, out, lse, q_head, full, heads, scale_log2, softcap,
    EACH: tl.constexpr, LISTS: tl.constexpr, UNITS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, LOG_SIZE: tl.constexpr, LN2: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The heads of one list, which share a KV head and what is read."""
    mine, split = tl.program_id(0), tl.program_id(1)
    row, channel = tl.arange(0, ROWS), tl.arange(0, D_PAD)
    head = mine * EACH + row
    there = (row < EACH)[:, None] & (channel < D)[None, :]
    q = tl.load(q_ptr + head.to(tl.int64)[:, None] * q_head + channel[None, :], mask=there, other=0.0)
    share = tl.cdiv(tl.cdiv(full, TILE), tl.num_programs(1)) * TILE
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    acc, weight, top = mean_steps(
        acc, weight, top, q, row * 0 + (1 << 30), marks + (mine * UNITS // LISTS).to(tl.int64) * full, keys, values,
        mine * KV_HEADS // LISTS, split * share, tl.minimum((split + 1) * share, full), scale_log2, softcap, KV_HEADS,
        D, D_PAD, 1, TILE, LOG_SIZE, CAPPED, PRECISION,
    )  # fmt: skip
    total = tl.where(weight == 0.0, 1.0, weight)
    at = (split * heads + head).to(tl.int64)
    tl.store(out + at[:, None] * D + channel[None, :], acc / total[:, None], mask=there)
    tl.store(lse + at, tl.where(weight == 0.0, float("-inf"), top + tl.log2(total)) * LN2, mask=row < EACH)
