"""Lists of keys for the rows of a batched decode step: the best of every unit, by score (means what ops/candidates.py
means), those that rows keep for good, and the first and last ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.row_words import KeptWords
from saccade.ops.triton import batched_best
from saccade.ops.triton.batch import KeyLists
from saccade.ops.triton.batched_best import find_best
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.best_parts import WORDS, bounds_at, known_at, part_at
from saccade.ops.triton.common import begin, launched
from saccade.ops.triton.radix_select import taken_of
from saccade.ops.triton.state_words import places

W = places(KeptWords)


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
    best = find_best(scores, bounds, active)
    _list[(best.parts, units, count)](
        scores,
        bounds,
        lengths,
        lengths if active is None else active,
        best.words,
        best.taken,
        counts,
        indices,
        scores.stride(0),
        scores.stride(1),
        indices.shape[1],
        UNITS=units,
        PARTS=triton.next_power_of_2(best.parts),
        WORDS=WORDS,
        CHOSEN=active is not None,
        SPAN=batched_best.SPAN,
        num_warps=8,
        maxnreg=64,
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


def kept_lists(rows: LayerRows, units: int) -> KeyLists:
    """The lists that rows keep for good, by their KeptWords."""
    device = rows.q.device
    starts = torch.empty(rows.count * units, dtype=torch.int64, device=device)
    counts = torch.empty(rows.count * units, dtype=torch.int32, device=device)
    _kept_lists[(rows.count,)](
        rows.words,
        rows.pages.lengths,
        starts,
        counts,
        rows.words.stride(0),
        UNITS=units,
        PADDED=triton.next_power_of_2(units),
        num_warps=1,
        **launched(device),
    )
    # Lists lie anywhere: their starts count from some tensor of the device.
    return KeyLists(starts, counts, rows.pages.lengths, units, 1, rows.pages.longest)


def seen_lists(rows: LayerRows) -> KeyLists:
    """One list a row: its first ``rows.first`` and last ``rows.second`` keys that its window does not hide."""
    device, longest = rows.q.device, rows.pages.longest
    counts = torch.empty(rows.count, dtype=torch.int32, device=device)
    indices = torch.empty(rows.count, longest, dtype=torch.int32, device=device)
    _seen[(rows.count,)](
        rows.pages.lengths,
        rows.hidden(),
        rows.first,
        rows.second,
        counts,
        indices,
        longest,
        SPAN=4096,
        num_warps=8,
        **launched(device),
    )
    return KeyLists(None, counts, indices, 1, 1, longest)


@triton.jit
def put_best(
    scores, bounds, lengths, words, taken, counts, indices, score_row, score_unit, room,
    UNITS: tl.constexpr, PARTS: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One part of a unit's list, as :func:`choose_keys` says; programs are (part, unit, row)."""
    part, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = row * UNITS + unit
    length = tl.load(lengths + row)
    first, last, low, high, wanted, between = bounds_at(bounds, entry, UNITS)
    hop = tl.num_programs(0) * SPAN
    at = tl.arange(0, SPAN)
    out = indices + entry.to(tl.int64) * room
    for start in tl.range(part * SPAN, first, hop):
        tl.store(out + start + at, start + at, mask=start + at < first)
    out += first
    begins, ends = part_at(first, last, part, SPAN)
    if (wanted > 0) & (begins < ends):
        seen = begins - first - tl.maximum(tl.minimum(high, begins) - low, 0)
        bound, spare, level, placed = known_at(words, taken, entry, part, seen, wanted, between, PARTS, WORDS)
        line = scores + row.to(tl.int64) * score_row + unit.to(tl.int64) * score_unit
        for start in tl.range(begins, ends, SPAN):
            key = start + at
            chosen = (key < ends) & ((key < low) | (key >= high))
            chosen, level = taken_of(line, key, chosen, bound, spare, level)
            tl.store(out + placed + tl.cumsum(chosen.to(tl.int32), 0) - 1, key, mask=chosen)
            placed += tl.sum(chosen.to(tl.int32), 0)
    out += wanted
    for start in tl.range(last + part * SPAN, length, hop):
        tl.store(out + start - last + at, start + at, mask=start + at < length)
    if part == 0:
        tl.store(counts + entry, first + wanted + length - last)


@triton.jit(
    do_not_specialize=["score_row", "score_unit", "room"],
    do_not_specialize_on_alignment=["bounds", "lengths", "active", "words", "taken", "counts", "indices"],
)
def _list(
    scores, bounds, lengths, active, words, taken, counts, indices, score_row, score_unit, room,
    UNITS: tl.constexpr, PARTS: tl.constexpr, WORDS: tl.constexpr, CHOSEN: tl.constexpr, SPAN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    mine = 1
    if CHOSEN:
        mine = tl.load(active + tl.program_id(2) * UNITS + tl.program_id(1)).to(tl.int32)
    if mine != 0:
        put_best(
            scores, bounds, lengths, words, taken, counts, indices, score_row, score_unit, room, UNITS, PARTS, WORDS,
            SPAN,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["longest"],
    do_not_specialize_on_alignment=["lengths", "hidden", "all_sinks", "windows", "counts"],
)
def _seen(
    lengths, hidden, all_sinks, windows, counts, indices, longest, SPAN: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    low, high = tl.load(hidden + 2 * row), tl.load(hidden + 2 * row + 1)
    sinks, near = tl.load(all_sinks + row), length - tl.load(windows + row)
    out = indices + row.to(tl.int64) * longest
    placed = 0
    for start in tl.range(0, length, SPAN):
        key = start + tl.arange(0, SPAN)
        seen = (key < length) & ((key < sinks) | (key >= near)) & ((key < low) | (key >= high))
        tl.store(out + placed + tl.cumsum(seen.to(tl.int32), 0) - 1, key, mask=seen)
        placed += tl.sum(seen.to(tl.int32), 0)
    tl.store(counts + row, placed)


@triton.jit
def entries_from(address, base):
    """How many 4-byte entries behind pointer ``base`` an address (int64) lies."""
    return (address - base.to(tl.int64)) // 4


@triton.jit(do_not_specialize=["word_row"], do_not_specialize_on_alignment=["words", "lengths"])
def _kept_lists(
    words, lengths, starts, counts, word_row, UNITS: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    unit = tl.arange(0, PADDED)
    mine = unit < UNITS
    count = tl.zeros([PADDED], tl.int32)
    start = tl.zeros([PADDED], tl.int64)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        start += entries_from(tl.load(own + W.lists), lengths) + unit * tl.load(own + W.width)
        kept = tl.load(tl.load(own + W.counts).to(tl.pointer_type(tl.int64)) + unit, mask=mine, other=0)
        count += (kept + length - tl.load(own + W.since)).to(tl.int32)
    tl.store(starts + row * UNITS + unit, start, mask=mine)
    tl.store(counts + row * UNITS + unit, count, mask=mine)
