"""The threshold from which on shares add up to a part of all of them, found on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.layout import flat
from saccade.ops.triton.common import pad

# Measured on a Hopper GPU: beyond ONE_PROGRAM 16 launches of many programs take less than one program of a row.
ONE_PROGRAM = 1 << 18  # entries of a row
SPAN = 8192
WARPS = 16
STAGES = 4
CHUNK = 8192  # entries that one of many programs sums in one pass


def mass_threshold(mass: Tensor, share: float, active: Tensor) -> Tensor:
    """The greatest t whose entries >= t hold ``share`` of each row of ``mass`` (fp32 [rows, m], within 0 .. 1): fp32
    [rows]. Rows that are not ``active`` (bool [rows]) are skipped and get 0.

    The bits of floats from 0 on order as they do, and those up to 1 have 30. Equal entries stand or fall together.
    """
    rows, m = mass.shape
    mass, active = flat(mass, torch.float32), flat(active, torch.bool)
    share = max(share, 1e-9)  # the heaviest of all is wanted even by a share of 0
    if m <= ONE_PROGRAM:
        found = torch.empty(rows, dtype=torch.float32, device=mass.device)
        span = min(SPAN, pad(m))
        warps = min(WARPS, max(1, span // 128))
        _threshold[(rows,)](mass, active, found, m, share, SPAN=span, STAGES=STAGES, num_warps=warps)
        return found
    chunks = -(-m // CHUNK)
    parts = torch.empty(rows, chunks, 16, dtype=torch.float32, device=mass.device)
    bits = torch.zeros(rows, dtype=torch.int32, device=mass.device)
    target = torch.zeros(rows, dtype=torch.float32, device=mass.device)
    for shift in range(28, -4, -4):
        _mass_above[(rows, chunks)](mass, active, bits, parts, m, chunks, shift, SPAN=min(1024, pad(m)), CHUNK=CHUNK)
        _next_bits[(rows,)](active, bits, target, parts, chunks, share, shift, CHUNKS=pad(chunks, 1))
    return bits.view(torch.float32)


@triton.jit
def _threshold(mass, active, found, m, share, SPAN: tl.constexpr, STAGES: tl.constexpr):
    """Two bits a pass: that takes the fewest operations an entry. Rows of a multiple of 16 entries are fetched 16 bytes
    at a time, so that ``m`` is not kept from being specialized."""
    row = tl.program_id(0).to(tl.int64)
    bits = tl.zeros([], tl.int32)
    if tl.load(active + row) != 0:
        mass += row * m
        whole = tl.zeros([SPAN], tl.float32)
        for start in tl.range(0, m, SPAN, num_stages=STAGES):
            at = start + tl.arange(0, SPAN)
            whole += tl.load(mass + at, mask=at < m, other=0.0)
        wanted = share * tl.sum(whole, 0)
        for turn in tl.range(0, 15):
            shift = 28 - 2 * turn
            one, two, three = bits + (1 << shift), bits + (2 << shift), bits + (3 << shift)
            first = tl.zeros([SPAN], tl.float32)
            second = tl.zeros([SPAN], tl.float32)
            third = tl.zeros([SPAN], tl.float32)
            for start in tl.range(0, m, SPAN, num_stages=STAGES):
                at = start + tl.arange(0, SPAN)
                value = tl.load(mass + at, mask=at < m, other=0.0)
                pattern = value.to(tl.int32, bitcast=True)
                first += tl.where(pattern >= one, value, 0.0)
                second += tl.where(pattern >= two, value, 0.0)
                third += tl.where(pattern >= three, value, 0.0)
            digit = (tl.sum(first, 0) >= wanted).to(tl.int32) + (tl.sum(second, 0) >= wanted).to(tl.int32)
            digit += (tl.sum(third, 0) >= wanted).to(tl.int32)
            bits += digit << shift
    tl.store(found + row, bits.to(tl.float32, bitcast=True))


@triton.jit
def row_threshold(value, share):
    """The greatest t whose entries >= t hold ``share`` of ``value`` fp32 [m], each within 0 .. 1."""
    pattern = value.to(tl.int32, bitcast=True)
    wanted = share * tl.sum(value, 0)
    bits = tl.zeros([], tl.int32)
    for place in tl.range(0, 30):
        higher = bits + (1 << (29 - place))
        enough = tl.sum(tl.where(pattern >= higher, value, 0.0), 0) >= wanted
        bits = tl.where(enough, higher, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _above(mass, at, m, known, shift):
    """Weight of entries ``at`` that lie above each of the candidates known + digit << shift."""
    value = tl.load(mass + at, mask=at < m, other=0.0)
    pattern = value.to(tl.int32, bitcast=True)
    # The digit says how many of the candidates this entry reaches.
    digit = tl.where(pattern < known, -1, tl.minimum((pattern - known) >> shift, 15))
    return tl.sum(tl.where(digit[:, None] >= tl.arange(0, 16)[None, :], value[:, None], 0.0), 0)


@triton.jit(do_not_specialize=["m", "chunks", "shift"])
def _mass_above(mass, active, bits, parts, m, chunks, shift, SPAN: tl.constexpr, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(active + row):
        known = tl.load(bits + row)
        step = tl.arange(0, 16)
        above = tl.zeros([16], tl.float32)
        for start in tl.range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, m), SPAN):
            at = start + tl.arange(0, SPAN)
            above += _above(mass + row.to(tl.int64) * m, at, m, known, shift)
        tl.store(parts + (row * chunks + chunk) * 16 + step, above)


@triton.jit(do_not_specialize=["chunks", "shift"])
def _next_bits(active, bits, target, parts, chunks, share, shift, CHUNKS: tl.constexpr):
    row = tl.program_id(0)
    if tl.load(active + row):
        chunk, step = tl.arange(0, CHUNKS), tl.arange(0, 16)
        above = tl.load(
            parts + (row * chunks + chunk)[:, None] * 16 + step[None, :], mask=(chunk < chunks)[:, None], other=0.0
        )
        above = tl.sum(above, 0)
        if shift == 28:  # the first candidate of the first pass is 0: all entries lie above it
            tl.store(target + row, share * tl.max(above, 0))
        wanted = tl.where(shift == 28, share * tl.max(above, 0), tl.load(target + row))
        digit = tl.maximum(tl.sum((above >= wanted).to(tl.int32), 0) - 1, 0)
        tl.store(bits + row, tl.load(bits + row) + (digit << shift))
