"""CIS on the device: which earlier query resembles the one at hand, what it shared, and what a new one will share.
Means what sharing.py means; nothing is read back to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.cis import triton_moving
from saccade.ops.layout import flat, rows
from saccade.ops.triton.common import also, begin, launched, pad
from saccade.ops.triton.radix_select import least_taken, taken_of
from saccade.selection import Tokens

if TYPE_CHECKING:
    from saccade.methods.cis.anchors import Anchors


def share(
    anchors: Anchors,
    q: Tensor,
    tau: float,
    local: int,
    length: int,
    cover_gap: bool,
    moves: tuple[int, int] = (0, 0),
    passes_on: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``sharing.share``; there is room for two lists' worth behind the indices that mean something."""
    anchors.check()
    q = rows(q)
    units, channels = anchors.directions.shape[1:]
    gap = max(0, length - 1 - anchors.first) if cover_gap and anchors.count else 0
    whose = torch.empty(units, dtype=torch.int32, device=q.device)
    counts = torch.empty(units, dtype=torch.int64, device=q.device)
    searching = torch.empty(units, dtype=torch.bool, device=q.device)
    shared = (anchors.counts, anchors.positions, whose, counts)
    _resemble[(units,)](
        q,
        anchors.directions,
        anchors.has,
        *shared,
        searching.view(torch.uint8),
        q.stride(0),
        anchors.count,
        length - local,
        local,
        tau,
        HEAD=q.shape[1],
        HEADS_EACH=channels // q.shape[1],
        UNITS=units,
        GAP=cover_gap,
        NOTES=passes_on,
        WIDTH=pad(channels),
        num_warps=4,
        **launched(q.device),
    )
    room = anchors.capacity + gap if anchors.count else 0
    indices = torch.empty(units * room, dtype=torch.int32, device=q.device)
    if not room:
        return torch.zeros(units + 1, dtype=torch.int64, device=q.device), indices, searching
    if anchors.most:
        return *triton_moving.union(anchors, whose, local, length, cover_gap, moves), searching
    offsets = torch.empty(units + 1, dtype=torch.int64, device=q.device)
    _copy_shared[(triton.cdiv(room, 1024), units)](
        anchors.keys,
        *shared,
        offsets,
        indices,
        anchors.capacity,
        local,
        UNITS=units,
        SPAN=1024,
        num_warps=4,
        **launched(q.device),
    )
    return offsets, indices, searching


def keep(
    anchors: Anchors,
    at: int,
    searching: Tensor,
    read: Tokens,
    weights: Tensor,
    middle: tuple[int, int],
    best: int,
    reach: int,
) -> None:
    """The lists of anchor ``at``, of the units that are ``searching`` (bool [units]): see ``sharing.keep``. ``read``
    has a list for each of its units."""
    anchors.check()
    units, weights = anchors.units, rows(weights)
    offsets, indices = flat(read.offsets, torch.int64), flat(read.indices, torch.int32)
    marks = torch.zeros(1 + bool(anchors.most), units, read.shape.k_len, dtype=torch.int8, device=weights.device)
    meaned = torch.empty(indices.numel(), dtype=torch.float32, device=weights.device)
    args = (flat(searching, torch.bool).view(torch.uint8), offsets, indices, weights, meaned, marks[0], marks[-1])
    _mark[(units,)](
        *args,
        weights.stride(0),
        marks.shape[2],
        *middle,
        best,
        EACH=weights.shape[0],
        REACH=reach,
        MOVES=anchors.most > 0,
        SPAN=1024,
        num_warps=4,
        **launched(weights.device),
    )
    lists = [(marks[0], anchors.counts[at], anchors.keys[at])]
    if anchors.most:
        anchors.moving[at] = torch.iinfo(torch.int32).max
        lists.append((marks[1], torch.empty_like(anchors.counts[at]), anchors.moving[at]))
    for marked, counts, keys in lists:
        _list_marks[(units,)](
            marked,
            counts,
            keys,
            marked.shape[1],
            keys.shape[1],
            SPAN=4096,
            num_warps=8,
            **launched(weights.device),
        )


@triton.jit(do_not_specialize=["anchored", "window"])
def _resemble(
    q_ptr, directions, has, sizes, positions, whose, counts, searching, q_head, anchored, window, local, tau,
    HEAD: tl.constexpr, HEADS_EACH: tl.constexpr, UNITS: tl.constexpr, GAP: tl.constexpr, NOTES: tl.constexpr,
    WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Store the direction of the unit's query behind the last anchor, and find who retrieved what the latest anchor
    has that it resembles. Who ``NOTES`` it writes that behind the last anchor, too."""
    begin(EARLY)
    unit = tl.program_id(0)
    CHANNELS: tl.constexpr = HEAD * HEADS_EACH
    channel = tl.arange(0, WIDTH)
    real = channel < CHANNELS
    row = unit * HEADS_EACH + channel // HEAD
    q = tl.load(q_ptr + row.to(tl.int64) * q_head + channel % HEAD, mask=real, other=0.0).to(tl.float32)
    direction = q / tl.maximum(tl.sqrt(tl.sum(q * q, 0)), 1e-38)
    tl.store(directions + (anchored * UNITS + unit).to(tl.int64) * CHANNELS + channel, direction, mask=real)
    found = -1
    for number in tl.range(0, anchored):
        at = number * UNITS + unit
        other = tl.load(directions + at.to(tl.int64) * CHANNELS + channel, mask=real, other=0.0)
        alike = (tl.sum(direction * other, 0) > tau) & (tl.load(has + at) != 0)
        found = tl.where(alike, number, found)
    known = tl.maximum(found, 0)
    size = tl.load(sizes + known * UNITS + unit, mask=found >= 0, other=0)
    if size < 0:  # passed on
        known = -1 - size
        found = known
        size = tl.load(sizes + known * UNITS + unit)
    if NOTES:
        tl.store(sizes + anchored * UNITS + unit, tl.where(found < 0, 0, -1 - found))
    count = size.to(tl.int64)
    if GAP:
        count += tl.maximum(window - (tl.load(positions + known) + 1 - local), 0)
    tl.store(whose + unit, found)
    tl.store(counts + unit, tl.where(found < 0, 0, count))
    tl.store(searching + unit, tl.cast(found < 0, tl.uint8))


@triton.jit(do_not_specialize=["capacity"])
def _copy_shared(
    keys, sizes, positions, whose, counts, offsets, indices, capacity, local,
    UNITS: tl.constexpr, SPAN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit = tl.program_id(1)
    found = tl.maximum(tl.load(whose + unit), 0)
    count = tl.load(counts + unit).to(tl.int32)
    before = tl.arange(0, triton.next_power_of_2(UNITS))
    start = tl.sum(tl.load(counts + before, mask=before < unit, other=0), 0)
    if tl.program_id(0) == 0:
        tl.store(offsets + unit, start)  # the next unit's program stores where this one's list ends
        if unit == UNITS - 1:
            tl.store(offsets + UNITS, start + count)
    at = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    size = tl.load(sizes + found * UNITS + unit)
    left = tl.load(positions + found).to(tl.int32) + 1 - local
    listed = keys + (found * UNITS + unit).to(tl.int64) * capacity
    key = tl.load(listed + at, mask=(at < size) & (at < count), other=0)
    key = tl.where(at < size, key, left + at - size)
    tl.store(indices + start + at, key, mask=at < count)


@triton.jit
def _mean_weight(weights, place, valid, weight_row, EACH: tl.constexpr, SPAN: tl.constexpr):
    total = tl.zeros([SPAN], tl.float32)
    for number in tl.static_range(EACH):
        total += tl.load(weights + number * weight_row + place, mask=valid, other=0.0)
    return total / EACH


@triton.jit(
    do_not_specialize=["weight_row", "length", "low", "high", "best"],
    do_not_specialize_on_alignment=["has", "offsets", "indices", "weights", "meaned", "marks", "heaviest"],
)
def _mark(
    has, offsets, indices, weights, meaned, marks, heaviest, weight_row, length, low, high, best,
    EACH: tl.constexpr, REACH: tl.constexpr, MOVES: tl.constexpr, SPAN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Mark the unit's keys between ``low`` and ``high`` and the neighbours of the ``best`` heaviest, and if they are
    to move those by themselves too. ``meaned`` has room for the mean weight of every entry."""
    begin(EARLY)
    unit = tl.program_id(0)
    if tl.load(has + unit) != 0:
        start = tl.load(offsets + unit)
        count = (tl.load(offsets + unit + 1) - start).to(tl.int32)
        at = tl.arange(0, SPAN)
        mine = marks + unit.to(tl.int64) * length
        line = meaned + start
        for first in tl.range(0, count, SPAN):
            valid = first + at < count
            key = tl.load(indices + start + first + at, mask=valid, other=0)
            inside = valid & (key >= low) & (key < high)
            weight = _mean_weight(weights, start + first + at, inside, weight_row, EACH, SPAN)
            tl.store(line + first + at, tl.where(inside, weight, float("-inf")), mask=valid)
        tl.debug_barrier()  # other threads read them
        bound, spare = least_taken(line, 0, count, 0, 0, best, SPAN)
        level_before = 0
        for first in tl.range(0, count, SPAN):
            valid = first + at < count
            key = tl.load(indices + start + first + at, mask=valid, other=0)
            inside = valid & (key >= low) & (key < high)
            heavy, level_before = taken_of(line, first + at, inside, bound, spare, level_before)
            heavy = also(heavy, best > 0)
            tl.store(mine + key, tl.full([SPAN], 1, tl.int8), mask=inside)
            if MOVES:
                tl.store(heaviest + unit.to(tl.int64) * length + key, tl.full([SPAN], 1, tl.int8), mask=heavy)
            for away in tl.static_range(1, REACH + 1):
                tl.store(mine + key + away, tl.full([SPAN], 1, tl.int8), mask=heavy & (key + away < high))
                tl.store(mine + key - away, tl.full([SPAN], 1, tl.int8), mask=heavy & (key - away >= low))


@triton.jit(do_not_specialize=["length", "capacity"], do_not_specialize_on_alignment=["marks", "counts", "keys"])
def _list_marks(marks, counts, keys, length, capacity, SPAN: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    unit = tl.program_id(0)
    at = tl.arange(0, SPAN)
    count = 0
    for first in tl.range(0, length, SPAN, num_stages=3):
        marked = tl.load(marks + unit.to(tl.int64) * length + first + at, mask=first + at < length, other=0).to(
            tl.int32
        )
        place = count + tl.cumsum(marked, 0) - 1
        tl.store(keys + unit.to(tl.int64) * capacity + place, first + at, mask=(marked != 0) & (place < capacity))
        count += tl.sum(marked, 0)
    tl.store(counts + unit, tl.minimum(count, capacity))
