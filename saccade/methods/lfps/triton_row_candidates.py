"""LFPS's candidates in recorded steps, and which of them are read. Means what tables.py means."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.lfps.triton_row_words import budget_at, pointer, query_of, static
from saccade.methods.lfps.triton_stand_ins import _row
from saccade.methods.lfps.triton_tables import _entries, _threshold
from saccade.ops.triton.batched_decode import ordered_bits
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.batched_tokens import least_taken
from saccade.ops.triton.common import begin, launched
from saccade.ops.triton.decode import KeyLists

SPAN = 2048


def best_blocks(rows: LayerRows, units: int, size: int) -> Tensor:
    """int8 [rows * units, n]: 1 for the blocks of ``size`` keys whose means agree best with a unit's queries."""
    q, summaries = query_of(rows), rows.summaries
    assert summaries is not None
    blocks = max(1, rows.pages.longest // size)
    scores = torch.empty(rows.count * units, blocks, dtype=torch.float32, device=q.device)
    _mean_scores[(triton.cdiv(blocks, 64), units, rows.count)](
        q, summaries.pointers, rows.pages.lengths, scores, q.stride(0), q.stride(1), blocks, UNITS=units, SIZE=size,
        **static(rows, num_warps=4),
    )  # fmt: skip
    marks = torch.empty(rows.count * units, blocks, dtype=torch.int8, device=q.device)
    _mark_best[(units, rows.count)](
        scores, rows.pages.lengths, rows.words, marks, rows.words.stride(0), blocks, UNITS=units, SIZE=size, SPAN=SPAN,
        num_warps=8, **launched(q.device),
    )  # fmt: skip
    return marks


def candidates(
    rows: LayerRows, units: int, idle: Tensor, blocks: Tensor | None, size: int
) -> tuple[Tensor, Tensor, KeyLists]:
    """int8 [rows * units, n] which keys are candidates, int32 [rows * units] how many, and lists of the forced keys
    before, the candidates and the forced keys behind; of all keys where a row reads everything."""
    device, width, count = rows.q.device, rows.pages.longest, rows.count
    chunks = triton.cdiv(width, SPAN)
    marks = torch.empty(count * units, width, dtype=torch.int8, device=device)
    counts = torch.empty(count * units, chunks, dtype=torch.int32, device=device)
    _scan[(chunks, units, count)](
        rows.words, rows.reals, rows.pages.lengths, idle, idle if blocks is None else blocks, marks, counts,
        rows.words.stride(0), rows.reals.stride(0), width, 0 if blocks is None else blocks.shape[1], UNITS=units,
        EACH=rows.heads // units, SIZE=0 if blocks is None else size, SPAN=SPAN, num_warps=8, **launched(device),
    )  # fmt: skip
    indices = torch.empty(count * units, width, dtype=torch.int32, device=device)
    totals = torch.empty(2, count * units, dtype=torch.int32, device=device)
    _list[(chunks, units, count)](
        rows.words, rows.reals, rows.pages.lengths, marks, counts, indices, totals[0], totals[1],
        rows.words.stride(0), rows.reals.stride(0), width, UNITS=units, CHUNKS=triton.next_power_of_2(chunks),
        SPAN=SPAN, num_warps=8, **launched(device),
    )  # fmt: skip
    return marks, totals[0], KeyLists(None, totals[1], indices, units, 1, width)


def choose(
    rows: LayerRows, scores: Tensor, found: KeyLists, listed: Tensor, idle: Tensor, lists: int, room: int
) -> KeyLists:
    """What is read: the forced keys and the best candidates, in one list for each of ``lists`` (units, or query heads
    where some rest)."""
    device = rows.q.device
    room = min(room, rows.pages.longest)
    counts = torch.empty(rows.count * lists, dtype=torch.int32, device=device)
    indices = torch.empty(rows.count * lists, room, dtype=torch.int32, device=device)
    _choose[(lists, rows.count)](
        scores, rows.words, rows.reals, rows.pages.lengths, found.indices, listed, idle, counts, indices,
        rows.words.stride(0), rows.reals.stride(0), scores.stride(0), scores.stride(1), found.longest, room,
        LISTS=lists, UNITS=found.units, HEADS=rows.heads, SPAN=SPAN, num_warps=8, **launched(device),
    )  # fmt: skip
    return KeyLists(None, counts, indices, lists, 1, room)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["pointers", "lengths", "scores"])
def _mean_scores(
    q_ptr, pointers, lengths, scores, q_row, q_head, blocks,
    UNITS: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, PAGE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(1), tl.program_id(2)
    EACH: tl.constexpr = HEADS // UNITS
    full = tl.load(lengths + row) // SIZE
    block = tl.program_id(0) * 64 + tl.arange(0, 64)
    if tl.program_id(0) * 64 < full:
        means = tl.load(pointers + row).to(tl.pointer_type(q_ptr.dtype.element_ty))
        channel = tl.arange(0, D_PAD)
        total = tl.zeros([64], tl.float32)
        for number in tl.range(0, EACH):
            head = unit * EACH + number
            q = _row(q_ptr + row.to(tl.int64) * q_row, head, q_head, D, D_PAD)
            at = (block.to(tl.int64)[:, None] * KV_HEADS + head // (HEADS // KV_HEADS)) * D + channel[None, :]
            mean = tl.load(means + at, mask=(block < full)[:, None] & (channel < D)[None, :], other=0.0)
            total += tl.sum(mean.to(tl.float32) * q[None, :], 1)
        to = scores + (row * UNITS + unit).to(tl.int64) * blocks + block
        tl.store(to, total / EACH, mask=(block < blocks) & (block < full))


@triton.jit(
    do_not_specialize=["word_row", "blocks"], do_not_specialize_on_alignment=["lengths", "words", "marks", "scores"]
)
def _mark_best(
    scores, lengths, words, marks, word_row, blocks,
    UNITS: tl.constexpr, SIZE: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    if length > 0:
        full = length // SIZE
        wanted = tl.minimum(tl.load(words + row.to(tl.int64) * word_row + 6), full.to(tl.int64)).to(tl.int32)
        line = scores + (row * UNITS + unit).to(tl.int64) * blocks
        bound = tl.full([], 0, tl.uint32)
        spare = wanted
        if (wanted > 0) & (wanted < full):
            bound, spare = least_taken(line, 0, full, 0, 0, wanted, SPAN)
        at = tl.arange(0, SPAN)
        level_before = 0
        for start in tl.range(0, full, SPAN):
            inside = start + at < full
            taken = inside
            if wanted < full:
                order = ordered_bits(tl.load(line + start + at, mask=inside, other=0.0) + 0.0)
                level = inside & (order == bound)
                earlier = level_before + tl.cumsum(level.to(tl.int32), 0)
                taken = ((inside & (order > bound)) | (level & (earlier <= spare))) & (at * 0 + wanted > 0)
                level_before += tl.sum(level.to(tl.int32), 0)
            to = marks + (row * UNITS + unit).to(tl.int64) * blocks + start + at
            tl.store(to, taken.to(tl.int8), mask=inside)


@triton.jit(
    do_not_specialize=["word_row", "real_row", "width", "n_blocks"],
    do_not_specialize_on_alignment=["words", "reals", "lengths", "idle", "blocks", "marks", "counts"],
)
def _scan(
    words, reals, lengths, idle, blocks, marks, counts, word_row, real_row, width, n_blocks,
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
        if (dense == 0) & (chunk * SPAN < stop):
            at = chunk * SPAN + tl.arange(0, SPAN)
            votes = 0
            for head in tl.static_range(EACH):
                votes += (tl.load(idle + entry * EACH + head) == 0).to(tl.int32)
            a = tl.load(reals + 2)
            sums = pointer(own, 16, tl.float64) + unit * 8
            mean_v, tau_v = _threshold(sums, n.to(tl.float64), a)
            mean_s, tau_s = _threshold(sums + 4, n.to(tl.float64), a)
            base = length - 2 + (tl.load(own + 9) & 1).to(tl.int32) - first
            capacity = tl.load(own + 12).to(tl.int32)
            vertical = pointer(own, 14, tl.float32) + unit.to(tl.int64) * capacity
            slash = pointer(own, 15, tl.float32) + unit.to(tl.int64) * capacity
            here_v, here_s = _entries(vertical, slash, at, at < n, base, capacity)
            high = (here_v > mean_v) | (here_s > mean_s)
            above = (here_v > tau_v) | (here_s > tau_s)
            near = above
            if a < 0:
                near = at < n
                above = near
            else:
                before, after = tl.load(own + 4).to(tl.int32), tl.load(own + 5).to(tl.int32)
                for offset in tl.range(-before, after + 1):
                    other = at - offset
                    inside = (other >= 0) & (other < n)
                    value_v, value_s = _entries(vertical, slash, other, inside, base, capacity)
                    near = near | (inside & ((value_v > tau_v) | (value_s > tau_s)))
            gate = tl.load(own + 10)
            chosen = near & (high | (at * 0 + gate == 2))
            chosen = chosen | (above & (at * 0 + gate == 1))
            if SIZE > 0:
                block = (first + at) // SIZE
                known = (block < n_blocks) & (block < length // SIZE)
                chosen = chosen | (tl.load(blocks + entry * n_blocks + block, mask=known, other=0) != 0)
            chosen = chosen & (at < stop) & (at * 0 + votes > 0)
            tl.store(marks + entry * width + at, chosen.to(tl.int8), mask=at < stop)
            found = tl.sum(chosen.to(tl.int32), 0)
    tl.store(counts + entry * tl.num_programs(0) + chunk, found)


@triton.jit(
    do_not_specialize=["word_row", "real_row", "width"],
    do_not_specialize_on_alignment=["words", "reals", "lengths", "marks", "counts", "indices", "listed", "sizes"],
)
def _list(
    words, reals, lengths, marks, counts, indices, listed, sizes, word_row, real_row, width,
    UNITS: tl.constexpr, CHUNKS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Forced keys before, candidates, forced keys behind. A row that reads everything has no candidates and its list is
    not written."""
    begin(EARLY)
    chunk, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = (row * UNITS + unit).to(tl.int64)
    length = tl.load(lengths + row)
    if length == 0:
        if chunk == 0:
            tl.store(listed + entry, 0)
            tl.store(sizes + entry, 0)
    else:
        own = words + row.to(tl.int64) * word_row
        reals += row.to(tl.int64) * real_row
        first = tl.load(own).to(tl.int32)
        n, dense, take, local = budget_at(own, reals, length, first)
        number = tl.arange(0, CHUNKS)
        here = tl.load(counts + entry * tl.num_programs(0) + number, mask=number < tl.num_programs(0), other=0)
        total = tl.sum(here, 0)
        start = first + tl.sum(tl.where(number < chunk, here, 0), 0)
        at = chunk * SPAN + tl.arange(0, SPAN)
        out = indices + entry * width
        if chunk == 0:
            tl.store(listed + entry, total)
            # What is scored is only needed where not all are read.
            few = dense | (total <= take)
            tl.store(sizes + entry, tl.where(few, 0, first + total + local))
            behind = tl.arange(0, 64)
            for begins in tl.range(0, first, 64):
                tl.store(out + begins + behind, begins + behind, mask=begins + behind < first)
            if dense == 0:
                for begins in tl.range(0, local, 64):
                    to = out + first + total + begins + behind
                    tl.store(to, length - local + begins + behind, mask=begins + behind < local)
        if (dense == 0) & (chunk * SPAN < n - local):
            marked = tl.load(marks + entry * width + at, mask=at < n - local, other=0).to(tl.int32)
            tl.store(out + start + tl.cumsum(marked, 0) - 1, first + at, mask=marked > 0)


@triton.jit(
    do_not_specialize=["word_row", "real_row", "score_row", "score_unit", "width", "room"],
    do_not_specialize_on_alignment=["words", "reals", "lengths", "listed", "idle", "counts", "indices"],
)
def _choose(
    scores, words, reals, lengths, found, listed, idle, counts, indices, word_row, real_row, score_row, score_unit,
    width, room,
    LISTS: tl.constexpr, UNITS: tl.constexpr, HEADS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    one, row = tl.program_id(0), tl.program_id(1)
    entry = row * LISTS + one
    length = tl.load(lengths + row)
    placed = 0
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        reals += row.to(tl.int64) * real_row
        first = tl.load(own).to(tl.int32)
        _n, dense, take, local = budget_at(own, reals, length, first)
        unit = one // (LISTS // UNITS)
        listed_here = tl.load(listed + row * UNITS + unit)
        rests = 0
        if LISTS == HEADS:
            rests = tl.load(idle + entry).to(tl.int32)
        at = tl.arange(0, SPAN)
        out = indices + entry.to(tl.int64) * room
        if rests != 0:
            placed = tl.where(tl.load(own + 8) == 2, 0, tl.minimum(first, length))
            for start in tl.range(0, placed, SPAN):
                tl.store(out + start + at, start + at, mask=start + at < placed)
        elif dense:
            placed = length
            for start in tl.range(0, length, SPAN):
                tl.store(out + start + at, start + at, mask=start + at < length)
        else:
            ids = found + (row * UNITS + unit).to(tl.int64) * width
            line = scores + row.to(tl.int64) * score_row + unit.to(tl.int64) * score_unit
            wanted = tl.minimum(take, listed_here)
            for start in tl.range(0, first, SPAN):
                tl.store(out + start + at, start + at, mask=start + at < first)
            placed = first
            bound = tl.full([], 0, tl.uint32)
            spare = wanted
            if (wanted < listed_here) & (wanted > 0):
                bound, spare = least_taken(line, first, first + listed_here, 0, 0, wanted, SPAN)
            level_before = 0
            if wanted > 0:
                for start in tl.range(first, first + listed_here, SPAN):
                    taken = start + at < first + listed_here
                    key = tl.load(ids + start + at, mask=taken, other=0)
                    if wanted < listed_here:
                        order = ordered_bits(tl.load(line + start + at, mask=taken, other=0.0) + 0.0)
                        level = taken & (order == bound)
                        earlier = level_before + tl.cumsum(level.to(tl.int32), 0)
                        taken = (taken & (order > bound)) | (level & (earlier <= spare))
                        level_before += tl.sum(level.to(tl.int32), 0)
                    tl.store(out + placed + tl.cumsum(taken.to(tl.int32), 0) - 1, key, mask=taken)
                    placed += tl.sum(taken.to(tl.int32), 0)
            for start in tl.range(0, local, SPAN):
                tl.store(out + placed + start + at, length - local + start + at, mask=start + at < local)
            placed += local
    tl.store(counts + entry, placed)
