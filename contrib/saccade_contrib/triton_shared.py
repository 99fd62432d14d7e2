"""HShare's sets in recorded steps (hshare.py): whose turn it is to retrieve, and the lists that all units read.
Words of its rows (KeyWords): ``sets`` and ``since`` of the layer, ``other_sets`` and ``other_since`` of its donor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.row_words import KeyWords
from saccade.ops.triton.batch import KeyLists
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.best_parts import put_bounds
from saccade.ops.triton.common import begin, launched
from saccade.ops.triton.state_words import places

W = places(KeyWords)


def whose_turn(rows: LayerRows, units: int) -> tuple[Tensor, Tensor, Tensor]:
    """int8 [rows] who takes new sets, int8 [rows * units] which units retrieve for that, and choose_keys's bounds."""
    device = rows.q.device
    due = torch.empty(rows.count, dtype=torch.int8, device=device)
    active = torch.empty(rows.count * units, dtype=torch.int8, device=device)
    bounds = torch.empty(rows.count, 5, dtype=torch.int32, device=device)
    _whose_turn[(rows.count,)](
        rows.words, rows.pages.lengths, due, active, bounds, rows.words.stride(0), UNITS=units,
        PADDED=triton.next_power_of_2(units), num_warps=1, **launched(device),
    )  # fmt: skip
    return due, active, bounds


def shared_lists(rows: LayerRows, units: int, due: Tensor, chosen: KeyLists, room: int) -> KeyLists:
    """The sets of all units, those that were ``chosen`` in this step among them, with the keys before and after."""
    device = rows.q.device
    room = min(room, rows.pages.longest)
    counts = torch.empty(rows.count * units, dtype=torch.int32, device=device)
    indices = torch.empty(rows.count * units, room, dtype=torch.int32, device=device)
    _shared_lists[(units, rows.count)](
        rows.words, rows.pages.lengths, due, chosen.indices, counts, indices, rows.words.stride(0), chosen.longest,
        room, UNITS=units, SPAN=1024, num_warps=4, **launched(device),
    )  # fmt: skip
    return KeyLists(None, counts, indices, units, 1, room)


@triton.jit(
    do_not_specialize=["word_row"], do_not_specialize_on_alignment=["words", "lengths", "due", "active", "bounds"]
)
def _whose_turn(
    words, lengths, due, active, bounds, word_row, UNITS: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    unit = tl.arange(0, PADDED)
    turn, own_donor = tl.full([], 0, tl.int8), unit < 0
    first, last, take = length, length, tl.full([], 0, tl.int32)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        heavy, sinks, local = tl.load(own + W.k), tl.load(own + W.sinks), tl.load(own + W.local)
        if length > heavy + sinks + local:
            since = tl.load(tl.load(own + W.since).to(tl.pointer_type(tl.int64)))
            turn = ((since == 0) | (length % tl.load(own + W.every) == 0)).to(tl.int8)
            donors = tl.load(tl.load(own + W.donors).to(tl.pointer_type(tl.int32)) + unit, mask=unit < UNITS, other=-1)
            retrieves = (turn != 0) & (tl.load(own + W.other_sets) == 0)
            own_donor = (donors == unit) & (unit * 0 + retrieves.to(tl.int32) != 0)
            first, last, take = sinks.to(tl.int32), length - local.to(tl.int32), heavy.to(tl.int32)
    tl.store(due + row, turn)
    tl.store(active + row * UNITS + unit, own_donor.to(tl.int8), mask=unit < UNITS)
    put_bounds(bounds, row, first, last, 0, 0, take)


@triton.jit(
    do_not_specialize=["word_row", "chosen_room", "room"],
    do_not_specialize_on_alignment=["words", "lengths", "due", "counts"],
)
def _shared_lists(
    words, lengths, due, chosen, counts, indices, word_row, chosen_room, room,
    UNITS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    entry = row * UNITS + unit
    length = tl.load(lengths + row)
    placed = tl.full([], 0, tl.int32)
    at = tl.arange(0, SPAN)
    out = indices + entry.to(tl.int64) * room
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        heavy = tl.load(own + W.k).to(tl.int32)
        sinks, local = tl.load(own + W.sinks).to(tl.int32), tl.load(own + W.local).to(tl.int32)
        start_of_rest = tl.full([], 0, tl.int32)
        if length > heavy + sinks + local:
            sets = tl.load(own + W.sets).to(tl.pointer_type(tl.int32)) + unit * heavy
            ends = tl.load(own + W.since).to(tl.pointer_type(tl.int64))
            turn = tl.load(due + row) != 0
            other = tl.load(own + W.other_sets)
            source = sets
            since = tl.load(ends)
            if turn:
                if other != 0:
                    source = other.to(tl.pointer_type(tl.int32)) + unit * heavy
                    since = tl.load(tl.load(own + W.other_since).to(tl.pointer_type(tl.int64)))
                else:
                    donor = tl.load(tl.load(own + W.donors).to(tl.pointer_type(tl.int32)) + unit)
                    source = chosen + (row * UNITS + donor).to(tl.int64) * chosen_room + sinks
                    since = (length - local).to(tl.int64)
            for start in tl.range(0, sinks, SPAN):
                tl.store(out + start + at, start + at, mask=start + at < sinks)
            for start in tl.range(0, heavy, SPAN):
                inside = start + at < heavy
                key = tl.load(source + start + at, mask=inside, other=0)
                tl.store(out + sinks + start + at, key, mask=inside)
                if turn:
                    tl.store(sets + start + at, key, mask=inside)
            placed = sinks + heavy
            start_of_rest = since.to(tl.int32)
            if turn:
                tl.store(ends, since)  # by all units alike
        for start in tl.range(start_of_rest, length, SPAN):
            tl.store(out + placed + start - start_of_rest + at, start + at, mask=start + at < length)
        placed += length - start_of_rest
    tl.store(counts + entry, placed)
