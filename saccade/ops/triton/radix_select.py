"""The least of the highest scores, found digit by digit of their bits (radix select): parts of kernels, for scores that
one program holds, and for lists that it reads. batched_best.py searches long lists by many programs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered_bits(value):
    """uint32 that order as the float32 ``value`` do; -inf is the least of all numbers."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def least_held(order, wanted):
    """Of scores that one program holds, as ``ordered_bits`` and 0 for what is none: the bits of the least among the
    ``wanted`` highest (at least one), and how many that equal it are among those. Bit by bit, until a bound parts as
    many from the others; those that all scores share are known at once."""
    most = tl.max(order, 0)
    differ = most ^ tl.min(tl.where(order > 0, order, most), 0)
    bit = tl.full([], 2147483648, tl.uint32)
    while bit > differ:
        bit = bit >> 1
    # The greatest known with at least `wanted` entries at or above it.
    bound = most & ~(bit | (bit - tl.where(bit > 0, 1, 0).to(tl.uint32)))
    reached = wanted + 1
    while (bit != 0) & (reached != wanted):
        higher = bound | bit
        count = tl.sum((order >= higher).to(tl.int32), 0)
        bound = tl.where(count >= wanted, higher, bound)
        reached = tl.where(count >= wanted, count, reached)
        bit = bit >> 1
    bound = tl.min(tl.where(order >= bound, order, tl.full([], 4294967295, tl.uint32)), 0)
    return bound, wanted - tl.sum((order > bound).to(tl.int32), 0)


@triton.jit
def best_of(score, take):
    """Which of the scores that one program holds are among the ``take`` best (at least one), ties to the first; none
    that is -inf."""
    free = score > float("-inf")
    order = ordered_bits(score + 0.0)  # -0.0 and 0.0 are equal, but not their bits
    bound, spare = least_held(tl.where(free, order, 0), take)
    level = free & (order == bound)
    return (free & (order > bound)) | (level & (tl.cumsum(level.to(tl.int32), 0) <= spare))


@triton.jit
def least_taken(line, first, last, low, high, wanted, SPAN: tl.constexpr):
    """The same search by one program, for entries ``first .. last - 1`` of a short list but those from ``low`` to
    ``high`` (the same where none are left out): the bits of the least score among the ``wanted`` highest, and how many
    that equal it are among those."""
    at = tl.arange(0, SPAN)
    bound = tl.full([], 0, tl.uint32)
    spare = wanted
    digits = tl.arange(0, 256)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        found = tl.zeros([256], tl.int32)
        for start in tl.range(first, last, SPAN):
            inside = (start + at < last) & ((start + at < low) | (start + at >= high))
            order = ordered_bits(tl.load(line + start + at, mask=inside, other=0.0) + 0.0)
            digit = ((order >> shift) & 255).to(tl.int32)
            if step > 0:
                inside = inside & ((order >> (shift + 8)) == (bound >> (shift + 8)))
            others = SPAN - tl.sum(inside.to(tl.int32), 0)  # which are counted as zeros
            found += tl.histogram(tl.where(inside, digit, 0), 256) - tl.where(digits == 0, others, 0)
        reach = tl.sum(found, 0) - tl.cumsum(found, 0) + found  # entries of this digit and above
        best = tl.max(tl.where(reach >= spare, digits, 0), 0)
        spare -= tl.sum(tl.where(digits > best, found, 0), 0)
        bound = bound | (best.to(tl.uint32) << shift)
    return bound, spare


@triton.jit
def taken_of(line, number, inside, bound, spare, level_before):
    """Which of the entries ``number`` that are ``inside`` are taken, and how many equal the least up to them."""
    order = ordered_bits(tl.load(line + number, mask=inside, other=0.0) + 0.0)
    level = inside & (order == bound)
    earlier = level_before + tl.cumsum(level.to(tl.int32), 0)
    return (inside & (order > bound)) | (level & (earlier <= spare)), level_before + tl.sum(level.to(tl.int32), 0)
