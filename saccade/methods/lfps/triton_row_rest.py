"""What stands for keys that LFPS's recorded steps do not read: bypasses, and the sampled rest. Means what stand_ins.py
means."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.lfps.recorded import MOST_PROBES
from saccade.methods.lfps.triton_row_words import R, W, budget_at, pointer, query_of, static
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.common import begin, cap_logits, pool_rows
from saccade.ops.triton.readers import load_keys


def bypasses(rows: LayerRows) -> tuple[Tensor, Tensor]:
    """Who is bypassed, int8 [rows * heads], and what stands then for all that a head leaves out, float32 [rows *
    heads], as log-sum-exp."""
    q = query_of(rows)
    idle = torch.empty(rows.count * rows.heads, dtype=torch.int8, device=q.device)
    instead = torch.empty(rows.count * rows.heads, dtype=torch.float32, device=q.device)
    _bypass[(rows.heads, rows.count)](
        q, rows.pages.k, rows.pages.tables, rows.pages.lengths, rows.words, rows.reals, idle, instead, q.stride(0),
        q.stride(1), *rows.pages.table_strides, rows.words.stride(0), rows.reals.stride(0), rows.scale,
        rows.softcap or 0.0, **static(rows, CAPPED=rows.softcap is not None, num_warps=2),
    )  # fmt: skip
    return idle, instead


def join_rest(
    rows: LayerRows,
    parts: Tensor,
    lse: Tensor,
    marks: Tensor,
    listed: Tensor,
    idle: Tensor,
    instead: Tensor,
    units: int,
) -> tuple[Tensor, Tensor]:
    """What was read, ``parts`` and ``lse``, with what stands for the keys that were not: out like the queries, and
    log-sum-exp."""
    q = query_of(rows)
    joined, total = torch.empty_like(q), torch.empty_like(lse)
    _join[(rows.heads, rows.count)](
        q, rows.pages.k, rows.pages.tables, rows.pages.lengths, rows.words, rows.reals, marks, listed, idle, instead,
        parts, lse, joined, total, q.stride(0), q.stride(1), joined.stride(0), joined.stride(1),
        *rows.pages.table_strides, rows.words.stride(0), rows.reals.stride(0), marks.shape[1], parts.shape[2],
        rows.scale, rows.softcap or 0.0,
        **static(rows, UNITS=units, MOST=MOST_PROBES, CAPPED=rows.softcap is not None, num_warps=4),
    )  # fmt: skip
    return joined, total


@triton.jit
def _row(q_ptr, head, q_head, D: tl.constexpr, D_PAD: tl.constexpr):
    channel = tl.arange(0, D_PAD)
    return tl.load(q_ptr + head.to(tl.int64) * q_head + channel, mask=channel < D, other=0.0).to(tl.float32)


@triton.jit
def _logits(
    q, k_pool, table, key, valid, kv_head, scale, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Base-2 logits of one row, -inf where not ``valid``."""
    channel = tl.arange(0, D_PAD)
    at = pool_rows(table, key, valid, kv_head, KV_HEADS, PAGE)[:, None]
    k = load_keys(k_pool, at, channel[None, :], valid[:, None], D, tl.float32).to(tl.float32)
    found = cap_logits(tl.sum(k * q[None, :], 1), scale * 1.4426950408889634, softcap, CAPPED)
    return tl.where(valid, found, float("-inf"))


@triton.jit
def _add_up(scores):
    """Natural log-sum-exp of base-2 ``scores``."""
    top = tl.max(scores, 0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(scores - anchor), 0)
    found = anchor + tl.log2(tl.where(total > 0.0, total, 1.0))
    return tl.where(total > 0.0, found * 0.6931471805599453, float("-inf"))


@triton.jit
def _span(
    q, k_pool, table, start, stop, kv_head, scale, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Natural log-sum-exp over the keys ``start .. stop - 1``."""
    top = tl.full([16], float("-inf"), tl.float32)
    weight = tl.zeros([16], tl.float32)
    for at in tl.range(start, stop, 16):
        key = at + tl.arange(0, 16)
        scores = _logits(
            q, k_pool, table, key, key < stop, kv_head, scale, softcap, KV_HEADS, D, D_PAD, PAGE, CAPPED
        )  # fmt: skip
        higher = tl.maximum(top, scores)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weight = weight * tl.exp2(top - anchor) + tl.exp2(scores - anchor)
        top = higher
    return _add_up(tl.where(weight > 0.0, top + tl.log2(tl.where(weight > 0.0, weight, 1.0)), float("-inf")))


@triton.jit(
    do_not_specialize=["table_stride", "table_head", "word_row", "real_row"],
    do_not_specialize_on_alignment=["tables", "lengths", "words", "reals", "idle", "instead"],
)
def _bypass(
    q_ptr, k_pool, tables, lengths, words, reals, idle, instead, q_row, q_head, table_stride, table_head, word_row,
    real_row, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    CAPPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    head, row = tl.program_id(0), tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    entry = row * HEADS + head
    length = tl.load(lengths + row)
    rests = tl.full([], 0, tl.int8)
    left = tl.full([], float("-inf"), tl.float32)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        reals += row.to(tl.int64) * real_row
        first = tl.load(own + W.sinks).to(tl.int32)
        _n, dense, _, _ = budget_at(own, reals, length, first)
        epsilon = tl.load(reals + R.epsilon).to(tl.float32)
        if (dense == 0) & (first > 0) & (epsilon < 1.0):
            table = tables + row.to(tl.int64) * table_stride + kv_head.to(tl.int64) * table_head
            q = _row(q_ptr + row.to(tl.int64) * q_row, head, q_head, D, D_PAD)
            sinks = tl.minimum(first, length)
            recent = tl.maximum(length - tl.load(own + W.local).to(tl.int32), first)
            near = _span(q, k_pool, table, 0, sinks, kv_head, scale, softcap, KV_HEADS, D, D_PAD, PAGE, CAPPED)
            last = _span(q, k_pool, table, recent, length, kv_head, scale, softcap, KV_HEADS, D, D_PAD, PAGE, CAPPED)
            mean = _row(pointer(own, W.mean_key, tl.float32), kv_head, D, D, D_PAD)
            spread = tl.load(pointer(own, W.spread, tl.float32) + head)
            count = tl.maximum(length - first, 1).to(tl.float32)
            middle = tl.sum(q * mean, 0) * scale + 0.5 * tl.sum(q * q, 0) * spread + tl.log(count)
            top = tl.maximum(middle, tl.maximum(near, last))
            total = tl.exp(near - top) + tl.exp(middle - top) + tl.exp(last - top)
            rests = (tl.exp(near - top) / total > epsilon).to(tl.int8)
            left = middle
    tl.store(idle + entry, rests)
    tl.store(instead + entry, left)


@triton.jit(
    do_not_specialize=["table_stride", "table_head", "word_row", "real_row", "width", "splits"],
    do_not_specialize_on_alignment=["tables", "lengths", "words", "reals", "marks", "listed", "idle", "instead"],
)
def _join(
    q_ptr, k_pool, tables, lengths, words, reals, marks, listed, idle, instead, parts, lse, joined, total, q_row,
    q_head, to_row, to_head, table_stride, table_head, word_row, real_row, width, splits, scale, softcap,
    UNITS: tl.constexpr, MOST: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``stand_ins.sampled_rest``, or what stands for a bypassed head, merged by log-sum-exp."""
    begin(EARLY)
    head, row = tl.program_id(0), tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    entry = row * HEADS + head
    length = tl.load(lengths + row)
    rest = tl.full([], float("-inf"), tl.float32)
    channel = tl.arange(0, D_PAD)
    value = tl.zeros([D_PAD], tl.float32)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        reals += row.to(tl.int64) * real_row
        first = tl.load(own + W.sinks).to(tl.int32)
        n, dense, _take, local = budget_at(own, reals, length, first)
        if dense == 0:
            value = _row(pointer(own, W.mean_value, tl.float32), kv_head, D, D, D_PAD)
            count = tl.load(own + W.probes).to(tl.int32)
            if tl.load(idle + entry) != 0:
                rest = tl.load(instead + entry)
            elif count > 0:
                unit = (row * UNITS + head // (HEADS // UNITS)).to(tl.int64)
                size = n - local
                number = tl.arange(0, MOST)
                golden = (number.to(tl.float64) + 0.5) * 0.6180339887498949
                share = golden - tl.floor(golden)
                place = tl.where(size <= count, number, (share * size.to(tl.float64)).to(tl.int32))
                asked = (number < count) & (number < size)
                other = tl.where(asked, place, -1)  # two probes may fall on one key: the later one does not count
                twice = (other[:, None] == other[None, :]) & (number[None, :] < number[:, None])
                asked = asked & (tl.sum(twice.to(tl.int32), 1) == 0)
                word = tl.load(marks + unit * width + place // 16, mask=asked, other=0)
                free = asked & ((word >> place % 16) & 1 == 0)
                table = tables + row.to(tl.int64) * table_stride + kv_head.to(tl.int64) * table_head
                q = _row(q_ptr + row.to(tl.int64) * q_row, head, q_head, D, D_PAD)
                scores = _logits(
                    q, k_pool, table, first + place, free, kv_head, scale, softcap, KV_HEADS, D, D_PAD, PAGE, CAPPED
                )  # fmt: skip
                left = (size - tl.load(listed + unit)).to(tl.float32)
                left = left / tl.maximum(tl.sum(free.to(tl.int32), 0), 1)
                rest = _add_up(scores) + tl.log(tl.maximum(left, 1e-30))
    own_lse = tl.load(lse + entry)
    top = tl.maximum(own_lse, rest)
    top = tl.where(top == float("-inf"), 0.0, top)
    mine, others = tl.exp(own_lse - top), tl.exp(rest - top)
    weight = mine + others
    have = tl.zeros([D_PAD], tl.float32)
    EACH: tl.constexpr = HEADS // UNITS
    part = (row * UNITS + head // EACH).to(tl.int64) * splits * EACH + head % EACH
    for _ in tl.range(0, splits):
        have += tl.load(parts + part * D + channel, mask=channel < D, other=0.0)
        part += EACH
    mixed = (have * mine + value * others) / tl.where(weight > 0.0, weight, 1.0)
    to = joined + row.to(tl.int64) * to_row + head.to(tl.int64) * to_head + channel
    tl.store(to, mixed.to(joined.dtype.element_ty), mask=channel < D)
    tl.store(total + entry, tl.where(weight > 0.0, top + tl.log(tl.where(weight > 0.0, weight, 1.0)), float("-inf")))
