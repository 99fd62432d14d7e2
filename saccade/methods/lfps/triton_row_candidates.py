"""LFPS's candidates in recorded steps. Means what choosing.py means."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.lfps import triton_row_begin
from saccade.methods.lfps.triton_row_begin import BITS, Seen
from saccade.methods.lfps.triton_row_words import W, budget_at
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.best_parts import BOUNDS, put_bounds
from saccade.ops.triton.common import begin, launched, pad
from saccade.ops.triton.decode import KeyLists

WARPS = 4


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


def candidates(rows: LayerRows, units: int, seen: Seen, idle: Tensor, size: int) -> Found:
    """By what was ``seen``, of blocks of ``size`` keys; ``idle`` as in ``Begun``."""
    device, width, count = rows.q.device, rows.pages.longest, rows.count
    words, parts = triton.cdiv(width, BITS), seen.counts.shape[1]
    marks = torch.empty(count * units, words, dtype=torch.int32, device=device)
    indices = torch.empty(count * units, width, dtype=torch.int32, device=device)
    bounds = torch.empty(count * units, BOUNDS, dtype=torch.int32, device=device)
    totals = torch.empty(2, count * units, dtype=torch.int32, device=device)
    scored = torch.empty(count, units, dtype=torch.float64, device=device)
    _list[(parts, units, count)](
        rows.words, rows.reals, rows.pages.lengths, idle, idle if seen.blocks is None else seen.blocks,
        seen.entries, marks, seen.counts, indices, *totals, scored, bounds, rows.words.stride(0), rows.reals.stride(0),
        width, words, 0 if seen.blocks is None else seen.blocks.shape[1],
        UNITS=units, EACH=rows.heads // units, SIZE=size, TILE=triton_row_begin.TILE,
        PARTS=pad(parts, 32 * WARPS), num_warps=WARPS, **launched(device),
    )  # fmt: skip
    return Found(marks, totals[0], scored, KeyLists(None, totals[1], indices, units, 1, width), bounds)


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


@triton.jit
def _marked(
    own, idle, blocks, seen, marks, entry, part, length, first, n, dense, local, n_words, n_blocks,
    EACH: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The candidates of a part of a unit's words, none where all its heads rest or it reads everything, and how many
    they are."""
    before, after = tl.load(own + W.before).to(tl.int32), tl.load(own + W.after).to(tl.int32)
    base = length - 1 - first
    votes = 0
    for head in tl.static_range(EACH):
        votes += (tl.load(idle + entry * EACH + head) == 0).to(tl.int32)
    last = tl.cdiv(n, 16)
    word = part * TILE + tl.arange(0, TILE)
    chosen = tl.zeros([TILE], tl.int32)
    if (length > 0) & (dense == 0) & (part * TILE < last):
        seen += entry * 2 * n_words
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
    return chosen, tl.sum(_count_bits(chosen), 0)


@triton.jit
def _count_bits(word):
    """How many of the lower 16 bits are set."""
    pairs = word - ((word >> 1) & 0x5555)
    fours = (pairs & 0x3333) + ((pairs >> 2) & 0x3333)
    eights = (fours + (fours >> 4)) & 0x0F0F
    return (eights + (eights >> 8)) & 31


@triton.jit(
    do_not_specialize=["word_row", "real_row", "width", "n_words", "n_blocks"],
    do_not_specialize_on_alignment=[
        "words", "reals", "lengths", "idle", "blocks", "seen", "marks", "counts", "indices", "listed", "sizes",
        "scored", "bounds",
    ],
)  # fmt: skip
def _list(
    words, reals, lengths, idle, blocks, seen, marks, counts, indices, listed, sizes, scored, bounds, word_row,
    real_row, width, n_words, n_blocks,
    UNITS: tl.constexpr, EACH: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A unit's forced keys before, candidates, forced keys behind; all keys where it reads everything. A program says
    in ``counts`` how many candidates its part has, and one more, and waits for what those of the parts before say;
    these have begun before it, for programs begin in their order."""
    begin(EARLY)
    part, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(0)
    entry = (row * UNITS + unit).to(tl.int64)
    # What the words say is loaded before it is known that it is of use: one wait instead of several.
    own = words + row.to(tl.int64) * word_row
    length, first = tl.load(lengths + row), tl.load(own + W.sinks).to(tl.int32)
    n, dense, take, local = budget_at(own, reals + row.to(tl.int64) * real_row, length, first)
    chosen, mine = _marked(
        own, idle, blocks, seen, marks, entry, part, length, first, n, dense, local, n_words, n_blocks, EACH,
        SIZE, TILE,
    )  # fmt: skip
    tl.store(counts + entry * parts + part, mine + 1)
    number = tl.arange(0, PARTS)  # no two threads look at one word: they might not see the same
    said = counts + entry * parts + number
    before = tl.load(said, mask=number < part, other=1, volatile=True)
    while tl.min(before, 0) == 0:
        before = tl.load(said, mask=number < part, other=1, volatile=True)
    ahead = tl.sum(before - 1, 0)  # candidates of the parts before
    total = ahead + mine  # of all, in the last part
    out, lane = indices + entry * width, tl.arange(0, TILE)
    if length > 0:
        everywhere = tl.where(dense, length, first)
        for start in tl.range(part * TILE, everywhere, parts * TILE):
            tl.store(out + start + lane, start + lane, mask=start + lane < everywhere)
        if dense == 0:
            count = _count_bits(chosen)
            place = first + ahead + tl.cumsum(count, 0) - count
            key = first + (part * TILE + lane) * 16
            for bit in tl.static_range(16):
                marked = (chosen >> bit) & 1
                tl.store(out + place, key + bit, mask=marked != 0)
                place += marked
    if part == parts - 1:
        if (length > 0) & (dense == 0):
            for start in tl.range(0, local, TILE):
                behind = out + first + total + start + lane
                tl.store(behind, length - local + start + lane, mask=start + lane < local)
        size = tl.where(length > 0, tl.where(dense, length, first + total + local), 0)
        tl.store(listed + entry, total)
        tl.store(scored + entry, (total + tl.full([], 0, tl.int32)).to(tl.float64) / UNITS)
        tl.store(sizes + entry, size)
        put_bounds(bounds, entry, first, first + total, 0, 0, tl.where(length > 0, take, 0))
