"""Scores of all keys, or of listed ones, for the rows of a batched decode step (batched_lists.py: the best of them).
Means what ops/candidates.py means."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton import batched_best
from saccade.ops.triton.batch import KeyLists
from saccade.ops.triton.batched_best import parts_of
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.code_products import lines_for, products, queries
from saccade.ops.triton.common import LOG2E, begin, cap_logits, launched, pad, pool_rows, precision, processors
from saccade.ops.triton.readers import key_codes

KEYS, WARPS, STAGES = 64, 4, 3  # keys scored in one go
BUSY = 16  # programs for each processor


def score_keys(rows: LayerRows, units: int, lists: KeyLists | None = None, idle: Tensor | None = None) -> Tensor:
    """Float32 [rows, units, n] for ``n`` = ``rows.pages.longest``: what ranks the keys of each unit, the logit of one
    query head or the mean of several heads' softmax weights. Only what is said of keys below a row's length counts.

    With ``lists`` (a row of ``indices`` for each unit) only their keys are scored, each at its place in its list.
    Heads that are ``idle`` (int8 [rows * heads]) have no say."""
    return score_heads(rows, units, lists, idle)[1]


def score_heads(
    rows: LayerRows, units: int, lists: KeyLists | None = None, idle: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The logits of every head by themselves, base 2, float32 [rows, heads, n]; and what :func:`score_keys` gives."""
    q = rows.q if rows.q.stride(-1) == 1 else rows.q.contiguous()
    count, heads, head_dim = q.shape
    kv_heads, width, device = rows.kv_heads, rows.pages.longest, q.device
    programs = kv_heads if lists is None else max(units, kv_heads)  # heads that score the same keys share a program
    per, each = heads // programs, heads // units
    scores = torch.empty(count, heads, width, dtype=torch.float32, device=device)
    splits = max(1, min(triton.cdiv(width, KEYS), triton.cdiv(BUSY * processors(device), programs * count)))
    none = rows.pages.lengths
    sums = torch.empty(count, heads, splits, 2, dtype=torch.float32, device=device) if each > 1 else scores
    _score[(splits, programs, count)](
        q,
        rows.pages.k,
        rows.pages.tables,
        rows.pages.lengths,
        none if lists is None else lists.counts,
        none if lists is None else lists.indices,
        scores,
        sums,
        q.stride(0),
        q.stride(1),
        *rows.pages.table_strides,
        width,
        rows.scale * LOG2E,
        rows.softcap or 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        UNITS=units,
        PER=per,
        PER_PAD=lines_for(per, rows.pages.k, q.dtype),
        D=head_dim,
        D_PAD=pad(head_dim),
        PAGE=rows.pages.k.shape[2],
        KEYS=KEYS,
        LISTED=lists is not None,
        SUMS=each > 1,
        CAPPED=rows.softcap is not None,
        PRECISION=precision(q.dtype),
        num_warps=WARPS,
        num_stages=STAGES,
        **launched(device),
    )
    if each == 1:
        return scores, scores
    counts = None if lists is None else lists.counts
    return scores, mean_weights(scores, sums, units, none if counts is None else counts, counts is not None, idle)


def mean_weights(
    scores: Tensor, sums: Tensor, units: int, counts: Tensor, each_unit: bool = True, idle: Tensor | None = None
) -> Tensor:
    """The mean of the softmax weights of each unit's heads, float32 [rows, units, n]: ``scores`` [rows, heads, n] of
    base 2, of which ``counts`` (int [rows * units], or without ``each_unit`` [rows]) are there; ``sums`` [rows, heads,
    splits, 2], parts of their softmax, the greatest score and the sum over it. Heads that are ``idle`` (int8 [rows *
    heads]) have no say."""
    rows, heads, width = scores.shape
    splits, device = sums.shape[2], scores.device
    ranks = torch.empty(rows, units, width, dtype=torch.float32, device=device)
    _vote[(parts_of(rows * units, width, device), units, rows)](
        scores,
        sums,
        ranks,
        counts,
        counts,
        counts if idle is None else idle,
        width,
        splits,
        UNITS=units,
        EACH=heads // units,
        SPLITS=triton.next_power_of_2(splits),
        LISTED=each_unit,
        IDLE=idle is not None,
        SPAN=batched_best.SPAN,
        num_warps=16,
        **launched(device),
    )
    return ranks


@triton.jit(
    do_not_specialize=["table_stride", "table_head", "width"],
    do_not_specialize_on_alignment=["tables", "lengths", "counts", "indices", "sums"],
)
def _score(
    q_ptr, k_pool, tables, lengths, counts, indices, scores, sums, q_row, q_head, table_stride, table_head, width,
    scale_log2, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, PER: tl.constexpr, PER_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, LISTED: tl.constexpr,
    SUMS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Logits, and with ``SUMS`` what each program's keys add to a head's softmax, as the greatest logit and the sum
    over it. Where a program's keys lie is looked up while those before them are on their way, as decode.py does."""
    begin(EARLY)
    EACH: tl.constexpr = HEADS // UNITS
    split, program, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    unit = row * UNITS + program * PER // EACH
    count = tl.load(lengths + row)
    ids = indices
    if LISTED:
        count = tl.load(counts + unit)
        ids = indices + unit.to(tl.int64) * width
    mine = tl.arange(0, PER_PAD)
    tiles = tl.cdiv(count, KEYS)
    if (split < tiles) | SUMS:
        kv_head = program * PER // (HEADS // KV_HEADS)
        table = tables + row.to(tl.int64) * table_stride + kv_head.to(tl.int64) * table_head
        channel = tl.arange(0, D_PAD)
        q = tl.load(
            q_ptr + row.to(tl.int64) * q_row + (program * PER + mine).to(tl.int64)[:, None] * q_head + channel[None, :],
            mask=(mine < PER)[:, None] & (channel[None, :] < D),
            other=0.0,
        )
        TYPE: tl.constexpr = q.dtype
        q, rise = queries(q, k_pool, D)
        head = row.to(tl.int64) * HEADS + program * PER + mine
        out = scores + head[:, None] * width
        hop = tl.num_programs(0) * KEYS
        number = split * KEYS + tl.arange(0, KEYS)
        after = number + hop
        place = pool_rows(table, _key(ids, number, count, LISTED), number < count, kv_head, KV_HEADS, PAGE)
        key = _key(ids, after, count, LISTED)
        top = tl.full([PER_PAD], float("-inf"), tl.float32)
        weight = tl.zeros([PER_PAD], tl.float32)
        for _ in tl.range(split, tiles, tl.num_programs(0)):
            k, k_scale = key_codes(
                k_pool, place[:, None], channel[None, :], (number < count)[:, None], D, TYPE, PER_PAD
            )
            here = number
            number += hop
            place = pool_rows(table, key, number < count, kv_head, KV_HEADS, PAGE)
            key = _key(ids, number + hop, count, LISTED)
            found = cap_logits(products(q, rise, k, k_scale, PRECISION), scale_log2, softcap, CAPPED)
            tl.store(out + here[None, :], found, mask=(mine < PER)[:, None] & (here < count)[None, :])
            if SUMS:
                found = tl.where((here < count)[None, :], found, float("-inf"))
                higher = tl.maximum(top, tl.max(found, 1))
                anchor = tl.where(higher == float("-inf"), 0.0, higher)
                weight = weight * tl.exp2(top - anchor) + tl.sum(tl.exp2(found - anchor[:, None]), 1)
                top = higher
        if SUMS:
            own = sums + (head * tl.num_programs(0) + split) * 2
            tl.store(own, top, mask=mine < PER)
            tl.store(own + 1, weight, mask=mine < PER)


@triton.jit
def _key(ids, number, count, LISTED: tl.constexpr):
    key = number
    if LISTED:
        key = tl.load(ids + number, mask=number < count, other=0)
    return key


@triton.jit(
    do_not_specialize=["width", "splits"],
    do_not_specialize_on_alignment=["ranks", "lengths", "counts", "idle"],
)
def _vote(
    scores, sums, ranks, lengths, counts, idle, width, splits,
    UNITS: tl.constexpr, EACH: tl.constexpr, SPLITS: tl.constexpr, LISTED: tl.constexpr, IDLE: tl.constexpr,
    SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The mean of the softmax weights of a unit's heads."""
    begin(EARLY)
    part, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(lengths + row)
    if LISTED:
        count = tl.load(counts + row * UNITS + unit)
    at = tl.arange(0, SPAN)
    split = tl.arange(0, SPLITS)
    first = (row * UNITS + unit).to(tl.int64) * EACH
    line = scores + first * width
    to = ranks + (row * UNITS + unit).to(tl.int64) * width
    for start in tl.range(part * SPAN, count, tl.num_programs(0) * SPAN):
        inside = start + at < count
        total = tl.zeros([SPAN], tl.float32)
        for number in tl.static_range(EACH):
            own = sums + ((first + number) * splits + split) * 2
            tops = tl.load(own, mask=split < splits, other=float("-inf"))
            peak = tl.max(tops, 0)
            peak = tl.where(peak == float("-inf"), 0.0, peak)
            weight = tl.sum(tl.load(own + 1, mask=split < splits, other=0.0) * tl.exp2(tops - peak), 0)
            weight = tl.where(weight == 0.0, 1.0, weight)
            if IDLE:
                weight = tl.where(tl.load(idle + first + number) == 0, weight, float("inf"))
            score = tl.load(line + number * width + start + at, mask=inside, other=0.0)
            total += tl.exp2(score - peak) / weight
        tl.store(to + start + at, total / EACH, mask=inside)
