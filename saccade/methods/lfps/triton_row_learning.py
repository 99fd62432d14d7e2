"""LFPS's tables in recorded steps: what a step has learnt is left beside them, and the step after takes it in, so that
one that breaks off and runs again learns once. Means what tables.py means."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.lfps.triton_row_words import pointer
from saccade.methods.lfps.triton_tables import _powers, _threshold
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.common import begin, launched, pad, pool_rows
from saccade.ops.triton.readers import load_keys, load_values

SPAN = 2048


def take_in(rows: LayerRows, units: int) -> Tensor:
    """Take in what the step before has learnt: float32 [rows * units, 4], mean and threshold of the vertical table, and
    of the slash table."""
    limits = torch.empty(rows.count * units, 4, dtype=torch.float32, device=rows.q.device)
    _take_in[(units, rows.count)](
        rows.words, rows.reals, rows.pages.lengths, limits, rows.words.stride(0), rows.reals.stride(0),
        UNITS=units, SPAN=SPAN, TABLE=4096, num_warps=8, maxnreg=128, **launched(rows.q.device),
    )  # fmt: skip
    return limits


def move_means(rows: LayerRows) -> None:
    """Let the rows' own keys and values, which are stored, into the means of those rows whose means run."""
    # The keys of a layer may lie apart: one program follows one KV head's mean.
    _move_means[(rows.kv_heads, rows.count)](
        rows.pages.k, rows.pages.v, rows.pages.tables, rows.pages.lengths, rows.words, *rows.pages.table_strides,
        rows.words.stride(0), KV_HEADS=rows.kv_heads, D=rows.q.shape[2], D_PAD=pad(rows.q.shape[2]),
        PAGE=rows.pages.k.shape[2], num_warps=1, **launched(rows.q.device),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["word_row", "real_row"], do_not_specialize_on_alignment=["words", "reals", "lengths", "limits"]
)
def _take_in(
    words, reals, lengths, limits, word_row, real_row,
    UNITS: tl.constexpr, SPAN: tl.constexpr, TABLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        decay = tl.load(reals + row.to(tl.int64) * real_row + 1)
        marks = pointer(own, 24, tl.int64) + unit * 4
        pending, learnt, count = tl.load(marks), tl.load(marks + 1), tl.load(marks + 2).to(tl.int32)
        place = pending - 1
        if (pending == length - 1) & (learnt < pending):
            tl.store(marks + 1, pending)
            capacity, room = tl.load(own + 12), tl.load(own + 13)
            first = tl.load(own).to(tl.int32)
            vertical = pointer(own, 14, tl.float32) + unit * capacity
            slash = pointer(own, 15, tl.float32) + unit * capacity
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
                sums = pointer(own, 16, tl.float64) + unit * 8
                scales = pointer(own, 17, tl.float64) + unit
                keys = pointer(own, 22, tl.int32) + unit * room
                gains = pointer(own, 23, tl.float32) + unit * room
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
                tl.debug_barrier()  # other threads read them
        n = (length - tl.load(own).to(tl.int32)).to(tl.float64)
        a = tl.load(reals + row.to(tl.int64) * real_row + 2)
        for table in tl.static_range(2):
            mean, tau = _threshold(pointer(own, 16, tl.float64) + unit * 8 + table * 4, n, a)
            tl.store(limits + (row * UNITS + unit) * 4 + table * 2, mean)
            tl.store(limits + (row * UNITS + unit) * 4 + table * 2 + 1, tau)


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
            counters = pointer(own, 25, tl.int64) + kv_head
            counted = tl.load(counters)
            first = tl.load(own)
            if first + counted == length - 1:  # else the step is run again
                table = tables + row.to(tl.int64) * table_stride + kv_head.to(tl.int64) * table_head
                at = length - 1
                channel = tl.arange(0, D_PAD)
                real = channel < D
                place = pool_rows(table, at, None, kv_head, KV_HEADS, PAGE)
                for which in tl.static_range(2):
                    means = pointer(own, 19 + which, tl.float32) + kv_head * D + channel
                    mean = tl.load(means, mask=real, other=0.0)
                    if which == 0:
                        fresh = load_keys(k_pool, place, channel, real, D).to(tl.float32)
                    else:
                        fresh = load_values(v_pool, place, channel, real, D).to(tl.float32)
                    tl.store(means, mean + (fresh - mean) / (counted + 1).to(tl.float32), mask=real)
                tl.store(counters, counted + 1)
