"""Blocks of keys that LFPS's recorded steps take for candidates: those whose mean keys agree best with the queries.
Parts of kernels (triton_row_begin.py, triton_row_candidates.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.methods.lfps.triton_row_words import W
from saccade.ops.triton.best_alone import least_alone
from saccade.ops.triton.radix_select import ordered_bits

EACH = 64  # blocks that a program scores
EACH_BLOCKS: tl.constexpr = tl.constexpr(EACH)


@triton.jit
def mean_scores(
    q_ptr, pointers, lengths, scores, q_row, q_head, blocks, part, kv_head, row,
    UNITS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """How well the means of some blocks of ``SIZE`` keys agree with the queries of a KV head, whose heads share them:
    ``scores`` float32 [rows, units, blocks]."""
    GROUPED: tl.constexpr = HEADS // KV_HEADS
    full = tl.load(lengths + row) // SIZE
    member = tl.arange(0, GROUP)
    if part * EACH_BLOCKS < full:
        block = part * EACH_BLOCKS + tl.arange(0, EACH_BLOCKS)
        means = tl.multiple_of(tl.load(pointers + row).to(tl.pointer_type(q_ptr.dtype.element_ty)), 16)
        channel = tl.arange(0, D_PAD)
        head = kv_head * GROUPED + member
        q = tl.load(
            q_ptr + row.to(tl.int64) * q_row + head.to(tl.int64)[:, None] * q_head + channel[None, :],
            mask=(member < GROUPED)[:, None] & (channel < D)[None, :],
            other=0.0,
        )
        at = (block.to(tl.int64)[:, None] * KV_HEADS + kv_head) * D + channel[None, :]
        mean = tl.load(means + at, mask=(block < full)[:, None] & (channel < D)[None, :], other=0.0)
        found = tl.dot(mean, tl.trans(q), input_precision=PRECISION)
        if UNITS == HEADS:
            to = scores + (row * UNITS + head).to(tl.int64)[None, :] * blocks + block[:, None]
            tl.store(to, found, mask=(member < GROUPED)[None, :] & (block < full)[:, None])
        else:
            to = scores + (row * UNITS + kv_head).to(tl.int64) * blocks + block
            tl.store(to, tl.sum(found, 1) / GROUPED, mask=block < full)


@triton.jit
def find_least(
    scores, lengths, words, least, near, word_row, blocks, unit, row,
    UNITS: tl.constexpr, SIZE: tl.constexpr, SAMPLE: tl.constexpr, SLACK: tl.constexpr, SPAN: tl.constexpr,
    FEW: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Which blocks are a unit's best, ties to the lower, as :func:`is_best` takes it: ``least`` int32 [rows * units,
    2], the bits of the least score taken, and the last block taken that has it."""
    full = tl.load(lengths + row) // SIZE
    wanted = tl.load(words + row.to(tl.int64) * word_row + W.blocks)
    wanted = tl.minimum(wanted, full.to(tl.int64)).to(tl.int32)
    entry = (row * UNITS + unit).to(tl.int64)
    bound, edge = tl.full([], 0, tl.uint32), full  # all
    if wanted <= 0:
        bound, edge = tl.full([], 4294967295, tl.uint32), tl.zeros_like(full) - 1  # none
    elif wanted < full:
        bound, _spare, edge = least_alone(
            scores + entry * blocks, 0, full, 0, 0, wanted, full, near + entry * 2 * ROOM, least, 1,
            SAMPLE, SLACK, SPAN, FEW, ROOM, False,
        )  # fmt: skip
    tl.store(least + entry * 2, bound.to(tl.int32, bitcast=True))
    tl.store(least + entry * 2 + 1, edge)


@triton.jit
def is_best(score, block, bound, edge):
    """Whether a ``block`` with that ``score`` is among the best."""
    order = ordered_bits(score + 0.0)
    return (order > bound) | ((order == bound) & (block <= edge))
