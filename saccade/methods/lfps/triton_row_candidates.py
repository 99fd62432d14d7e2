"""LFPS's candidates in recorded steps. Means what choosing.py means."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.lfps.triton_row_words import W, budget_at, pointer
from saccade.ops.triton.batch import KeyLists
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.best_parts import BOUNDS
from saccade.ops.triton.common import begin, launched

SPAN = 4096  # entries that a program compares
BITS = tl.constexpr(16)  # entries of a word
TILE = 512  # words that a program marks, or lists


class Found(NamedTuple):
    """``marks`` int32 [rows * units, m]: 16 keys a word, from the first that is no sink on, 1 for the candidates.
    ``listed`` int32 [rows * units], how many these are, and ``scored`` float64 [rows, units] over the units; ``lists``
    of the forced keys before, the candidates and the forced keys behind, or of all keys where all are read; ``bounds``
    int32 [rows * units, BOUNDS], as find_best takes them, of the candidates in a list and how many are taken."""

    marks: Tensor
    listed: Tensor
    scored: Tensor
    lists: KeyLists
    bounds: Tensor


def scan(rows: LayerRows, units: int, limits: Tensor) -> Tensor:
    """Which entries of a row's tables stand out, int32 [rows * units, 2, m] (``_scan``); ``limits`` as take_in leaves
    them."""
    device, width, count = rows.q.device, rows.pages.longest, rows.count
    words = triton.cdiv(width, BITS.value)
    seen = torch.empty(count * units, 2, words, dtype=torch.int32, device=device)
    _scan[(triton.cdiv(width, SPAN), units, count)](
        rows.words, rows.reals, rows.pages.lengths, limits, seen, rows.words.stride(0), rows.reals.stride(0), words,
        UNITS=units, SPAN=SPAN, num_warps=8, **launched(device),
    )  # fmt: skip
    return seen


def candidates(rows: LayerRows, units: int, seen: Tensor, idle: Tensor, blocks: Tensor | None, size: int) -> Found:
    """``seen`` as scan gives it; ``blocks`` as best_blocks marks those of ``size`` keys."""
    device, width, count = rows.q.device, rows.pages.longest, rows.count
    words = triton.cdiv(width, BITS.value)
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
    scored = torch.empty(count, units, dtype=torch.float64, device=device)
    _list[(parts, units, count)](
        rows.words, rows.reals, rows.pages.lengths, marks, counts, indices, *totals, scored, bounds,
        rows.words.stride(0), rows.reals.stride(0), width, words, UNITS=units, TILE=TILE,
        PARTS=triton.next_power_of_2(parts), num_warps=4, **launched(device),
    )  # fmt: skip
    return Found(marks, totals[0], scored, KeyLists(None, totals[1], indices, units, 1, width), bounds)


@triton.jit(
    do_not_specialize=["word_row", "real_row", "width"],
    do_not_specialize_on_alignment=["words", "reals", "lengths", "limits", "seen"],
)
def _scan(
    words, reals, lengths, limits, seen, word_row, real_row, width,
    UNITS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of 16 entries of a table a word: which are above their threshold (the lower bits), and which above their mean
    (the others). The vertical table's words come before those of the slash table, which is read as it lies."""
    begin(EARLY)
    chunk, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = (row * UNITS + unit).to(tl.int64)
    # What the words say is loaded before it is known that it is of use: one wait instead of several.
    own, reals = words + row.to(tl.int64) * word_row, reals + row.to(tl.int64) * real_row
    length, first = tl.load(lengths + row), tl.load(own + W.sinks).to(tl.int32)
    line = unit * tl.multiple_of(tl.load(own + W.capacity), 16)
    verticals = tl.multiple_of(pointer(own, W.vertical, tl.float32), 16)
    slashes = tl.multiple_of(pointer(own, W.slash, tl.float32), 16)
    n, dense, _take, _local = budget_at(own, reals, length, first)
    if (length > 0) & (dense == 0) & (chunk * SPAN < n):
        word, lane = tl.arange(0, SPAN // 16)[:, None], tl.arange(0, 16)[None, :]
        at = chunk * SPAN + word * 16 + lane
        # Tables are as wide as a multiple of 16 entries: they are read by whole words.
        there = (chunk * SPAN + word * 16 < n) & (lane >= 0)
        vertical = tl.load(verticals + line + at, mask=there, other=0.0)
        slash = tl.load(slashes + line + at, mask=there, other=0.0)
        left = n - chunk * SPAN
        own_limits = limits + entry * 4
        own_seen = seen + entry * 2 * width + chunk * (SPAN // 16)
        to = tl.arange(0, SPAN // 16)
        mine = to < tl.cdiv(left, 16)
        tl.store(own_seen + to, _bits(vertical, own_limits, left, SPAN), mask=mine)
        tl.store(own_seen + width + to, _bits(slash, own_limits + 2, left, SPAN), mask=mine)


@triton.jit
def _bits(value, limits, left, SPAN: tl.constexpr):
    """Words of the entries ``value``, of which ``left`` count."""
    lane = tl.arange(0, 16)[None, :]
    at = tl.arange(0, SPAN // 16)[:, None] * 16 + lane
    mean, tau = tl.load(limits), tl.load(limits + 1)
    bits = tl.where((value > tau) & (at < left), 1 << lane, 0)
    return tl.sum(bits | tl.where((value > mean) & (at < left), 65536 << lane, 0), 1)


@triton.jit
def _seen_at(seen, word, last, base, n_words):
    """Of the keys of each ``word``, what _scan says: of the key at distance ``base`` - i, and of key i."""
    bits = tl.load(seen + word, mask=(word >= 0) & (word < last), other=0)
    least = base - 15 - word * 16  # the distance of the last of them
    place = (least + 16) // 16 - 1  # rounded down, where it is -15 or more
    far = least - place * 16
    known = (word >= 0) & (word < last) & (place >= -1)
    lower = tl.load(seen + n_words + place, mask=known & (place >= 0), other=0)
    upper = tl.load(seen + n_words + place + 1, mask=known & (place + 1 < last), other=0)
    above = (((lower & 65535) | (upper << 16)) >> far) & 65535
    high = ((((lower >> 16) & 65535) | (upper & -65536)) >> far) & 65535
    return bits | _reversed(above) | (_reversed(high) << 16)


@triton.jit
def _reversed(word):
    """The lower 16 bits in reverse."""
    word = ((word >> 1) & 0x5555) | ((word & 0x5555) << 1)
    word = ((word >> 2) & 0x3333) | ((word & 0x3333) << 2)
    word = ((word >> 4) & 0x0F0F) | ((word & 0x0F0F) << 4)
    return ((word >> 8) & 0x00FF) | ((word & 0x00FF) << 8)


@triton.jit
def _far(seen, word, last, base, n_words, far):
    """Which of the 16 keys from ``far`` behind each word's first one on are above their threshold."""
    word += (far + 1024) // 16 - 64
    lower = _seen_at(seen, word, last, base, n_words) & 65535
    upper = _seen_at(seen, word + 1, last, base, n_words) & 65535
    return (lower | (upper << 16)) >> ((far + 1024) % 16)


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
    own = words + row.to(tl.int64) * word_row  # as in _scan
    length, first = tl.load(lengths + row), tl.load(own + W.sinks).to(tl.int32)
    before, after = tl.load(own + W.before).to(tl.int32), tl.load(own + W.after).to(tl.int32)
    base = length - 1 - first
    votes = 0
    for head in tl.static_range(EACH):
        votes += (tl.load(idle + entry * EACH + head) == 0).to(tl.int32)
    n, dense, _take, local = budget_at(own, reals + row.to(tl.int64) * real_row, length, first)
    last = tl.cdiv(n, 16)
    total = 0
    if (length > 0) & (dense == 0) & (part * TILE < last):
        seen += entry * 2 * n_words
        word = part * TILE + tl.arange(0, TILE)
        here = _seen_at(seen, word, last, base, n_words)
        above = here & 65535
        # Some key above its threshold is at most `before` keys ahead, or `after` keys back.
        near = above
        before_it = _seen_at(seen, word - 1, last, base, n_words) & 65535
        behind_it = _seen_at(seen, word + 1, last, base, n_words) & 65535
        ahead, back = above | (behind_it << 16), before_it | (above << 16)
        for far in tl.range(1, tl.minimum(before, 16) + 1):
            near = near | (ahead >> far)
        for far in tl.range(1, tl.minimum(after, 16) + 1):
            near = near | (back >> (16 - far))
        for far in tl.range(17, before + 1):
            near = near | _far(seen, word, last, base, n_words, far)
        for far in tl.range(17, after + 1):
            near = near | _far(seen, word, last, base, n_words, -far)
        chosen = near & (here >> 16) & 65535
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
        "words", "reals", "lengths", "marks", "counts", "indices", "listed", "sizes", "scored", "bounds",
    ],
)  # fmt: skip
def _list(
    words, reals, lengths, marks, counts, indices, listed, sizes, scored, bounds, word_row, real_row, width, n_words,
    UNITS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A unit's forced keys before, candidates, forced keys behind; all keys where it reads everything."""
    begin(EARLY)
    part, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(0)
    entry = (row * UNITS + unit).to(tl.int64)
    own = words + row.to(tl.int64) * word_row  # as in _scan
    length, first = tl.load(lengths + row), tl.load(own + W.sinks).to(tl.int32)
    number = tl.arange(0, PARTS)
    here = tl.load(counts + entry * parts + number, mask=number < parts, other=0)
    n, dense, take, local = budget_at(own, reals + row.to(tl.int64) * real_row, length, first)
    total, size = 0, 0
    if length > 0:
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
                behind = out + first + total + start + lane
                tl.store(behind, length - local + start + lane, mask=start + lane < local)
        size = tl.where(dense, length, first + total + local)
    if part == 0:
        tl.store(listed + entry, total)
        tl.store(scored + entry, (total + tl.full([], 0, tl.int32)).to(tl.float64) / UNITS)
        tl.store(sizes + entry, size)
        own_bounds = bounds + entry * 5
        tl.store(own_bounds, first)
        tl.store(own_bounds + 1, first + total)
        tl.store(own_bounds + 2, 0)
        tl.store(own_bounds + 3, 0)
        tl.store(own_bounds + 4, tl.where(length > 0, take, 0))
