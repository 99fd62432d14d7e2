"""From marks to lists of blocks and lines on the device, and FlexPrefill's lines by token; no number goes to the
host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.layout import flat
from saccade.ops.triton.common import arrivals, pad
from saccade.selection import Blocks, Lines, Shape

SCANNED = 1024  # rows whose counts are added up at a time


def compact(shape: Shape, block_size: int, taken: Tensor) -> Blocks:
    """Block lists from ``taken`` [units, q_blocks, k_blocks] (int8 or bool, causal). ``indices`` keeps room for every
    block, since only the device knows how many there are."""
    return Blocks(shape, block_size, *lists_of(taken.flatten(0, 1)))


def compact_lines(shape: Shape, columns: Tensor, distances: Tensor) -> Lines:
    """Lines from bool [units, k_len] each, with room like :func:`compact`'s."""
    return Lines(shape, *lists_of(columns), *lists_of(distances))


def lists_of(taken: Tensor) -> tuple[Tensor, Tensor]:
    """(offsets int64 [rows + 1], indices int32) of what is taken, int8 or bool [rows, m] of 0 and 1."""
    rows, m = taken.shape
    taken = taken.contiguous() if taken.dtype in (torch.bool, torch.int8) else flat(taken != 0, torch.bool)
    if not rows:
        return taken.new_zeros(1, dtype=torch.int64), taken.new_empty(0, dtype=torch.int32)
    marks, offsets = taken.view(torch.int8), torch.empty(rows + 1, dtype=torch.int64, device=taken.device)
    _count[(rows,)](marks, offsets, arrivals(taken.device, 1), m, WIDTH=width_of(m), SCANNED=SCANNED)
    return offsets, listed(marks, offsets)


def listed(marks: Tensor, offsets: Tensor) -> Tensor:
    """What is taken, ``marks`` int8 [rows, m], as int32 [rows * m], whose entries from ``offsets[rows]`` on mean
    nothing."""
    rows, m = marks.shape
    indices = torch.empty(marks.numel(), dtype=torch.int32, device=marks.device)
    _compact[(rows,)](marks, offsets, indices, m, WIDTH=width_of(m))
    return indices


def width_of(m: int) -> int:
    """Entries of a row of ``m`` that a program looks at at a time."""
    return min(1024 if m <= 4096 else 4096, pad(m))


def kept_lines(mass: Tensor, gamma: float, forced: int, least: int, most: int | None) -> tuple[Tensor, Tensor]:
    """FlexPrefill's Alg. 3 by token (``methods.flexprefill.method.token_lines``) from ``mass`` fp32 [2, heads, n], the
    weight by column and by distance: two bool [heads, n].

    Everything is decided in order of falling weight; only the ``max(least, most)`` heaviest lines of a kind can be
    among so many of both.
    """
    n = mass.shape[2]
    values, order = torch.sort(mass, dim=2, descending=True, stable=True)
    upto = values.cumsum(2, dtype=torch.float64)
    total = upto[..., -1:]
    before = torch.where(torch.isfinite(total) & (total > 0), (upto - values) / total, 0.0)
    always = order < forced
    keep = before < max(gamma, 1e-9)  # the heaviest of all is wanted even by gamma=0
    limits = [limit for limit in (most, least) if limit is not None]
    bound = {limit: _among_least(before, always, limit, 2 * min(forced, n)) for limit in limits if 0 < limit < 2 * n}
    if most is not None:
        keep = keep & bound.get(most, keep)
    keep = keep | always
    if least > 0:
        keep = keep | bound.get(least, torch.ones_like(keep))
    marks = torch.empty_like(keep).scatter_(2, order, keep)
    return marks[0], marks[1]


def _among_least(before: Tensor, always: Tensor, count: int, forced: int) -> Tensor:
    """bool like ``before`` fp64 [2, heads, n]: what is among the ``count`` least of both kinds together, of which the
    ``forced`` entries of ``always`` come first."""
    width = min(count, before.shape[2])
    found = torch.zeros_like(always)
    count -= forced
    if count <= 0:
        return found
    heads = before.shape[1]
    head = before[..., :width].masked_fill(always[..., :width], torch.inf)
    both = head.transpose(0, 1).reshape(heads, -1)
    count = min(count, both.shape[1])
    least = torch.topk(both, count, dim=1, largest=False, sorted=False).values.amax(1, keepdim=True)
    below, equal = both < least, both == least
    taken = below | (equal & (equal.cumsum(1) <= count - below.sum(1, keepdim=True)))
    found[..., :width] = taken.view(heads, 2, -1).transpose(0, 1)
    return found


@triton.jit
def scan_offsets(offsets, arrived, row, count, rows, SCANNED: tl.constexpr):
    """Write down ``count``, how many entries list ``row`` of ``rows`` has. The last program that does so makes
    ``offsets`` of the counts."""
    tl.store(offsets + 1 + row, count.to(tl.int64))
    tl.debug_barrier()
    others = tl.atomic_add(arrived, tl.cast(1, tl.int64), sem="acq_rel", scope="gpu")
    if others == rows - 1:
        tl.store(arrived, tl.cast(0, tl.int64))
        tl.store(offsets, tl.cast(0, tl.int64))
        before = tl.cast(0, tl.int64)
        for start in tl.range(0, rows, SCANNED):
            at = start + tl.arange(0, SCANNED)
            counts = tl.load(offsets + 1 + at, mask=at < rows, other=0, volatile=True)
            tl.store(offsets + 1 + at, before + tl.cumsum(counts, 0), mask=at < rows)
            before += tl.sum(counts, 0)


@triton.jit(do_not_specialize=["m"])
def _count(taken, offsets, arrived, m, WIDTH: tl.constexpr, SCANNED: tl.constexpr):
    row = tl.program_id(0)
    line = taken + row.to(tl.int64) * m
    count = tl.zeros([WIDTH], tl.int32)
    for start in tl.range(0, m, WIDTH):
        at = start + tl.arange(0, WIDTH)
        count += tl.load(line + at, mask=at < m, other=0).to(tl.int32)
    scan_offsets(offsets, arrived, row, tl.sum(count, 0), tl.num_programs(0), SCANNED)


@triton.jit(do_not_specialize=["k_blocks"])
def _compact(taken, offsets, indices, k_blocks, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(offsets + row)
    for start in tl.range(0, k_blocks, WIDTH):
        block = start + tl.arange(0, WIDTH)
        here = tl.load(taken + row * k_blocks + block, mask=block < k_blocks, other=0).to(tl.int32)
        tl.store(indices + at + tl.cumsum(here, 0) - 1, block, mask=here > 0)
        at += tl.sum(here, 0)
