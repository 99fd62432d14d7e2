"""Blocks of keys that LFPS's recorded steps take for candidates: those whose mean keys agree best with the queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.lfps.triton_row_words import W
from saccade.ops.triton import batched_best
from saccade.ops.triton.batched_best import find_best
from saccade.ops.triton.best_parts import EACH_BOUNDS, WORDS, bounds_at, known_at, part_at
from saccade.ops.triton.common import begin, launched, pad
from saccade.ops.triton.radix_select import least_held, ordered_bits, taken_of

EACH = 64  # blocks that a program scores
EACH_BLOCKS: tl.constexpr = tl.constexpr(EACH)
HELD = 16384  # blocks whose scores a program holds


def best_blocks(scores: Tensor, bounds: Tensor) -> Tensor:
    """int8 [rows * units, n]: 1 for the blocks of highest ``scores`` [rows, units, n]; ``bounds`` as mean_scores leaves
    them."""
    count, units, blocks = scores.shape
    marks = torch.empty(count * units, blocks, dtype=torch.int8, device=scores.device)
    if blocks <= HELD:
        _mark_held[(units, count)](
            scores, bounds, marks, blocks, HELD=min(HELD, pad(blocks, 1024)), SPAN=1024,
            num_warps=16, maxnreg=64, **launched(scores.device),
        )  # fmt: skip
        return marks
    best = find_best(scores, bounds)
    _mark_best[(best.parts, units, count)](
        scores, bounds, best.words, best.taken, marks, blocks, PARTS=triton.next_power_of_2(best.parts), WORDS=WORDS,
        SPAN=batched_best.SPAN, num_warps=8, maxnreg=64, **launched(scores.device),
    )  # fmt: skip
    return marks


@triton.jit
def mean_scores(
    q_ptr, pointers, lengths, words, scores, bounds, q_row, q_head, word_row, blocks, part, kv_head, row,
    UNITS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """How well the means of some blocks of ``SIZE`` keys agree with the queries of a KV head, whose heads share them:
    ``scores`` float32 [rows, units, blocks]; and ``bounds`` int32 [rows * units, BOUNDS], as find_best takes them."""
    GROUPED: tl.constexpr = HEADS // KV_HEADS
    full = tl.load(lengths + row) // SIZE
    member = tl.arange(0, GROUP)
    if part == 0:
        wanted = tl.minimum(tl.load(words + row.to(tl.int64) * word_row + W.blocks), full.to(tl.int64)).to(tl.int32)
        entry, none = row * UNITS + kv_head * (UNITS // KV_HEADS) + member, tl.zeros([GROUP], tl.int32)
        own, mine = bounds + entry * EACH_BOUNDS, member < UNITS // KV_HEADS
        tl.store(own, none, mask=mine)
        tl.store(own + 1, none + full, mask=mine)
        tl.store(own + 2, none, mask=mine)
        tl.store(own + 3, none, mask=mine)
        tl.store(own + 4, none + wanted, mask=mine)
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


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["bounds", "marks"])
def _mark_held(
    scores, bounds, marks, blocks, HELD: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """What _mark_best does, by one program."""
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    entry = row * tl.num_programs(0) + unit
    _first, full, _low, _high, wanted, _between = bounds_at(bounds, entry, 1)
    line = entry.to(tl.int64) * blocks
    block = tl.arange(0, HELD)
    order = ordered_bits(tl.load(scores + line + block, mask=block < full, other=0.0) + 0.0)
    order = tl.where(block < full, order, 0)
    bound, spare = tl.full([], 0, tl.uint32), full  # all
    if (wanted > 0) & (wanted < full):
        bound, spare = least_held(order, wanted)
    if wanted <= 0:
        bound, spare = tl.full([], 4294967295, tl.uint32), 0  # none
    tl.store(marks + line + block, (order >= bound).to(tl.int8), mask=block < full)
    if tl.sum((order == bound).to(tl.int32), 0) > spare:  # of those some are left out
        tl.debug_barrier()  # others have stored what these do
        level = tl.full([], 0, tl.int32)
        for start in tl.range(0, full, SPAN):
            own = start + tl.arange(0, SPAN)
            chosen, level = taken_of(scores + line, own, own < full, bound, spare, level)
            tl.store(marks + line + own, chosen.to(tl.int8), mask=own < full)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["bounds", "words", "taken", "marks"])
def _mark_best(
    scores, bounds, words, taken, marks, blocks,
    PARTS: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    part, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = row * tl.num_programs(1) + unit
    first, last, _low, _high, wanted, between = bounds_at(bounds, entry, 1)
    begins, ends = part_at(first, last, part, SPAN)
    if begins < ends:
        bound, spare, level, _placed = known_at(words, taken, entry, part, 0, wanted, between, PARTS, WORDS)
        if wanted <= 0:
            bound, spare = tl.full([], 4294967295, tl.uint32), tl.full([], 0, tl.int32)  # none
        at = tl.arange(0, SPAN)
        line = entry.to(tl.int64) * blocks
        for start in tl.range(begins, ends, SPAN):
            block = start + at
            chosen, level = taken_of(scores + line, block, block < ends, bound, spare, level)
            tl.store(marks + line + block, chosen.to(tl.int8), mask=block < ends)
