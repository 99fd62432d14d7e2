"""Column and diagonal sums of the attention of a chunk's last rows: what FlexPrefill and its kin decide by.

Here by key and by distance, in ``block_sums`` by blocks of them. One kernel finds every row's log-sum-exp, split over
the keys, a second computes the weights again tile by tile, sums them by key and lays them down by distance for a third
to add. Every sum is added in a fixed order, so none changes from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.layout import rows as in_rows
from saccade.ops.triton.common import LOG2E, cap_logits, pad, pool_rows, precision, processors
from saccade.ops.triton.readers import load_keys
from saccade.selection import Shape

MOST_BYTES = 1 << 30  # of weights laid down by distance at once


def token_sums(
    q: Tensor, kv: KVView, shape: Shape, rows: int, scale: float, softcap: float | None = None, begin: int = 0
) -> tuple[Tensor, Tensor]:
    """``ops.scores.line_sums``: softmax weights of the last ``rows`` rows (see ``triton.serves_sums``) over the keys
    from ``begin`` on, summed by key and by distance from the row, two fp32 [heads, k_len]."""
    call = _Call(q, kv, shape, rows, pad(rows), scale, softcap, begin)
    heads, visible, row_log = shape.heads, call.visible, call.row_log()
    sums = torch.zeros(2, heads, shape.k_len, dtype=torch.float32, device=q.device)
    together = max(1, min(heads, MOST_BYTES // (4 * rows * visible)))
    laid = torch.empty(together, rows, visible, dtype=torch.float32, device=q.device)
    for head in range(0, heads, together):
        count = min(together, heads - head)
        _token_sums[(triton.cdiv(visible, 64), count)](
            *call.shared, row_log, sums, laid, head, shape.k_len, *call.numbers, **call.static, num_warps=call.warps
        )
        _sum_distances[(triton.cdiv(visible, 512), count)](
            laid, sums[1], head, shape.k_len, rows, visible, SPAN=512, num_warps=4
        )
    return sums[0], sums[1]


class _Call:
    """What the kernels of one call share, ``size`` the rows of a tile."""

    def __init__(
        self, q: Tensor, kv: KVView, shape: Shape, rows: int, size: int, scale: float, softcap: float | None, begin: int
    ) -> None:
        self.visible = shape.q_start + shape.q_len
        self.first = self.visible - rows  # position of the first of these rows
        self.size, self.heads, self.device = size, shape.heads, q.device
        given = in_rows(q[:, -rows:])
        paged = kv.paged()
        self.shared = (given, paged.k, paged.block_table)
        self.numbers = (
            given.stride(0), given.stride(1), paged.head_stride, rows, self.first, self.visible, begin, scale * LOG2E,
            softcap or 0.0,
        )  # fmt: skip
        self.static = {
            "HEADS": shape.heads,
            "KV_HEADS": kv.kv_heads,
            "D": kv.head_dim,
            "D_PAD": pad(kv.head_dim),
            "PAGE": kv.block_size,
            "SIZE": size,
            "CAPPED": softcap is not None,
            "PRECISION": precision(q.dtype),
        }
        self.warps = 4 if size <= 64 else 8

    def row_log(self) -> Tensor:
        """Base-2 log-sum-exp of every row: fp32 [heads, size]."""
        splits = max(1, min(4 * processors(self.device) // self.heads, -(-self.visible // 512), 64))
        logs = torch.empty(self.heads, splits, self.size, dtype=torch.float32, device=self.device)
        _row_logs[(self.heads, splits)](*self.shared, logs, *self.numbers, **self.static, num_warps=self.warps)
        return torch.logsumexp(logs * (1 / LOG2E), 1) * LOG2E


@triton.jit
def rows_of(q_ptr, head, q_head, q_row, rows, D: tl.constexpr, D_PAD: tl.constexpr, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)
    channel = tl.arange(0, D_PAD)
    return tl.load(
        q_ptr + head.to(tl.int64) * q_head + row[:, None] * q_row + channel[None, :],
        mask=(row < rows)[:, None] & (channel[None, :] < D),
        other=0.0,
    )


@triton.jit
def _logits(
    q, k_pool, table, kv_head, key, rows, first, visible, begin, scale_log2, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Base-2 logits [SIZE rows, keys], -inf where acausal, before ``begin`` or beyond the rows there are."""
    channel = tl.arange(0, D_PAD)
    valid = key < visible
    at = pool_rows(table, key, valid, kv_head, KV_HEADS, PAGE)
    k = load_keys(k_pool, at[:, None], channel[None, :], valid[:, None], D, q.dtype)
    scores = cap_logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale_log2, softcap, CAPPED)
    row = tl.arange(0, SIZE)
    seen = (key[None, :] <= first + row[:, None]) & (row < rows)[:, None] & (key >= begin)[None, :]
    return tl.where(seen, scores, float("-inf"))


@triton.jit(
    do_not_specialize=["table_head", "rows", "first", "visible", "begin"], do_not_specialize_on_alignment=["table"]
)
def _row_logs(
    q_ptr, k_pool, table, logs, q_head, q_row, table_head, rows, first, visible, begin, scale_log2, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    kv_head = head // (HEADS // KV_HEADS)
    table += kv_head.to(tl.int64) * table_head
    q = rows_of(q_ptr, head, q_head, q_row, rows, D, D_PAD, SIZE)
    share = tl.cdiv(tl.cdiv(visible, 64), splits) * 64
    top = tl.full([SIZE], float("-inf"), tl.float32)
    weight = tl.zeros([SIZE], tl.float32)
    for at in tl.range(split * share, tl.minimum((split + 1) * share, visible), 64, num_stages=3):
        key = at + tl.arange(0, 64)
        scores = _logits(
            q, k_pool, table, kv_head, key, rows, first, visible, begin, scale_log2, softcap, KV_HEADS, D, D_PAD, PAGE,
            SIZE, CAPPED, PRECISION,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weight = weight * tl.exp2(top - anchor) + tl.sum(tl.exp2(scores - anchor[:, None]), 1)
        top = higher
    total = tl.where(weight == 0.0, 1.0, weight)
    found = tl.where(weight == 0.0, float("-inf"), top + tl.log2(total))
    tl.store(logs + (head * splits + split) * SIZE + tl.arange(0, SIZE), found)


@triton.jit(
    do_not_specialize=["table_head", "rows", "first", "visible", "begin", "head_from", "k_len"],
    do_not_specialize_on_alignment=["table"],
)
def _token_sums(
    q_ptr, k_pool, table, row_log, columns, laid, head_from, k_len, q_head, q_row, table_head, rows, first, visible,
    begin, scale_log2, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = head_from + tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    table += kv_head.to(tl.int64) * table_head
    q = rows_of(q_ptr, head, q_head, q_row, rows, D, D_PAD, SIZE)
    row = tl.arange(0, SIZE)
    known = tl.load(row_log + head * SIZE + row)
    known = tl.where((row < rows) & (known > float("-inf")), known, 0.0)
    key = tl.program_id(0) * 64 + tl.arange(0, 64)
    scores = _logits(
        q, k_pool, table, kv_head, key, rows, first, visible, begin, scale_log2, softcap, KV_HEADS, D, D_PAD, PAGE,
        SIZE, CAPPED, PRECISION,
    )  # fmt: skip
    weights = tl.exp2(scores - known[:, None])
    tl.store(columns + head.to(tl.int64) * k_len + key, tl.sum(weights, 0), mask=key < visible)
    # Keys at one distance lie below each other, the greatest distance first, so that neighbours stay neighbours.
    line = (tl.program_id(1).to(tl.int64) * rows + row)[:, None] * visible
    place = key[None, :] + (rows - 1 - row)[:, None]
    tl.store(laid + line + place, weights, mask=(place < visible) & (row < rows)[:, None])


@triton.jit(do_not_specialize=["head_from", "k_len", "rows", "visible"])
def _sum_distances(laid, slashes, head_from, k_len, rows, visible, SPAN: tl.constexpr):
    place = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    line = laid + tl.program_id(1).to(tl.int64) * rows * visible + place
    total = tl.zeros([SPAN], tl.float32)
    for row in tl.range(0, rows):  # what lies before its first key is not written
        total += tl.load(line + row * visible, mask=(place >= rows - 1 - row) & (place < visible), other=0.0)
    head = (head_from + tl.program_id(1)).to(tl.int64)
    tl.store(slashes + head * k_len + visible - 1 - place, total, mask=place < visible)
