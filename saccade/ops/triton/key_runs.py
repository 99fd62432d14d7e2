"""Which keys a tile of decode holds: numbers in a list, or runs of keys side by side, which are looked up once."""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.ops.triton.batch import listed_keys


@triton.jit
def listed(ids, number, upto, RUN: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr):
    """The ``number``-th keys of a list of ``upto``; of a tile of runs of keys that lie side by side, two at most, the
    first key of each."""
    key = listed_keys(ids, number, number < upto, SIZE)
    other = key
    if RUN > 1 and RUN < KEYS:
        other = listed_keys(ids, number + RUN, number + RUN < upto, SIZE)
    return key, other


@triton.jit
def seen_of(number, count, first, second, length, step, RUN: tl.constexpr, KEYS: tl.constexpr):
    """Which of a tile's keys there are, of a list of ``count`` and a sequence of ``length``."""
    if RUN == 1:
        found = (number < count) & (first < length)
    else:
        left = tl.minimum(count - number, length - first)
        if RUN == KEYS:
            found = step < left
        else:
            found = tl.where(step < RUN, step < left, step - RUN < tl.minimum(count - number - RUN, length - second))
    return found


@triton.jit
def spread(first, second, step, RUN: tl.constexpr, KEYS: tl.constexpr):
    """Of a tile all numbers, from those that its one or two runs begin with; without runs (1) they are there."""
    if RUN == 1:
        found = first
    elif RUN == KEYS:
        found = first + step
    else:
        found = tl.where(step < RUN, first + step, second + (step - RUN))
    return found
