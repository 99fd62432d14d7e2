"""The best entries of many lists at once, on the device: every list is cut into parts, and a program takes a part.

Long lists take a radix search: what the least score taken is comes out six to ten bits at a time. Each of four passes
counts the digits of the scores that agree with the bits known so far; counts are whole numbers, so the order in which
programs add them does not matter. A fifth pass counts what each part takes, so that the program that writes lists knows
where a part's entries go (best_parts.known_at). Other lists take one launch or two. Lengths are read on the device;
nothing goes through the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.batch import even_splits
from saccade.ops.triton.best_near import search_near
from saccade.ops.triton.best_parts import KNOWN, WORDS, bounds_at, part_at
from saccade.ops.triton.common import begin, launched, processors
from saccade.ops.triton.radix_select import least_held, ordered_bits

SPAN = 2048  # entries that a program takes in one go
SHORT = 8  # parts: lists of up to so many are searched by one program, which holds all their scores
LARGE = 1 << 15  # entries
RESIDENT = 4  # programs of eight warps that share a processor, two of sixteen
NEAR = 72  # parts: lists of up to so many are searched by a sample (best_near.py); more would put too many aside
# Of each pass: where its digit begins in a score's bits, the digit's bits, and where its counts lie in a list's words.
# The first digits are those of nearly all entries, counted in registers; few agree with both, and they are counted in
# memory one by one.
DIGITS = ((26, 6, 0), (20, 6, 64), (10, 10, 128), (0, 10, 1152))


class Best(NamedTuple):
    """What :func:`find_best` has found: ``bounds`` as it was given, of every ``each`` lists alike; ``words`` int32
    [lists, WORDS]; ``taken`` int32 [lists, parts, 2], entries of a part above the least score taken, and equal to
    it."""

    bounds: Tensor
    each: int
    words: Tensor
    taken: Tensor

    @property
    def parts(self) -> int:
        return self.taken.shape[1]


def parts_of(lists: int, longest: int, device: torch.device, some: bool = False) -> int:
    """Into how many parts to cut each of ``lists``; ``some``: most often no list is searched, and a launch takes the
    longer the more programs find nothing to do."""
    most = max(1, min(triton.cdiv(longest, SPAN), 128))
    if some:
        return even_splits(lists, RESIDENT * processors(device), most)
    return max(1, min(most, triton.cdiv(16 * processors(device), lists)))


def find_best(scores: Tensor, bounds: Tensor, active: Tensor | None = None, usual: int = LARGE) -> Best:
    """Of each list of ``scores`` float32 [rows, units, n], the best entries, ties to the lower: what is taken is above
    the least score taken, or among the first so many (``spare``) that equal it.

    ``bounds`` int32 [rows or rows * units, BOUNDS]: the first entry, the end, entries (from, to) that are hidden, and
    how many are taken. Only lists that are ``active`` (int8 [rows * units], all by default) are searched, and only
    those that do not take all or none. ``usual``: how many entries a list usually has."""
    rows, units, width = scores.shape
    device, lists = scores.device, rows * units
    assert scores.stride(2) == 1
    each = lists // len(bounds)
    if width <= SHORT * SPAN:
        return _find_short(scores, bounds, active, each)
    parts = parts_of(lists, width, device, active is not None)
    taken = torch.empty(lists, parts, 2, dtype=torch.int32, device=device)
    if width <= NEAR * SPAN:
        words = torch.empty(lists, WORDS, dtype=torch.int32, device=device)
        search_near(scores, bounds, active, words, taken, each, SPAN, 8 if usual < LARGE else 16)
        return Best(bounds, each, words, taken)
    words = torch.zeros(lists, WORDS, dtype=torch.int32, device=device)
    none = bounds
    for step in range(len(DIGITS) + 1):
        last = step == len(DIGITS)
        shift, bits, at = DIGITS[min(step, len(DIGITS) - 1)]
        shift_before, bits_before, at_before = DIGITS[max(step - 1, 0)]
        _pass[(parts, units, rows)](
            scores,
            bounds,
            none if active is None else active,
            words,
            taken,
            scores.stride(0),
            scores.stride(1),
            STEP=step,
            LAST=last,
            SHIFT=shift,
            BITS=bits,
            AT=at,
            B_SHIFT=shift_before,
            B_BITS=bits_before,
            B_AT=at_before,
            WORDS=WORDS,
            EACH=each,
            CHOSEN=active is not None,
            SPAN=SPAN,
            num_warps=8,
            **launched(device),
        )
    return Best(bounds, each, words, taken)


def _find_short(scores: Tensor, bounds: Tensor, active: Tensor | None, each: int) -> Best:
    rows, units, width = scores.shape
    lists, device = rows * units, scores.device
    parts = max(1, triton.cdiv(width, SPAN))
    words = torch.empty(lists, WORDS, dtype=torch.int32, device=device)
    taken = torch.empty(lists, parts, 2, dtype=torch.int32, device=device)
    padded = triton.next_power_of_2(parts)
    _search[(units, rows)](
        scores,
        bounds,
        bounds if active is None else active,
        words,
        taken,
        scores.stride(0),
        scores.stride(1),
        parts,
        PARTS=padded,
        WORDS=WORDS,
        EACH=each,
        CHOSEN=active is not None,
        SPAN=SPAN,
        num_warps=min(16, 4 * padded),
        maxnreg=64,
        **launched(device),
    )
    return Best(bounds, each, words, taken)


@triton.jit(
    do_not_specialize=["score_row", "score_unit"], do_not_specialize_on_alignment=["bounds", "active", "words", "taken"]
)
def _pass(
    scores, bounds, active, words, taken, score_row, score_unit,
    STEP: tl.constexpr, LAST: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr, AT: tl.constexpr,
    B_SHIFT: tl.constexpr, B_BITS: tl.constexpr, B_AT: tl.constexpr, WORDS: tl.constexpr, EACH: tl.constexpr,
    CHOSEN: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    part, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = row * tl.num_programs(1) + unit
    searches = 1
    if CHOSEN:
        searches = tl.load(active + entry).to(tl.int32)
    first, last, low, high, wanted, between = bounds_at(bounds, entry, EACH)
    start, stop = part_at(first, last, part, SPAN)
    if (searches != 0) & (wanted > 0) & (wanted < between) & ((start < stop) | (part == 0)):
        own = words + entry.to(tl.int64) * WORDS
        bound, spare = tl.full([], 0, tl.uint32), wanted
        if STEP > 1:
            bound = tl.load(own + KNOWN + 2 * STEP - 4).to(tl.uint32, bitcast=True)
            spare = tl.load(own + KNOWN + 2 * STEP - 3)
        if STEP > 0:  # what the pass before has counted
            digits = tl.arange(0, 1 << B_BITS)
            found = tl.load(own + B_AT + digits)
            reach = tl.sum(found, 0) - tl.cumsum(found, 0) + found  # entries of this digit and above
            best = tl.max(tl.where(reach >= spare, digits, 0), 0)
            spare -= tl.sum(tl.where(digits > best, found, 0), 0)
            bound = bound | (best.to(tl.uint32) << B_SHIFT)
            if part == 0:
                tl.store(own + KNOWN + 2 * STEP - 2, bound.to(tl.int32, bitcast=True))
                tl.store(own + KNOWN + 2 * STEP - 1, spare)
        at = tl.arange(0, SPAN)
        line = scores + row.to(tl.int64) * score_row + unit.to(tl.int64) * score_unit
        above, level = 0, 0
        found = tl.zeros([1 << BITS], tl.int32)
        after = tl.load(line + start + at, mask=start + at < stop, other=0.0)
        for here in tl.range(start, stop, SPAN):
            number = here + at
            inside = (number < stop) & ((number < low) | (number >= high))
            order = ordered_bits(after + 0.0)
            after = tl.load(line + SPAN + number, mask=number < stop - SPAN, other=0.0)  # on its way meanwhile
            if LAST:
                above += tl.sum((inside & (order > bound)).to(tl.int32), 0)
                level += tl.sum((inside & (order == bound)).to(tl.int32), 0)
            else:
                if STEP > 0:
                    inside = inside & ((order >> B_SHIFT) == (bound >> B_SHIFT))
                digit = ((order >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
                if STEP < 2:
                    others = SPAN - tl.sum(inside.to(tl.int32), 0)  # which are counted as zeros
                    found += tl.histogram(tl.where(inside, digit, 0), 1 << BITS)
                    found -= tl.where(tl.arange(0, 1 << BITS) == 0, others, 0)
                else:
                    one = tl.full([SPAN], 1, tl.int32)
                    tl.atomic_add(own + AT + digit, one, mask=inside, sem="relaxed")
        if LAST:
            place = taken + (entry.to(tl.int64) * tl.num_programs(0) + part) * 2
            tl.store(place, above)
            tl.store(place + 1, level)
        elif STEP < 2:
            tl.atomic_add(own + AT + tl.arange(0, 1 << BITS), found, mask=found > 0, sem="relaxed")


@triton.jit(
    do_not_specialize=["score_row", "score_unit", "parts"],
    do_not_specialize_on_alignment=["bounds", "active", "words", "taken"],
)
def _search(
    scores, bounds, active, words, taken, score_row, score_unit, parts,
    PARTS: tl.constexpr, WORDS: tl.constexpr, EACH: tl.constexpr, CHOSEN: tl.constexpr, SPAN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The same for a list that one program holds, bit by bit: comparing takes less than counting digits does."""
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    entry = row * tl.num_programs(0) + unit
    searches = 1
    if CHOSEN:
        searches = tl.load(active + entry).to(tl.int32)
    first, last, low, high, wanted, between = bounds_at(bounds, entry, EACH)
    if (searches != 0) & (wanted > 0) & (wanted < between):
        line = scores + row.to(tl.int64) * score_row + unit.to(tl.int64) * score_unit
        number = first + tl.arange(0, PARTS * SPAN)
        inside = (number < last) & ((number < low) | (number >= high))
        order = ordered_bits(tl.load(line + number, mask=inside, other=0.0) + 0.0)
        bound, spare = least_held(tl.where(inside, order, 0), wanted)
        own = words + entry.to(tl.int64) * WORDS + KNOWN + 6
        tl.store(own, bound.to(tl.int32, bitcast=True))
        tl.store(own + 1, spare)
        above = tl.sum(tl.reshape((inside & (order > bound)).to(tl.int32), [PARTS, SPAN]), 1)
        level = tl.sum(tl.reshape((inside & (order == bound)).to(tl.int32), [PARTS, SPAN]), 1)
        part = tl.arange(0, PARTS)
        place = taken + (entry.to(tl.int64) * parts + part) * 2
        tl.store(place, above, mask=part < parts)
        tl.store(place + 1, level, mask=part < parts)
