"""The cover in rounds on the device: chooses what ``rounds.cover_rounds`` chooses, to the last line.

A round counts the chosen lines below every number, by which each line's new cells are known, weighs all lines,
decides, and takes what it decided: entries are set to 0 and leave the sums of the lines that cross. Sums are whole
numbers, so that it does not matter in which order threads add to them. One program covers one head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.loopserve.rounds import LADDER, STEPS, UNIT
from saccade.ops.layout import flat, written
from saccade.ops.triton.common import pad


def cover(weights: Tensor, positions: Tensor, first: int, share: float, near: int = 1) -> Tensor:
    """Lines that recover ``share`` of ``weights`` fp32 [heads, m, n], the causal softmax rows at ``positions`` (int64
    [m], rising, within ``first .. n - 1``): int8 [2, heads, n], which columns and which distances; every column where
    weights are NaN. Distances below ``near``, at most n, are taken first. ``weights`` is overwritten."""
    heads, m, n = written("weights", weights, torch.float32).shape
    positions, device = flat(positions, torch.int64), weights.device
    gains = torch.empty(2, heads, n, dtype=torch.int64, device=device)  # columns, distances
    spoilt = torch.zeros(heads, dtype=torch.int32, device=device)
    span = min(1024 if n >= 16384 else 128, pad(n))
    _sum_lines[(triton.cdiv(n, span), heads)](
        weights, positions, gains, spoilt, heads * n, m, n, SPAN=span, UNIT=UNIT, num_warps=4
    )
    marks = torch.zeros(2, heads, n, dtype=torch.int8, device=device)
    upto = torch.empty(2, heads, n, dtype=torch.int32, device=device)
    worth = torch.empty(2, heads, n, dtype=torch.float64, device=device)
    fresh = torch.zeros(2, heads, n, dtype=torch.int32, device=device)
    fresh[1, :, :near] = torch.arange(near, device=device)
    goals = share * gains[0].sum(1).double()
    rows = pad(m)
    _rounds[(heads,)](
        weights, positions, gains, marks, upto, worth, fresh, spoilt, goals, heads * n, m, n, first, near,
        ROWS=rows, LINES=max(1, 4096 // rows), SPAN=4096 if n > 2048 else 1024, LADDER=LADDER, STEPS=STEPS,
        UNIT=UNIT,
        num_warps=16 if n > 2048 else 4,
    )  # fmt: skip
    return marks


@triton.jit(do_not_specialize=["kind_stride", "m", "n"])
def _sum_lines(weights, positions, gains, spoilt, kind_stride, m, n, SPAN: tl.constexpr, UNIT: tl.constexpr):
    """Every column's and every distance's weight in whole units, and whether a head's weights are NaN."""
    head = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    by_column, by_distance = tl.zeros([SPAN], tl.int64), tl.zeros([SPAN], tl.int64)
    broken = tl.zeros([SPAN], tl.int32)
    for j in tl.range(0, m):
        line, position = weights + (head * m + j) * n, tl.load(positions + j)
        found = tl.load(line + number, mask=(number < n) & (number <= position), other=0.0)
        broken |= (found != found).to(tl.int32)
        by_column += (tl.where(found == found, found, 0.0).to(tl.float64) * UNIT).to(tl.int64)
        key = position - number
        found = tl.load(line + key, mask=(key >= 0) & (number < n), other=0.0)
        by_distance += (tl.where(found == found, found, 0.0).to(tl.float64) * UNIT).to(tl.int64)
    tl.store(gains + head * n + number, by_column, mask=number < n)
    tl.store(gains + kind_stride + head * n + number, by_distance, mask=number < n)
    if tl.max(broken, 0) > 0:
        tl.atomic_max(spoilt + head, 1)


@triton.jit
def _take(
    weights, positions, gains, marks, fresh, count, kind_stride, m, n,
    KIND: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Recover the ``count`` lines of a kind that are listed: their weight, which they and the lines that cross them
    lose."""
    row = tl.arange(0, ROWS)
    position = tl.load(positions + row, mask=row < m, other=-1)[None, :]
    recovered = tl.zeros([], tl.int64)
    for start in tl.range(0, count, LINES):
        turn = start + tl.arange(0, LINES)
        line = tl.load(fresh + KIND * kind_stride + turn, mask=turn < count, other=0)[:, None]
        across = position - line
        there = (across >= 0) & (turn < count)[:, None]
        key = across if KIND == 1 else line + across * 0
        entry = weights + row.to(tl.int64)[None, :] * n + key
        found = (tl.load(entry, mask=there, other=0.0).to(tl.float64) * UNIT).to(tl.int64)
        tl.atomic_add(gains + (1 - KIND) * kind_stride + across, -found, mask=there & (found != 0), sem="relaxed")
        recovered += tl.sum(tl.sum(found, 1), 0)
        tl.debug_barrier()  # several threads may hold the same entry: all have read before one writes
        tl.store(entry, tl.zeros([LINES, ROWS], tl.float32), mask=there)
        tl.store(marks + KIND * kind_stride + line, tl.full([LINES, 1], 1, tl.int8), mask=(turn < count)[:, None])
    tl.debug_barrier()
    return recovered


@triton.jit
def _count_below(marks, upto, n, SPAN: tl.constexpr):
    """How many of lines 0 .. number are chosen, for every number."""
    done = tl.zeros([], tl.int32)
    for start in tl.range(0, n, SPAN):
        number = start + tl.arange(0, SPAN)
        here = tl.load(marks + number, mask=number < n, other=0).to(tl.int32)
        tl.store(upto + number, done + tl.cumsum(here, 0), mask=number < n)
        done += tl.sum(here, 0)


@triton.jit
def _weigh(gains, marks, crossing, worth, n, first, SPAN: tl.constexpr):
    """Every line's gain per new cell; the greatest of them. ``crossing``: chosen lines of the other kind upto each."""
    best = tl.full([SPAN], -1.0, tl.float64)
    for start in tl.range(0, n, SPAN):
        number = start + tl.arange(0, SPAN)
        inside = number < n
        crossed = tl.load(crossing + n - 1 - number, mask=inside, other=0)
        crossed -= tl.load(crossing + first - 1 - number, mask=inside & (number < first), other=0)
        cells = tl.maximum(tl.minimum(n - first, n - number) - crossed, 1)
        gain = tl.load(gains + number, mask=inside, other=0).to(tl.float64)
        chosen = tl.load(marks + number, mask=inside, other=1) != 0
        found = tl.where(chosen, -1.0, gain / cells.to(tl.float64))
        tl.store(worth + number, found, mask=inside)
        best = tl.maximum(best, found)
    return tl.max(best, 0)


@triton.jit
def _reaching(gains, worth, floor, n, SPAN: tl.constexpr):
    """Summed gain of the lines whose worth is at least ``floor``."""
    total = tl.zeros([SPAN], tl.int64)
    for start in tl.range(0, n, SPAN):
        number = start + tl.arange(0, SPAN)
        reached = tl.load(worth + number, mask=number < n, other=-2.0) >= floor
        total += tl.load(gains + number, mask=reached, other=0)
    return tl.sum(total, 0)


@triton.jit
def _decide(gains, worth, fresh, n, above, floor, ahead, lacking, SPAN: tl.constexpr):
    """Write the lines that a round takes; their number, and the summed gain of those between ``floor`` and ``above``
    so far."""
    count = tl.zeros([], tl.int32)
    for start in tl.range(0, n, SPAN):
        number = start + tl.arange(0, SPAN)
        found = tl.load(worth + number, mask=number < n, other=-2.0)
        near = (found >= floor) & (found < above)
        gain = tl.load(gains + number, mask=near, other=0)
        before = ahead + tl.cumsum(gain, 0) - gain
        taken = ((found >= above) | (near & (before.to(tl.float64) < lacking))).to(tl.int32)
        tl.store(fresh + count + tl.cumsum(taken, 0) - 1, number, mask=taken > 0)
        count += tl.sum(taken, 0)
        ahead += tl.sum(gain, 0)
    return count, ahead


@triton.jit(do_not_specialize=["kind_stride", "m", "n", "first", "near"])
def _rounds(
    weights, positions, gains, marks, upto, worth, fresh, spoilt, goals, kind_stride, m, n, first, near,
    ROWS: tl.constexpr, LINES: tl.constexpr, SPAN: tl.constexpr, LADDER: tl.constexpr, STEPS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    weights += head * m * n
    gains += head * n
    marks += head * n
    upto += head * n
    worth += head * n
    fresh += head * n
    if tl.load(spoilt + head) != 0:  # such a head reads everything, and so says NaN itself
        for start in tl.range(0, n, SPAN):
            number = start + tl.arange(0, SPAN)
            tl.store(marks + number, tl.full([SPAN], 1, tl.int8), mask=number < n)
    else:
        goal = tl.load(goals + head)
        recovered = tl.zeros([], tl.int64)
        chosen = tl.zeros([], tl.int32)
        columns, distances = chosen + 1, chosen + near  # distance 0 and column 0, so that no row is left without keys
        while columns + distances > 0:
            recovered += _take(
                weights, positions, gains, marks, fresh, columns, kind_stride, m, n, 0, ROWS, LINES, UNIT
            )
            recovered += _take(
                weights, positions, gains, marks, fresh, distances, kind_stride, m, n, 1, ROWS, LINES, UNIT
            )
            chosen += columns + distances
            columns = chosen * 0
            distances = chosen * 0
            if (recovered.to(tl.float64) < goal) & (chosen < 2 * n):
                _count_below(marks, upto, n, SPAN)
                _count_below(marks + kind_stride, upto + kind_stride, n, SPAN)
                tl.debug_barrier()
                best = tl.maximum(
                    _weigh(gains, marks, upto + kind_stride, worth, n, first, SPAN),
                    _weigh(gains + kind_stride, marks + kind_stride, upto, worth + kind_stride, n, first, SPAN),
                )
                tl.debug_barrier()
                lacking = goal - recovered.to(tl.float64)
                floor = best * (1.0 - LADDER / STEPS)
                above = floor  # the whole ladder, unless it holds more than is lacking
                ahead = tl.zeros([], tl.int64)
                reach = _reaching(gains, worth, floor, n, SPAN)
                reach += _reaching(gains + kind_stride, worth + kind_stride, floor, n, SPAN)
                if reach.to(tl.float64) >= lacking:
                    step = chosen * 0
                    floor = best + float("inf")
                    reach = tl.zeros([], tl.int64)  # not `ahead` itself: a loop would take the two for one
                    while (step < LADDER) & (reach.to(tl.float64) < lacking):
                        step += 1
                        above = floor
                        ahead = reach
                        floor = best * (1.0 - step.to(tl.float64) / STEPS)
                        reach = _reaching(gains, worth, floor, n, SPAN)
                        reach += _reaching(gains + kind_stride, worth + kind_stride, floor, n, SPAN)
                columns, ahead = _decide(gains, worth, fresh, n, above, floor, ahead, lacking, SPAN)
                distances, ahead = _decide(
                    gains + kind_stride, worth + kind_stride, fresh + kind_stride, n, above, floor, ahead, lacking, SPAN
                )
                tl.debug_barrier()
