"""A sorting network over the words of one program: Batcher's bitonic sort (Batcher 1968, Sorting networks and their
applications) on a tile that is seen as a hypercube, a dimension for each bit of a word's place.

Triton's own ``tl.sort`` is the same network, but compares each pair twice and lets the layout of what was loaded say
which places one thread holds. Here they are neighbours, so that most comparisons need no other thread.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def neighbours(first, COUNT: tl.constexpr, EACH: tl.constexpr):
    """int32 [EACH, COUNT // EACH], the numbers from ``first`` on. Of what is loaded for them a thread holds a column,
    where EACH is COUNT over the program's threads, and :func:`in_line` puts the columns behind each other."""
    WIDE: tl.constexpr = COUNT // EACH
    return first + tl.arange(0, EACH)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]


@triton.jit
def in_line(tile, COUNT: tl.constexpr):
    """The ``COUNT`` words of a tile of :func:`neighbours`, column by column."""
    return tl.reshape(tl.trans(tile), [COUNT])


@triton.jit
def _digit(BITS: tl.constexpr, bit: tl.constexpr):
    """Bit ``bit`` of every place of the hypercube, as a bool."""
    return tl.reshape(tl.arange(0, 2), [1] * (BITS - 1 - bit) + [2] + [1] * bit) != 0


@triton.jit
def _compare(words, rising, BITS: tl.constexpr, bit: tl.constexpr, OWN: tl.constexpr):
    """Puts the words whose places differ in ``bit`` alone in order. ``OWN``: both lie with one thread."""
    other = tl.sum(words, BITS - 1 - bit, keep_dims=True) - words  # the compiler sees that it is a move
    behind = _digit(BITS, bit)
    if OWN:  # both ask the same of the pair, so that it is compared once
        stays = tl.where(behind, other > words, words > other) ^ rising
    else:
        stays = (words > other) ^ (behind ^ rising)
    return tl.where(stays, words, other)


@triton.jit
def sort_falling(words, BITS: tl.constexpr, EACH: tl.constexpr):
    """2 ** BITS words (integers, as :func:`in_line` has them), greatest first. ``EACH``: that of :func:`neighbours`;
    only speed hangs on it."""
    cube = tl.reshape(words, [2] * BITS)
    for run in tl.static_range(1, BITS + 1):
        rising = _digit(BITS, run) if run < BITS else tl.full([1] * BITS, 0, tl.int1)
        for bit in tl.static_range(run):
            cube = _compare(cube, rising, BITS, run - 1 - bit, (1 << (run - 1 - bit)) < EACH)
    return tl.reshape(cube, [1 << BITS])
