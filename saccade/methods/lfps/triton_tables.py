"""LFPS's tables on the device: candidates from a scan of both, and what a step adds to them. Means what
methods/lfps/tables.py means; nothing is read back to the host.

Bounds of 16 entries are not kept here, as a scan visits every entry; power sums are computed anew only where the stored
values are scaled down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.options import LARGEST
from saccade.ops.layout import flat, rows
from saccade.ops.triton.common import also, pad
from saccade.selection import Tokens

if TYPE_CHECKING:
    from saccade.methods.lfps.tables import ScoreTables

SPAN = 2048


def candidates(
    tables: ScoreTables,
    length: int,
    stop: int,
    a: float | None,
    gate: int,
    offsets: tuple[int, int],
    idle: Tensor | None,
    blocks: Tensor | None = None,
    block_size: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """``tables.candidates`` (``gate`` by its number in GATES, distance 0 at ``tables.row``), and the keys of
    ``blocks`` (int8 [units, m], 1 for a block whose keys are candidates): (offsets int64 [units + 1], indices int32
    with room behind the last list, marks int8 [units, stop] by place in the table). Units whose heads (bool [heads])
    are all ``idle`` get empty lists."""
    tables.check()
    units, device = tables.units, tables.vertical.device
    idle = None if idle is None else flat(idle, torch.bool)
    blocks = None if blocks is None else flat(blocks, torch.int8)
    chunks = triton.cdiv(stop, SPAN)
    marks = torch.empty(units, stop, dtype=torch.int8, device=device)
    counts = torch.empty(units * chunks, dtype=torch.int64, device=device)
    _scan[(chunks, units)](
        tables.vertical,
        tables.slash,
        tables.sums,
        tables.row,
        marks if idle is None else idle.view(torch.uint8),
        marks if blocks is None else blocks,
        marks,
        counts,
        tables.capacity,
        length,
        stop,
        tables.first,
        0 if blocks is None else blocks.shape[1],
        0.0 if a is None else a,
        *offsets,
        HEADS=1 if idle is None else idle.numel() // units,
        IDLE=idle is not None,
        ALL=a is None,
        GATE=gate,
        BLOCK=0 if blocks is None else block_size,
        SPAN=SPAN,
        num_warps=8,
    )
    ends = counts.cumsum(0)
    lists = torch.nn.functional.pad(ends.view(units, chunks)[:, -1], (1, 0))
    indices = torch.empty(units * stop, dtype=torch.int32, device=device)
    _list[(chunks, units)](marks, counts, ends, indices, stop, tables.first, SPAN=SPAN, num_warps=8)
    return lists, indices, marks


def learn(
    tables: ScoreTables, read: Tokens, weights: Tensor, idle: Tensor | None, decay: float, stop: int = LARGEST
) -> None:
    """See ``tables.learn``: ``weights`` fp32 [heads // lists, entries], idle bool [heads]."""
    tables.check()
    heads, weights = read.shape.heads, rows(weights.float())
    idle = None if idle is None else flat(idle, torch.bool)
    _learn[(tables.units,)](
        tables.vertical,
        tables.slash,
        tables.sums,
        tables.scale,
        tables.row,
        flat(read.offsets, torch.int64),
        flat(read.indices, torch.int32),
        weights,
        weights if idle is None else idle.view(torch.uint8),
        weights.stride(0),
        tables.capacity,
        tables.first,
        stop,
        decay,
        HEADS=heads // tables.units,
        HEADS_PAD=pad(heads // tables.units, 1),
        PER_LIST=heads // read.units,
        IDLE=idle is not None,
        SPAN=SPAN // pad(heads // tables.units, 1),
        TABLE=4096,
        num_warps=8,
    )


@triton.jit
def _threshold(sums, n, a):
    """(mean, tau) of a table, fp64, as ``tables.threshold``."""
    s1, s2, s3, s4 = tl.load(sums), tl.load(sums + 1), tl.load(sums + 2), tl.load(sums + 3)
    mean = s1 / n
    m2 = s2 - n * mean * mean
    m4 = s4 - 4.0 * mean * s3 + 6.0 * mean * mean * s2 - 3.0 * n * mean * mean * mean * mean
    spread = (n > 1.0) & (m2 > 1e-12 * s2) & (m4 > 0.0)
    tau = a * mean * m2 * m2 / tl.where(spread, m4, 1.0)
    return mean.to(tl.float32), tl.where(spread, tau, float("inf")).to(tl.float32)


@triton.jit
def _entries(vertical, slash, at, valid, base, capacity):
    """Both tables' values for the positions ``at``, 0 where a table holds none."""
    distance = base - at
    known = valid & (distance >= 0) & (distance < capacity)
    return tl.load(vertical + at, mask=valid, other=0.0), tl.load(slash + distance, mask=known, other=0.0)


@triton.jit(do_not_specialize=["capacity", "length", "stop", "first", "n_blocks", "before", "after"])
def _scan(
    vertical, slash, sums, rows, idle, blocks, marks, counts, capacity, length, stop, first, n_blocks, a, before, after,
    HEADS: tl.constexpr, IDLE: tl.constexpr, ALL: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    chunk, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * SPAN + tl.arange(0, SPAN)
    votes = 1
    if IDLE:
        votes = 0
        for head in tl.static_range(HEADS):
            votes += (tl.load(idle + unit * HEADS + head) == 0).to(tl.int32)
    n = length.to(tl.float64)
    mean_v, tau_v = _threshold(sums + unit * 8, n, a)
    mean_s, tau_s = _threshold(sums + unit * 8 + 4, n, a)
    base = (tl.load(rows + unit) - first).to(tl.int32)
    vertical += unit * capacity
    slash += unit * capacity
    here_v, here_s = _entries(vertical, slash, at, at < length, base, capacity)
    high = (here_v > mean_v) | (here_s > mean_s)
    above = (here_v > tau_v) | (here_s > tau_s)
    near = above
    if ALL:
        near = at < length
        above = near
    else:
        for offset in tl.range(-before, after + 1):
            other = at - offset
            inside = (other >= 0) & (other < length)
            value_v, value_s = _entries(vertical, slash, other, inside, base, capacity)
            near = near | (inside & ((value_v > tau_v) | (value_s > tau_s)))
    chosen = near
    if GATE < 2:
        chosen = near & high
    if GATE == 1:
        chosen = chosen | above
    if BLOCK > 0:
        block = (first + at) // BLOCK
        chosen = chosen | (tl.load(blocks + unit * n_blocks + block, mask=block < n_blocks, other=0) != 0)
    chosen = also(chosen & (at < stop), votes > 0) if IDLE else chosen & (at < stop)
    tl.store(marks + unit * stop + at, chosen.to(tl.int8), mask=at < stop)
    tl.store(counts + unit * tl.num_programs(0) + chunk, tl.sum(chosen.to(tl.int32), 0).to(tl.int64))


@triton.jit(do_not_specialize=["stop", "first"])
def _list(marks, counts, ends, indices, stop, first, SPAN: tl.constexpr):
    chunk, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * SPAN + tl.arange(0, SPAN)
    number = unit * tl.num_programs(0) + chunk
    here = tl.load(marks + unit * stop + at, mask=at < stop, other=0).to(tl.int32)
    start = tl.load(ends + number) - tl.load(counts + number)
    tl.store(indices + start + tl.cumsum(here, 0) - 1, first + at, mask=here > 0)


@triton.jit
def _powers(after, before, valid):
    """What a table's first four power sums gain: fp64 [4]."""
    x, y = tl.where(valid, after, 0.0).to(tl.float64), tl.where(valid, before, 0.0).to(tl.float64)
    xx, yy = x * x, y * y
    power = tl.arange(0, 4)
    low = tl.where(power == 0, tl.sum(x - y, 0), tl.sum(xx - yy, 0))
    high = tl.where(power == 2, tl.sum(xx * x - yy * y, 0), tl.sum(xx * xx - yy * yy, 0))
    return tl.where(power < 2, low, high)


@triton.jit(do_not_specialize=["weight_row", "capacity", "first", "stop"])
def _learn(
    vertical, slash, sums, scales, rows, offsets, indices, weights, idle, weight_row, capacity, first, stop, decay,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, PER_LIST: tl.constexpr, IDLE: tl.constexpr, SPAN: tl.constexpr,
    TABLE: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64)
    mine = tl.arange(0, HEADS_PAD)
    head = unit * HEADS + mine
    votes = mine < HEADS
    if IDLE:
        votes = votes & (tl.load(idle + head, mask=votes, other=1) == 0)
    voters = tl.sum(votes.to(tl.int32), 0)
    if voters > 0:
        lead = tl.min(tl.where(votes, mine, HEADS_PAD), 0)
        list_of = head // PER_LIST
        start_of = tl.load(offsets + list_of, mask=votes, other=0)
        lead_list = (unit * HEADS + lead) // PER_LIST
        start = tl.load(offsets + lead_list)
        size = (tl.load(offsets + lead_list + 1) - start).to(tl.int32)
        line = weights + (head % PER_LIST) * weight_row + start_of
        at = tl.arange(0, SPAN)
        total = tl.zeros([HEADS_PAD], tl.float32)
        count = 0
        for begin in tl.range(0, size, SPAN):
            number = begin + at
            key = tl.load(indices + start + number, mask=number < size, other=-1)
            learnt = (number < size) & (key >= first) & (key < stop)
            own = tl.load(line[:, None] + number[None, :], mask=votes[:, None] & learnt[None, :], other=0.0)
            total += tl.sum(own, 1)
            count += tl.sum(learnt.to(tl.int32), 0)
        total = tl.maximum(total, 1e-38)
        vertical += unit * capacity
        slash += unit * capacity
        sums += unit * 8
        scale = tl.load(scales + unit) * decay
        place, power = tl.arange(0, TABLE), tl.arange(0, 4)
        sums_v, sums_s = tl.load(sums + power), tl.load(sums + 4 + power)
        if scale < 1e-8:  # the fourth powers of stored values come near the end of float32
            sums_v, sums_s = tl.zeros([4], tl.float64), tl.zeros([4], tl.float64)
            for begin in tl.range(0, capacity, TABLE):
                inside = begin + place < capacity
                value_v = (tl.load(vertical + begin + place, mask=inside, other=0.0) * scale).to(tl.float32)
                value_s = (tl.load(slash + begin + place, mask=inside, other=0.0) * scale).to(tl.float32)
                tl.store(vertical + begin + place, value_v, mask=inside)
                tl.store(slash + begin + place, value_s, mask=inside)
                sums_v += _powers(value_v, tl.zeros([TABLE], tl.float32), inside)
                sums_s += _powers(value_s, tl.zeros([TABLE], tl.float32), inside)
            scale = scale * 0.0 + 1.0
            tl.debug_barrier()  # other threads read the entries
        tl.store(scales + unit, scale)
        row = tl.load(rows + unit).to(tl.int32)
        even = 0.5 / tl.maximum(count, 1)
        for begin in tl.range(0, size, SPAN):
            number = begin + at
            key = tl.load(indices + start + number, mask=number < size, other=-1)
            learnt = (number < size) & (key >= first) & (key < stop)
            own = tl.load(line[:, None] + number[None, :], mask=votes[:, None] & learnt[None, :], other=0.0)
            gain = tl.sum(own / total[:, None], 0) / voters
            gain = ((gain - even).to(tl.float64) / scale).to(tl.float32)
            before = tl.load(vertical + key - first, mask=learnt, other=0.0)
            tl.store(vertical + key - first, before + gain, mask=learnt)
            sums_v += _powers(before + gain, before, learnt)
            distance = row - key
            ahead = learnt & (distance >= 0)
            before = tl.load(slash + distance, mask=ahead, other=0.0)
            tl.store(slash + distance, before + gain, mask=ahead)
            sums_s += _powers(before + gain, before, ahead)
        tl.store(sums + power, sums_v)
        tl.store(sums + 4 + power, sums_s)
