"""CIS in recorded steps: what searchers will share, marked a bit a key and listed. Means what sharing.py means.
triton_one_launch.py does it for lists that one program holds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.cis.triton_row_words import W, budget_at, place_of
from saccade.ops.triton import batched_best
from saccade.ops.triton.batched_best import find_best
from saccade.ops.triton.batched_lists import put_best
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.best_parts import WORDS as BEST_WORDS
from saccade.ops.triton.common import arrivals, begin, launched
from saccade.ops.triton.radix_select import least_taken, taken_of


def list_and_keep(
    rows: LayerRows, searching: Tensor, bounds: Tensor, counts: Tensor, indices: Tensor, scores: Tensor
) -> None:
    """Of the query heads that are ``searching`` (int8 [rows * heads]) list the best keys by ``scores`` float32 [rows,
    heads, n], as batched_lists.choose_keys does, and make them anchors: a head's scores order what it reads as its
    weights do. Who writes the last part of a list goes on with the whole of it."""
    device, units = rows.q.device, rows.heads
    best = find_best(scores, bounds, searching)
    marks, weights = _marks(rows, units), torch.empty(indices.shape, dtype=torch.float32, device=device)
    _list_and_keep[(best.parts, units, rows.count)](
        rows.words,
        rows.reals,
        rows.pages.lengths,
        searching,
        bounds,
        counts,
        indices,
        scores,
        weights,
        marks,
        best.words,
        best.taken,
        arrivals(device, rows.count * units),
        rows.words.stride(0),
        rows.reals.stride(0),
        indices.shape[1],
        scores.stride(0),
        scores.stride(1),
        marks.shape[1],
        UNITS=units,
        PARTS=triton.next_power_of_2(best.parts),
        KNOWN_WORDS=BEST_WORDS,
        SPAN=batched_best.SPAN,
        num_warps=8,
        maxnreg=64,
        **launched(device),
    )


def _marks(rows: LayerRows, units: int) -> Tensor:
    """Room for a bit a key."""
    width = triton.cdiv(rows.pages.longest, 32)
    return torch.empty(rows.count * units, width, dtype=torch.int32, device=rows.q.device)


@triton.jit
def _mark_key(marks, key, valid, hid, shown):
    """Set the bits of the keys that are ``valid`` and not hidden."""
    bit = (tl.zeros(key.shape, tl.int32) + 1) << (key & 31)
    tl.atomic_or(marks + (key >> 5), bit, mask=valid & ((key < hid) | (key >= shown)), sem="relaxed")


@triton.jit
def _count_bits(words):
    """How many bits of uint32 ``words`` are set, int32."""
    pairs = words - ((words >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    halves = eights + (eights >> 8)
    return ((halves + (halves >> 16)) & 63).to(tl.int32)


@triton.jit
def _keep_unit(
    own, reals, length, hid, shown, unit, read, count, line, scores, mine, UNITS: tl.constexpr, SPAN: tl.constexpr
):
    """Make one unit an anchor by the ``count`` keys that it has ``read`` and its ``scores`` of all keys, which order
    keys as their weights do. ``line``: room for the scores of what was read; ``mine``: for a bit a key. Marks the keys
    between sinks and window that were read, and the neighbours of the heaviest, and lists the marks; none from ``hid``
    to ``shown``."""
    sinks = tl.load(own + W.sinks).to(tl.int32)
    end = length - tl.load(own + W.local).to(tl.int32)
    best = tl.load(own + W.best)
    best = tl.where(best < 0, (budget_at(own, reals, length) // 3).to(tl.int64), best)
    best = tl.minimum(best, length.to(tl.int64)).to(tl.int32)
    reach = tl.minimum(tl.load(own + W.reach), end.to(tl.int64)).to(tl.int32)
    capacity, most = tl.load(own + W.capacity), tl.load(own + W.most)
    place = (place_of(own, length) * UNITS + unit).to(tl.int64)
    at = tl.arange(0, SPAN)
    some = tl.cdiv(end, 32)
    for start in tl.range(0, some, SPAN):
        tl.store(mine + start + at, tl.zeros([SPAN], tl.int32), mask=start + at < some)
    # Lists rise: what lies between the sinks and the window is one stretch of them.
    begins, ends = 0, 0
    for start in tl.range(0, count, SPAN):
        key = tl.load(read + start + at, mask=start + at < count, other=2147483647)
        begins += tl.sum((key < sinks).to(tl.int32), 0)
        ends += tl.sum((key < end).to(tl.int32), 0)
        listed = start + at < count
        tl.store(line + start + at, tl.load(scores + key, mask=listed, other=0.0), mask=listed)
    tl.debug_barrier()  # others have put scores there
    wanted = tl.minimum(best, ends - begins)
    bound = tl.full([], 0, tl.uint32)
    spare = wanted
    if (wanted > 0) & (wanted < ends - begins):
        bound, spare = least_taken(line, begins, ends, 0, 0, wanted, SPAN)
    tl.debug_barrier()  # others have set the marks to zero
    level_before, listed = 0, 0
    moving = tl.load(own + W.moving).to(tl.pointer_type(tl.int32)) + place * most
    for start in tl.range(begins, ends, SPAN):
        inside = start + at < ends
        key = tl.load(read + start + at, mask=inside, other=0)
        heavy = inside
        if wanted < ends - begins:
            heavy, level_before = taken_of(line, start + at, inside, bound, spare, level_before)
        heavy = heavy & (tl.zeros([SPAN], tl.int32) + wanted > 0)
        _mark_key(mine, key, inside, hid, shown)
        for away in tl.range(1, reach + 1):
            _mark_key(mine, key + away, heavy & (key + away < end), hid, shown)
            _mark_key(mine, key - away, heavy & (key - away >= sinks), hid, shown)
        number = listed + tl.cumsum(heavy.to(tl.int32), 0) - 1
        tl.store(moving + number, key, mask=heavy & (number < most))
        listed += tl.sum(heavy.to(tl.int32), 0)
    for start in tl.range(listed, most.to(tl.int32), SPAN):
        tl.store(moving + start + at, tl.full([SPAN], 2147483647, tl.int32), mask=start + at < most)
    tl.debug_barrier()  # others have marked keys
    shared = 0
    keys = tl.load(own + W.keys).to(tl.pointer_type(tl.int32)) + place * capacity
    for start in tl.range(0, some, SPAN):
        marked = tl.load(mine + start + at, mask=start + at < some, other=0, cache_modifier=".cg")
        marked = marked.to(tl.uint32, bitcast=True)
        counted = _count_bits(marked)
        number = shared + tl.cumsum(counted, 0) - counted
        shared += tl.sum(counted, 0)
        for bit in tl.range(0, 32):
            here = ((marked >> bit) & 1) != 0
            tl.store(keys + number, (start + at) * 32 + bit, mask=here & (number < capacity))
            number += here.to(tl.int32)
    tl.store(tl.load(own + W.counts).to(tl.pointer_type(tl.int32)) + place, tl.minimum(shared, capacity.to(tl.int32)))


@triton.jit(
    do_not_specialize=["word_row", "real_row", "room", "score_row", "score_unit", "width"],
    do_not_specialize_on_alignment=[
        "words",
        "reals",
        "lengths",
        "searching",
        "bounds",
        "counts",
        "indices",
        "known",
        "taken",
        "arrived",
    ],
)
def _list_and_keep(
    words, reals, lengths, searching, bounds, counts, indices, scores, weights, marks, known, taken, arrived, word_row,
    real_row, room, score_row, score_unit, width,
    UNITS: tl.constexpr, PARTS: tl.constexpr, KNOWN_WORDS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(1), tl.program_id(2)
    entry = row * UNITS + unit
    if tl.load(searching + entry) != 0:
        put_best(
            scores, bounds, lengths, known, taken, counts, indices, score_row, score_unit, room, UNITS, PARTS,
            KNOWN_WORDS, SPAN,
        )  # fmt: skip
        tl.debug_barrier()  # all threads' stores come before the arrival that one of them announces
        others = tl.atomic_add(arrived + entry, tl.full([], 1, tl.int64), sem="acq_rel", scope="gpu")
        if others == tl.num_programs(0) - 1:
            _keep_unit(
                words + row.to(tl.int64) * word_row, reals + row.to(tl.int64) * real_row, tl.load(lengths + row),
                tl.load(bounds + row * 5 + 2), tl.load(bounds + row * 5 + 3), unit, indices + entry.to(tl.int64) * room,
                tl.load(counts + entry), weights + entry.to(tl.int64) * room,
                scores + row.to(tl.int64) * score_row + unit.to(tl.int64) * score_unit,
                marks + entry.to(tl.int64) * width, UNITS, 1024,
            )  # fmt: skip
            tl.store(arrived + entry, tl.full([], 0, tl.int64))
