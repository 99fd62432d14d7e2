"""Blocks of many rows in order of criticality, for the progressive loop of a batched decode step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.batched_decode import PageChoice
from saccade.ops.triton.decode import Pages


def rank_blocks(scores: Tensor, pages: Pages, choice: PageChoice) -> tuple[Tensor, Tensor, Tensor]:
    """From ``scores`` [rows, units, n] (batched_decode.score_blocks): ``always`` int32 [rows * units, a], the blocks
    that ``choice`` forces; ``order`` int32 [rows * units, n], the others by falling score, ties to the lower block; and
    how many of each there are, int32 [2, rows * units]. A row that reads everything has all blocks in ``always``.

    A block's rank is the number of blocks before it: each is compared with each, which for some thousand blocks takes
    less time than the passes of a sort.
    """
    rows, units, blocks = scores.shape
    longest = choice.longest
    always = torch.empty(rows * units, longest, dtype=torch.int32, device=scores.device)
    order = torch.empty(rows * units, blocks, dtype=torch.int32, device=scores.device)
    counts = torch.empty(2, rows * units, dtype=torch.int32, device=scores.device)
    _rank[(triton.cdiv(blocks, 64), units, rows)](
        scores,
        pages.lengths,
        always,
        order,
        counts,
        blocks,
        longest,
        UNITS=units,
        SIZE=choice.size,
        FIRST=choice.first,
        LAST=choice.last,
        AFTER_FULL=choice.after_full,
        DENSE_UPTO=choice.dense_upto,
        LISTED=triton.next_power_of_2(longest),
        TILE=64,
        OTHERS=128,
        num_warps=4,
    )
    return always, order, counts


@triton.jit(do_not_specialize=["blocks", "longest"])
def _rank(
    scores, lengths, always, order, counts, blocks, longest,
    UNITS: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, AFTER_FULL: tl.constexpr,
    DENSE_UPTO: tl.constexpr, LISTED: tl.constexpr, TILE: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    tile, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = (row * UNITS + unit).to(tl.int64)
    length = tl.load(lengths + row)
    everything = length <= DENSE_UPTO
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
        tl.store(counts + entry, forced)
        tl.store(counts + UNITS * tl.num_programs(2) + entry, tl.where(everything, 0, stop - FIRST))
    if (tile * TILE < stop) & (length > DENSE_UPTO):
        mine = tile * TILE + tl.arange(0, TILE)
        real = (mine >= FIRST) & (mine < stop)
        score = tl.load(scores + entry * blocks + mine, mask=real, other=0.0)
        rank = tl.zeros([TILE], tl.int32)
        for start in tl.range(0, stop, OTHERS):
            other = start + tl.arange(0, OTHERS)
            rival = tl.load(
                scores + entry * blocks + other, mask=(other >= FIRST) & (other < stop), other=float("-inf")
            )
            ahead = (rival[None, :] > score[:, None]) | (
                (rival[None, :] == score[:, None]) & (other[None, :] < mine[:, None])
            )
            rank += tl.sum(ahead.to(tl.int32), 1)
        tl.store(order + entry * blocks + rank, mine, mask=real)


def ranked_keys(used: Tensor, counts: Tensor, size: int, microbatch: int) -> Tensor:
    """Keys of ranked blocks that each unit read, int64 [units]: ``used`` microbatches (progressive.attend_progressive)
    of the ``counts[1]`` blocks of its order, all of them full."""
    return torch.minimum(used * microbatch, counts[1]).to(torch.int64) * size
