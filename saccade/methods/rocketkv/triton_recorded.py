"""RocketKV's decode in recorded steps: blocks of kept keys that grow, what they weigh, and lists of the best ones'
keys. Means what ``RocketKV.select_decode`` means."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.rocketkv.method import TINY
from saccade.methods.rocketkv.recorded import RING, Words
from saccade.ops.triton.batch import KeyLists
from saccade.ops.triton.batched_lists import choose_keys, new_lists
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.batched_tokens import mean_weights
from saccade.ops.triton.best_parts import BOUNDS, put_bounds
from saccade.ops.triton.common import LOG2E, begin, cap_logits, launched, pad, pool_rows, precision, processors
from saccade.ops.triton.radix_select import best_of
from saccade.ops.triton.readers import load_keys
from saccade.ops.triton.state_words import places

W = places(Words)
BLOCKS, WARPS, STAGES = 64, 4, 2  # scored in one go
BUSY = 8  # programs for each processor
SPAN = 1024  # keys that a program lists in one go


class Asked(NamedTuple):
    """What rows look for: their queries [rows, heads, head_dim], 0 in channels that do not count; int8 [rows, units,
    head_dim], which extreme of a block counts there, 1 the greatest, 0 the least, -1 none; and float32 [rows, heads],
    what makes a product a logit of base 2. ``blocks`` int32 [rows * units] that there are, and the ``bounds`` of
    batched_best.find_best."""

    queries: Tensor
    sides: Tensor
    factors: Tensor
    blocks: Tensor
    bounds: Tensor

    @property
    def units(self) -> int:
        return self.sides.shape[1]


def take_in(rows: LayerRows, units: int, room: int) -> Asked:
    """Add each row's newest key, which is stored, to the last block of its units, and see what the row looks for; at
    most ``room`` blocks of it."""
    q = rows.q if rows.q.stride(-1) == 1 else rows.q.contiguous()
    count, heads, head_dim = q.shape
    device, pages = q.device, rows.pages
    asked = Asked(
        torch.empty(count, heads, head_dim, dtype=q.dtype, device=device),
        torch.empty(count, units, head_dim, dtype=torch.int8, device=device),
        torch.empty(count, heads, dtype=torch.float32, device=device),
        torch.empty(count * units, dtype=torch.int32, device=device),
        torch.empty(count * units, BOUNDS, dtype=torch.int32, device=device),
    )
    _take_in[(units, count)](
        q, pages.k, pages.tables, pages.lengths, rows.words, *asked, q.stride(0), q.stride(1), *pages.table_strides,
        rows.words.stride(0), rows.scale * LOG2E, min(room, pages.longest), HEADS=heads, KV_HEADS=rows.kv_heads,
        UNITS=units, EACH_PAD=triton.next_power_of_2(heads // units), D=head_dim, D_PAD=pad(head_dim),
        PAGE=pages.k.shape[2], SLOTS=RING, LEAST=TINY, num_warps=4, **launched(device),
    )  # fmt: skip
    return asked


def score_blocks(rows: LayerRows, asked: Asked) -> Tensor:
    """What a key of each block is estimated to weigh, meaned over a unit's heads: float32 [rows, units, n], of each
    unit as many as it has blocks."""
    count, heads, head_dim = asked.queries.shape
    units, width, device = asked.units, rows.pages.longest, asked.queries.device
    splits = max(1, min(triton.cdiv(width, BLOCKS), triton.cdiv(BUSY * processors(device), units * count)))
    logits = torch.empty(count, heads, width, dtype=torch.float32, device=device)
    sums = torch.empty(count, heads, splits, 2, dtype=torch.float32, device=device)
    _score[(splits, units, count)](
        asked.queries, asked.sides, asked.factors, asked.blocks, rows.pages.lengths, rows.words, logits, sums,
        rows.words.stride(0), width, rows.softcap or 0.0, HEADS=heads, UNITS=units, EACH_PAD=pad(heads // units),
        D=head_dim, D_PAD=pad(head_dim), BLOCKS=BLOCKS, CAPPED=rows.softcap is not None,
        PRECISION=precision(asked.queries.dtype), num_warps=WARPS, num_stages=STAGES, **launched(device),
    )  # fmt: skip
    return mean_weights(logits, sums, units, asked.blocks)


def best_lists(rows: LayerRows, scores: Tensor, asked: Asked, room: int) -> tuple[KeyLists, Tensor]:
    """The keys of the best blocks by ``scores``, ties to the lower one, at most ``room`` of them; and float64 [rows],
    how many blocks were scored to choose."""
    units, device, longest = asked.units, scores.device, rows.pages.longest
    best = choose_keys(
        scores.view(-1, 1, scores.shape[2]), asked.bounds, asked.blocks, *new_lists(rows, units, room)
    )  # of every unit by itself
    counts, indices = new_lists(rows, units, room)
    estimated = torch.empty(rows.count, dtype=torch.float64, device=device)
    room = indices.shape[1]
    _list_keys[(min(8, triton.cdiv(room, SPAN)), units, rows.count)](
        rows.words, rows.pages.lengths, asked.blocks, best.counts, best.indices, counts, indices, estimated,
        rows.words.stride(0), room, UNITS=units, PADDED=triton.next_power_of_2(units), SPAN=SPAN, num_warps=4,
        **launched(device),
    )  # fmt: skip
    return KeyLists(None, counts, indices, units, 1, min(room, longest)), estimated


@triton.jit
def held_at(own, unit, length):
    """How many keys a unit has where the sequence holds ``length``."""
    kept = tl.load(tl.load(own + W.counts).to(tl.pointer_type(tl.int64)) + unit)
    return (kept + length - tl.load(own + W.since)).to(tl.int32)


@triton.jit(
    do_not_specialize=["table_row", "table_head", "word_row", "room"],
    do_not_specialize_on_alignment=["tables", "lengths", "words", "sides", "factors", "blocks", "bounds"],
)
def _take_in(
    q_ptr, k_pool, tables, lengths, words, queries, sides, factors, blocks, bounds, q_row, q_head, table_row,
    table_head, word_row, scale_log2, room,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, EACH_PAD: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, PAGE: tl.constexpr, SLOTS: tl.constexpr, LEAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    EACH: tl.constexpr = HEADS // UNITS
    TYPE: tl.constexpr = q_ptr.dtype.element_ty
    unit, row = tl.program_id(0), tl.program_id(1)
    entry = row * UNITS + unit
    length = tl.load(lengths + row)
    there, wanted = 0, 0
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        size = tl.load(own + W.size).to(tl.int32)
        last = held_at(own, unit, length) - 1
        there = last // size + 1
        wanted = tl.minimum(tl.minimum(tl.load(own + W.wanted).to(tl.int32), there), room)
        # A step may run again, after steps behind it: what the block was before this key is known by its length.
        channel = tl.arange(0, D_PAD)
        inside = channel < D
        kv_head = unit * KV_HEADS // UNITS
        table = tables + row.to(tl.int64) * table_row + kv_head.to(tl.int64) * table_head
        key = load_keys(k_pool, pool_rows(table, length - 1, None, kv_head, KV_HEADS, PAGE), channel, None, D, TYPE)
        low = key.to(tl.float32)
        high = low
        ring = tl.load(own + W.ring).to(tl.pointer_type(TYPE)) + unit * SLOTS * 2 * D + channel
        if last % size > 0:
            before = ring + (length - 1) % SLOTS * 2 * D
            low = tl.minimum(low, tl.load(before, mask=inside, other=0.0).to(tl.float32))
            high = tl.maximum(high, tl.load(before + D, mask=inside, other=0.0).to(tl.float32))
        low, high = low.to(TYPE), high.to(TYPE)
        after = ring + length % SLOTS * 2 * D
        extremes = tl.load(own + W.extremes).to(tl.pointer_type(TYPE)) + channel
        extremes += (unit * tl.load(own + W.extent) + last // size) * 2 * D
        tl.store(after, low, mask=inside)
        tl.store(after + D, high, mask=inside)
        tl.store(extremes, low, mask=inside)
        tl.store(extremes + D, high, mask=inside)
        mine = tl.arange(0, EACH_PAD)
        head = unit * EACH + mine
        member = (mine < EACH)[:, None] & inside[None, :]
        q = tl.load(
            q_ptr + row.to(tl.int64) * q_row + head.to(tl.int64)[:, None] * q_head + channel[None, :],
            mask=member, other=0.0,
        )  # fmt: skip
        wide = q.to(tl.float32)
        strength = tl.where(inside, tl.sum(tl.abs(wide), 0), float("-inf"))
        counts = best_of(strength, tl.load(own + W.channels).to(tl.int32))
        side = tl.where(counts, (tl.sum(wide, 0) > 0).to(tl.int32), -1)
        weight, whole = tl.sum(tl.where(counts[None, :], tl.abs(wide), 0.0), 1), tl.sum(tl.abs(wide), 1)
        share = tl.maximum(weight / tl.maximum(whole, LEAST), LEAST)
        line = row.to(tl.int64) * HEADS + head
        tl.store(
            queries + line[:, None] * D + channel[None, :], tl.where(counts[None, :], q, tl.zeros_like(q)), mask=member
        )
        tl.store(sides + entry.to(tl.int64) * D + channel, side.to(tl.int8), mask=inside)
        tl.store(factors + line, scale_log2 / tl.sqrt(share), mask=mine < EACH)
    tl.store(blocks + entry, there)
    put_bounds(bounds, entry, 0, there, 0, 0, wanted)


@triton.jit(
    do_not_specialize=["word_row", "width"],
    do_not_specialize_on_alignment=["sides", "factors", "blocks", "lengths", "words", "sums"],
)
def _score(
    queries, sides, factors, blocks, lengths, words, logits, sums, word_row, width, softcap,
    HEADS: tl.constexpr, UNITS: tl.constexpr, EACH_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCKS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Logits, and what each program's blocks add to a head's softmax over keys: the greatest logit and the sum over
    it."""
    begin(EARLY)
    EACH: tl.constexpr = HEADS // UNITS
    TYPE: tl.constexpr = queries.dtype.element_ty
    split, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = (row * UNITS + unit).to(tl.int64)
    there = tl.load(blocks + entry)
    mine = tl.arange(0, EACH_PAD)
    head = entry * EACH + mine
    top = tl.full([EACH_PAD], float("-inf"), tl.float32)
    weight = tl.zeros([EACH_PAD], tl.float32)
    tiles = tl.cdiv(there, BLOCKS)
    if split < tiles:
        own = words + row.to(tl.int64) * word_row
        size = tl.load(own + W.size).to(tl.int32)
        held = held_at(own, unit, tl.load(lengths + row))
        channel = tl.arange(0, D_PAD)
        inside = channel < D
        q = tl.load(
            queries + head[:, None] * D + channel[None, :], mask=(mine < EACH)[:, None] & inside[None, :], other=0.0
        )
        side = tl.load(sides + entry * D + channel, mask=inside, other=-1)[None, :]
        factor = tl.load(factors + head, mask=mine < EACH, other=0.0)[:, None]
        extremes = tl.load(own + W.extremes).to(tl.pointer_type(TYPE)) + unit * tl.load(own + W.extent) * 2 * D
        for tile in tl.range(split, tiles, tl.num_programs(0)):
            block = tile * BLOCKS + tl.arange(0, BLOCKS)
            known = block < there
            at = extremes + block.to(tl.int64)[:, None] * (2 * D) + channel[None, :]
            read = known[:, None] & inside[None, :]
            # Of each channel one of both counts; both come in the same lines, whichever it is.
            low, high = tl.load(at, mask=read, other=0.0), tl.load(at + D, mask=read, other=0.0)
            toward = tl.where(side > 0, high, low)
            toward = tl.where(side < 0, tl.zeros_like(toward), toward)
            found = tl.dot(q, tl.trans(toward), input_precision=PRECISION)
            found = cap_logits(found, factor, softcap, CAPPED)
            tl.store(
                logits + head[:, None] * width + block[None, :], found, mask=(mine < EACH)[:, None] & known[None, :]
            )
            found = tl.where(known[None, :], found, float("-inf"))
            keys = tl.minimum(held - block * size, size).to(tl.float32)  # the last block may be short
            higher = tl.maximum(top, tl.max(found, 1))
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            weight = weight * tl.exp2(top - anchor) + tl.sum(tl.exp2(found - anchor[:, None]) * keys[None, :], 1)
            top = higher
    to = sums + (head * tl.num_programs(0) + split) * 2
    tl.store(to, top, mask=mine < EACH)
    tl.store(to + 1, weight, mask=mine < EACH)


@triton.jit(
    do_not_specialize=["word_row", "room"],
    do_not_specialize_on_alignment=["words", "lengths", "blocks", "taken", "best", "counts", "indices", "estimated"],
)
def _list_keys(
    words, lengths, blocks, taken, best, counts, indices, estimated, word_row, room,
    UNITS: tl.constexpr, PADDED: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The keys of each unit's blocks ``best`` [rows * units, room], of which ``taken`` count. Blocks rise, so that the
    last one alone may be short."""
    begin(EARLY)
    part, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = row * UNITS + unit
    length = tl.load(lengths + row)
    total = 0
    looked = tl.zeros([], tl.float64)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        size = tl.load(own + W.size).to(tl.int32)
        count = tl.load(taken + entry)
        chosen = best + entry.to(tl.int64) * room
        total = count * size
        if tl.load(chosen + count - 1) == tl.load(blocks + entry) - 1:
            total -= tl.load(blocks + entry) * size - held_at(own, unit, length)
        total = tl.minimum(total, room)
        lists = tl.load(own + W.lists).to(tl.pointer_type(tl.int32)) + unit * tl.load(own + W.width)
        out = indices + entry.to(tl.int64) * room
        for start in tl.range(part * SPAN, total, tl.num_programs(0) * SPAN):
            number = start + tl.arange(0, SPAN)
            inside = number < total
            block = tl.load(chosen + number // size, mask=inside, other=0)
            key = tl.load(lists + block * size + number % size, mask=inside, other=0)
            tl.store(out + number, key, mask=inside)
        each = tl.arange(0, PADDED)
        most = tl.max(tl.load(blocks + row * UNITS + each, mask=each < UNITS, other=0), 0)
        looked = tl.where(most > tl.load(own + W.wanted), most, 0).to(tl.float64)
    if part == 0:
        tl.store(counts + entry, total)
        if unit == 0:
            tl.store(estimated + row, looked)
