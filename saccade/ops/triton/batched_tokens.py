"""Keys by exact score for the rows of a batched decode step: scores of all keys, and lists of the best of every unit.
Means what ops/candidates.py means."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.batched_decode import ordered_bits
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.common import LOG2E, begin, launched, pad, precision, processors
from saccade.ops.triton.decode import KeyLists
from saccade.ops.triton.weights import logits

KEYS = 64  # scored in one go
BOUNDS = 5  # int32 a row: see choose_keys


def score_keys(
    rows: LayerRows,
    units: int,
    hidden: Tensor | None = None,
    active: Tensor | None = None,
    lists: KeyLists | None = None,
    idle: Tensor | None = None,
) -> Tensor:
    """Float32 [rows, units, n] for ``n`` = ``rows.pages.longest``: what ranks the keys of each unit, the logit of one
    query head or the mean of several heads' softmax weights over all keys but the ``hidden`` ones (int32 [rows, 2],
    from, to). Only what is said of keys below a row's length counts, and of units that are ``active`` (int8 [rows *
    units], all by default).

    With ``lists`` (a row of ``indices`` for each unit) only their keys are scored, each at its place in its list.
    Heads that are ``idle`` (int8 [rows * heads]) have no say."""
    q = rows.q if rows.q.stride(-1) == 1 else rows.q.contiguous()
    count, heads, head_dim = q.shape
    kv_heads, width, device = rows.kv_heads, rows.pages.longest, q.device
    programs = max(units, kv_heads)
    per = heads // programs
    scores = torch.empty(count, heads, width, dtype=torch.float32, device=device)
    splits = max(1, min(triton.cdiv(width, KEYS), triton.cdiv(16 * processors(device), programs * count)))
    none = rows.pages.lengths
    _score[(splits, programs, count)](
        q,
        rows.pages.k,
        rows.pages.tables,
        rows.pages.lengths,
        none if active is None else active,
        none if lists is None else lists.counts,
        none if lists is None else lists.indices,
        scores,
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
        PER_PAD=pad(per),
        D=head_dim,
        D_PAD=pad(head_dim),
        PAGE=rows.pages.k.shape[2],
        KEYS=KEYS,
        CHOSEN=active is not None,
        LISTED=lists is not None,
        CAPPED=rows.softcap is not None,
        PRECISION=precision(q.dtype),
        num_warps=4,
        **launched(device),
    )
    each = heads // units
    if each > 1:
        _vote[(units, count)](
            scores,
            rows.pages.lengths,
            none if hidden is None else hidden,
            none if active is None else active,
            none if lists is None else lists.counts,
            none if idle is None else idle,
            width,
            UNITS=units,
            EACH=each,
            HIDES=hidden is not None,
            CHOSEN=active is not None,
            LISTED=lists is not None,
            IDLE=idle is not None,
            SPAN=2048,
            num_warps=8,
            **launched(device),
        )
    return scores.view(count, units, each, width)[:, :, 0]


def choose_keys(
    scores: Tensor,
    bounds: Tensor,
    lengths: Tensor,
    counts: Tensor,
    indices: Tensor,
    active: Tensor | None = None,
) -> KeyLists:
    """Lists of each unit's keys, rising: a row's first and last ones, and the best between them by ``scores`` [rows,
    units, n] (as score_keys gives them), ties to the lower. ``bounds`` int32 [rows, BOUNDS]: the first key that is none
    of the first ones, the first of the last ones, keys (from, to) that are hidden, and how many of those between are
    taken. Written to ``counts`` int32 [rows * units] and ``indices`` int32 [rows * units, room], of units that are
    ``active`` (int8 [rows * units], all by default)."""
    count, units, _ = scores.shape
    _choose[(units, count)](
        scores,
        bounds,
        lengths,
        lengths if active is None else active,
        counts,
        indices,
        scores.stride(0),
        scores.stride(1),
        indices.shape[1],
        UNITS=units,
        CHOSEN=active is not None,
        SPAN=2048,
        num_warps=8,
        **launched(scores.device),
    )
    return KeyLists(None, counts, indices, units, 1, indices.shape[1])


def new_lists(rows: LayerRows, units: int, room: int) -> tuple[Tensor, Tensor]:
    """Empty counts and indices of one list a unit, of at most ``room`` keys."""
    device, entries = rows.q.device, rows.count * units
    room = min(room, rows.pages.longest)
    return (
        torch.empty(entries, dtype=torch.int32, device=device),
        torch.empty(entries, room, dtype=torch.int32, device=device),
    )


@triton.jit(
    do_not_specialize=["table_stride", "table_head", "width"],
    do_not_specialize_on_alignment=["tables", "lengths", "active", "counts", "indices"],
)
def _score(
    q_ptr, k_pool, tables, lengths, active, counts, indices, scores, q_row, q_head, table_stride, table_head, width,
    scale_log2, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, PER: tl.constexpr, PER_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, CHOSEN: tl.constexpr,
    LISTED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    program, row = tl.program_id(1), tl.program_id(2)
    unit = row * UNITS + program * PER // (HEADS // UNITS)
    count = tl.load(lengths + row)
    if LISTED:
        count = tl.load(counts + unit)
    if CHOSEN:
        count = tl.where(tl.load(active + unit) != 0, count, 0)
    table = tables + row.to(tl.int64) * table_stride + (program * PER // (HEADS // KV_HEADS)).to(tl.int64) * table_head
    mine = tl.arange(0, PER_PAD)
    out = scores + (row.to(tl.int64) * HEADS + program * PER + mine)[:, None] * width
    for tile in tl.range(tl.program_id(0), tl.cdiv(count, KEYS), tl.num_programs(0)):
        number = tile * KEYS + tl.arange(0, KEYS)
        valid = number < count
        key = number
        if LISTED:
            key = tl.load(indices + unit.to(tl.int64) * width + number, mask=valid, other=0)
        found = logits(
            q_ptr + row.to(tl.int64) * q_row, k_pool, table, program, key, valid, q_head, scale_log2, softcap, HEADS,
            KV_HEADS, PER, PER_PAD, D, D_PAD, PAGE, CAPPED, PRECISION,
        )  # fmt: skip
        tl.store(out + number[None, :], found, mask=(mine < PER)[:, None] & valid[None, :])


@triton.jit(
    do_not_specialize=["width"], do_not_specialize_on_alignment=["lengths", "hidden", "active", "counts", "idle"]
)
def _vote(
    scores, lengths, hidden, active, counts, idle, width,
    UNITS: tl.constexpr, EACH: tl.constexpr, HIDES: tl.constexpr, CHOSEN: tl.constexpr, LISTED: tl.constexpr,
    IDLE: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The mean of the softmax weights of a unit's heads, in the place of its first head's logits."""
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    count = tl.load(lengths + row)
    low, high = 0, 0
    if HIDES:
        low, high = tl.load(hidden + 2 * row), tl.load(hidden + 2 * row + 1)
    if LISTED:
        count = tl.load(counts + row * UNITS + unit)
    if CHOSEN:
        count = tl.where(tl.load(active + row * UNITS + unit) != 0, count, 0)
    at = tl.arange(0, SPAN)
    line = scores + (row * UNITS + unit).to(tl.int64) * EACH * width
    for number in tl.static_range(EACH):
        top = tl.full([SPAN], float("-inf"), tl.float32)
        weight = tl.zeros([SPAN], tl.float32)
        for start in tl.range(0, count, SPAN):
            key = start + at
            seen = (key < count) & ((key < low) | (key >= high))
            score = tl.load(line + number * width + key, mask=seen, other=float("-inf"))
            higher = tl.maximum(top, score)
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            weight = weight * tl.exp2(top - anchor) + tl.exp2(score - anchor)
            top = higher
        peak = tl.max(top, 0)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        total = tl.sum(weight * tl.exp2(top - peak), 0)
        total = tl.where(total == 0.0, 1.0, total)
        if IDLE:
            votes = tl.load(idle + (row * UNITS + unit) * EACH + number) == 0
            total = tl.where(votes, total, float("inf"))
        for start in tl.range(0, count, SPAN):
            key = start + at
            inside = key < count
            share = tl.exp2(tl.load(line + number * width + key, mask=inside, other=0.0) - peak) / total
            if number == 0:
                tl.store(line + key, share, mask=inside)
            else:
                tl.store(line + key, tl.load(line + key, mask=inside, other=0.0) + share, mask=inside)
        tl.debug_barrier()  # other threads may go on with what these have stored
    for start in tl.range(0, count, SPAN):
        key = start + at
        tl.store(line + key, tl.load(line + key, mask=key < count, other=0.0) / EACH, mask=key < count)


@triton.jit
def least_taken(scores, first, last, low, high, wanted, SPAN: tl.constexpr):
    """Of the keys ``first .. last - 1`` but ``low .. high - 1``: the bits of the least score among the ``wanted``
    highest, and how many that equal it are among those. The bound is found eight bits of the scores at a time."""
    at = tl.arange(0, SPAN)
    bound = tl.full([], 0, tl.uint32)
    spare = wanted
    digits = tl.arange(0, 256)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        found = tl.zeros([512], tl.int32)
        for start in tl.range(first, last, SPAN):
            key = start + at
            inside = (key < last) & ((key < low) | (key >= high))
            order = ordered_bits(tl.load(scores + key, mask=inside, other=0.0) + 0.0)
            digit = ((order >> shift) & 255).to(tl.int32)
            if step > 0:
                inside = inside & ((order >> (shift + 8)) == (bound >> (shift + 8)))
            found += tl.histogram(tl.where(inside, digit, 256), 512)
        found = tl.sum(tl.reshape(found, [2, 256]) * (tl.arange(0, 2) == 0)[:, None].to(tl.int32), 0)
        reach = tl.sum(found, 0) - tl.cumsum(found, 0) + found  # entries of this digit and above
        best = tl.max(tl.where(reach >= spare, digits, 0), 0)
        spare -= tl.sum(tl.where(digits > best, found, 0), 0)
        bound = bound | (best.to(tl.uint32) << shift)
    return bound, spare


@triton.jit(do_not_specialize=["score_row", "score_unit", "room"], do_not_specialize_on_alignment=["active", "bounds"])
def _choose(
    scores, bounds, lengths, active, counts, indices, score_row, score_unit, room,
    UNITS: tl.constexpr, CHOSEN: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    entry = row * UNITS + unit
    mine = 1
    if CHOSEN:
        mine = tl.load(active + entry).to(tl.int32)
    if mine != 0:
        length = tl.load(lengths + row)
        first, last = tl.load(bounds + row * 5), tl.load(bounds + row * 5 + 1)
        low, high = tl.load(bounds + row * 5 + 2), tl.load(bounds + row * 5 + 3)
        take = tl.load(bounds + row * 5 + 4)
        line = scores + row.to(tl.int64) * score_row + unit.to(tl.int64) * score_unit
        low, high = tl.maximum(low, first), tl.minimum(high, last)
        between = last - first - tl.maximum(high - low, 0)
        wanted = tl.minimum(take, between)
        at = tl.arange(0, SPAN)
        out = indices + entry.to(tl.int64) * room
        for start in tl.range(0, first, SPAN):
            tl.store(out + start + at, start + at, mask=start + at < first)
        out += first
        bound = tl.full([], 0, tl.uint32)
        spare = wanted
        if (wanted < between) & (wanted > 0):
            bound, spare = least_taken(line, first, last, low, high, wanted, SPAN)
        placed = 0
        level_before = 0
        if wanted > 0:
            for start in tl.range(first, last, SPAN):
                key = start + at
                taken = (key < last) & ((key < low) | (key >= high))
                if wanted < between:
                    order = ordered_bits(tl.load(line + key, mask=taken, other=0.0) + 0.0)
                    level = taken & (order == bound)
                    earlier = level_before + tl.cumsum(level.to(tl.int32), 0)
                    taken = (taken & (order > bound)) | (level & (earlier <= spare))
                    level_before += tl.sum(level.to(tl.int32), 0)
                tl.store(out + placed + tl.cumsum(taken.to(tl.int32), 0) - 1, key, mask=taken)
                placed += tl.sum(taken.to(tl.int32), 0)
        out += placed
        for start in tl.range(last, length, SPAN):
            tl.store(out + start - last + at, start + at, mask=start + at < length)
        tl.store(counts + entry, first + placed + length - last)
