"""Which keys the microbatches of a progressive read hold: those of blocks always read, then those of ranked ones."""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.ops.triton.common import also


@triton.jit
def own_counts(counts, unit, units, MICROBATCH: tl.constexpr):
    """What there is for one unit: blocks always read, ranked ones, microbatches of the former and of both."""
    listed, ranked = tl.load(counts + unit), tl.load(counts + units + unit)
    ahead = tl.cdiv(listed, MICROBATCH)
    return listed, ranked, ahead, ahead + tl.cdiv(ranked, MICROBATCH)


@triton.jit
def microbatch_keys(
    part, start, always, order, ahead, always_each, ranked, length,
    SIZE: tl.constexpr, TILE: tl.constexpr, MICROBATCH: tl.constexpr,
):  # fmt: skip
    """A tile of keys, those of microbatch ``part`` from ``start`` on; ``length`` where there is none."""
    number = start + tl.arange(0, TILE)
    entry = part * MICROBATCH + number // SIZE
    in_first = also((number // SIZE < MICROBATCH) & (entry < always_each), part < ahead)
    block = tl.load(always + entry, mask=in_first, other=0)
    entry -= ahead * MICROBATCH
    in_order = also((number // SIZE < MICROBATCH) & (entry < ranked), part >= ahead)
    block += tl.load(order + entry, mask=in_order, other=0)
    return tl.where(in_first | in_order, block * SIZE + number % SIZE, length)
