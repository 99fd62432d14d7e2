"""What LFPS's recorded steps read: the best candidates, what they weigh, and the sum of their values. Logits are those
that chose, so keys are read once; what a step has learnt is left for the next one (triton_row_learning.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.lfps.triton_row_candidates import Found
from saccade.methods.lfps.triton_row_words import MARKS, M, W, pointer, static
from saccade.ops.triton import batched_best
from saccade.ops.triton.batch import KeyLists, even_splits
from saccade.ops.triton.batched_best import find_best
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.best_parts import WORDS, bounds_at, known_at, part_at
from saccade.ops.triton.common import begin, launched, pad, pool_rows, precision, processors
from saccade.ops.triton.radix_select import taken_of
from saccade.ops.triton.readers import load_values

KEYS = 32  # whose values are read in one go
USUAL = 1 << 13  # candidates


class Chosen(NamedTuple):
    """``lists`` of every query head, those of a unit's heads in one place; ``logits`` float32 [rows * heads, room] in
    base 2, in their order; ``sums`` float32 [rows * heads, 3, parts]: of what a part of a list adds to a head's
    softmax, the greatest logit, the sum over it, and that of the keys that are learnt."""

    lists: KeyLists
    logits: Tensor
    sums: Tensor


def choose(rows: LayerRows, units: int, logits: Tensor, ranks: Tensor, found: Found, idle: Tensor, room: int) -> Chosen:
    """The forced keys and the best candidates, by ``ranks`` [rows, units, n] of the entries of ``found.lists``, and of
    heads that rest their sinks; ``logits`` [rows, heads, n] as ``batched_tokens.score_heads`` gives them."""
    device, count = rows.q.device, rows.count
    room = min(room, rows.pages.longest)
    lists, each = count * rows.heads, rows.heads // units
    best = find_best(ranks, found.bounds, None, USUAL)
    starts = torch.empty(lists, dtype=torch.int64, device=device)
    counts = torch.empty(lists, dtype=torch.int32, device=device)
    indices = torch.empty(count * units, room, dtype=torch.int32, device=device)
    taken = torch.empty(lists, room, dtype=torch.float32, device=device)
    sums = torch.empty(lists, 3, best.parts, dtype=torch.float32, device=device)
    padded = triton.next_power_of_2(each)
    _take[(best.parts, units, count)](
        logits, ranks, found.bounds, best.words, best.taken, found.lists.counts, found.lists.indices, rows.words,
        rows.pages.lengths, idle, starts, counts, indices, taken, sums, rows.words.stride(0), found.lists.longest, room,
        UNITS=units, EACH=each, EACH_PAD=padded, PARTS=triton.next_power_of_2(best.parts), WORDS=WORDS,
        SPAN=batched_best.SPAN, CHUNK=max(16, batched_best.SPAN // min(padded, 4)), num_warps=8, maxnreg=64,
        **launched(device),
    )  # fmt: skip
    return Chosen(KeyLists(starts, counts, indices, rows.heads, 1, room), taken, sums)


def read_values(rows: LayerRows, units: int, chosen: Chosen, idle: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted values of what every head reads, float32 [rows, units, parts, heads of a unit, head_dim]: the sum
    over parts is attention's output; and float32 [rows, heads], the log-sum-exp of what was read. What is learnt of it
    is left in the rows' states."""
    if rows.watch is not None:
        rows.watch.end()
        rows.watch.begin("attention")
    head_dim, device, room = rows.q.shape[2], rows.q.device, chosen.lists.longest
    each, counted = rows.heads // units, chosen.sums.shape[2]
    splits = even_splits(rows.count * units, 6 * processors(device), max(1, min(-(-room // (4 * KEYS)), 128)))
    parts = torch.empty(rows.count, units, splits, each, head_dim, dtype=torch.float32, device=device)
    lse = torch.empty(rows.count, rows.heads, dtype=torch.float32, device=device)
    _read[(splits, units, rows.count)](
        rows.pages.v, rows.pages.tables, rows.pages.lengths, chosen.lists.counts, chosen.lists.indices, chosen.logits,
        chosen.sums, rows.words, idle, parts, lse, *rows.pages.table_strides, rows.words.stride(0), room, counted,
        **static(
            rows, UNITS=units, EACH=each, EACH_PAD=pad(each) if each > 1 else 1, KEYS=KEYS,
            PARTS=triton.next_power_of_2(counted), PRECISION=precision(rows.q.dtype), num_warps=4,
            maxnreg=80 if each == 1 else None,
        ),
    )  # fmt: skip
    if rows.watch is not None:
        rows.watch.end()
        rows.watch.begin("selection")
    return parts, lse


@triton.jit
def _put(
    number, chosen, to, ids, out, keys, lines, line, top, weight, own, reads, first, learnt
):  # fmt: skip
    """Copy the ``chosen`` entries ``number`` of a list to the places ``to``, and add what they weigh to the sums."""
    key = tl.load(ids + number, mask=chosen, other=0)
    tl.store(out + to, key, mask=chosen)
    tl.store(keys + to, key, mask=chosen & (to >= first) & (to < learnt))
    asked = chosen[None, :] & (reads >= 0)[:, None]
    logit = tl.load(lines[:, None] + number[None, :], mask=asked, other=float("-inf"))
    tl.store(line[:, None] + to[None, :], logit, mask=asked)
    logit = tl.where(to[None, :] < reads[:, None], logit, float("-inf"))
    higher = tl.maximum(top, tl.max(logit, 1))
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    shrink, part = tl.exp2(top - anchor), tl.exp2(logit - anchor[:, None])
    weight = weight * shrink + tl.sum(part, 1)
    own = own * shrink + tl.sum(tl.where(((to >= first) & (to < learnt))[None, :], part, 0.0), 1)
    return higher, weight, own


@triton.jit(
    do_not_specialize=["word_row", "width", "room"],
    do_not_specialize_on_alignment=[
        "logits", "ranks", "bounds", "known", "counted", "sizes", "found", "words", "lengths", "idle", "starts",
        "counts", "indices", "taken", "sums",
    ],
)  # fmt: skip
def _take(
    logits, ranks, bounds, known, counted, sizes, found, words, lengths, idle, starts, counts, indices, taken, sums,
    word_row, width, room,
    UNITS: tl.constexpr, EACH: tl.constexpr, EACH_PAD: tl.constexpr, PARTS: tl.constexpr, WORDS: tl.constexpr,
    SPAN: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of a part of a unit's candidates those that are taken, and of its forced keys some."""
    begin(EARLY)
    part, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(0)
    entry = (row * UNITS + unit).to(tl.int64)
    member = tl.arange(0, EACH_PAD)
    mine = member < EACH
    head = entry * EACH + member
    # What the words say is loaded before it is known that it is of use: one wait instead of several.
    own = words + row.to(tl.int64) * word_row
    length, size = tl.load(lengths + row), tl.load(sizes + entry)
    first, stop, _low, _high, wanted, between = bounds_at(bounds, entry, 1)
    rests = tl.load(idle + head, mask=mine, other=1).to(tl.int32)
    keys = pointer(own, W.pending, tl.int32) + unit * tl.load(own + W.room)
    if length == 0:
        if part == 0:
            tl.store(starts + head, tl.zeros([EACH_PAD], tl.int64), mask=mine)
            tl.store(counts + head, tl.zeros([EACH_PAD], tl.int32), mask=mine)
    else:
        voters = tl.sum((rests == 0).to(tl.int32), 0)
        count = size - between + wanted
        learnt = tl.maximum(count, first)  # lists rise, so that this is all but the sinks
        reads = tl.where(mine, tl.where(rests != 0, tl.minimum(first, length), count), -1)
        keys -= first
        learnt_keys = tl.where(voters > 0, learnt, first)
        ids, out, line = found + entry * width, indices + entry * room, ranks + entry * width
        lines, to_lines = logits + head * width, taken + head * room
        top = tl.full([EACH_PAD], float("-inf"), tl.float32)
        weight, learns = tl.zeros([EACH_PAD], tl.float32), tl.zeros([EACH_PAD], tl.float32)
        at = tl.arange(0, CHUNK)
        begins, ends = part_at(first, stop, part, SPAN)
        if (wanted > 0) & (begins < ends):
            bound, spare, level, placed = known_at(
                known, counted, entry, part, begins - first, wanted, between, PARTS, WORDS
            )
            placed += first
            for start in tl.range(begins, ends, CHUNK):
                number = start + at
                chosen, level = taken_of(line, number, number < ends, bound, spare, level)
                to = placed + tl.cumsum(chosen.to(tl.int32), 0) - 1
                top, weight, learns = _put(
                    number, chosen, to, ids, out, keys, lines, to_lines, top, weight, learns, reads, first, learnt_keys
                )  # fmt: skip
                placed += tl.sum(chosen.to(tl.int32), 0)
        forced = size - between
        for start in tl.range((parts - 1 - part) * CHUNK, forced, parts * CHUNK):  # before the candidates and behind
            place = start + at
            number = tl.where(place < first, place, place + between)
            to = tl.where(place < first, place, place + wanted)
            top, weight, learns = _put(
                number, place < forced, to, ids, out, keys, lines, to_lines, top, weight, learns, reads, first,
                learnt_keys,
            )  # fmt: skip
        tl.store(sums + head * 3 * parts + part, top, mask=mine)
        tl.store(sums + (head * 3 + 1) * parts + part, weight, mask=mine)
        tl.store(sums + (head * 3 + 2) * parts + part, learns, mask=mine)
        if part == 0:
            tl.store(starts + head, tl.zeros([EACH_PAD], tl.int64) + entry * room, mask=mine)
            tl.store(counts + head, reads, mask=mine)
            marks = pointer(own, W.marks, tl.int64) + unit * MARKS
            tl.store(marks + M.until, length.to(tl.int64))
            tl.store(marks + M.keys, tl.where(voters > 0, learnt - first, -1).to(tl.int64))


@triton.jit(
    do_not_specialize=["table_stride", "table_head", "word_row", "room", "counted"],
    do_not_specialize_on_alignment=[
        "tables", "lengths", "counts", "indices", "logits", "sums", "words", "idle", "parts", "lse",
    ],
)  # fmt: skip
def _read(
    v_pool, tables, lengths, counts, indices, logits, sums, words, idle, parts, lse, table_stride, table_head, word_row,
    room, counted,
    UNITS: tl.constexpr, EACH: tl.constexpr, EACH_PAD: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
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
    # What a head reads weighs, and what is learnt of it.
    number = tl.arange(0, PARTS)
    asked = mine[:, None] & (number < counted)[None, :] & (reads > 0)[:, None]
    held = sums + head[:, None] * 3 * counted + number[None, :]
    tops = tl.load(held, mask=asked, other=float("-inf"))
    top = tl.max(tops, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    scales = tl.exp2(tops - top[:, None])
    mass = tl.sum(tl.load(held + counted, mask=asked, other=0.0) * scales, 1)
    share = tl.sum(tl.load(held + 2 * counted, mask=asked, other=0.0) * scales, 1)
    log = top + tl.log2(tl.where(mass > 0.0, mass, 1.0))
    if split == 0:
        tl.store(lse + head, tl.where(mass > 0.0, log * 0.6931471805599453, float("-inf")), mask=mine)
    total = log - 8.0  # small weights fit float16, too
    votes = mine & (tl.load(idle + head, mask=mine, other=1) == 0)
    voters = tl.sum(votes.to(tl.int32), 0)
    share = tl.where(votes, 1.0 / (tl.maximum(share, tl.maximum(1e-38 * mass, 1e-38)) * tl.maximum(voters, 1)), 0.0)
    first, learnt, even = 0, 0, 0.0
    gains = lse
    if (count > 0) & (voters > 0):
        own = words + row.to(tl.int64) * word_row
        first = tl.load(own + W.sinks).to(tl.int32)
        learnt = tl.maximum(count, first)
        even = 0.5 / tl.maximum(learnt - first, 1)
        gains = pointer(own, W.gains, tl.float32) + unit * tl.load(own + W.room) - first
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
        v = load_values(v_pool, place[:, None], channel[None, :], there, D)
        seen = number[None, :] < reads[:, None]
        logit = tl.load(lines + number[None, :], mask=seen, other=float("-inf"))
        gain = tl.sum(tl.exp2(logit - top[:, None]) * share[:, None], 0) - even  # before the tables' scale is known
        tl.store(gains + number, gain, mask=(number >= first) & (number < learnt))
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
