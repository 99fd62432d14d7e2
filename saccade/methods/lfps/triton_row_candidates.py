"""LFPS's candidates in recorded steps. Means what tables.py means."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.lfps.triton_row_words import budget_at, pointer
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.best_parts import BOUNDS
from saccade.ops.triton.common import begin, launched
from saccade.ops.triton.decode import KeyLists

SPAN = 4096  # entries that a program compares
BITS = tl.constexpr(16)  # entries of a word
TILE = 512  # words that a program marks, or lists


class Found(NamedTuple):
    """``marks`` int32 [rows * units, m]: 16 keys a word, from the first that is no sink on, 1 for the candidates.
    ``listed`` int32 [rows * units], how many these are; ``lists`` of the forced keys before, the candidates and the
    forced keys behind, or of all keys where all are read; ``bounds`` int32 [rows * units, BOUNDS], as find_best takes
    them, of the candidates in a list and how many are taken."""

    marks: Tensor
    listed: Tensor
    lists: KeyLists
    bounds: Tensor


def candidates(rows: LayerRows, units: int, limits: Tensor, idle: Tensor, blocks: Tensor | None, size: int) -> Found:
    """``limits`` as take_in leaves them; ``blocks`` as best_blocks marks those of ``size`` keys."""
    device, width, count = rows.q.device, rows.pages.longest, rows.count
    words = triton.cdiv(width, BITS.value)
    seen = torch.empty(count * units, words, dtype=torch.int32, device=device)
    _scan[(triton.cdiv(width, SPAN), units, count)](
        rows.words, rows.reals, rows.pages.lengths, limits, seen, rows.words.stride(0), rows.reals.stride(0), words,
        UNITS=units, SPAN=SPAN, num_warps=8, **launched(device),
    )  # fmt: skip
    parts = triton.cdiv(words, TILE)
    marks = torch.empty(count * units, words, dtype=torch.int32, device=device)
    counts = torch.empty(count * units, parts, dtype=torch.int32, device=device)
    _mark[(parts, units, count)](
        rows.words, rows.reals, rows.pages.lengths, idle, idle if blocks is None else blocks, seen, marks, counts,
        rows.words.stride(0), rows.reals.stride(0), words, 0 if blocks is None else blocks.shape[1], UNITS=units,
        EACH=rows.heads // units, SIZE=0 if blocks is None else size, TILE=TILE, num_warps=4, **launched(device),
    )  # fmt: skip
    indices = torch.empty(count * units, width, dtype=torch.int32, device=device)
    bounds = torch.empty(count * units, BOUNDS, dtype=torch.int32, device=device)
    totals = torch.empty(2, count * units, dtype=torch.int32, device=device)
    _list[(parts, units, count)](
        rows.words, rows.reals, rows.pages.lengths, marks, counts, indices, *totals, bounds, rows.words.stride(0),
        rows.reals.stride(0), width, words, UNITS=units, TILE=TILE, PARTS=triton.next_power_of_2(parts), num_warps=4,
        **launched(device),
    )  # fmt: skip
    return Found(marks, totals[0], KeyLists(None, totals[1], indices, units, 1, width), bounds)


@triton.jit(
    do_not_specialize=["word_row", "real_row", "width"],
    do_not_specialize_on_alignment=["words", "reals", "lengths", "limits", "seen"],
)
def _scan(
    words, reals, lengths, limits, seen, word_row, real_row, width,
    UNITS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of each word's entries, which are above a threshold (the lower bits) and which above a mean (the others)."""
    begin(EARLY)
    chunk, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = (row * UNITS + unit).to(tl.int64)
    length = tl.load(lengths + row)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        reals += row.to(tl.int64) * real_row
        first = tl.load(own).to(tl.int32)
        n, dense, _take, _local = budget_at(own, reals, length, first)
        if (dense == 0) & (chunk * SPAN < n):
            word, lane = tl.arange(0, SPAN // 16)[:, None], tl.arange(0, 16)[None, :]
            at = chunk * SPAN + word * 16 + lane
            mean_v, tau_v = tl.load(limits + entry * 4), tl.load(limits + entry * 4 + 1)
            mean_s, tau_s = tl.load(limits + entry * 4 + 2), tl.load(limits + entry * 4 + 3)
            base = length - 2 + (tl.load(own + 9) & 1).to(tl.int32) - first
            capacity = tl.load(own + 12)
            vertical = pointer(own, 14, tl.float32) + unit * capacity
            slash = pointer(own, 15, tl.float32) + unit * capacity + base
            here_v = tl.load(vertical + at, mask=at < n, other=0.0)
            here_s = tl.load(slash - at, mask=at <= tl.minimum(base, n - 1), other=0.0)
            high = (here_v > mean_v) | (here_s > mean_s)
            above = (here_v > tau_v) | (here_s > tau_s)
            above = above | (at * 0 + (tl.load(reals + 2) < 0).to(tl.int32) != 0)  # then every entry is
            bits = tl.where(above, 1 << lane, 0) | tl.where(high, 65536 << lane, 0)
            bits = tl.where(at < n, bits, 0)
            to = chunk * (SPAN // 16) + tl.arange(0, SPAN // 16)
            tl.store(seen + entry * width + to, tl.sum(bits, 1), mask=to < tl.cdiv(n, 16))


@triton.jit
def _window(seen, word, last, BACK: tl.constexpr):
    """Bits of four words, the first of them ``BACK`` behind each ``word``, as int64; 0 for words there are none of."""
    bits = tl.zeros(word.shape, tl.int64)
    for number in tl.static_range(4):
        other = word - BACK + number
        part = tl.load(seen + other, mask=(other >= 0) & (other < last), other=0) & 65535
        bits = bits | (part.to(tl.int64) << (16 * number))
    return bits


@triton.jit(
    do_not_specialize=["word_row", "real_row", "n_words", "n_blocks"],
    do_not_specialize_on_alignment=["words", "reals", "lengths", "idle", "blocks", "seen", "marks", "counts"],
)
def _mark(
    words, reals, lengths, idle, blocks, seen, marks, counts, word_row, real_row, n_words, n_blocks,
    UNITS: tl.constexpr, EACH: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The candidates of a part of a unit's words, none where all its heads rest or it reads everything."""
    begin(EARLY)
    part, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = (row * UNITS + unit).to(tl.int64)
    length = tl.load(lengths + row)
    total = 0
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        first = tl.load(own).to(tl.int32)
        n, dense, _take, local = budget_at(own, reals + row.to(tl.int64) * real_row, length, first)
        last = tl.cdiv(n, 16)
        if (dense == 0) & (part * TILE < last):
            votes = 0
            for head in tl.static_range(EACH):
                votes += (tl.load(idle + entry * EACH + head) == 0).to(tl.int32)
            before, after = tl.load(own + 4).to(tl.int32), tl.load(own + 5).to(tl.int32)
            gate = tl.load(own + 10)
            seen += entry * n_words
            word = part * TILE + tl.arange(0, TILE)
            here = tl.load(seen + word, mask=word < last, other=0)
            above = here & 65535
            # Some key above its threshold is at most `before` keys ahead, or `after` keys back.
            near = above.to(tl.int64)
            bits = _window(seen, word, last, 0)
            for far in tl.range(1, tl.minimum(before, 48) + 1):
                near = near | (bits >> far)
            bits = _window(seen, word, last, 3)
            for far in tl.range(1, tl.minimum(after, 48) + 1):
                near = near | (bits >> (48 - far))
            if before > 48:
                bits = _window(seen, word, last, -1)
                for far in tl.range(49, before + 1):
                    near = near | (bits >> (far - 16))
            if after > 48:
                bits = _window(seen, word, last, 4)
                for far in tl.range(49, after + 1):
                    near = near | (bits >> (64 - far))
            near = near.to(tl.int32) & 65535
            chosen = near & ((here >> 16) | tl.where(gate == 2, 65535, 0))
            chosen = (chosen | tl.where(gate == 1, above, 0)) & 65535
            if SIZE > 0:
                key = first + word * 16
                for number in tl.static_range(16 // SIZE + 1 if SIZE < 16 else 2):
                    block = key // SIZE + number
                    known = (word < last) & (block < tl.minimum(n_blocks, length // SIZE))
                    best = tl.load(blocks + entry * n_blocks + block, mask=known, other=0) != 0
                    begins = tl.minimum(tl.maximum(block * SIZE - key, 0), 16)
                    ends = tl.minimum(block * SIZE + SIZE - key, 16)
                    span = (1 << tl.maximum(ends, begins)) - (1 << begins)
                    chosen = chosen | tl.where(best, span, 0)
            stop = tl.where(votes > 0, n - local, 0)
            left = tl.minimum(tl.maximum(stop - word * 16, 0), 16)
            chosen = chosen & ((1 << left) - 1)
            tl.store(marks + entry * n_words + word, chosen, mask=word < last)
            total = tl.sum(_count_bits(chosen), 0)
    tl.store(counts + entry * tl.num_programs(0) + part, total)


@triton.jit
def _count_bits(word):
    """How many of the lower 16 bits are set."""
    pairs = word - ((word >> 1) & 0x5555)
    fours = (pairs & 0x3333) + ((pairs >> 2) & 0x3333)
    eights = (fours + (fours >> 4)) & 0x0F0F
    return (eights + (eights >> 8)) & 31


@triton.jit(
    do_not_specialize=["word_row", "real_row", "width", "n_words"],
    do_not_specialize_on_alignment=[
        "words",
        "reals",
        "lengths",
        "marks",
        "counts",
        "indices",
        "listed",
        "sizes",
        "bounds",
    ],
)
def _list(
    words, reals, lengths, marks, counts, indices, listed, sizes, bounds, word_row, real_row, width, n_words,
    UNITS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A unit's forced keys before, candidates, forced keys behind; all keys where it reads everything."""
    begin(EARLY)
    part, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(0)
    entry = (row * UNITS + unit).to(tl.int64)
    length = tl.load(lengths + row)
    total, size, first, take = 0, 0, 0, 0
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        first = tl.load(own).to(tl.int32)
        n, dense, take, local = budget_at(own, reals + row.to(tl.int64) * real_row, length, first)
        number = tl.arange(0, PARTS)
        here = tl.load(counts + entry * parts + number, mask=number < parts, other=0)
        total = tl.sum(here, 0)
        out = indices + entry * width
        lane = tl.arange(0, TILE)
        ahead = tl.where(dense, length, first)
        for start in tl.range(part * TILE, ahead, parts * TILE):
            tl.store(out + start + lane, start + lane, mask=start + lane < ahead)
        if dense == 0:
            word = part * TILE + lane
            chosen = tl.load(marks + entry * n_words + word, mask=word < tl.cdiv(n, 16), other=0)
            count = _count_bits(chosen)
            place = first + tl.sum(tl.where(number < part, here, 0), 0) + tl.cumsum(count, 0) - count
            for bit in tl.static_range(16):
                marked = (chosen >> bit) & 1
                tl.store(out + place, first + word * 16 + bit, mask=marked != 0)
                place += marked
            for start in tl.range(part * TILE, local, parts * TILE):
                to = out + first + total + start + lane
                tl.store(to, length - local + start + lane, mask=start + lane < local)
        size = tl.where(dense, length, first + total + local)
    if part == 0:
        tl.store(listed + entry, total)
        tl.store(sizes + entry, size)
        own_bounds = bounds + entry * 5
        tl.store(own_bounds, first)
        tl.store(own_bounds + 1, first + total)
        tl.store(own_bounds + 2, 0)
        tl.store(own_bounds + 3, 0)
        tl.store(own_bounds + 4, take)
