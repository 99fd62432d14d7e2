"""The least of the highest scores of a list in two launches: a sample of the list says between which two scores it
lies, its programs put aside what lies there, and the last of them to end finds it among those few. A sample that
misleads, or scores too many of which are alike, cost time but nothing else: then that program reads the whole list."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.best_parts import KNOWN, WORDS, bounds_at, part_at
from saccade.ops.triton.common import arrivals, begin, launched
from saccade.ops.triton.radix_select import least_held, least_taken, ordered_bits

SAMPLE = 1024
ROOM = 512  # scores put aside for each warp
SLACK = 5.0  # standard deviations of a sample's rank


def search_near(
    scores: Tensor,
    bounds: Tensor,
    active: Tensor | None,
    words: Tensor,
    taken: Tensor,
    each: int,
    span: int,
    warps: int,
) -> None:
    """``batched_best.find_best``, of lists in parts of ``span`` entries or a multiple: fills in what is known of the
    least score taken in ``words`` int32 [lists, WORDS], and ``taken`` int32 [lists, parts, 2]."""
    rows, units, _ = scores.shape
    device, lists, parts = scores.device, rows * units, taken.shape[1]
    room = ROOM * warps
    near = torch.empty(lists, 2, room, dtype=torch.int32, device=device)
    searched = bounds if active is None else active
    _sample[(units, rows)](
        scores, bounds, searched, words, scores.stride(0), scores.stride(1), WORDS=WORDS, EACH=each,
        CHOSEN=active is not None, SAMPLE=SAMPLE, SLACK=SLACK, num_warps=4, **launched(device),
    )  # fmt: skip
    _narrow[(parts, units, rows)](
        scores, bounds, searched, words, taken, near, arrivals(device, 2 * lists), scores.stride(0), scores.stride(1),
        PARTS=triton.next_power_of_2(parts), WORDS=WORDS, EACH=each, CHOSEN=active is not None, SPAN=span, ROOM=room,
        num_warps=warps, maxnreg=64, **launched(device),
    )  # fmt: skip


@triton.jit
def _least_two(order, fewest, most):
    """``least_held`` for two numbers of at most 32,767 scores at once, ``fewest`` at most ``most``; bits alone."""
    peak = tl.max(order, 0)
    differ = peak ^ tl.min(tl.where(order > 0, order, peak), 0)
    bit = tl.full([], 2147483648, tl.uint32)
    while bit > differ:
        bit = bit >> 1
    upper = peak & ~(bit | (bit - tl.where(bit > 0, 1, 0).to(tl.uint32)))
    lower = upper
    count, other = fewest - 1, most - 1
    while (bit != 0) & ((count != fewest) | (other != most)):
        # Both are counted by one sum: programs wait for each.
        above, below = (order >= (upper | bit)).to(tl.int32), (order >= (lower | bit)).to(tl.int32)
        both = tl.sum(above + (below << 16), 0)
        above, below = both & 65535, both >> 16
        upper, count = tl.where(above >= fewest, upper | bit, upper), tl.where(above >= fewest, above, count)
        lower, other = tl.where(below >= most, lower | bit, lower), tl.where(below >= most, below, other)
        bit = bit >> 1
    none = tl.full([], 4294967295, tl.uint32)
    lower = tl.min(tl.where((order >= lower) & (order > 0), order, none), 0)
    return lower, tl.min(tl.where((order >= upper) & (order > 0), order, none), 0)


@triton.jit
def sampled_bounds(line, first, low, high, wanted, between, SAMPLE: tl.constexpr, SLACK: tl.constexpr):
    """Bits of two scores between which the least one taken lies, most likely; the same where it is that one. ``wanted``
    of ``between`` entries are taken, of ``line`` from ``first`` on but those from ``low`` to ``high``."""
    number = tl.arange(0, SAMPLE)
    # One entry of each of as many stretches, from no place that scores in a pattern could know.
    share = ((number * 40503) & 65535).to(tl.float32) * (1.0 / 65536)
    place = tl.minimum(((number + share) * (between / SAMPLE)).to(tl.int32), between - 1)
    place = first + tl.where(between <= SAMPLE, number, place)
    place += tl.where(place >= low, high - low, 0)
    drawn = tl.minimum(between, SAMPLE)
    order = ordered_bits(tl.load(line + place, mask=number < drawn, other=0.0) + 0.0)
    order = tl.where(number < drawn, order, 0)
    part = wanted.to(tl.float32) / between
    slack = tl.where(between <= SAMPLE, 0.0, SLACK * tl.sqrt(SAMPLE * part * (1.0 - part)) + 2.0)
    fewest = (part * drawn - slack + 0.5).to(tl.int32)
    most = (part * drawn + slack + 0.5).to(tl.int32)
    lower, upper = _least_two(order, tl.maximum(fewest, 1), tl.minimum(most, drawn))
    lower = tl.where(most > drawn, tl.zeros([], tl.uint32), lower)
    return lower, tl.where(fewest < 1, tl.full([], 4294967295, tl.uint32), upper)


@triton.jit(
    do_not_specialize=["score_row", "score_unit"],
    do_not_specialize_on_alignment=["bounds", "active", "words"],
)
def _sample(
    scores, bounds, active, words, score_row, score_unit,
    WORDS: tl.constexpr, EACH: tl.constexpr, CHOSEN: tl.constexpr, SAMPLE: tl.constexpr, SLACK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    entry = row * tl.num_programs(0) + unit
    searches = 1
    if CHOSEN:
        searches = tl.load(active + entry).to(tl.int32)
    first, _last, low, high, wanted, between = bounds_at(bounds, entry, EACH)
    if (searches != 0) & (wanted > 0) & (wanted < between):
        line = scores + row.to(tl.int64) * score_row + unit.to(tl.int64) * score_unit
        lower, upper = sampled_bounds(line, first, low, high, wanted, between, SAMPLE, SLACK)
        known = words + entry.to(tl.int64) * WORDS
        tl.store(known, lower.to(tl.int32, bitcast=True))
        tl.store(known + 1, upper.to(tl.int32, bitcast=True))


@triton.jit(
    do_not_specialize=["score_row", "score_unit"],
    do_not_specialize_on_alignment=["bounds", "active", "words", "taken", "arrived"],
)
def _narrow(
    scores, bounds, active, words, taken, near, arrived, score_row, score_unit,
    PARTS: tl.constexpr, WORDS: tl.constexpr, EACH: tl.constexpr, CHOSEN: tl.constexpr, SPAN: tl.constexpr,
    ROOM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    part, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(0)
    entry = row * tl.num_programs(1) + unit
    searches = 1
    if CHOSEN:
        searches = tl.load(active + entry).to(tl.int32)
    first, last, low, high, wanted, between = bounds_at(bounds, entry, EACH)
    start, stop = part_at(first, last, part, SPAN)
    if (searches != 0) & (wanted > 0) & (wanted < between) & (start < stop):
        line = scores + row.to(tl.int64) * score_row + unit.to(tl.int64) * score_unit
        known = words + entry.to(tl.int64) * WORDS
        lower, upper = tl.load(known).to(tl.uint32, bitcast=True), tl.load(known + 1).to(tl.uint32, bitcast=True)
        aside = near + entry.to(tl.int64) * 2 * ROOM
        cursor = arrived + tl.num_programs(1) * tl.num_programs(2) + entry
        at = tl.arange(0, SPAN)
        above, level = 0, 0
        for here in tl.range(start, stop, SPAN):
            number = here + at
            inside = (number < stop) & ((number < low) | (number >= high))
            order = ordered_bits(tl.load(line + number, mask=inside, other=0.0) + 0.0)
            among = inside & (order >= lower) & (order <= upper)
            some = tl.sum(among.to(tl.int32), 0)
            above += tl.sum((inside & (order > upper)).to(tl.int32), 0)
            level += some
            if (some > 0) & (lower < upper):
                base = tl.atomic_add(cursor, some.to(tl.int64), sem="relaxed").to(tl.int32)
                to = base + tl.cumsum(among.to(tl.int32), 0) - 1
                tl.store(aside + to, order.to(tl.int32, bitcast=True), mask=among & (to < ROOM))
                tl.store(aside + ROOM + to, tl.zeros([SPAN], tl.int32) + part, mask=among & (to < ROOM))
        own = taken + entry.to(tl.int64) * parts * 2
        tl.store(own + 2 * part, above)
        tl.store(own + 2 * part + 1, tl.where(lower < upper, 0, level))
        span = tl.cdiv(tl.cdiv(last - first, SPAN), parts) * SPAN
        present = tl.cdiv(last - first, span)
        tl.debug_barrier()  # all threads' stores come before the arrival that one of them announces
        others = tl.atomic_add(arrived + entry, tl.full([], 1, tl.int64), sem="acq_rel", scope="gpu")
        if others == present - 1:
            every = tl.arange(0, PARTS)
            counted = every < present
            over = tl.sum(tl.load(own + 2 * every, mask=counted, other=0, cache_modifier=".cg"), 0)
            alike = tl.sum(tl.load(own + 2 * every + 1, mask=counted, other=0, cache_modifier=".cg"), 0)
            size = tl.atomic_add(cursor, tl.zeros([], tl.int64), sem="relaxed").to(tl.int32)
            bound, spare = lower, wanted - over
            held = (over < wanted) & (wanted <= over + alike)
            if (lower < upper) & (over < wanted) & (wanted <= over + size) & (size <= ROOM):
                number = tl.arange(0, ROOM)
                word = tl.load(aside + number, mask=number < size, other=0, cache_modifier=".cg")
                order = word.to(tl.uint32, bitcast=True)
                bound, spare = least_held(order, wanted - over)
                of = tl.load(aside + ROOM + number, mask=number < size, other=0, cache_modifier=".cg")
                one = tl.full([ROOM], 1, tl.int32)
                tl.atomic_add(own + 2 * of, one, mask=(number < size) & (order > bound), sem="relaxed")
                tl.atomic_add(own + 2 * of + 1, one, mask=(number < size) & (order == bound), sem="relaxed")
                held = size > 0
            if held == 0:
                bound, spare = least_taken(line, first, last, low, high, wanted, SPAN)
                for number in tl.range(0, present):
                    above, level = 0, 0
                    begins = first + number * span
                    for here in tl.range(begins, tl.minimum(begins + span, last), SPAN):
                        inside = (here + at < last) & ((here + at < low) | (here + at >= high))
                        order = ordered_bits(tl.load(line + here + at, mask=inside, other=0.0) + 0.0)
                        above += tl.sum((inside & (order > bound)).to(tl.int32), 0)
                        level += tl.sum((inside & (order == bound)).to(tl.int32), 0)
                    tl.store(own + 2 * number, above)
                    tl.store(own + 2 * number + 1, level)
            tl.store(known + KNOWN + 6, bound.to(tl.int32, bitcast=True))
            tl.store(known + KNOWN + 7, spare)
            tl.store(cursor, tl.zeros([], tl.int64))
            tl.store(arrived + entry, tl.zeros([], tl.int64))
