"""What LFPS's recorded steps read: the best candidates, what they weigh, and the sum of their values. Logits are those
that chose, so keys are read once; what a step has learnt is left for the next one (triton_row_learning.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.lfps.triton_row_candidates import Found
from saccade.methods.lfps.triton_row_words import budget_at, pointer, static
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.common import begin, launched, pad, pool_rows, precision, processors
from saccade.ops.triton.decode import KeyLists, even_splits
from saccade.ops.triton.radix_select import least_held, least_taken, ordered_bits, taken_of

HELD = 32768  # candidates that a program holds at most; of more it reads the scores again and again
SPAN = 4096  # entries that it writes in one go
KEYS = 32  # whose values are read in one go


class Chosen(NamedTuple):
    """``lists`` of every query head, those of a unit's heads in one place; ``logits`` float32 [rows * heads, room] in
    base 2, in their order; ``lse`` float32 [rows, heads] over what a head reads."""

    lists: KeyLists
    logits: Tensor
    lse: Tensor


def choose(rows: LayerRows, units: int, logits: Tensor, ranks: Tensor, found: Found, idle: Tensor, room: int) -> Chosen:
    """The forced keys and the best candidates, by ``ranks`` [rows, units, n] of the entries of ``found.lists``, and of
    heads that rest their sinks; ``logits`` [rows, heads, n] as ``batched_tokens.score_heads`` gives them."""
    device, count = rows.q.device, rows.count
    room = min(room, rows.pages.longest)
    lists = count * rows.heads
    starts = torch.empty(lists, dtype=torch.int64, device=device)
    counts = torch.empty(lists, dtype=torch.int32, device=device)
    indices = torch.empty(count * units, room, dtype=torch.int32, device=device)
    taken = torch.empty(lists, room, dtype=torch.float32, device=device)
    lse = torch.empty(count, rows.heads, dtype=torch.float32, device=device)
    held = min(HELD, max(2048, triton.next_power_of_2(found.lists.longest) // 8))  # twice as many as are usual
    _choose[(units, count)](
        logits, ranks, found.listed, found.lists.counts, found.lists.indices, rows.words, rows.reals,
        rows.pages.lengths, idle, starts, counts, indices, taken, lse, rows.words.stride(0), rows.reals.stride(0),
        found.lists.longest, room, UNITS=units, EACH=rows.heads // units, HELD=held, SPAN=SPAN, num_warps=16,
        maxnreg=64, **launched(device),
    )  # fmt: skip
    return Chosen(KeyLists(starts, counts, indices, rows.heads, 1, room), taken, lse)


def read_values(rows: LayerRows, units: int, chosen: Chosen) -> Tensor:
    """The weighted values of what every head reads, float32 [rows, units, parts, heads of a unit, head_dim]: the sum
    over parts is attention's output."""
    if rows.watch is not None:
        rows.watch.end()
        rows.watch.begin("attention")
    head_dim, device, room = rows.q.shape[2], rows.q.device, chosen.lists.longest
    each = rows.heads // units
    splits = even_splits(rows.count * units, 6 * processors(device), max(1, min(-(-room // (4 * KEYS)), 128)))
    parts = torch.empty(rows.count, units, splits, each, head_dim, dtype=torch.float32, device=device)
    _read[(splits, units, rows.count)](
        rows.pages.v, rows.pages.tables, rows.pages.lengths, chosen.lists.counts, chosen.lists.indices, chosen.logits,
        chosen.lse, parts, *rows.pages.table_strides, room,
        **static(
            rows, UNITS=units, EACH=each, EACH_PAD=pad(each) if each > 1 else 1, KEYS=KEYS,
            PRECISION=precision(rows.q.dtype), num_warps=4, maxnreg=80 if each == 1 else None,
        ),
    )  # fmt: skip
    if rows.watch is not None:
        rows.watch.end()
        rows.watch.begin("selection")
    return parts


@triton.jit(
    do_not_specialize=["word_row", "real_row", "width", "room"],
    do_not_specialize_on_alignment=[
        "logits",
        "ranks",
        "listed",
        "sizes",
        "found",
        "words",
        "reals",
        "lengths",
        "idle",
        "starts",
        "counts",
        "indices",
        "taken",
        "lse",
    ],
)
def _choose(
    logits, ranks, listed, sizes, found, words, reals, lengths, idle, starts, counts, indices, taken, lse, word_row,
    real_row, width, room,
    UNITS: tl.constexpr, EACH: tl.constexpr, HELD: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    entry = (row * UNITS + unit).to(tl.int64)
    length = tl.load(lengths + row)
    at = tl.arange(0, SPAN)
    if length == 0:
        for number in tl.static_range(EACH):
            tl.store(starts + entry * EACH + number, 0)
            tl.store(counts + entry * EACH + number, 0)
            tl.store(lse + entry * EACH + number, float("-inf"))
    else:
        own = words + row.to(tl.int64) * word_row
        first = tl.load(own).to(tl.int32)
        _n, _dense, take, _local = budget_at(own, reals + row.to(tl.int64) * real_row, length, first)
        total, size = tl.load(listed + entry), tl.load(sizes + entry)
        stop = first + total  # of the candidates; behind them all are forced
        line = ranks + entry * width
        bound, spare = tl.full([], 0, tl.uint32), tl.full([], 2147483647, tl.int32)  # takes all
        if total > take:
            if take == 0:
                bound, spare = tl.full([], 4294967295, tl.uint32), tl.full([], 0, tl.int32)
            else:
                if total <= HELD:
                    number = tl.arange(0, HELD)
                    scores = tl.load(line + first + number, mask=number < total, other=0.0)
                    order = tl.where(number < total, ordered_bits(scores + 0.0), 0)
                    bound, spare = least_held(order, take)
                else:
                    bound, spare = least_taken(line, first, stop, take, SPAN)
        ids, out = found + entry * width, indices + entry * room
        level, count = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        for start in tl.range(0, size, SPAN):
            number = start + at
            forced = (number < first) | (number >= stop)
            chosen, level = taken_of(line, number, (number < size) & (forced == 0), bound, spare, level)
            chosen = chosen | (forced & (number < size))
            to = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(out + to, tl.load(ids + number, mask=chosen, other=0), mask=chosen)
            for head in tl.static_range(EACH):
                one = entry * EACH + head
                logit = tl.load(logits + one * width + number, mask=chosen, other=0.0)
                tl.store(taken + one * room + to, logit, mask=chosen)
            count += tl.sum(chosen.to(tl.int32), 0)
        tl.debug_barrier()  # other threads have written what these read
        # Lists rise, so what is learnt is all but the sinks and, for the paper, the row's own key.
        shifts = tl.load(own + 9)
        learnt = tl.maximum(count - 1 + ((shifts & 4) != 0).to(tl.int32), first)
        gains = pointer(own, 23, tl.float32) + unit * tl.load(own + 13) - first
        voters = 0
        for head in tl.static_range(EACH):
            voters += (tl.load(idle + entry * EACH + head) == 0).to(tl.int32)
        even = 0.5 / tl.maximum(learnt - first, 1)
        earlier = 0
        for head in tl.static_range(EACH):
            one = entry * EACH + head
            rests = tl.load(idle + one).to(tl.int32)
            reads = tl.where(rests != 0, tl.where(tl.load(own + 8) == 2, 0, tl.minimum(first, length)), count)
            row_of = taken + one * room
            peak = tl.full([SPAN], float("-inf"), tl.float32)
            for start in tl.range(0, reads, SPAN):
                logit = tl.load(row_of + start + at, mask=start + at < reads, other=float("-inf"))
                peak = tl.maximum(peak, logit)
            top = tl.max(peak, 0)
            top = tl.where(top == float("-inf"), 0.0, top)
            all_sum, own_sum = tl.zeros([SPAN], tl.float32), tl.zeros([SPAN], tl.float32)
            for start in tl.range(0, reads, SPAN):
                number = start + at
                logit = tl.load(row_of + number, mask=number < reads, other=float("-inf"))
                part = tl.exp2(logit - top)
                all_sum += part
                own_sum += tl.where((number >= first) & (number < learnt), part, 0.0)
            weight = tl.sum(all_sum, 0)
            log = top + tl.log2(tl.where(weight > 0.0, weight, 1.0))
            tl.store(starts + one, entry * room)
            tl.store(counts + one, reads)
            tl.store(lse + one, tl.where(weight > 0.0, log * 0.6931471805599453, float("-inf")))
            if rests == 0:  # tables.learn's gains, before the tables' scale is known
                share = 1.0 / tl.maximum(tl.sum(own_sum, 0), 1e-38 * weight)
                for start in tl.range(0, learnt, SPAN):
                    number = start + at
                    mine = (number >= first) & (number < learnt)
                    gain = tl.exp2(tl.load(row_of + number, mask=mine, other=0.0) - top) * share / voters
                    before = tl.load(gains + number, mask=mine & (number * 0 + earlier > 0), other=0.0)
                    tl.store(gains + number, before + gain - tl.where(earlier == 0, even, 0.0), mask=mine)
                earlier += 1
        written = -1
        if voters > 0:
            keys = pointer(own, 22, tl.int32) + unit * tl.load(own + 13) - first
            for start in tl.range(0, learnt, SPAN):
                number = start + at
                mine = (number >= first) & (number < learnt)
                tl.store(keys + number, tl.load(out + number, mask=mine, other=0), mask=mine)
            written = learnt - first
        marks = pointer(own, 24, tl.int64) + unit * 4
        tl.store(marks, length.to(tl.int64))
        tl.store(marks + 2, tl.zeros([], tl.int64) + written)
        tl.store(marks + 3, ((voters == 0) & ((shifts & 2) == 0)).to(tl.int64))


@triton.jit(
    do_not_specialize=["table_stride", "table_head", "room"],
    do_not_specialize_on_alignment=["tables", "lengths", "counts", "indices", "logits", "lse", "parts"],
)
def _read(
    v_pool, tables, lengths, counts, indices, logits, lse, parts, table_stride, table_head, room,
    UNITS: tl.constexpr, EACH: tl.constexpr, EACH_PAD: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    split, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(0)
    kv_head = unit * EACH // (HEADS // KV_HEADS)
    entry = (row * UNITS + unit).to(tl.int64)
    table = tables + row.to(tl.int64) * table_stride + kv_head.to(tl.int64) * table_head
    member = tl.arange(0, EACH_PAD)
    mine = member < EACH
    head = entry * EACH + member
    reads = tl.load(counts + head, mask=mine, other=0)
    count = tl.max(reads, 0)
    total = tl.load(lse + head, mask=mine, other=0.0) * 1.4426950408889634 - 8.0  # small weights fit float16, too
    ids, lines = indices + entry * room, logits + head[:, None] * room
    channel = tl.arange(0, D_PAD)
    acc = tl.zeros([KEYS if EACH == 1 else EACH_PAD, D_PAD], tl.float32)
    number = split * KEYS + tl.arange(0, KEYS)
    hop = splits * KEYS
    key = tl.load(ids + number, mask=number < count, other=0)
    after = tl.load(ids + number + hop, mask=number + hop < count, other=0)
    place = pool_rows(table, key, number < count, kv_head, KV_HEADS, PAGE)
    for _ in tl.range(split, tl.cdiv(count, KEYS), splits):
        # Where the next values lie is looked up while these are on their way.
        there = (number < count)[:, None] & (channel < D)[None, :]
        v = tl.load(v_pool + place[:, None] * D + channel[None, :], mask=there, other=0.0)
        seen = number[None, :] < reads[:, None]
        logit = tl.load(lines + number[None, :], mask=seen, other=float("-inf"))
        number += hop
        place = pool_rows(table, after, number < count, kv_head, KV_HEADS, PAGE)
        after = tl.load(ids + number + hop, mask=number + hop < count, other=0)
        weight = tl.where(seen, tl.exp2(logit - total[:, None]), 0.0)
        if EACH == 1:  # sums of its own for every place of a tile: they are joined once
            acc += tl.sum(weight, 0)[:, None] * v.to(tl.float32)
        else:
            acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=PRECISION)
    if EACH == 1:
        acc = tl.sum(acc, 0)[None, :]
    to = parts + ((entry * splits + split) * EACH + member)[:, None] * D + channel[None, :]
    tl.store(to, acc * 0.00390625 + tl.zeros([EACH_PAD, 1], tl.float32), mask=mine[:, None] & (channel < D)[None, :])
