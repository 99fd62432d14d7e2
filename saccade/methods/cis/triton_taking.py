"""CIS in recorded steps: what a head reads and will share, chosen by one program that holds its scores. Part of a
kernel (triton_one_launch.py); means what sharing.py means."""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.methods.cis.triton_row_words import W, budget_at
from saccade.ops.triton.common import also
from saccade.ops.triton.radix_select import least_held, ordered_bits


@triton.jit
def _best_of(order, among, wanted):
    """The ``wanted`` highest of the entries ``among`` those that ``order``, ties to the lower."""
    some = tl.sum(among.to(tl.int32), 0)
    bound, spare = tl.full([], 0, tl.uint32), some
    if (wanted > 0) & (wanted < some):
        bound, spare = least_held(tl.where(among, order, 0), wanted)
    level = among & (order == bound)
    best = (among & (order > bound)) | (level & (tl.cumsum(level.to(tl.int32), 0) <= spare))
    return also(best, wanted > 0)


@triton.jit
def take_best(
    own, reals, line, out, counted, length, at, unit, first, last, low, high, take, width,
    UNITS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """List what one head reads, by its scores at ``line``, and what its anchor shares: the keys that are read between
    sinks and window, and the neighbours of the best of them. A head's weights order keys as its scores do. How many
    keys it reads."""
    key = tl.arange(0, HELD)
    seen = (key < low) | (key >= high)
    free = (key >= first) & (key < last) & seen
    order = ordered_bits(tl.load(line + key, mask=free, other=0.0) + 0.0)
    taken = _best_of(order, free, take)
    tl.store(out + key, key, mask=key < first)
    tl.store(out + first + tl.cumsum(taken.to(tl.int32), 0) - 1, key, mask=taken)
    placed = first + tl.sum(taken.to(tl.int32), 0)
    tl.store(out + placed + key - last, key, mask=(key >= last) & (key < length))
    placed += length - last
    tl.store(counted, placed)

    sinks = tl.load(own + W.sinks).to(tl.int32)
    end = length - tl.load(own + W.local).to(tl.int32)
    best = tl.load(own + W.best)
    best = tl.where(best < 0, (budget_at(own, reals, length) // 3).to(tl.int64), best)
    reach = tl.minimum(tl.load(own + W.reach), end.to(tl.int64)).to(tl.int32)
    middle = taken & (key >= sinks) & (key < end)
    heavy = _best_of(order, middle, tl.minimum(best, length.to(tl.int64)).to(tl.int32))
    capacity, most = tl.load(own + W.capacity), tl.load(own + W.most)
    place = (at * UNITS + unit).to(tl.int64)
    moving = tl.load(own + W.moving).to(tl.pointer_type(tl.int32)) + place * most
    number = tl.cumsum(heavy.to(tl.int32), 0) - 1
    tl.store(moving + number, key, mask=heavy & (number < most))
    tl.store(moving + key, tl.full([HELD], 2147483647, tl.int32), mask=(key >= tl.max(number, 0) + 1) & (key < most))
    # A key's neighbours are other threads': the scores have been read, and give their place to marks.
    tl.debug_barrier()
    tl.store(line + key, heavy.to(tl.float32), mask=key < width)
    tl.debug_barrier()
    shared = middle
    between = (key >= sinks) & (key < end) & seen
    for away in tl.range(1, reach + 1):
        near = tl.load(line + key - away, mask=between & (key >= away), other=0.0)
        near += tl.load(line + key + away, mask=between & (key + away < width), other=0.0)
        shared = shared | (near > 0.0)
    shared = shared & between
    keys = tl.load(own + W.keys).to(tl.pointer_type(tl.int32)) + place * capacity
    number = tl.cumsum(shared.to(tl.int32), 0) - 1
    tl.store(keys + number, key, mask=shared & (number < capacity))
    tl.store(
        tl.load(own + W.counts).to(tl.pointer_type(tl.int32)) + place,
        tl.minimum(tl.sum(shared.to(tl.int32), 0), capacity.to(tl.int32)),
    )
    return placed
