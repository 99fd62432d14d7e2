"""LFPS's candidates in recorded steps, and which of them are read. Means what tables.py means."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.lfps.triton_row_words import budget_at, pointer, query_of, static
from saccade.methods.lfps.triton_tables import _threshold
from saccade.ops.triton import batched_best
from saccade.ops.triton.batched_best import (
    BOUNDS,
    WORDS,
    bounds_at,
    find_best,
    known_at,
    part_at,
    taken_of,
)
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.common import begin, launched, pad, precision
from saccade.ops.triton.decode import KeyLists

SPAN = 2048  # entries that a program loads
HALO: tl.constexpr = tl.constexpr(64)  # of these on either side, for candidates spread less far


class Found(NamedTuple):
    """``marks`` int8 [rows * units, n] which keys are candidates, ``listed`` int32 [rows * units] how many; ``lists``
    of the forced keys before, the candidates and the forced keys behind, empty where all are read; ``bounds`` of the
    best of a list, as batched_best.find_best takes them; ``ends`` int32 [2, rows * units], how many of the first and of
    the last keys are read."""

    marks: Tensor
    listed: Tensor
    lists: KeyLists
    bounds: Tensor
    ends: Tensor


def best_blocks(rows: LayerRows, units: int, size: int) -> Tensor:
    """int8 [rows * units, n]: 1 for the blocks of ``size`` keys whose means agree best with a unit's queries."""
    q, summaries = query_of(rows), rows.summaries
    assert summaries is not None
    device, blocks = q.device, max(1, rows.pages.longest // size)
    scores = torch.empty(rows.count, units, blocks, dtype=torch.float32, device=device)
    bounds = torch.empty(rows.count * units, BOUNDS, dtype=torch.int32, device=device)
    _mean_scores[(triton.cdiv(blocks, 64), rows.kv_heads, rows.count)](
        q, summaries.pointers, rows.pages.lengths, rows.words, scores, bounds, q.stride(0), q.stride(1),
        rows.words.stride(0), blocks, UNITS=units, SIZE=size, GROUP=pad(rows.heads // rows.kv_heads),
        PRECISION=precision(q.dtype), **static(rows, num_warps=4),
    )  # fmt: skip
    best = find_best(scores, bounds)
    marks = torch.empty(rows.count * units, blocks, dtype=torch.int8, device=device)
    _mark_best[(best.parts, units, rows.count)](
        scores, bounds, best.words, best.taken, marks, blocks, PARTS=triton.next_power_of_2(best.parts), WORDS=WORDS,
        SPAN=batched_best.SPAN, num_warps=8, maxnreg=64, **launched(device),
    )  # fmt: skip
    return marks


def candidates(rows: LayerRows, units: int, idle: Tensor, blocks: Tensor | None, size: int) -> Found:
    """``blocks``: as best_blocks marks those of ``size`` keys."""
    device, width, count = rows.q.device, rows.pages.longest, rows.count
    chunks = triton.cdiv(width, SPAN - 2 * HALO.value)
    limits = torch.empty(count * units, 4, dtype=torch.float32, device=device)
    _limits[(units, count)](
        rows.words, rows.reals, rows.pages.lengths, limits, rows.words.stride(0), rows.reals.stride(0), UNITS=units,
        num_warps=1, **launched(device),
    )  # fmt: skip
    marks = torch.empty(count * units, width, dtype=torch.int8, device=device)
    counts = torch.empty(count * units, chunks, dtype=torch.int32, device=device)
    _scan[(chunks, units, count)](
        rows.words, rows.reals, rows.pages.lengths, limits, idle, idle if blocks is None else blocks, marks, counts,
        rows.words.stride(0), rows.reals.stride(0), width, 0 if blocks is None else blocks.shape[1], UNITS=units,
        EACH=rows.heads // units, SIZE=0 if blocks is None else size, SPAN=SPAN, num_warps=8, **launched(device),
    )  # fmt: skip
    indices = torch.empty(count * units, width, dtype=torch.int32, device=device)
    totals = torch.empty(4, count * units, dtype=torch.int32, device=device)
    bounds = torch.empty(count * units, BOUNDS, dtype=torch.int32, device=device)
    _list[(triton.cdiv(chunks, 4), units, count)](
        rows.words, rows.reals, rows.pages.lengths, marks, counts, indices, *totals, bounds,
        rows.words.stride(0), rows.reals.stride(0), width, chunks, UNITS=units, EACH=4,
        CHUNKS=triton.next_power_of_2(chunks), SPAN=SPAN, num_warps=8, **launched(device),
    )  # fmt: skip
    return Found(marks, totals[0], KeyLists(None, totals[1], indices, units, 1, width), bounds, totals[2:])


def choose(rows: LayerRows, scores: Tensor, found: Found, idle: Tensor, lists: int, room: int) -> KeyLists:
    """What is read: the forced keys and the best candidates by ``scores`` [rows, units, n], in one list for each of
    ``lists`` (units, or query heads where some rest)."""
    device = rows.q.device
    room = min(room, rows.pages.longest)
    counts = torch.empty(rows.count * lists, dtype=torch.int32, device=device)
    indices = torch.empty(rows.count * lists, room, dtype=torch.int32, device=device)
    best = find_best(scores, found.bounds)
    _choose[(best.parts, lists, rows.count)](
        scores, found.bounds, best.words, best.taken, *found.ends, found.lists.indices, rows.words, rows.pages.lengths,
        idle, counts, indices, rows.words.stride(0), scores.stride(0), scores.stride(1), found.lists.longest, room,
        LISTS=lists, UNITS=found.lists.units, HEADS=rows.heads, PARTS=triton.next_power_of_2(best.parts), WORDS=WORDS,
        SPAN=batched_best.SPAN, num_warps=8, maxnreg=64, **launched(device),
    )  # fmt: skip
    return KeyLists(None, counts, indices, lists, 1, room)


@triton.jit(
    do_not_specialize=["word_row", "blocks"],
    do_not_specialize_on_alignment=["pointers", "lengths", "words", "scores", "bounds"],
)
def _mean_scores(
    q_ptr, pointers, lengths, words, scores, bounds, q_row, q_head, word_row, blocks,
    UNITS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of the heads of one KV head, whose means they share."""
    begin(EARLY)
    kv_head, row = tl.program_id(1), tl.program_id(2)
    EACH: tl.constexpr = HEADS // KV_HEADS
    full = tl.load(lengths + row) // SIZE
    member = tl.arange(0, GROUP)
    if tl.program_id(0) == 0:
        wanted = tl.minimum(tl.load(words + row.to(tl.int64) * word_row + 6), full.to(tl.int64)).to(tl.int32)
        own = bounds + (row * UNITS + kv_head * (UNITS // KV_HEADS) + member) * 5
        mine = member < UNITS // KV_HEADS
        tl.store(own, tl.zeros([GROUP], tl.int32), mask=mine)
        tl.store(own + 1, tl.zeros([GROUP], tl.int32) + full, mask=mine)
        tl.store(own + 2, tl.zeros([GROUP], tl.int32), mask=mine)
        tl.store(own + 3, tl.zeros([GROUP], tl.int32), mask=mine)
        tl.store(own + 4, tl.zeros([GROUP], tl.int32) + wanted, mask=mine)
    block = tl.program_id(0) * 64 + tl.arange(0, 64)
    if tl.program_id(0) * 64 < full:
        means = tl.multiple_of(tl.load(pointers + row).to(tl.pointer_type(q_ptr.dtype.element_ty)), 16)
        channel = tl.arange(0, D_PAD)
        head = kv_head * EACH + member
        q = tl.load(
            q_ptr + row.to(tl.int64) * q_row + head.to(tl.int64)[:, None] * q_head + channel[None, :],
            mask=(member < EACH)[:, None] & (channel < D)[None, :],
            other=0.0,
        )
        at = (block.to(tl.int64)[:, None] * KV_HEADS + kv_head) * D + channel[None, :]
        mean = tl.load(means + at, mask=(block < full)[:, None] & (channel < D)[None, :], other=0.0)
        found = tl.dot(mean, tl.trans(q), input_precision=PRECISION)
        if UNITS == HEADS:
            to = scores + (row * UNITS + head).to(tl.int64)[None, :] * blocks + block[:, None]
            tl.store(to, found, mask=(member < EACH)[None, :] & (block < full)[:, None])
        else:
            to = scores + (row * UNITS + kv_head).to(tl.int64) * blocks + block
            tl.store(to, tl.sum(found, 1) / EACH, mask=block < full)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["bounds", "words", "taken", "marks"])
def _mark_best(
    scores, bounds, words, taken, marks, blocks,
    PARTS: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    part, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = row * tl.num_programs(1) + unit
    first, last, _low, _high, wanted, between = bounds_at(bounds, entry, 1)
    begins, ends = part_at(first, last, part, SPAN)
    if begins < ends:
        bound, spare, level, _placed = known_at(words, taken, entry, part, 0, wanted, between, PARTS, WORDS)
        if wanted <= 0:
            bound, spare = tl.full([], 4294967295, tl.uint32), tl.full([], 0, tl.int32)  # none
        at = tl.arange(0, SPAN)
        line = entry.to(tl.int64) * blocks
        for start in tl.range(begins, ends, SPAN):
            block = start + at
            chosen, level = taken_of(scores + line, block, block < ends, bound, spare, level)
            tl.store(marks + line + block, chosen.to(tl.int8), mask=block < ends)


@triton.jit(do_not_specialize=["word_row", "real_row"], do_not_specialize_on_alignment=["words", "reals", "lengths"])
def _limits(
    words, reals, lengths, limits, word_row, real_row, UNITS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Mean and threshold of both tables."""
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        n = (length - tl.load(own).to(tl.int32)).to(tl.float64)
        a = tl.load(reals + row.to(tl.int64) * real_row + 2)
        sums = pointer(own, 16, tl.float64) + unit * 8
        out = limits + (row * UNITS + unit) * 4
        for table in tl.static_range(2):
            mean, tau = _threshold(sums + table * 4, n, a)
            tl.store(out + table * 2, mean)
            tl.store(out + table * 2 + 1, tau)


@triton.jit(
    do_not_specialize=["word_row", "real_row", "width", "n_blocks"],
    do_not_specialize_on_alignment=["words", "reals", "lengths", "limits", "idle", "blocks", "marks", "counts"],
)
def _scan(
    words, reals, lengths, limits, idle, blocks, marks, counts, word_row, real_row, width, n_blocks,
    UNITS: tl.constexpr, EACH: tl.constexpr, SIZE: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    chunk, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = (row * UNITS + unit).to(tl.int64)
    length = tl.load(lengths + row)
    found = 0
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        reals += row.to(tl.int64) * real_row
        first = tl.load(own).to(tl.int32)
        n, dense, _take, local = budget_at(own, reals, length, first)
        stop = n - local
        STEP: tl.constexpr = SPAN - 2 * HALO
        if (dense == 0) & (chunk * STEP < stop):
            here = tl.arange(0, SPAN)
            at = chunk * STEP - HALO + here
            votes = 0
            for head in tl.static_range(EACH):
                votes += (tl.load(idle + entry * EACH + head) == 0).to(tl.int32)
            a = tl.load(reals + 2)
            mean_v, tau_v = tl.load(limits + entry * 4), tl.load(limits + entry * 4 + 1)
            mean_s, tau_s = tl.load(limits + entry * 4 + 2), tl.load(limits + entry * 4 + 3)
            base = length - 2 + (tl.load(own + 9) & 1).to(tl.int32) - first
            capacity = tl.multiple_of(tl.load(own + 12).to(tl.int32), 16)
            before, after = tl.load(own + 4).to(tl.int32), tl.load(own + 5).to(tl.int32)
            gate = tl.load(own + 10)
            vertical = tl.multiple_of(pointer(own, 14, tl.float32), 16) + unit.to(tl.int64) * capacity
            slash = pointer(own, 15, tl.float32) + unit.to(tl.int64) * capacity
            real = at.to(tl.uint32) < n.to(tl.uint32)  # below 0 is far behind the end
            here_v = tl.load(vertical + at, mask=real, other=0.0)
            here_s = tl.load(slash + base - at, mask=real & (at <= base), other=0.0)
            high = (here_v > mean_v) | (here_s > mean_s)
            above = real & ((here_v > tau_v) | (here_s > tau_s))
            near = real
            if a < 0:
                above = real
            else:  # some key above its threshold is at most `before` keys ahead, or `after` keys back
                upto = tl.cumsum(above.to(tl.int32), 0)
                ahead = tl.gather(upto, tl.minimum(here + before, SPAN - 1), 0)
                near = ahead > tl.gather(upto, tl.maximum(here - after - 1, 0), 0)
            chosen = near & (high | (at * 0 + gate == 2))
            chosen = chosen | (above & (at * 0 + gate == 1))
            mine = ((here - HALO).to(tl.uint32) < STEP) & (at < stop)
            if SIZE > 0:
                block = ((first + at).to(tl.uint32) // SIZE).to(tl.int32)  # a shift
                known = mine & (block < tl.minimum(n_blocks, length // SIZE))
                chosen = chosen | (tl.load(blocks + entry * n_blocks + block, mask=known, other=0) != 0)
            chosen = chosen & mine & (at * 0 + votes > 0)
            tl.store(marks + entry * width + at, chosen.to(tl.int8), mask=mine)
            found = tl.sum(chosen.to(tl.int32), 0)
    tl.store(counts + entry * tl.num_programs(0) + chunk, found)


@triton.jit(
    do_not_specialize=["word_row", "real_row", "width", "chunks"],
    do_not_specialize_on_alignment=[
        "words",
        "reals",
        "lengths",
        "marks",
        "counts",
        "indices",
        "listed",
        "sizes",
        "bounds",
    ],
)
def _list(
    words, reals, lengths, marks, counts, indices, listed, sizes, firsts, lasts, bounds, word_row, real_row, width,
    chunks,
    UNITS: tl.constexpr, EACH: tl.constexpr, CHUNKS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of ``EACH`` chunks: forced keys before, candidates, forced keys behind. A row that reads everything has no
    candidates, and its list is not written."""
    begin(EARLY)
    chunk, unit, row = tl.program_id(0) * EACH, tl.program_id(1), tl.program_id(2)
    entry = (row * UNITS + unit).to(tl.int64)
    length = tl.load(lengths + row)
    if length == 0:
        if chunk == 0:
            tl.store(listed + entry, 0)
            tl.store(sizes + entry, 0)
            tl.store(firsts + entry, 0)
            tl.store(lasts + entry, 0)
            for number in tl.static_range(5):
                tl.store(bounds + entry * 5 + number, 0)
    else:
        own = words + row.to(tl.int64) * word_row
        reals += row.to(tl.int64) * real_row
        first = tl.load(own).to(tl.int32)
        n, dense, take, local = budget_at(own, reals, length, first)
        number = tl.arange(0, CHUNKS)
        here = tl.load(counts + entry * chunks + number, mask=number < chunks, other=0)
        total = tl.sum(here, 0)
        start = first + tl.sum(tl.where(number < chunk, here, 0), 0)
        STEP: tl.constexpr = SPAN - 2 * HALO
        lane = tl.arange(0, SPAN)
        out = indices + entry * width
        if chunk == 0:
            tl.store(listed + entry, total)
            # What is scored is only needed where not all are read.
            few = dense | (total <= take)
            tl.store(sizes + entry, tl.where(few, 0, first + total + local))
            tl.store(firsts + entry, tl.where(dense, length, first))
            tl.store(lasts + entry, tl.where(dense, 0, local))
            tl.store(bounds + entry * 5, first)
            tl.store(bounds + entry * 5 + 1, first + total)
            tl.store(bounds + entry * 5 + 2, 0)
            tl.store(bounds + entry * 5 + 3, 0)
            tl.store(bounds + entry * 5 + 4, take)
            behind = tl.arange(0, 64)
            for begins in tl.range(0, first, 64):
                tl.store(out + begins + behind, begins + behind, mask=begins + behind < first)
            if dense == 0:
                for begins in tl.range(0, local, 64):
                    to = out + first + total + begins + behind
                    tl.store(to, length - local + begins + behind, mask=begins + behind < local)
        if (dense == 0) & (chunk * STEP < n - local):
            for each in tl.static_range(EACH):
                at = (chunk + each) * STEP + lane
                inside = (lane < STEP) & (at < n - local)
                marked = tl.load(marks + entry * width + at, mask=inside, other=0).to(tl.int32)
                tl.store(out + start + tl.cumsum(marked, 0) - 1, first + at, mask=marked > 0)
                start += tl.sum(marked, 0)


@triton.jit(
    do_not_specialize=["word_row", "score_row", "score_unit", "width", "room"],
    do_not_specialize_on_alignment=[
        "bounds",
        "known",
        "taken",
        "firsts",
        "lasts",
        "found",
        "words",
        "lengths",
        "idle",
        "counts",
        "indices",
    ],
)
def _choose(
    scores, bounds, known, taken, firsts, lasts, found, words, lengths, idle, counts, indices, word_row, score_row,
    score_unit, width, room,
    LISTS: tl.constexpr, UNITS: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, WORDS: tl.constexpr,
    SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    part, one, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = row * LISTS + one
    list_of = row * UNITS + one // (LISTS // UNITS)
    placed, behind = tl.load(firsts + list_of), tl.load(lasts + list_of)
    first, last, _low, _high, wanted, between = bounds_at(bounds, list_of, 1)
    length = tl.load(lengths + row)
    rests = 0
    if LISTS == HEADS:
        rests = tl.load(idle + entry).to(tl.int32)
    if rests != 0:
        own = words + row.to(tl.int64) * word_row
        placed = tl.where(tl.load(own + 8) == 2, 0, tl.minimum(tl.load(own).to(tl.int32), length))
        wanted, behind = 0, 0
    hop = tl.num_programs(0) * SPAN
    at = tl.arange(0, SPAN)
    out = indices + entry.to(tl.int64) * room
    for start in tl.range(part * SPAN, placed, hop):
        tl.store(out + start + at, start + at, mask=start + at < placed)
    begins, ends = part_at(first, last, part, SPAN)
    if (wanted > 0) & (begins < ends):
        bound, spare, level, place = known_at(
            known, taken, list_of, part, begins - first, wanted, between, PARTS, WORDS
        )
        ids = found + list_of.to(tl.int64) * width
        line = scores + row.to(tl.int64) * score_row + (list_of - row * UNITS).to(tl.int64) * score_unit
        for start in tl.range(begins, ends, SPAN):
            chosen, level = taken_of(line, start + at, start + at < ends, bound, spare, level)
            key = tl.load(ids + start + at, mask=chosen, other=0)
            tl.store(out + placed + place + tl.cumsum(chosen.to(tl.int32), 0) - 1, key, mask=chosen)
            place += tl.sum(chosen.to(tl.int32), 0)
    placed += tl.maximum(wanted, 0)
    for start in tl.range(part * SPAN, behind, hop):
        tl.store(out + placed + start + at, length - behind + start + at, mask=start + at < behind)
    if part == 0:
        tl.store(counts + entry, placed + behind)
