"""LoopServe's decode in recorded steps: the last queries, and what rows read of the lines that these choose
(triton_choosing.py). Means what ``LoopServe.select_decode`` means."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.loopserve.recorded import Words
from saccade.ops.triton.batch import KeyLists
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.common import begin, launched, pad
from saccade.ops.triton.state_words import places

W = places(Words)


class Due(NamedTuple):
    """int8 [rows]: who chooses in this step, and who has chosen by its end; float64 [rows]: the keys scored."""

    now: Tensor
    chosen: Tensor
    scored: Tensor


def remember(rows: LayerRows) -> Due:
    """Add the rows' queries to those that choose, and see whose turn it is."""
    q = rows.q if rows.q.stride(-1) == 1 else rows.q.contiguous()
    device = q.device
    due = Due(
        torch.empty(rows.count, dtype=torch.int8, device=device),
        torch.empty(rows.count, dtype=torch.int8, device=device),
        torch.empty(rows.count, dtype=torch.float64, device=device),
    )
    _remember[(rows.heads, rows.count)](
        q, rows.words, rows.pages.lengths, *due, q.stride(0), q.stride(1), rows.words.stride(0), HEADS=rows.heads,
        D=q.shape[2], D_PAD=pad(q.shape[2]), num_warps=1, **launched(device),
    )  # fmt: skip
    return due


def line_lists(rows: LayerRows, due: Due, room: int) -> KeyLists:
    """What rows that have chosen read: their lines, and all keys since."""
    device, units = rows.q.device, rows.kv_heads
    room = min(room, rows.pages.longest)
    counts = torch.empty(rows.count * units, dtype=torch.int32, device=device)
    indices = torch.empty(rows.count * units, room, dtype=torch.int32, device=device)
    _line_lists[(units, rows.count)](
        rows.words, rows.pages.lengths, due.chosen, counts, indices, rows.words.stride(0), room, UNITS=units, SPAN=1024,
        num_warps=4, **launched(device),
    )  # fmt: skip
    return KeyLists(None, counts, indices, units, 1, room)


@triton.jit
def observed_of(own, length):
    """How many queries there are, and how many of them look."""
    seen = tl.minimum(tl.load(own + W.every), length.to(tl.int64) - tl.load(own + W.known)).to(tl.int32)
    most = tl.load(own + W.observed).to(tl.int32)
    return seen, tl.where(most > 0, tl.minimum(seen, most), seen)


@triton.jit(
    do_not_specialize=["word_row"], do_not_specialize_on_alignment=["words", "lengths", "now", "chosen", "scored"]
)
def _remember(
    q_ptr, words, lengths, now, chosen, scored, q_row, q_head, word_row,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    head, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    due, has = tl.full([], 0, tl.int8), tl.full([], 0, tl.int8)
    keys = tl.zeros([], tl.float64)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        every = tl.load(own + W.every)
        place = (length.to(tl.int64) - 1) % every
        channel = tl.arange(0, D_PAD)
        q = tl.load(q_ptr + row.to(tl.int64) * q_row + head * q_head + channel, mask=channel < D, other=0.0)
        queries = tl.load(own + W.queries).to(tl.pointer_type(q_ptr.dtype.element_ty))
        tl.store(queries + (place * HEADS + head) * D + channel, q, mask=channel < D)
        if head == 0:
            late = length.to(tl.int64) - 1 - tl.load(own + W.turn) - tl.load(own + W.first)
            turn = (late >= 0) & (late % every == 0) & (length > tl.load(own + W.budget))
            due = turn.to(tl.int8)
            until = tl.load(own + W.until).to(tl.pointer_type(tl.int64))
            if turn:
                tl.store(until, length.to(tl.int64) - 1)
                seen, count = observed_of(own, length)
                for number in tl.range(0, count):
                    which = seen - 1 - (count - 1 - number) * seen // count
                    keys += (length - seen + 1 + which).to(tl.float64)
            has = (turn | (tl.load(until) > 0)).to(tl.int8)
    if head == 0:
        tl.store(now + row, due)
        tl.store(chosen + row, has)
        tl.store(scored + row, keys)


@triton.jit(
    do_not_specialize=["word_row", "room"], do_not_specialize_on_alignment=["words", "lengths", "chosen", "counts"]
)
def _line_lists(
    words, lengths, chosen, counts, indices, word_row, room,
    UNITS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    entry = row * UNITS + unit
    placed = 0
    if tl.load(chosen + row) != 0:
        length = tl.load(lengths + row)
        own = words + row.to(tl.int64) * word_row
        budget = tl.load(own + W.budget).to(tl.int32)
        until = tl.load(tl.load(own + W.until).to(tl.pointer_type(tl.int64))).to(tl.int32)
        lines = tl.load(own + W.chosen).to(tl.pointer_type(tl.int32)) + unit.to(tl.int64) * budget
        out = indices + entry.to(tl.int64) * room
        at = tl.arange(0, SPAN)
        columns = 0
        for start in tl.range(0, budget, SPAN):
            line = tl.load(lines + start + at, mask=start + at < budget, other=2147483647)
            tl.store(out + start + at, line, mask=line < until)
            columns += tl.sum((line < until).to(tl.int32), 0)
        placed = columns
        for start in tl.range(columns, budget, SPAN):
            inside = start + at < budget
            line = tl.load(lines + start + at, mask=inside, other=0)
            key = length - 1 + until - line
            # Several lines may meet in one key, and distances reach keys that are new and read anyway.
            left, size = tl.zeros([SPAN], tl.int32), tl.zeros([SPAN], tl.int32) + columns
            for _ in tl.range(0, 32):
                half = size // 2
                middle = tl.load(lines + left + half, mask=size > 0, other=0)
                right = (size > 0) & (middle < key)
                left = tl.where(right, left + half + 1, left)
                size = tl.where(right, size - half - 1, half)
            known = (left < columns) & (tl.load(lines + left, mask=left < columns, other=-1) == key)
            fresh = inside & (key < until) & (key >= 0) & (known == 0)
            tl.store(out + placed + tl.cumsum(fresh.to(tl.int32), 0) - 1, key, mask=fresh)
            placed += tl.sum(fresh.to(tl.int32), 0)
        for start in tl.range(until, length, SPAN):
            tl.store(out + placed + start - until + at, start + at, mask=start + at < length)
        placed += length - until
    tl.store(counts + entry, placed)
