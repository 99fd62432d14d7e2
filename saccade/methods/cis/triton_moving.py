"""What a unit shares where its best keys move along with the steps (CIS's ``follow``), on the device; sharing.py says
what that is. Sets are marks by key, so that lists that overlap become one that rises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.common import begin, launched

if TYPE_CHECKING:
    from saccade.methods.cis.anchors import Anchors


def union(
    anchors: Anchors, whose: Tensor, local: int, length: int, cover_gap: bool, moves: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The keys that every unit reads of anchor ``whose`` (int32 [units], below 0: none) as lists, as ``sharing.share``
    has them: (offsets int64 [units + 1], keys int32 with room behind the last list)."""
    units, device, last = anchors.units, whose.device, length - local
    follow = min(moves[0], length)
    marks = torch.zeros(units, last, dtype=torch.int8, device=device)
    _mark_shared[(units,)](
        whose,
        anchors.keys,
        anchors.counts,
        anchors.moving,
        anchors.positions,
        marks,
        anchors.capacity,
        anchors.most,
        length,
        local,
        moves[1],
        follow,
        UNITS=units,
        GAP=cover_gap,
        SPAN=1024,
        num_warps=4,
        **launched(device),
    )
    offsets = torch.nn.functional.pad(marks.sum(1, dtype=torch.int64).cumsum(0), (1, 0))
    gap = max(0, length - 1 - anchors.first) if cover_gap else 0
    longest = min(last, anchors.capacity + gap + anchors.most * (2 * follow + 1))
    keys = torch.empty(units * longest, dtype=torch.int32, device=device)
    _list_shared[(units,)](marks, offsets, keys, last, SPAN=4096, num_warps=8, **launched(device))
    return offsets, keys


@triton.jit(do_not_specialize=["capacity", "most", "length", "local", "low", "follow"])
def _mark_shared(
    whose, keys, sizes, moving, positions, marks, capacity, most, length, local, low, follow,
    UNITS: tl.constexpr, GAP: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit = tl.program_id(0)
    found = tl.load(whose + unit)
    last = length - local
    mine = marks + unit.to(tl.int64) * last
    at = tl.arange(0, SPAN)
    one = tl.full([SPAN], 1, tl.int8)
    if found >= 0:
        place = found * UNITS + unit
        size = tl.load(sizes + place)
        listed = keys + place.to(tl.int64) * capacity
        for first in tl.range(0, size, SPAN):
            valid = first + at < size
            tl.store(mine + tl.load(listed + first + at, mask=valid, other=0), one, mask=valid)
        position = tl.load(positions + found).to(tl.int32)
        if GAP:
            for first in tl.range(position + 1 - local, last, SPAN):
                tl.store(mine + first + at, one, mask=first + at < last)
        best = moving + place.to(tl.int64) * most
        steps = length - 1 - position
        for first in tl.range(0, most, SPAN):
            center = tl.load(best + first + at, mask=first + at < most, other=2147483647)
            there = center != 2147483647
            for away in tl.range(-follow, follow + 1):
                key = tl.where(there, center, 0) + steps + away
                tl.store(mine + key, one, mask=there & (key >= low) & (key < last))


@triton.jit(do_not_specialize=["length"])
def _list_shared(marks, offsets, keys, length, SPAN: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    unit = tl.program_id(0)
    at = tl.arange(0, SPAN)
    mine = marks + unit.to(tl.int64) * length
    count = tl.load(offsets + unit)
    for first in tl.range(0, length, SPAN, num_stages=3):
        marked = tl.load(mine + first + at, mask=first + at < length, other=0).to(tl.int32)
        tl.store(keys + count + tl.cumsum(marked, 0) - 1, first + at, mask=marked != 0)
        count += tl.sum(marked, 0).to(tl.int64)
