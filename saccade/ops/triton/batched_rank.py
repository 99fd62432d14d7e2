"""Blocks of many rows in order of criticality, for the progressive loop of a batched decode step."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.layout import flat
from saccade.ops.triton.batch import KeyLists, Pages
from saccade.ops.triton.batched_decode import room_for
from saccade.ops.triton.common import begin, launched
from saccade.ops.triton.sorting import in_line, neighbours, sort_falling
from saccade.selection.readings import Choice

FEW = 256  # blocks of a list that are taken
LEAST = 128  # blocks of a chunk
NEVER: tl.constexpr = tl.constexpr(-2147483648)  # as a score's bits: where no block is


class Tiles(NamedTuple):
    """How the work is cut: blocks of a ``chunk``, sorted by ``warps``; and of the words that a program looks up, how
    many (``looked_up``), in how many other chunks at a time, and its warps. All powers of two."""

    chunk: int
    warps: int
    looked_up: int
    others: int
    rank_warps: int


def tiles_for(blocks: int, take: int | None = None) -> Tiles:
    """For lists of ``blocks``, of which the ``take`` best are wanted, or all in order. What is sorted grows with the
    chunk, by the square of its logarithm; what is looked up falls with it, and is little where few are taken."""
    looked_up = 256
    if take is not None and take <= FEW:
        chunk, others, rank_warps = 512, 8 if blocks > 1024 else 1, 4 if blocks > 1024 else 2
    elif blocks <= 2048:
        chunk, others, rank_warps = 1024, 1, 4
    elif blocks <= 8192:  # H100: 4,608 blocks in 12.7 us, by chunks of 1024 16.1; 3,328 of 8 rows in 27.0 and 32.3
        chunk, others, rank_warps, looked_up = 512, 8, 4, 128
    else:
        chunk, others, rank_warps = 2048, 2, 4
    chunk = min(chunk, max(LEAST, triton.next_power_of_2(blocks)))
    warps = 2 if chunk == 1024 else max(1, min(4, chunk // 128))
    return Tiles(chunk, warps, looked_up, others, rank_warps)


def rank_blocks(
    scores: Tensor, pages: Pages, choice: Choice, dense_upto: Tensor, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """From ``scores`` [rows, units, n] (batched_decode.score_blocks): ``always`` int32 [rows * units, a], the blocks
    that ``choice`` forces; ``order`` int32 [rows * units, n], the others by falling score, ties to the lower block; and
    how many of each there are, int32 [2, rows * units]. A row of up to its ``dense_upto`` keys (int32 [rows], at most
    that of ``choice``) reads everything: all its blocks are in ``always``.

    A block's rank is the number of blocks before it. The blocks of a chunk are sorted by one program, and each is then
    looked up in the chunks so ordered: two launches, or one where there is but one chunk. ``tiles``: by default those
    of :func:`tiles_for`, as in :func:`choose_ranked`.
    """
    rows, units, blocks = scores.shape
    longest = room_for(choice, pages)
    always = torch.empty(rows * units, longest, dtype=torch.int32, device=scores.device)
    order = torch.empty(rows * units, blocks, dtype=torch.int32, device=scores.device)
    counts = torch.empty(2, rows * units, dtype=torch.int32, device=scores.device)
    _launch(scores, pages, choice, always, order, counts, None, dense_upto, tiles)
    return always, order, counts


def choose_ranked(
    scores: Tensor,
    pages: Pages,
    choice: Choice,
    take: Tensor,
    dense_upto: Tensor,
    tiles: Tiles | None = None,
) -> KeyLists:
    """The lists of batched_decode.choose_best, in another order, by ranks: faster where lists are few, for it sets more
    of the device to work on each. Of a chunk, no more blocks than are taken in all are looked up, in as many of each
    other chunk."""
    rows, units, _ = scores.shape
    longest = room_for(choice, pages)
    indices = torch.empty(rows * units, longest, dtype=torch.int32, device=scores.device)
    counts = torch.empty(1, rows * units, dtype=torch.int32, device=scores.device)
    best = indices[:, min(choice.first + choice.last, longest - 1) :]  # behind the others; where none fit, none come
    _launch(scores, pages, choice, indices, best, counts, take, dense_upto, tiles)
    return KeyLists(None, counts[0], indices, units, choice.size, longest)


def _launch(
    scores: Tensor,
    pages: Pages,
    choice: Choice,
    always: Tensor,
    order: Tensor,
    counts: Tensor,
    take: Tensor | None,
    dense_upto: Tensor,
    tiles: Tiles | None,
) -> None:
    """``take``: lists of so many of the best are wanted, not ranks of all."""
    scores = flat(scores, torch.float32)
    rows, units, blocks = scores.shape
    longest = room_for(choice, pages)
    best = choice.take
    chunk, warps, looked_up, others, rank_warps = tiles or tiles_for(blocks, best)
    wanted = chunk if best is None else min(chunk, triton.next_power_of_2(max(best, 16)))  # of a chunk
    takes = best != 0
    looked_up = min(looked_up, wanted)
    chunks = triton.cdiv(blocks, chunk)
    shape = {
        "ALL": best is None, "UNITS": units, "SIZE": choice.size, "FIRST": choice.first, "LAST": choice.last,
        "AFTER_FULL": choice.ruled, "CHUNK": chunk, "WANTED": wanted, **launched(scores.device),
    }  # fmt: skip
    numbers = pages.lengths, dense_upto if take is None else take, dense_upto  # unused pointers are pointers, too
    # Of every list the sorted scores, as integers, and then of every list their blocks.
    sorts = torch.empty(2, rows * units, chunks * chunk, dtype=torch.int32, device=scores.device)
    _order[(chunks, units, rows)](
        scores, *numbers, always, order, sorts, counts, blocks, longest, order.stride(0), TAKES=takes,
        LISTED=triton.next_power_of_2(longest), BITS=chunk.bit_length() - 1, EACH=max(1, chunk // (32 * warps)),
        ONE=chunks == 1, num_warps=warps, **shape,
    )  # fmt: skip
    if takes and chunks > 1:
        _rank[(chunks * (wanted // looked_up), units, rows)](
            sorts, *numbers, order, chunks, order.stride(0), TILE=looked_up, OTHERS=others,
            HALVES=wanted.bit_length() - 1, num_warps=rank_warps, **shape,
        )  # fmt: skip


@triton.jit
def _words(scores, block, real):
    """int64 that fall as blocks are to be listed: by falling score, ties to the lower block, at the end what is not
    real. The upper half is NEVER there alone."""
    bits = (tl.load(scores + block, mask=real, other=0.0) + 0.0).to(tl.int32, bitcast=True)
    rising = tl.maximum(bits ^ ((bits >> 31) & 2147483647), NEVER + 1).to(tl.int64)
    return tl.where(real, (rising << 32) | (2147483647 - block).to(tl.int64), -9223372036854775808)


@triton.jit
def blocks_at(lengths, row, SIZE: tl.constexpr, LAST: tl.constexpr, AFTER_FULL: tl.constexpr):
    """A row's length, its blocks, and the first behind those that are ranked."""
    length = tl.load(lengths + row)
    pages = tl.cdiv(length, SIZE)
    stop = pages
    if AFTER_FULL:
        stop = length // SIZE
    return length, pages, stop - LAST


@triton.jit
def put_forced(out, everything, pages, stop, FIRST: tl.constexpr, LISTED: tl.constexpr):
    """Lists a row's first blocks and those from ``stop`` on, or all of them; returns how many."""
    number = tl.arange(0, LISTED)
    forced = tl.where(everything, pages, FIRST + pages - stop)
    block = tl.where(everything | (number < FIRST), number, stop - FIRST + number)
    tl.store(out + number, block, mask=number < forced)
    return forced


@triton.jit(
    do_not_specialize=["blocks", "longest", "order_stride"],
    do_not_specialize_on_alignment=["lengths", "takes", "denses", "order"],
)
def _order(
    scores, lengths, takes, denses, always, order, sorts, counts, blocks, longest, order_stride,
    ALL: tl.constexpr, TAKES: tl.constexpr, UNITS: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, AFTER_FULL: tl.constexpr, LISTED: tl.constexpr, CHUNK: tl.constexpr, WANTED: tl.constexpr,
    BITS: tl.constexpr, EACH: tl.constexpr, ONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sorts the blocks of every CHUNK by score."""
    begin(EARLY)
    chunk, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = (row * UNITS + unit).to(tl.int64)
    length, pages, stop = blocks_at(lengths, row, SIZE, LAST, AFTER_FULL)
    dense_upto, take = tl.load(denses + row), stop
    if TAKES and not ALL:
        take = tl.load(takes + row)
    everything = length <= dense_upto
    if chunk == 0:
        forced = put_forced(always + entry * longest, everything, pages, stop, FIRST, LISTED)
        if ALL:
            tl.store(counts + entry, forced)
            tl.store(counts + UNITS * tl.num_programs(2) + entry, tl.where(everything, 0, stop - FIRST))
        else:
            tl.store(counts + entry, tl.where(everything, pages, forced + take if TAKES else forced))
    if (chunk * CHUNK < stop) & (length > dense_upto) & TAKES:
        mine = neighbours(chunk * CHUNK, CHUNK, EACH)
        word = _words(scores + entry * blocks, mine, (mine >= FIRST) & (mine < stop))
        word = sort_falling(in_line(word, CHUNK), BITS, EACH)
        place = tl.arange(0, CHUNK)
        score, block = (word >> 32).to(tl.int32), 2147483647 - (word & 2147483647).to(tl.int32)
        if ONE:  # chunk: there is nothing to look up
            tl.store(order + entry * order_stride + place, block, mask=(score > NEVER) & (place < take))
        else:
            lists = UNITS * tl.num_programs(2).to(tl.int64)
            line = sorts + (entry * tl.num_programs(0) + chunk) * CHUNK + place
            tl.store(line, score, mask=place < WANTED)
            tl.store(line + lists * tl.num_programs(0) * CHUNK, block, mask=place < WANTED)


@triton.jit(
    do_not_specialize=["chunks", "order_stride"], do_not_specialize_on_alignment=["lengths", "takes", "denses", "order"]
)
def _rank(
    sorts, lengths, takes, denses, order, chunks, order_stride,
    ALL: tl.constexpr, UNITS: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    AFTER_FULL: tl.constexpr, CHUNK: tl.constexpr, WANTED: tl.constexpr, TILE: tl.constexpr, OTHERS: tl.constexpr,
    HALVES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A block's rank: its place in its chunk and how many scores of each other chunk are above its own, found by
    halving."""
    begin(EARLY)
    TILES: tl.constexpr = WANTED // TILE
    chunk, tile, unit, row = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1), tl.program_id(2)
    entry = (row * UNITS + unit).to(tl.int64)
    length, _pages, stop = blocks_at(lengths, row, SIZE, LAST, AFTER_FULL)
    take = stop
    if not ALL:
        take = tl.load(takes + row)
    listed = tl.minimum(chunk * CHUNK + CHUNK, stop) - tl.maximum(chunk * CHUNK, FIRST)  # of the chunk's blocks
    listed = tl.minimum(listed, take)
    if (tile * TILE < listed) & (length > tl.load(denses + row)):
        line = sorts + entry * chunks * CHUNK
        place = tile * TILE + tl.arange(0, TILE)
        # A warp's places follow each other in a chunk, so where they lie in another one does, too: few cache lines.
        score = tl.load(line + chunk * CHUNK + place)
        lists = UNITS * tl.num_programs(2).to(tl.int64)
        block = tl.load(line + lists * chunks * CHUNK + chunk * CHUNK + place)
        rank = place
        others = tl.cdiv(stop, CHUNK) - 1
        for first in tl.range(0, others, OTHERS):
            number = first + tl.arange(0, OTHERS)
            before = number < chunk
            begins = tl.minimum(tl.where(before, number, number + 1), others) * CHUNK
            least = score[None, :] - before[:, None].to(tl.int32)  # ties go to the chunk before
            start = line + begins[:, None]
            at = start + tl.zeros([OTHERS, TILE], tl.int32)  # pointers, for offsets would be added to one each time
            for half in tl.static_range(1, HALVES + 1):
                at += tl.where(tl.load(at + ((WANTED >> half) - 1)) > least, WANTED >> half, 0)
            above = ((at.to(tl.int64) - start.to(tl.int64)) >> 2).to(tl.int32) + (tl.load(at) > least).to(tl.int32)
            rank += tl.sum(tl.where((number < others)[:, None], above, 0), 0)
        tl.store(order + entry * order_stride + rank, block, mask=(place < listed) & (rank < take))
