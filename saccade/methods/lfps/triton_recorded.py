"""LFPS in recorded steps: tables, bypasses, candidates and the rest for many rows at once. Means what tables.py and
stand_ins.py mean. A step leaves what it has learnt beside the tables, and the step after takes it in: one that breaks
off and runs again learns once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.lfps.triton_stand_ins import _add_up, _logits, _row, _span
from saccade.methods.lfps.triton_tables import _entries, _powers, _threshold
from saccade.methods.triton_topk import budget_of
from saccade.ops.triton.batched_decode import ordered_bits
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.batched_tokens import least_taken
from saccade.ops.triton.common import begin, launched, pad
from saccade.ops.triton.decode import KeyLists

SPAN = 2048
MOST_PROBES = 128

# Words of a row: numbers, then addresses.
(FIRST, LOCAL, K, LEAST, BEFORE, AFTER, BLOCKS, PROBES, BYPASS, SHIFTS, GATE, MEANS, CAPACITY, ROOM) = range(14)
(VERTICAL, SLASH, SUMS, SCALE, UNUSED, KEY, VALUE, SPREAD, PENDING, GAINS, MARKS, COUNTED, SINK_LOCAL) = range(14, 27)
SHARE, DECAY, A, EPSILON = range(4)  # reals; A is negative where every entry is a candidate
# marks int64 [units, 4]: the length that what is pending belongs to, the length learnt up to, entries, -1 where the
# unit learns nothing, and whether its slash table is to stay where it is.
SINK, SINK_MEAN, MEAN = range(3)  # BYPASS; SHIFTS: 1 slash_shift_on_read, 2 bypass_shift, 4 read_local


def _launch(rows: LayerRows, **more: object) -> dict[str, object]:
    """What all kernels of rows take when they are compiled."""
    return {
        "HEADS": rows.heads, "KV_HEADS": rows.kv_heads, "D": rows.q.shape[2], "D_PAD": pad(rows.q.shape[2]),
        "PAGE": rows.pages.k.shape[2], **more, **launched(rows.q.device),
    }  # fmt: skip


def _query(rows: LayerRows) -> Tensor:
    return rows.q if rows.q.stride(-1) == 1 else rows.q.contiguous()


def take_in(rows: LayerRows, units: int) -> None:
    """Take in what the step before has learnt, move the means along where they are to run, and set up the rows' own
    place in the slash tables."""
    _take_in[(units, rows.count)](
        rows.words, rows.reals, rows.pages.lengths, rows.words.stride(0), rows.reals.stride(0),
        UNITS=units, SPAN=SPAN, TABLE=4096, num_warps=8, **launched(rows.q.device),
    )  # fmt: skip
    # The keys of a layer may lie apart: one program follows one KV head's mean.
    _move_means[(rows.kv_heads, rows.count)](
        rows.pages.k, rows.pages.v, rows.pages.tables, rows.pages.lengths, rows.words, *rows.pages.table_strides,
        rows.words.stride(0), KV_HEADS=rows.kv_heads, D=rows.q.shape[2], D_PAD=pad(rows.q.shape[2]),
        PAGE=rows.pages.k.shape[2], num_warps=1, **launched(rows.q.device),
    )  # fmt: skip


def bypasses(rows: LayerRows) -> tuple[Tensor, Tensor]:
    """Who is bypassed, int8 [rows * heads], and what stands then for all that a head leaves out, float32 [rows *
    heads], as log-sum-exp."""
    q = _query(rows)
    idle = torch.empty(rows.count * rows.heads, dtype=torch.int8, device=q.device)
    instead = torch.empty(rows.count * rows.heads, dtype=torch.float32, device=q.device)
    _bypass[(rows.heads, rows.count)](
        q, rows.pages.k, rows.pages.tables, rows.pages.lengths, rows.words, rows.reals, idle, instead, q.stride(0),
        q.stride(1), *rows.pages.table_strides, rows.words.stride(0), rows.reals.stride(0), rows.scale,
        rows.softcap or 0.0, **_launch(rows, CAPPED=rows.softcap is not None, num_warps=2),
    )  # fmt: skip
    return idle, instead


def best_blocks(rows: LayerRows, units: int, size: int) -> Tensor:
    """int8 [rows * units, n]: 1 for the blocks of ``size`` keys whose means agree best with a unit's queries."""
    q, summaries = _query(rows), rows.summaries
    assert summaries is not None
    blocks = max(1, rows.pages.longest // size)
    scores = torch.empty(rows.count * units, blocks, dtype=torch.float32, device=q.device)
    programs = min(units, rows.kv_heads)
    _mean_scores[(triton.cdiv(blocks, 64), programs, rows.count)](
        q, summaries.pointers, rows.pages.lengths, rows.words, scores, q.stride(0), q.stride(1), rows.words.stride(0),
        blocks, EACH=rows.heads // programs, UNITS=units // programs, SIZE=size,
        **_launch(rows, num_warps=4),
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


def join_rest(
    rows: LayerRows, out: Tensor, lse: Tensor, marks: Tensor, listed: Tensor, idle: Tensor, instead: Tensor, units: int
) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` with what stands for the keys that were not read."""
    q = _query(rows)
    joined, total = torch.empty_like(out), torch.empty_like(lse)
    _join[(rows.heads, rows.count)](
        q, rows.pages.k, rows.pages.tables, rows.pages.lengths, rows.words, rows.reals, marks, listed, idle, instead,
        out, lse, joined, total, q.stride(0), q.stride(1), *rows.pages.table_strides, rows.words.stride(0),
        rows.reals.stride(0), marks.shape[1], rows.scale, rows.softcap or 0.0,
        **_launch(rows, UNITS=units, MOST=MOST_PROBES, CAPPED=rows.softcap is not None, num_warps=4),
    )  # fmt: skip
    return joined, total


def leave(rows: LayerRows, lists: KeyLists, weights: Tensor, idle: Tensor, units: int) -> None:
    """Leave what the step has learnt: ``weights`` float32 [rows * heads, room] over ``lists``."""
    _leave[(units, rows.count)](
        rows.words, rows.reals, rows.pages.lengths, lists.counts, lists.indices, weights, idle, rows.words.stride(0),
        rows.reals.stride(0), lists.longest, weights.stride(0), UNITS=units, LISTS=lists.units,
        EACH=rows.heads // units,
        EACH_PAD=pad(rows.heads // units, 1), SPAN=SPAN // pad(rows.heads // units, 1), num_warps=8,
        **launched(rows.q.device),
    )  # fmt: skip


@triton.jit
def _budget(own, reals, length, first):
    """Keys that are no sinks, whether all are read, how many candidates are, and how many last keys are forced."""
    n = length - first
    whole = tl.minimum(tl.load(own + 2), 1 << 30).to(tl.int32)
    budget = budget_of(whole, tl.load(reals), n)
    budget = tl.where(whole > 0, budget, tl.maximum(budget, tl.minimum(tl.load(own + 3), 1 << 30).to(tl.int32)))
    reads_local = (tl.load(own + 9) & 4) != 0
    local = tl.minimum(tl.load(own + 1).to(tl.int32), n)
    dense = n - tl.where(reads_local, 0, 1) <= budget
    return n, dense, tl.where(reads_local, tl.maximum(budget - local, 0), budget), local


@triton.jit
def _pointer(own, WORD: tl.constexpr, TYPE: tl.constexpr):
    return tl.load(own + WORD).to(tl.pointer_type(TYPE))


@triton.jit(do_not_specialize=["word_row", "real_row"], do_not_specialize_on_alignment=["words", "reals", "lengths"])
def _take_in(
    words, reals, lengths, word_row, real_row,
    UNITS: tl.constexpr, SPAN: tl.constexpr, TABLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        decay = tl.load(reals + row.to(tl.int64) * real_row + 1)
        marks = _pointer(own, 24, tl.int64) + unit * 4
        pending, learnt, count = tl.load(marks), tl.load(marks + 1), tl.load(marks + 2).to(tl.int32)
        place = pending - 1
        if (pending == length - 1) & (learnt < pending):
            tl.store(marks + 1, pending)
            capacity, room = tl.load(own + 12), tl.load(own + 13)
            first = tl.load(own).to(tl.int32)
            vertical = _pointer(own, 14, tl.float32) + unit * capacity
            slash = _pointer(own, 15, tl.float32) + unit * capacity
            if tl.load(marks + 3) != 0:  # all its distances grow by one
                cells = tl.arange(0, TABLE)
                last = length - first
                for number in tl.range(0, tl.cdiv(last, TABLE)):
                    start = (tl.cdiv(last, TABLE) - 1 - number) * TABLE
                    inside = start + cells < last
                    moved = tl.load(slash + start + cells - 1, mask=inside & (start + cells > 0), other=0.0)
                    tl.debug_barrier()  # other threads have yet to read what these write
                    tl.store(slash + start + cells, moved, mask=inside)
                    tl.debug_barrier()
            if count >= 0:
                sums = _pointer(own, 16, tl.float64) + unit * 8
                scales = _pointer(own, 17, tl.float64) + unit
                keys = _pointer(own, 22, tl.int32) + unit * room
                gains = _pointer(own, 23, tl.float32) + unit * room
                scale = tl.load(scales) * decay
                at, power = tl.arange(0, TABLE), tl.arange(0, 4)
                sums_v, sums_s = tl.load(sums + power), tl.load(sums + 4 + power)
                if scale < 1e-8:  # the fourth powers of stored values come near the end of float32
                    sums_v, sums_s = tl.zeros([4], tl.float64), tl.zeros([4], tl.float64)
                    for start in tl.range(0, capacity.to(tl.int32), TABLE):
                        inside = start + at < capacity
                        value_v = (tl.load(vertical + start + at, mask=inside, other=0.0) * scale).to(tl.float32)
                        value_s = (tl.load(slash + start + at, mask=inside, other=0.0) * scale).to(tl.float32)
                        tl.store(vertical + start + at, value_v, mask=inside)
                        tl.store(slash + start + at, value_s, mask=inside)
                        sums_v += _powers(value_v, tl.zeros([TABLE], tl.float32), inside)
                        sums_s += _powers(value_s, tl.zeros([TABLE], tl.float32), inside)
                    scale = scale * 0.0 + 1.0
                    tl.debug_barrier()  # other threads read the entries
                tl.store(scales, scale)
                number = tl.arange(0, SPAN)
                for start in tl.range(0, count, SPAN):
                    inside = start + number < count
                    key = tl.load(keys + start + number, mask=inside, other=0)
                    gain = tl.load(gains + start + number, mask=inside, other=0.0)
                    gain = (gain.to(tl.float64) / scale).to(tl.float32)
                    before = tl.load(vertical + key - first, mask=inside, other=0.0)
                    tl.store(vertical + key - first, before + gain, mask=inside)
                    sums_v += _powers(before + gain, before, inside)
                    distance = place.to(tl.int32) - key
                    ahead = inside & (distance >= 0)
                    before = tl.load(slash + distance, mask=ahead, other=0.0)
                    tl.store(slash + distance, before + gain, mask=ahead)
                    sums_s += _powers(before + gain, before, ahead)
                tl.store(sums + power, sums_v)
                tl.store(sums + 4 + power, sums_s)


@triton.jit(
    do_not_specialize=["table_stride", "table_head", "word_row"],
    do_not_specialize_on_alignment=["tables", "lengths", "words"],
)
def _move_means(
    k_pool, v_pool, tables, lengths, words, table_stride, table_head, word_row,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    kv_head, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        if tl.load(own + 11) != 0:
            counters = _pointer(own, 25, tl.int64) + kv_head
            counted = tl.load(counters)
            first = tl.load(own)
            if first + counted == length - 1:  # else the step is run again
                table = tables + row.to(tl.int64) * table_stride + kv_head.to(tl.int64) * table_head
                at = length - 1
                slot = tl.load(table + at // PAGE).to(tl.int64)
                channel = tl.arange(0, D_PAD)
                real = channel < D
                place = ((slot * KV_HEADS + kv_head) * PAGE + at % PAGE) * D + channel
                for which in tl.static_range(2):
                    means = _pointer(own, 19 + which, tl.float32) + kv_head * D + channel
                    mean = tl.load(means, mask=real, other=0.0)
                    if which == 0:
                        fresh = tl.load(k_pool + place, mask=real, other=0.0).to(tl.float32)
                    else:
                        fresh = tl.load(v_pool + place, mask=real, other=0.0).to(tl.float32)
                    tl.store(means, mean + (fresh - mean) / (counted + 1).to(tl.float32), mask=real)
                tl.store(counters, counted + 1)


@triton.jit(
    do_not_specialize=["table_stride", "table_head", "word_row", "real_row"],
    do_not_specialize_on_alignment=["tables", "lengths", "words", "reals", "idle", "instead"],
)
def _bypass(
    q_ptr, k_pool, tables, lengths, words, reals, idle, instead, q_row, q_head, table_stride, table_head, word_row,
    real_row, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    CAPPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    head, row = tl.program_id(0), tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    entry = row * HEADS + head
    length = tl.load(lengths + row)
    rests = tl.full([], 0, tl.int8)
    left = tl.full([], float("-inf"), tl.float32)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        reals += row.to(tl.int64) * real_row
        first = tl.load(own).to(tl.int32)
        _n, dense, _, _ = _budget(own, reals, length, first)
        epsilon = tl.load(reals + 3).to(tl.float32)
        if (dense == 0) & (first > 0) & (epsilon < 1.0):
            table = tables + row.to(tl.int64) * table_stride + kv_head.to(tl.int64) * table_head
            q = _row(q_ptr + row.to(tl.int64) * q_row, head, q_head, D, D_PAD)
            sinks = tl.minimum(first, length)
            recent = tl.maximum(length - tl.load(own + 26).to(tl.int32), first)
            near = _span(q, k_pool, table, 0, sinks, kv_head, scale, softcap, KV_HEADS, D, D_PAD, PAGE, CAPPED)
            last = _span(q, k_pool, table, recent, length, kv_head, scale, softcap, KV_HEADS, D, D_PAD, PAGE, CAPPED)
            mean = _row(_pointer(own, 19, tl.float32), kv_head, D, D, D_PAD)
            spread = tl.load(_pointer(own, 21, tl.float32) + head)
            count = tl.maximum(length - first, 1).to(tl.float32)
            middle = tl.sum(q * mean, 0) * scale + 0.5 * tl.sum(q * q, 0) * spread + tl.log(count)
            top = tl.maximum(middle, tl.maximum(near, last))
            total = tl.exp(near - top) + tl.exp(middle - top) + tl.exp(last - top)
            rests = (tl.exp(near - top) / total > epsilon).to(tl.int8)
            left = tl.where(tl.load(own + 8) == 0, float("-inf"), middle)
    tl.store(idle + entry, rests)
    tl.store(instead + entry, left)


@triton.jit(
    do_not_specialize=["blocks", "word_row"],
    do_not_specialize_on_alignment=["pointers", "lengths", "words", "scores"],
)
def _mean_scores(
    q_ptr, pointers, lengths, words, scores, q_row, q_head, word_row, blocks,
    EACH: tl.constexpr, UNITS: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``EACH`` query heads, which make ``UNITS`` units."""
    begin(EARLY)
    program, row = tl.program_id(1), tl.program_id(2)
    full = tl.load(lengths + row) // SIZE
    block = tl.program_id(0) * 64 + tl.arange(0, 64)
    if tl.program_id(0) * 64 < full:
        means = tl.load(pointers + row).to(tl.pointer_type(q_ptr.dtype.element_ty))
        channel = tl.arange(0, D_PAD)
        total = tl.zeros([64], tl.float32)
        for number in tl.static_range(EACH):
            head = program * EACH + number
            q = _row(q_ptr + row.to(tl.int64) * q_row, head, q_head, D, D_PAD)
            at = (block.to(tl.int64)[:, None] * KV_HEADS + head // (HEADS // KV_HEADS)) * D + channel[None, :]
            mean = tl.load(means + at, mask=(block < full)[:, None] & (channel < D)[None, :], other=0.0)
            total += tl.sum(mean.to(tl.float32) * q[None, :], 1)
            if (number + 1) % (EACH // UNITS) == 0:
                unit = (row * tl.num_programs(1) + program) * UNITS + number // (EACH // UNITS)
                to = scores + unit.to(tl.int64) * blocks + block
                tl.store(to, total / (EACH // UNITS), mask=(block < blocks) & (block < full))
                total = tl.zeros([64], tl.float32)


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
        n, dense, _take, local = _budget(own, reals, length, first)
        stop = n - local
        if (dense == 0) & (chunk * SPAN < stop):
            at = chunk * SPAN + tl.arange(0, SPAN)
            votes = 0
            for head in tl.static_range(EACH):
                votes += (tl.load(idle + entry * EACH + head) == 0).to(tl.int32)
            a = tl.load(reals + 2)
            sums = _pointer(own, 16, tl.float64) + unit * 8
            mean_v, tau_v = _threshold(sums, n.to(tl.float64), a)
            mean_s, tau_s = _threshold(sums + 4, n.to(tl.float64), a)
            base = length - 2 + (tl.load(own + 9) & 1).to(tl.int32) - first
            capacity = tl.load(own + 12).to(tl.int32)
            vertical = _pointer(own, 14, tl.float32) + unit.to(tl.int64) * capacity
            slash = _pointer(own, 15, tl.float32) + unit.to(tl.int64) * capacity
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
        n, dense, take, local = _budget(own, reals, length, first)
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
        _n, dense, take, local = _budget(own, reals, length, first)
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


@triton.jit(
    do_not_specialize=["table_stride", "table_head", "word_row", "real_row", "width"],
    do_not_specialize_on_alignment=["tables", "lengths", "words", "reals", "marks", "listed", "idle", "instead"],
)
def _join(
    q_ptr, k_pool, tables, lengths, words, reals, marks, listed, idle, instead, out, lse, joined, total, q_row, q_head,
    table_stride, table_head, word_row, real_row, width, scale, softcap,
    UNITS: tl.constexpr, MOST: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``stand_ins.sampled_rest``, or what stands for a bypassed head, merged by log-sum-exp."""
    begin(EARLY)
    head, row = tl.program_id(0), tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    entry = row * HEADS + head
    length = tl.load(lengths + row)
    rest = tl.full([], float("-inf"), tl.float32)
    channel = tl.arange(0, D_PAD)
    value = tl.zeros([D_PAD], tl.float32)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        reals += row.to(tl.int64) * real_row
        first = tl.load(own).to(tl.int32)
        n, dense, _take, local = _budget(own, reals, length, first)
        if dense == 0:
            value = _row(_pointer(own, 20, tl.float32), kv_head, D, D, D_PAD)
            count = tl.load(own + 7).to(tl.int32)
            if tl.load(idle + entry) != 0:
                rest = tl.load(instead + entry)
            elif count > 0:
                unit = (row * UNITS + head // (HEADS // UNITS)).to(tl.int64)
                size = n - local
                number = tl.arange(0, MOST)
                golden = (number.to(tl.float64) + 0.5) * 0.6180339887498949
                share = golden - tl.floor(golden)
                place = tl.where(size <= count, number, (share * size.to(tl.float64)).to(tl.int32))
                asked = (number < count) & (number < size)
                other = tl.where(asked, place, -1)  # two probes may fall on one key: the later one does not count
                twice = (other[:, None] == other[None, :]) & (number[None, :] < number[:, None])
                asked = asked & (tl.sum(twice.to(tl.int32), 1) == 0)
                free = asked & (tl.load(marks + unit * width + place, mask=asked, other=1) == 0)
                table = tables + row.to(tl.int64) * table_stride + kv_head.to(tl.int64) * table_head
                q = _row(q_ptr + row.to(tl.int64) * q_row, head, q_head, D, D_PAD)
                scores = _logits(
                    q, k_pool, table, first + place, free, kv_head, scale, softcap, KV_HEADS, D, D_PAD, PAGE, CAPPED
                )  # fmt: skip
                left = (size - tl.load(listed + unit)).to(tl.float32)
                left = left / tl.maximum(tl.sum(free.to(tl.int32), 0), 1)
                rest = _add_up(scores) + tl.log(tl.maximum(left, 1e-30))
    own_lse = tl.load(lse + entry)
    top = tl.maximum(own_lse, rest)
    top = tl.where(top == float("-inf"), 0.0, top)
    mine, others = tl.exp(own_lse - top), tl.exp(rest - top)
    weight = mine + others
    at = entry.to(tl.int64) * D + channel
    have = tl.load(out + at, mask=channel < D, other=0.0).to(tl.float32)
    mixed = (have * mine + value * others) / tl.where(weight > 0.0, weight, 1.0)
    tl.store(joined + at, mixed.to(joined.dtype.element_ty), mask=channel < D)
    tl.store(total + entry, tl.where(weight > 0.0, top + tl.log(tl.where(weight > 0.0, weight, 1.0)), float("-inf")))


@triton.jit(
    do_not_specialize=["word_row", "real_row", "room", "weight_row"],
    do_not_specialize_on_alignment=["words", "reals", "lengths", "counts", "indices", "weights", "idle"],
)
def _leave(
    words, reals, lengths, counts, indices, weights, idle, word_row, real_row, room, weight_row,
    UNITS: tl.constexpr, LISTS: tl.constexpr, EACH: tl.constexpr, EACH_PAD: tl.constexpr, SPAN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """``tables.learn``'s gains, before the tables' scale is known."""
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        first = tl.load(own).to(tl.int32)
        mine = tl.arange(0, EACH_PAD)
        head = (row * UNITS + unit).to(tl.int64) * EACH + mine
        votes = (mine < EACH) & (tl.load(idle + head, mask=mine < EACH, other=1) == 0)
        voters = tl.sum(votes.to(tl.int32), 0)
        marks = _pointer(own, 24, tl.int64) + unit * 4
        shifts = tl.load(own + 9)
        stays = (voters == 0) & ((shifts & 2) == 0)
        stop = length - 1 + ((shifts & 4) != 0).to(tl.int32)  # the paper does not learn from the row's own key
        written = -1
        if voters > 0:
            lead = tl.min(tl.where(votes, mine, EACH_PAD), 0)
            one = ((row * UNITS + unit) * EACH + lead) // (UNITS * EACH // LISTS)
            count = tl.load(counts + one)
            ids = indices + one.to(tl.int64) * room
            line = weights + head * weight_row
            at = tl.arange(0, SPAN)
            total = tl.zeros([EACH_PAD], tl.float32)
            learnt_keys = 0
            for start in tl.range(0, count, SPAN):
                number = start + at
                key = tl.load(ids + number, mask=number < count, other=-1)
                learnt = (number < count) & (key >= first) & (key < stop)
                own_weight = tl.load(line[:, None] + number[None, :], mask=votes[:, None] & learnt[None, :], other=0.0)
                total += tl.sum(own_weight, 1)
                learnt_keys += tl.sum(learnt.to(tl.int32), 0)
            total = tl.maximum(total, 1e-38)
            even = 0.5 / tl.maximum(learnt_keys, 1)
            keys = _pointer(own, 22, tl.int32) + unit * tl.load(own + 13)
            gains = _pointer(own, 23, tl.float32) + unit * tl.load(own + 13)
            written = 0
            for start in tl.range(0, count, SPAN):
                number = start + at
                key = tl.load(ids + number, mask=number < count, other=-1)
                learnt = (number < count) & (key >= first) & (key < stop)
                own_weight = tl.load(line[:, None] + number[None, :], mask=votes[:, None] & learnt[None, :], other=0.0)
                gain = tl.sum(own_weight / total[:, None], 0) / voters - even
                to = written + tl.cumsum(learnt.to(tl.int32), 0) - 1
                tl.store(keys + to, key, mask=learnt)
                tl.store(gains + to, gain, mask=learnt)
                written += tl.sum(learnt.to(tl.int32), 0)
        tl.store(marks, length.to(tl.int64))
        tl.store(marks + 2, tl.zeros([], tl.int64) + written)
        tl.store(marks + 3, stays.to(tl.int64))
