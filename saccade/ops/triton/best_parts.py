"""How lists that are cut into parts say what is sought in them, and what was found (batched_best.py)."""

from __future__ import annotations

import triton
import triton.language as tl

BOUNDS = 5  # int32 of a list's bounds: see batched_best.find_best
EACH_BOUNDS: tl.constexpr = tl.constexpr(BOUNDS)
KNOWN: tl.constexpr = tl.constexpr(2176)  # behind the counts: what is known after each pass, bound and spare
WORDS = 2184


@triton.jit
def bounds_at(bounds, entry, EACH: tl.constexpr):
    """First and end of a list, the hidden entries (from, to; the same where none are), and how many of how many that
    are left are taken."""
    own = bounds + entry // EACH * EACH_BOUNDS
    first, last = tl.load(own), tl.load(own + 1)
    low, high = tl.maximum(tl.load(own + 2), first), tl.minimum(tl.load(own + 3), last)
    high = tl.maximum(high, low)
    between = tl.maximum(last - first - (high - low), 0)
    return first, last, low, high, tl.minimum(tl.load(own + 4), between), between


@triton.jit
def put_bounds(bounds, at, first, last, low, high, taken):
    """As :func:`bounds_at` reads them, of list ``at``: ``taken`` entries of those left."""
    own = bounds + at * EACH_BOUNDS
    tl.store(own, first)
    tl.store(own + 1, last)
    tl.store(own + 2, low)
    tl.store(own + 3, high)
    tl.store(own + 4, taken)


@triton.jit
def part_at(first, last, part, SPAN: tl.constexpr):
    """Where part ``part`` of as many as the grid has begins and ends."""
    each = tl.cdiv(tl.cdiv(last - first, SPAN), tl.num_programs(0)) * SPAN
    start = first + part * each
    return start, tl.minimum(start + each, last)


@triton.jit
def known_at(words, taken, entry, part, begins, wanted, between, PARTS: tl.constexpr, WORDS: tl.constexpr):
    """Of a part of a list: bits of the least score taken, how many that equal it are, how many equal ones the parts
    before have, and how many entries those take; ``begins`` where all are taken, which are above 0 bits or as many as
    may equal them."""
    bound, spare = tl.full([], 0, tl.uint32), tl.full([], 2147483647, tl.int32)
    level, placed = tl.full([], 0, tl.int32), begins
    if wanted < between:
        own = words + entry.to(tl.int64) * WORDS + KNOWN + 6
        bound, spare = tl.load(own).to(tl.uint32, bitcast=True), tl.load(own + 1)
        number = tl.arange(0, PARTS)
        counts = taken + (entry.to(tl.int64) * tl.num_programs(0) + number) * 2
        above = tl.sum(tl.load(counts, mask=number < part, other=0), 0)
        level = tl.sum(tl.load(counts + 1, mask=number < part, other=0), 0)
        placed = above + tl.minimum(level, spare)
    return bound, spare, level, placed
