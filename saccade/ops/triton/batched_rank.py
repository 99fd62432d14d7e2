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


def rank_blocks(
    scores: Tensor, pages: Pages, choice: RankedBlocks, dense_upto: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From ``scores`` [rows, units, n] (batched_decode.score_blocks): ``always`` int32 [rows * units, a], the blocks
    that ``choice`` forces; ``order`` int32 [rows * units, n], the others by falling score, ties to the lower block; and
    how many of each there are, int32 [2, rows * units]. A row of up to its ``dense_upto`` keys (int32 [rows], at most
    that of ``choice``) reads everything: all its blocks are in ``always``.

    A block's rank is the number of blocks before it: each is compared with each, which for some thousand blocks takes
    less time than the passes of a sort.
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
    _rank[(triton.cdiv(blocks, 64), units, rows)](
        scores,
        pages.lengths,
        dense_upto if take is None else take,  # unused pointers must still be pointers
        dense_upto,
        always,
        order,
        counts,
        blocks,
        longest,
        order.stride(0),
        ALL=take is None,
        TAKES=take is None or (isinstance(choice, BestBlocks) and choice.take > 0),
        UNITS=units,
        SIZE=choice.size,
        FIRST=choice.first,
        LAST=choice.last,
        AFTER_FULL=choice.after_full,
        LISTED=triton.next_power_of_2(longest),
        TILE=64,
        OTHERS=128,
        num_warps=4,
        **launched(scores.device),
    )


@triton.jit
def _rivals(scores, start, FIRST: tl.constexpr, stop, OTHERS: tl.constexpr):
    other = start + tl.arange(0, OTHERS)
    return tl.load(scores + other, mask=(other >= FIRST) & (other < stop), other=float("-inf"))


@triton.jit(
    do_not_specialize=["blocks", "longest", "order_stride"],
    do_not_specialize_on_alignment=["lengths", "takes", "denses", "order"],
)
def _rank(
    scores, lengths, takes, denses, always, order, counts, blocks, longest, order_stride,
    ALL: tl.constexpr, TAKES: tl.constexpr, UNITS: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, AFTER_FULL: tl.constexpr, LISTED: tl.constexpr, TILE: tl.constexpr, OTHERS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    tile, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = (row * UNITS + unit).to(tl.int64)
    length = tl.load(lengths + row)
    dense_upto, take = tl.load(denses + row), 0
    if TAKES and not ALL:
        take = tl.load(takes + row)
    everything = length <= dense_upto
    stop = tl.cdiv(length, SIZE)
    pages = stop
    if AFTER_FULL:
        stop = length // SIZE
    stop = stop - LAST
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
        mine = tile * TILE + tl.arange(0, TILE)
        real = (mine >= FIRST) & (mine < stop)
        score = tl.load(scores + entry * blocks + mine, mask=real, other=0.0)
        ahead = tl.zeros([TILE, OTHERS], tl.int32)
        here = tile * TILE // OTHERS * OTHERS  # others before it are lower blocks, others behind it higher ones
        for start in tl.range(0, here, OTHERS):
            rival = _rivals(scores + entry * blocks, start, FIRST, stop, OTHERS)
            ahead += (rival[None, :] >= score[:, None]).to(tl.int32)
        rival = _rivals(scores + entry * blocks, here, FIRST, stop, OTHERS)
        lower = (here + tl.arange(0, OTHERS))[None, :] < mine[:, None]
        ahead += ((rival[None, :] > score[:, None]) | ((rival[None, :] == score[:, None]) & lower)).to(tl.int32)
        for start in tl.range(here + OTHERS, stop, OTHERS):
            rival = _rivals(scores + entry * blocks, start, FIRST, stop, OTHERS)
            ahead += (rival[None, :] > score[:, None]).to(tl.int32)
        rank = tl.sum(ahead, 1)
        if not ALL:
            real = real & (rank < take)
        tl.store(order + entry * order_stride + rank, mine, mask=real)
