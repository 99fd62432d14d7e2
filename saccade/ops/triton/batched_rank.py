"""Blocks of many rows in order of criticality, for the progressive loop of a batched decode step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.layout import flat
from saccade.ops.triton.batched_decode import choose_best, room_for
from saccade.ops.triton.common import begin, launched
from saccade.ops.triton.decode import KeyLists, Pages
from saccade.selection.plan import BestBlocks, RankedBlocks

MOST_COMPARED = 1 << 28  # pairs of blocks
CHUNK = 512  # blocks that are compared with each other
TILE, OTHERS, WARPS = 64, 64, 4  # blocks of a program, and how many it compares them with in one go


def rank_blocks(
    scores: Tensor, pages: Pages, choice: RankedBlocks, dense_upto: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From ``scores`` [rows, units, n] (batched_decode.score_blocks): ``always`` int32 [rows * units, a], the blocks
    that ``choice`` forces; ``order`` int32 [rows * units, n], the others by falling score, ties to the lower block; and
    how many of each there are, int32 [2, rows * units]. A row of up to its ``dense_upto`` keys (int32 [rows], at most
    that of ``choice``) reads everything: all its blocks are in ``always``.

    A block's rank is the number of blocks before it. Blocks of a chunk are compared with each other, and each is then
    looked up in the chunks so ordered: far fewer comparisons than all with all, in two launches.
    """
    rows, units, blocks = scores.shape
    longest = room_for(choice, pages)
    always = torch.empty(rows * units, longest, dtype=torch.int32, device=scores.device)
    order = torch.empty(rows * units, blocks, dtype=torch.int32, device=scores.device)
    counts = torch.empty(2, rows * units, dtype=torch.int32, device=scores.device)
    _launch(scores, pages, choice, always, order, counts, None, dense_upto)
    return always, order, counts


def choose_blocks(scores: Tensor, pages: Pages, choice: BestBlocks, take: Tensor, dense_upto: Tensor) -> KeyLists:
    """:func:`choose_ranked` or batched_decode.choose_best, whichever is faster at this size."""
    rows, units, blocks = scores.shape
    ranks = rows * units * blocks * blocks <= MOST_COMPARED
    return (choose_ranked if ranks else choose_best)(scores, pages, choice, take, dense_upto)


def choose_ranked(scores: Tensor, pages: Pages, choice: BestBlocks, take: Tensor, dense_upto: Tensor) -> KeyLists:
    """The lists of batched_decode.choose_best, in another order, by ranks: faster where lists are few, for it sets more
    of the device to work on each."""
    rows, units, _ = scores.shape
    longest = room_for(choice, pages)
    indices = torch.empty(rows * units, longest, dtype=torch.int32, device=scores.device)
    counts = torch.empty(1, rows * units, dtype=torch.int32, device=scores.device)
    best = indices[:, min(choice.first + choice.last, longest - 1) :]  # behind the others; where none fit, none come
    _launch(scores, pages, choice, indices, best, counts, take, dense_upto)
    return KeyLists(None, counts[0], indices, units, choice.size, longest)


def _launch(
    scores: Tensor,
    pages: Pages,
    choice: BestBlocks | RankedBlocks,
    always: Tensor,
    order: Tensor,
    counts: Tensor,
    take: Tensor | None,
    dense_upto: Tensor,
) -> None:
    """``take``: lists of so many of the best are wanted, not ranks of all."""
    scores = flat(scores, torch.float32)
    rows, units, blocks = scores.shape
    longest = room_for(choice, pages)
    takes = take is None or (isinstance(choice, BestBlocks) and choice.take > 0)
    shape = {
        "ALL": take is None, "UNITS": units, "SIZE": choice.size, "FIRST": choice.first, "LAST": choice.last,
        "AFTER_FULL": choice.after_full, "CHUNK": CHUNK, "TILE": TILE, "num_warps": WARPS, **launched(scores.device),
    }  # fmt: skip
    numbers = pages.lengths, dense_upto if take is None else take, dense_upto  # unused pointers are pointers, too
    width = triton.cdiv(blocks, CHUNK) * CHUNK
    sorts = torch.empty(rows * units, width, dtype=torch.int64, device=scores.device)
    grid = (triton.cdiv(blocks, TILE), units, rows)
    _order[grid](
        scores, *numbers, always, order, sorts, counts, blocks, longest, width, order.stride(0), TAKES=takes,
        LISTED=triton.next_power_of_2(longest), OTHERS=OTHERS, ONE=width == CHUNK, **shape,
    )  # fmt: skip
    if takes and width > CHUNK:
        _rank[grid](
            sorts, *numbers, order, width, order.stride(0),
            CHUNKS=max(2, min(32, triton.next_power_of_2(width // CHUNK))), HALVES=CHUNK.bit_length() - 1, **shape,
        )  # fmt: skip


@triton.jit
def _words(scores, block, real):
    """int64 that fall as blocks are to be listed: by falling score, ties to the lower block."""
    bits = (tl.load(scores + block, mask=real, other=0.0) + 0.0).to(tl.int32, bitcast=True)
    rising = (bits ^ ((bits >> 31) & 2147483647)).to(tl.int64)
    return (rising << 32) | (2147483647 - block).to(tl.int64)


@triton.jit
def _blocks_at(lengths, row, SIZE: tl.constexpr, LAST: tl.constexpr, AFTER_FULL: tl.constexpr):
    """A row's length, its blocks, and the first behind those that are ranked."""
    length = tl.load(lengths + row)
    pages = tl.cdiv(length, SIZE)
    stop = pages
    if AFTER_FULL:
        stop = length // SIZE
    return length, pages, stop - LAST


@triton.jit(
    do_not_specialize=["blocks", "longest", "width", "order_stride"],
    do_not_specialize_on_alignment=["lengths", "takes", "denses", "order"],
)
def _order(
    scores, lengths, takes, denses, always, order, sorts, counts, blocks, longest, width, order_stride,
    ALL: tl.constexpr, TAKES: tl.constexpr, UNITS: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, AFTER_FULL: tl.constexpr, LISTED: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    OTHERS: tl.constexpr, ONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Puts the words of every CHUNK blocks in order, comparing each with each."""
    begin(EARLY)
    tile, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = (row * UNITS + unit).to(tl.int64)
    length, pages, stop = _blocks_at(lengths, row, SIZE, LAST, AFTER_FULL)
    dense_upto, take = tl.load(denses + row), 0
    if TAKES and not ALL:
        take = tl.load(takes + row)
    everything = length <= dense_upto
    if tile == 0:
        number = tl.arange(0, LISTED)
        forced = tl.where(everything, pages, FIRST + pages - stop)
        block = tl.where(everything | (number < FIRST), number, stop - FIRST + number)
        tl.store(always + entry * longest + number, block, mask=number < forced)
        if ALL:
            tl.store(counts + entry, forced)
            tl.store(counts + UNITS * tl.num_programs(2) + entry, tl.where(everything, 0, stop - FIRST))
        else:
            tl.store(counts + entry, tl.where(everything, pages, forced + take))
    if (tile * TILE < stop) & (length > dense_upto) & TAKES:
        line = scores + entry * blocks
        mine = tile * TILE + tl.arange(0, TILE)
        real = (mine >= FIRST) & (mine < stop)
        word = _words(line, mine, real)
        ahead = tl.zeros([TILE, OTHERS], tl.int32)
        chunk = tile * TILE // CHUNK * CHUNK
        for start in tl.range(chunk, tl.minimum(chunk + CHUNK, stop), OTHERS):
            other = start + tl.arange(0, OTHERS)
            there = (other >= FIRST) & (other < tl.minimum(chunk + CHUNK, stop))
            rival = tl.where(there, _words(line, other, there), -9223372036854775808)
            ahead += (rival[None, :] > word[:, None]).to(tl.int32)
        rank = tl.sum(ahead, 1)
        if ONE:  # chunk: there is nothing to look up
            tl.store(order + entry * order_stride + rank, mine, mask=real & (ALL | (rank < take)))
        else:
            tl.store(sorts + entry * width + chunk + rank, word, mask=real)


@triton.jit(
    do_not_specialize=["width", "order_stride"], do_not_specialize_on_alignment=["lengths", "takes", "denses", "order"]
)
def _rank(
    sorts, lengths, takes, denses, order, width, order_stride,
    ALL: tl.constexpr, UNITS: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    AFTER_FULL: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr,
    HALVES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A block's rank: how many words of each chunk are above its own, found by halving."""
    begin(EARLY)
    tile, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = (row * UNITS + unit).to(tl.int64)
    length, _pages, stop = _blocks_at(lengths, row, SIZE, LAST, AFTER_FULL)
    take = stop
    if not ALL:
        take = tl.load(takes + row)
    if (tile * TILE < stop) & (length > tl.load(denses + row)):
        line = sorts + entry * width
        place = tile * TILE + tl.arange(0, TILE)
        own = place // CHUNK * CHUNK
        here = tl.minimum(own + CHUNK, stop) - tl.maximum(own, FIRST)  # words of a chunk
        real = place - own < here
        # A warp's places follow each other in a chunk, so where they lie in another one does, too: few cache lines.
        word = tl.load(line + place, mask=real, other=0)
        rank = tl.zeros([TILE], tl.int32)
        for first in tl.range(0, tl.cdiv(stop, CHUNK), CHUNKS):
            begins = (first + tl.arange(0, CHUNKS)) * CHUNK
            size = tl.minimum(begins + CHUNK, stop) - tl.maximum(begins, FIRST)
            above = tl.zeros([CHUNKS, TILE], tl.int32)
            for half in tl.static_range(1, HALVES + 1):
                at = above + (CHUNK >> half) - 1
                rival = tl.load(line + begins[:, None] + at, mask=at < size[:, None], other=-9223372036854775808)
                above += tl.where(rival > word[None, :], CHUNK >> half, 0)
            rival = tl.load(line + begins[:, None] + above, mask=above < size[:, None], other=-9223372036854775808)
            rank += tl.sum(above + (rival > word[None, :]).to(tl.int32), 0)
        block = 2147483647 - (word & 2147483647).to(tl.int32)
        tl.store(order + entry * order_stride + rank, block, mask=real & (rank < take))
