"""H2O on the device: keys kept for good, of which each step evicts the lightest (h2o.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.ops.triton.batch import KeyLists
from saccade.ops.triton.batched_lists import entries_from
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.common import begin, launched
from saccade.ops.triton.state_words import places
from saccade_contrib.heavy_words import HeavyWords

W = places(HeavyWords)


def advance(rows: LayerRows, units: int) -> tuple[KeyLists, torch.Tensor]:
    """Take in what the step before weighed, evict, and list the row's own key: the lists, and where the weights of
    this step go (entries from the float32 ``rows.reals``' place on, as KeyLists.starts count). By HeavyWords."""
    device, entries = rows.q.device, rows.count * units
    starts = torch.empty(2, entries, dtype=torch.int64, device=device)
    counts = torch.empty(entries, dtype=torch.int32, device=device)
    _advance[(units, rows.count)](
        rows.words,
        rows.pages.lengths,
        starts[0],
        starts[1],
        counts,
        rows.words.stride(0),
        UNITS=units,
        SPAN=2048,
        num_warps=8,
        **launched(device),
    )
    return KeyLists(starts[0], counts, rows.pages.lengths, units, 1, rows.pages.longest), starts[1]


@triton.jit(do_not_specialize=["word_row"], do_not_specialize_on_alignment=["words", "lengths", "pending_starts"])
def _advance(
    words, lengths, starts, pending_starts, counts, word_row,
    UNITS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    entry = row * UNITS + unit
    if length == 0:
        tl.store(counts + entry, 0)
        tl.store(starts + entry, tl.zeros([], tl.int64))
        tl.store(pending_starts + entry, tl.zeros([], tl.int64))
    else:
        own = words + row.to(tl.int64) * word_row
        room = tl.load(own + W.width)
        budget, recent = tl.load(own + W.budget).to(tl.int32), tl.load(own + W.recent).to(tl.int32)
        keys_at = tl.load(own + W.keys) + unit * room * 4
        pending_at = tl.load(own + W.pending) + unit * room * 4
        keys = keys_at.to(tl.pointer_type(tl.int32))
        sums = (tl.load(own + W.sums) + unit * room * 4).to(tl.pointer_type(tl.float32))
        pending = pending_at.to(tl.pointer_type(tl.float32))
        marks = (tl.load(own + W.marks) + unit * 24).to(tl.pointer_type(tl.int64))
        count, known, weighed = tl.load(marks).to(tl.int32), tl.load(marks + 1), tl.load(marks + 2)
        if known < length:  # else the step is run again
            least = float("inf")
            victim = count
            victim_key = -1
            at = tl.arange(0, SPAN)
            for start in tl.range(0, count, SPAN):
                inside = start + at < count
                total = tl.load(sums + start + at, mask=inside, other=0.0)
                if weighed < known:
                    total += tl.load(pending + start + at, mask=inside, other=0.0)
                    tl.store(sums + start + at, total, mask=inside)
                key = tl.load(keys + start + at, mask=inside, other=0)
                old = inside & (key < known - recent)
                total = tl.where(old, total, float("inf"))
                low = tl.min(total, 0)
                # Of equal ones the later key goes.
                last = tl.max(tl.where(old & (total == low), key, -1), 0)
                place = tl.max(tl.where(old & (key == last), start + at, -1), 0)
                if (last >= 0) & ((low < least) | ((low == least) & (last > victim_key))):
                    least, victim, victim_key = low, place, last
            slot = count
            if count > budget:
                slot = victim
            tl.debug_barrier()  # other threads write the sums
            tl.store(keys + slot, length - 1)
            tl.store(sums + slot, 0.0)
            count = tl.maximum(count, slot + 1)
            tl.store(marks, count.to(tl.int64))
            tl.store(marks + 1, length.to(tl.int64))
            tl.store(marks + 2, length.to(tl.int64) - 1)
        tl.store(counts + entry, count)
        tl.store(starts + entry, entries_from(keys_at, lengths))
        tl.store(pending_starts + entry, entries_from(pending_at, lengths))
