"""LoopServe's greedy cover on the device: means what ``line_cover.cover_lines`` with exact overlaps means.

One program covers one head: it takes a line, sets the entries that it recovered to 0, takes them from the lines that
cross it, and looks at all lines again. The gains are float64 as on the host, added in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.layout import flat, written
from saccade.ops.triton.common import pad

WARPS = 16


def cover(weights: Tensor, positions: Tensor, first: int, share: float) -> Tensor:
    """Lines that recover ``share`` of ``weights`` fp32 [heads, m, n], the causal softmax rows at ``positions`` (int64
    [m], rising, within ``first .. n - 1``): int8 [2, heads, n], which columns and which distances; every column where
    weights are NaN. ``weights`` is overwritten."""
    heads, m, n = written("weights", weights, torch.float32).shape
    positions = flat(positions, torch.int64)
    device = weights.device
    gains = torch.empty(2, heads, n, dtype=torch.float64, device=device)  # columns, distances
    gains[0] = weights.sum(1, dtype=torch.float64)
    span = min(2048, pad(n))
    _sum_distances[(triton.cdiv(n, span), heads)](weights, positions, gains[1], m, n, SPAN=span, num_warps=4)
    spoilt = ~gains[0].sum(1, keepdim=True).isfinite()  # such a head reads everything, and so says NaN itself
    number = torch.arange(n, device=device)
    cells = torch.clamp(n - number, max=n - first).to(torch.int32).expand(2, heads, n).contiguous()
    marks = torch.zeros(2, heads, n, dtype=torch.int8, device=device)
    _cover[(heads,)](
        weights,
        positions,
        gains,
        cells,
        marks,
        heads * n,
        m,
        n,
        first,
        share,
        ROWS=pad(m),
        SPAN=4096 if n > 2048 else 2048,
        num_warps=WARPS if n > 2048 else 8,
    )
    marks[0] |= spoilt
    return marks


@triton.jit(do_not_specialize=["m", "n"])
def _sum_distances(weights, positions, gains, m, n, SPAN: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    distance = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    total = tl.zeros([SPAN], tl.float64)
    for j in tl.range(0, m):
        key = tl.load(positions + j) - distance
        total += tl.load(weights + (head * m + j) * n + key, mask=(key >= 0) & (distance < n), other=0.0).to(tl.float64)
    tl.store(gains + head * n + distance, total, mask=distance < n)


@triton.jit
def _best(gains, cells, low, high, n, SPAN: tl.constexpr):
    """The line of greatest gain per new cell, the lower one of equals; lines ``low .. high - 1`` have one cell less.
    SPAN is no less than there are threads, so that no two of them count the same line down."""
    at = tl.arange(0, SPAN)
    best = tl.full([SPAN], float("-inf"), tl.float64)
    line = at
    for start in tl.range(0, n, SPAN):
        number = start + at
        inside = number < n
        gain = tl.load(gains + number, mask=inside, other=float("-inf"))
        left = tl.load(cells + number, mask=inside, other=1)
        crossed = (number >= low) & (number < high)
        tl.store(cells + number, left - 1, mask=inside & crossed)
        left -= crossed.to(tl.int32)
        worth = gain / tl.maximum(left, 1).to(tl.float64)
        line = tl.where(worth > best, number, line)
        best = tl.maximum(best, worth)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, line, n), 0)


@triton.jit(do_not_specialize=["kind_stride", "m", "n", "first"])
def _cover(
    weights, positions, gains, cells, marks, kind_stride, m, n, first, share,
    ROWS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    weights += head * m * n
    gains += head * n
    cells += head * n
    marks += head * n
    row = tl.arange(0, ROWS)
    position = tl.load(positions + row, mask=row < m, other=-1)
    at = tl.arange(0, SPAN)
    whole = tl.zeros([SPAN], tl.float64)
    for start in tl.range(0, n, SPAN):
        whole += tl.load(gains + start + at, mask=start + at < n, other=0.0)
    goal = share * tl.sum(whole, 0)
    recovered = tl.sum(tl.zeros([SPAN], tl.float64), 0)
    chosen = 0
    line = tl.zeros([], tl.int32)
    kind = 1  # diagonal 0, then column 0, so that no row is left without keys
    while ((recovered < goal) | (chosen < 2)) & (chosen < 2 * n):
        # Take the line: what it recovers, the lines that cross it lose.
        reach = position >= line
        across = position - line
        key = tl.where(kind == 1, across, line)
        entry = weights + row.to(tl.int64) * n + key
        found = tl.load(entry, mask=reach, other=0.0)
        met = gains + (1 - kind) * kind_stride + across
        left = tl.load(met, mask=reach, other=0.0) - found.to(tl.float64)
        tl.debug_barrier()  # several threads may hold the same row: all have read before one writes
        tl.store(entry, tl.zeros([ROWS], tl.float32), mask=reach)
        tl.store(met, left, mask=reach)
        tl.store(gains + kind * kind_stride + line, float("-inf"))
        tl.store(marks + kind * kind_stride + line, 1)
        recovered += tl.sum(found.to(tl.float64), 0)
        chosen += 1
        tl.debug_barrier()  # other threads read the gains and entries
        low, high = tl.maximum(first - line, 0), n - line
        by_column, column = _best(gains, cells, tl.where(kind == 1, low, 0), tl.where(kind == 1, high, 0), n, SPAN)
        by_distance, distance = _best(
            gains + kind_stride, cells + kind_stride, tl.where(kind == 1, 0, low), tl.where(kind == 1, 0, high), n, SPAN
        )
        if chosen == 1:
            kind, line = 0, 0
        else:
            kind = tl.where(by_distance >= by_column, 1, 0)
            line = tl.where(by_distance >= by_column, distance, column)
        tl.debug_barrier()
