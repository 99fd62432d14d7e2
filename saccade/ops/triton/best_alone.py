"""The least of the highest scores of a list by one program, in one launch: what best_near.py does by many, for lists
that are short, or whose programs have something else to run beside. A part of kernels, and one by itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.best_near import SAMPLE, SLACK, sampled_bounds
from saccade.ops.triton.best_parts import KNOWN, WORDS, bounds_at
from saccade.ops.triton.common import begin, launched
from saccade.ops.triton.radix_select import least_held, least_taken, ordered_bits

FEW, ROOM = 1024, 4096  # scores put aside, most often, and at most


def search_alone(scores: Tensor, bounds: Tensor, words: Tensor, taken: Tensor, each: int, span: int) -> None:
    """``batched_best.find_best`` by a program a list, of lists in parts of ``span`` entries or a multiple: fills in
    what is known of the least score taken in ``words`` int32 [lists, WORDS], and ``taken`` int32 [lists, parts, 2]."""
    rows, units, _ = scores.shape
    near = torch.empty(rows * units, 2, ROOM, dtype=torch.int32, device=scores.device)
    _alone[(units, rows)](
        scores, bounds, words, taken, near, scores.stride(0), scores.stride(1), taken.shape[1], WORDS=WORDS, EACH=each,
        SAMPLE=SAMPLE, SLACK=SLACK, SPAN=span, FEW=min(FEW, ROOM), ROOM=ROOM, num_warps=8, **launched(scores.device),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["score_row", "score_unit", "parts"],
    do_not_specialize_on_alignment=["bounds", "words", "taken"],
)
def _alone(
    scores, bounds, words, taken, near, score_row, score_unit, parts,
    WORDS: tl.constexpr, EACH: tl.constexpr, SAMPLE: tl.constexpr, SLACK: tl.constexpr, SPAN: tl.constexpr,
    FEW: tl.constexpr, ROOM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    entry = (row * tl.num_programs(0) + unit).to(tl.int64)
    first, last, low, high, wanted, between = bounds_at(bounds, entry, EACH)
    if (wanted > 0) & (wanted < between):
        line = scores + row.to(tl.int64) * score_row + unit.to(tl.int64) * score_unit
        bound, spare, _edge = least_alone(
            line, first, last, low, high, wanted, between, near + entry * 2 * ROOM, taken + entry * parts * 2, parts,
            SAMPLE, SLACK, SPAN, FEW, ROOM, True,
        )  # fmt: skip
        own = words + entry * WORDS + KNOWN + 6
        tl.store(own, bound.to(tl.int32, bitcast=True))
        tl.store(own + 1, spare)


@triton.jit
def least_alone(
    line, first, last, low, high, wanted, between, near, taken, parts,
    SAMPLE: tl.constexpr, SLACK: tl.constexpr, SPAN: tl.constexpr, FEW: tl.constexpr, ROOM: tl.constexpr,
    COUNTS: tl.constexpr,
):  # fmt: skip
    """Of the ``wanted`` best (at least one, not all) of ``between`` entries of ``line``, from ``first`` to ``last`` but
    those from ``low`` to ``high``: bits of the least score, how many that equal it are taken, and the last of those
    entries. ``near`` int32 [2, ROOM] is room. With ``COUNTS``: int32 ``taken`` [parts, 2], as find_best gives them."""
    lower, upper = sampled_bounds(line, first, low, high, wanted, between, SAMPLE, SLACK)
    at = tl.arange(0, SPAN)
    each = tl.cdiv(tl.cdiv(last - first, SPAN), parts)
    over, size, above, level = 0, 0, 0, 0
    after = tl.load(line + first + at, mask=first + at < last, other=0.0)
    for turn in tl.range(0, tl.cdiv(last - first, SPAN)):
        number = first + turn * SPAN + at
        inside = (number < last) & ((number < low) | (number >= high))
        order = ordered_bits(after + 0.0)
        after = tl.load(line + number + SPAN, mask=number + SPAN < last, other=0.0)  # on its way meanwhile
        among = (inside & (order >= lower) & (order <= upper)).to(tl.int32)
        to = size + tl.cumsum(among, 0) - 1
        aside = (among != 0) & (to < ROOM)
        tl.store(near + to, order.to(tl.int32, bitcast=True), mask=aside)
        tl.store(near + ROOM + to, number, mask=aside)
        both = tl.sum(among + ((inside & (order > upper)).to(tl.int32) << 16), 0)
        over += both >> 16
        size += both & 65535
        if COUNTS:
            above = tl.where(turn % each == 0, 0, above) + (both >> 16)
            tl.store(taken + turn // each * 2, above)
            tl.store(taken + turn // each * 2 + 1, 0)
    tl.debug_barrier()  # other threads have put scores aside, and counts
    bound, spare, edge = lower, wanted - over, last
    if (over < wanted) & (wanted <= over + size) & (size <= ROOM):
        if size <= FEW:
            bound, spare, edge = _least_aside(near, size, wanted - over, taken, first, each, SPAN, FEW, ROOM, COUNTS)
        else:
            bound, spare, edge = _least_aside(near, size, wanted - over, taken, first, each, SPAN, ROOM, ROOM, COUNTS)
    else:  # the sample has misled, or too many are alike
        bound, spare = least_taken(line, first, last, low, high, wanted, SPAN)
        seen = 0
        above *= 0
        for turn in tl.range(0, tl.cdiv(last - first, SPAN)):
            number = first + turn * SPAN + at
            inside = (number < last) & ((number < low) | (number >= high))
            order = ordered_bits(tl.load(line + number, mask=inside, other=0.0) + 0.0)
            equal = (inside & (order == bound)).to(tl.int32)
            upto = seen + tl.cumsum(equal, 0)
            edge = tl.where(seen < spare, tl.max(tl.where((equal != 0) & (upto <= spare), number, first), 0), edge)
            alike = tl.sum(equal, 0)
            seen += alike
            if COUNTS:
                heavier = tl.sum((inside & (order > bound)).to(tl.int32), 0)
                above = tl.where(turn % each == 0, 0, above) + heavier
                level = tl.where(turn % each == 0, 0, level) + alike
                tl.store(taken + turn // each * 2, above)
                tl.store(taken + turn // each * 2 + 1, level)
    return bound, spare, edge


@triton.jit
def _least_aside(
    near, size, wanted, taken, first, each,
    SPAN: tl.constexpr, HELD: tl.constexpr, ROOM: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """What least_alone finds, among the ``size`` scores that were put aside."""
    number = tl.arange(0, HELD)
    there = number < size
    order = tl.load(near + number, mask=there, other=0).to(tl.uint32, bitcast=True)
    place = tl.load(near + ROOM + number, mask=there, other=0)
    bound, spare = least_held(order, wanted)
    level = there & (order == bound)
    edge = tl.max(tl.where(level & (tl.cumsum(level.to(tl.int32), 0) <= spare), place, first), 0)
    if COUNTS:
        part = taken + (place - first) // (each * SPAN) * 2
        one = tl.full([HELD], 1, tl.int32)
        tl.atomic_add(part, one, mask=there & (order > bound), sem="relaxed")
        tl.atomic_add(part + 1, one, mask=level, sem="relaxed")
    return bound, spare, edge
