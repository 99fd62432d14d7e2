"""Rounds of LoopServe's cover with many programs for a head: what ``triton_rounds._rounds`` does in one program, as a
row of small kernels, which long contexts need. Nobody on the host knows when a head is done; from then on its kernels
end at once, and a head that needs more rounds than were launched goes on where they stopped.

Of ``state`` int64 [heads, 4] the entries are: recovered, how many columns and distances the next round takes, and how
many lines were chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.loopserve.rounds import LADDER, STEPS, UNIT
from saccade.ops.triton.common import pad

CHUNK = 2048  # lines of a program
TAKERS = 16  # programs that take a head's lines
COUNTED = 4096, 8  # lines that a program counts at once, and its warps


def launch_rounds(
    rounds: int, weights: Tensor, positions: Tensor, gains: Tensor, marks: Tensor, upto: Tensor, worth: Tensor,
    fresh: Tensor, goals: Tensor, state: Tensor, first: int,
) -> None:  # fmt: skip
    """At most ``rounds`` rounds of every head. The tensors are those of ``triton_rounds.cover``."""
    heads, m, n = weights.shape
    chunks, rows, kind = triton.cdiv(n, CHUNK), pad(m), heads * n
    best = torch.empty(heads, 2 * chunks, dtype=torch.float64, device=weights.device)
    sums = torch.empty(heads, 2 * chunks, LADDER, dtype=torch.int64, device=weights.device)
    wide = {"CHUNK": CHUNK, "PARTS": pad(2 * chunks, 1), "LADDER": LADDER, "STEPS": STEPS, "num_warps": 4}
    for _ in range(rounds):
        for turn in (0, 1):
            _take_lines[(TAKERS, heads)](
                weights, positions, gains, marks, fresh, state, kind, m, n,
                KIND=turn, ROWS=rows, LINES=max(1, 4096 // rows), UNIT=UNIT, num_warps=8,
            )  # fmt: skip
        _count_lines[(2, heads)](marks, upto, state, kind, n, SPAN=min(COUNTED[0], pad(n)), num_warps=COUNTED[1])
        grid = (chunks, heads, 2)
        _weigh_lines[grid](gains, marks, upto, worth, best, state, goals, kind, n, first, CHUNK=CHUNK, num_warps=4)
        _sum_ladder[grid](gains, worth, best, sums, state, goals, kind, n, **wide)
        _decide_lines[grid](gains, worth, best, sums, fresh, state, goals, kind, n, **wide)


@triton.jit
def take(
    weights, positions, gains, marks, fresh, begin, count, every, kind_stride, m, n,
    KIND: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Recover lines of a kind, ``LINES`` of every ``every`` in the list of ``count`` from the ``begin``-th on: their
    weight, which they and the lines that cross them lose."""
    row = tl.arange(0, ROWS)
    position = tl.load(positions + row, mask=row < m, other=-1)[None, :]
    recovered = tl.zeros([], tl.int64)
    for start in tl.range(begin, count, every):
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
def count_below(marks, upto, n, SPAN: tl.constexpr):
    """How many of lines 0 .. number are chosen, for every number."""
    done = tl.zeros([], tl.int32)
    for start in tl.range(0, n, SPAN):
        number = start + tl.arange(0, SPAN)
        here = tl.load(marks + number, mask=number < n, other=0).to(tl.int32)
        tl.store(upto + number, done + tl.cumsum(here, 0), mask=number < n)
        done += tl.sum(here, 0)


@triton.jit
def _goes_on(state, goals, head, n):
    """Whether the head lacks weight, and how much."""
    recovered = tl.load(state + head * 4).to(tl.float64)
    goal = tl.load(goals + head)
    return (recovered < goal) & (tl.load(state + head * 4 + 3) < 2 * n), goal - recovered


@triton.jit(do_not_specialize=["kind_stride", "m", "n"])
def _take_lines(
    weights, positions, gains, marks, fresh, state, kind_stride, m, n,
    KIND: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    count = tl.load(state + head * 4 + 1 + KIND).to(tl.int32)
    begin = tl.program_id(0) * LINES
    if begin < count:
        found = take(
            weights + head * m * n, positions, gains + head * n, marks + head * n, fresh + head * n, begin, count,
            tl.num_programs(0) * LINES, kind_stride, m, n, KIND, ROWS, LINES, UNIT,
        )  # fmt: skip
        tl.atomic_add(state + head * 4, found, sem="relaxed")


@triton.jit(do_not_specialize=["kind_stride", "n"])
def _count_lines(marks, upto, state, kind_stride, n, SPAN: tl.constexpr):
    """Chosen lines of a kind up to each; the lines that were just taken are no longer to take."""
    kind, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(state + head * 4 + 1 + kind)
    if count > 0:
        own = kind * kind_stride + head * n
        count_below(marks + own, upto + own, n, SPAN)
        tl.atomic_add(state + head * 4 + 3, count, sem="relaxed")
        tl.store(state + head * 4 + 1 + kind, count * 0)


@triton.jit(do_not_specialize=["kind_stride", "n", "first"])
def _weigh_lines(gains, marks, upto, worth, best, state, goals, kind_stride, n, first, CHUNK: tl.constexpr):
    """Every line's gain per new cell, and the greatest of the chunk."""
    head, kind = tl.program_id(1).to(tl.int64), tl.program_id(2)
    goes_on, _ = _goes_on(state, goals, head, n)
    if goes_on:
        own = kind * kind_stride + head * n
        crossing = upto + (1 - kind) * kind_stride + head * n
        number = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        inside = number < n
        crossed = tl.load(crossing + n - 1 - number, mask=inside, other=0)
        crossed -= tl.load(crossing + first - 1 - number, mask=inside & (number < first), other=0)
        cells = tl.maximum(tl.minimum(n - first, n - number) - crossed, 1)
        gain = tl.load(gains + own + number, mask=inside, other=0).to(tl.float64)
        chosen = tl.load(marks + own + number, mask=inside, other=1) != 0
        found = tl.where(chosen, -1.0, gain / cells.to(tl.float64))
        tl.store(worth + own + number, found, mask=inside)
        chunks = tl.num_programs(0)
        tl.store(best + head * 2 * chunks + kind * chunks + tl.program_id(0), tl.max(found, 0))


@triton.jit
def _best_of(best, head, chunks, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(best + head * 2 * chunks + part, mask=part < 2 * chunks, other=-1.0), 0)


@triton.jit(do_not_specialize=["kind_stride", "n"])
def _sum_ladder(
    gains, worth, best, sums, state, goals, kind_stride, n,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, LADDER: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The chunk's summed gain of lines at or above each step of the ladder."""
    head, kind, chunks = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(0)
    goes_on, _ = _goes_on(state, goals, head, n)
    if goes_on:
        top = _best_of(best, head, chunks, PARTS)
        own = kind * kind_stride + head * n
        number = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        found = tl.load(worth + own + number, mask=number < n, other=-2.0)
        gain = tl.load(gains + own + number, mask=found >= top * (1.0 - LADDER / STEPS), other=0)
        to = sums + (head * 2 * chunks + kind * chunks + tl.program_id(0)) * LADDER
        for step in tl.static_range(1, LADDER + 1):
            tl.store(to + step - 1, tl.sum(tl.where(found >= top * (1.0 - step / STEPS), gain, 0), 0))


@triton.jit(do_not_specialize=["kind_stride", "n"])
def _decide_lines(
    gains, worth, best, sums, fresh, state, goals, kind_stride, n,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, LADDER: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """List the chunk's lines that the next round takes, in any order: lines of a kind share no cell."""
    head, kind, chunks = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(0)
    goes_on, lacking = _goes_on(state, goals, head, n)
    if goes_on:
        top = _best_of(best, head, chunks, PARTS)
        part, step = tl.arange(0, PARTS), tl.arange(0, LADDER)
        each = tl.load(
            sums + (head * 2 * chunks + part[:, None]) * LADDER + step[None, :], mask=(part < 2 * chunks)[:, None],
            other=0,
        )  # fmt: skip
        total = tl.sum(each, 0)
        short = tl.sum((total.to(tl.float64) < lacking).to(tl.int32), 0)  # steps that do not hold what is lacking
        whole = short == LADDER  # the whole ladder then
        floor = top * (1.0 - (short + 1).to(tl.float64) / STEPS)
        above = tl.where(short == 0, float("inf"), top * (1.0 - short.to(tl.float64) / STEPS))
        floor = tl.where(whole, above, floor)
        # What lies above the step, and between it and the one before in the chunks ahead.
        upper = tl.where(step[None, :] == short - 1, each, 0)
        lower = tl.where(step[None, :] == short, each, 0)
        mine = kind * chunks + tl.program_id(0)
        ahead = tl.sum(tl.sum(upper, 1), 0)
        ahead += tl.sum(tl.where(part < mine, tl.sum(lower - upper, 1), 0), 0)
        own = kind * kind_stride + head * n
        number = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        found = tl.load(worth + own + number, mask=number < n, other=-2.0)
        near = (found >= floor) & (found < above)
        gain = tl.load(gains + own + number, mask=near, other=0)
        before = ahead + tl.cumsum(gain, 0) - gain
        taken = ((found >= above) | (near & (before.to(tl.float64) < lacking))).to(tl.int32)
        count = tl.sum(taken, 0)
        if count > 0:
            at = tl.atomic_add(state + head * 4 + 1 + kind, count.to(tl.int64), sem="relaxed")
            tl.store(fresh + own + at + tl.cumsum(taken, 0) - 1, number, mask=taken > 0)
