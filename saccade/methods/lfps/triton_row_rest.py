"""What stands for keys that LFPS's recorded steps do not read: bypasses, and the sampled rest. Means what stand_ins.py
means; what finds them are parts of kernels (triton_row_begin.py, triton_row_choice.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.lfps.triton_row_words import R, W, budget_at, pointer, query_of, static
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.common import begin, cap_logits, pool_rows
from saccade.ops.triton.readers import load_keys


def join_rest(rows: LayerRows, parts: Tensor, lse: Tensor, rest: Tensor, units: int) -> tuple[Tensor, Tensor]:
    """What was read, ``parts`` and ``lse``, with what the keys weigh that were not, float32 [rows * heads]: out like
    the queries, and log-sum-exp."""
    joined, total = torch.empty_like(query_of(rows)), torch.empty_like(lse)
    _join[(rows.heads, rows.count)](
        rows.pages.lengths, rows.words, rows.reals, rest, parts, lse, joined, total, joined.stride(0),
        joined.stride(1), rows.words.stride(0), rows.reals.stride(0), parts.shape[2],
        **static(rows, UNITS=units, num_warps=4),
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
    k = load_keys(k_pool, at, channel[None, :], valid[:, None] & (channel < D)[None, :], D).to(tl.float32)
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


@triton.jit
def find_rest(
    q_ptr, k_pool, tables, lengths, words, reals, idle, instead, q_row, q_head, table_stride, table_head, word_row,
    real_row, scale, softcap, head, row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Whether a ``head`` is bypassed, int8 [rows * heads], and what stands then for all that it leaves out, float32
    [rows * heads], as log-sum-exp."""
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


@triton.jit
def ask_probes(
    q_ptr, k_pool, tables, lengths, words, reals, marks, listed, idle, instead, rest, q_row, q_head, table_stride,
    table_head, word_row, real_row, width, scale, softcap, head, row,
    UNITS: tl.constexpr, MOST: tl.constexpr, ASKED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """What the keys that a ``head`` leaves out weigh, float32 [rows * heads], as log-sum-exp, by ASKED probes at a time
    (``stand_ins.sampled_rest``), or what stands for a bypassed head."""
    kv_head = head // (HEADS // KV_HEADS)
    entry = row * HEADS + head
    unit = (row * UNITS + head // (HEADS // UNITS)).to(tl.int64)
    length = tl.load(lengths + row)
    found = tl.full([], float("-inf"), tl.float32)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        first, count = tl.load(own + W.sinks).to(tl.int32), tl.load(own + W.probes).to(tl.int32)
        n, dense, _take, local = budget_at(own, reals + row.to(tl.int64) * real_row, length, first)
        rests, stands, candidates = tl.load(idle + entry), tl.load(instead + entry), tl.load(listed + unit)
        if (dense == 0) & (rests != 0):
            found = stands
        elif (dense == 0) & (count > 0):
            size = n - local
            others = _probe(tl.arange(0, MOST), count, size)
            table = tables + row.to(tl.int64) * table_stride + kv_head.to(tl.int64) * table_head
            q = _row(q_ptr + row.to(tl.int64) * q_row, head, q_head, D, D_PAD)
            top, weight, asked = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.float32), 0
            for start in tl.range(0, count, ASKED):
                number = start + tl.arange(0, ASKED)
                place = _probe(number, count, size)
                # Two probes may fall on one key: the later one does not count.
                same = (place[:, None] == others[None, :]) & (tl.arange(0, MOST)[None, :] < number[:, None])
                alone = (place >= 0) & (tl.sum(same.to(tl.int32), 1) == 0)
                word = tl.load(marks + unit * width + place // 16, mask=alone, other=0)
                free = alone & ((word >> place % 16) & 1 == 0)
                scores = _logits(
                    q, k_pool, table, first + place, free, kv_head, scale, softcap, KV_HEADS, D, D_PAD, PAGE, CAPPED
                )  # fmt: skip
                higher = tl.maximum(top, tl.max(scores, 0))
                anchor = tl.where(higher == float("-inf"), 0.0, higher)
                weight = weight * tl.exp2(top - anchor) + tl.sum(tl.exp2(scores - anchor), 0)
                top = higher
                asked += tl.sum(free.to(tl.int32), 0)
            left = (size - candidates).to(tl.float32) / tl.maximum(asked, 1)
            total = (top + tl.log2(tl.where(weight > 0.0, weight, 1.0))) * 0.6931471805599453
            found = tl.where(weight > 0.0, total + tl.log(tl.maximum(left, 1e-30)), float("-inf"))
    tl.store(rest + entry, found)


@triton.jit
def _probe(number, count, size):
    """The places of probes among ``size`` keys, all of these where they are no more than probes; -1 for none."""
    golden = (number.to(tl.float64) + 0.5) * 0.6180339887498949
    share = golden - tl.floor(golden)
    place = tl.where(size <= count, number, (share * size.to(tl.float64)).to(tl.int32))
    return tl.where((number < count) & (number < size), place, -1)


@triton.jit(
    do_not_specialize=["word_row", "real_row", "splits"],
    do_not_specialize_on_alignment=["lengths", "words", "reals", "rest"],
)
def _join(
    lengths, words, reals, rest, parts, lse, joined, total, to_row, to_head, word_row, real_row, splits,
    UNITS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PAGE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What was read and what stands for the rest, merged by log-sum-exp."""
    begin(EARLY)
    head, row = tl.program_id(0), tl.program_id(1)
    entry = row * HEADS + head
    length, left, own_lse = tl.load(lengths + row), tl.load(rest + entry), tl.load(lse + entry)
    channel = tl.arange(0, D_PAD)
    value = tl.zeros([D_PAD], tl.float32)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        first = tl.load(own + W.sinks).to(tl.int32)
        _n, dense, _take, _local = budget_at(own, reals + row.to(tl.int64) * real_row, length, first)
        if dense == 0:
            value = _row(pointer(own, W.mean_value, tl.float32), head // (HEADS // KV_HEADS), D, D, D_PAD)
    top = tl.maximum(own_lse, left)
    top = tl.where(top == float("-inf"), 0.0, top)
    mine, others = tl.exp(own_lse - top), tl.exp(left - top)
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
