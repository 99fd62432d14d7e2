"""CIS in recorded steps: whom a head's query resembles, and the list of what it then shares. Parts of a kernel
(triton_one_launch.py); means what sharing.py means."""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.methods.cis.triton_row_words import W, budget_at, place_of
from saccade.ops.triton.common import also

PIECE: tl.constexpr = tl.constexpr(32)  # entries of a list that no two programs share
WAYS: tl.constexpr = tl.constexpr(128)  # entries of a list that a search looks at in one go


@triton.jit
def searchable_at(own, reals, length, low, high):
    """Of a row that is no padding: whether there is something to choose; the row's step of its block; and the bounds
    of a choice, as ops.triton.batched_lists.choose_keys takes them: the first key that is none of the first ones, the
    first of the last ones, and how many between them are taken."""
    sinks = tl.minimum(tl.load(own + W.sinks), 1 << 30).to(tl.int32)
    local = tl.minimum(tl.load(own + W.local), 1 << 30).to(tl.int32)
    k = budget_at(own, reals, length)
    at = place_of(own, length)
    chooses = length.to(tl.int64) > sinks.to(tl.int64) + k + local
    first, last = length, length
    if chooses:
        first, last = sinks, length - local
        if high > 0:
            first, last = tl.minimum(sinks, low), tl.maximum(last, high)
    return chooses, at, first, last, tl.where(chooses, k, 0)


@triton.jit
def resembled(
    q, own, at, tau, first, count, writes, q_head,
    UNITS: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Of ``count`` units from ``first`` on, int32 [GROUP] each: the latest anchor before step ``at`` of its block that
    the unit's query (its row's at ``q``) resembles, -1 where there is none; where that query stands, and how many
    keys it shares, if there is one. Who ``writes`` notes the queries' directions. The units wait together, for one
    anchor each. A block's first step searches, and most often no other did: its anchor is read before it is known which
    there are, the others after that, the latest first."""
    # Triton knows no alignment of an address that it loads; all are starts of tensors.
    directions = tl.multiple_of(tl.load(own + W.directions), 16).to(tl.pointer_type(tl.float32))
    has = tl.load(own + W.has).to(tl.pointer_type(tl.int8))
    sizes = tl.load(own + W.counts).to(tl.pointer_type(tl.int32))
    positions = tl.load(own + W.positions).to(tl.pointer_type(tl.int64))
    member, channel, number = tl.arange(0, GROUP), tl.arange(0, WIDTH), tl.arange(0, PLACES)
    unit, mine = first + member, member < count
    there = mine[:, None] & (channel < HEAD)[None, :]
    begun = also(mine, at > 0)
    earlier = mine[:, None] & (number < at)[None, :]
    anchored = tl.load(has + number[None, :] * UNITS + unit[:, None], mask=earlier, other=0) != 0
    other = tl.load(
        directions + unit.to(tl.int64)[:, None] * HEAD + channel[None, :], mask=begun[:, None] & there, other=0.0
    )
    position = tl.load(positions + member * 0, mask=begun, other=0).to(tl.int32)
    size = tl.load(sizes + unit, mask=begun, other=0)
    asked = tl.load(q + unit.to(tl.int64)[:, None] * q_head + channel[None, :], mask=there, other=0.0).to(tl.float32)
    direction = asked / tl.maximum(tl.sqrt(tl.sum(asked * asked, 1)), 1e-38)[:, None]
    line = (at * UNITS + unit).to(tl.int64) * HEAD
    tl.store(directions + line[:, None] + channel[None, :], direction, mask=also(there, writes))
    opened = tl.max((anchored & (number == 0)[None, :]).to(tl.int32), 1) != 0
    found = tl.where(opened & (tl.sum(direction * other, 1) > tau), 0, -1)
    held = tl.max(tl.where(anchored, number[None, :], 0), 1)
    while tl.max(held, 0) > 0:
        some = held > 0
        place = (held * UNITS + unit).to(tl.int64)
        stands = tl.load(positions + held, mask=some, other=0).to(tl.int32)
        shared = tl.load(sizes + place, mask=some, other=0)
        other = tl.load(directions + place[:, None] * HEAD + channel[None, :], mask=some[:, None] & there, other=0.0)
        alike = some & (tl.sum(direction * other, 1) > tau)
        found = tl.where(alike, held, found)
        position, size = tl.where(alike, stands, position), tl.where(alike, shared, size)
        before = tl.max(tl.where(anchored & (number[None, :] < held[:, None]), number[None, :], 0), 1)
        held = tl.where(alike, 0, before)
    return found, position, size


@triton.jit
def _below(keys, count, bound):
    """How many of the first ``count`` of ``keys``, which rise, lie below ``bound``: every so many-th first, then those
    between two of them."""
    hop = tl.maximum(tl.cdiv(count, WAYS), 1)
    number = tl.arange(0, WAYS) * hop
    few = tl.load(keys + number, mask=number < count, other=2147483647)
    start = (tl.sum(((number < count) & (few < bound)).to(tl.int32), 0) - 1) * hop + 1
    stop = tl.minimum(start + hop - 1, count)
    below = tl.maximum(start, 0)
    if start > 0:
        for begin in tl.range(start, stop, WAYS):
            number = begin + tl.arange(0, WAYS)
            key = tl.load(keys + number, mask=number < stop, other=2147483647)
            below += tl.sum(((number < stop) & (key < bound)).to(tl.int32), 0)
    return below


@triton.jit
def _listed_at(keys, count, key):
    """Whether each ``key`` is among the first ``count`` of ``keys``, which rise."""
    left = tl.zeros(key.shape, tl.int32)
    size = tl.zeros(key.shape, tl.int32) + count
    rest = count
    while rest > 0:  # sizes halve alike
        half = size // 2
        middle = tl.load(keys + left + half, mask=size > 0, other=0)
        right = (size > 0) & (middle < key)
        left = tl.where(right, left + half + 1, left)
        size = tl.where(right, size - half - 1, half)
        rest = rest // 2
    return (left < count) & (tl.load(keys + left, mask=left < count, other=0) == key)


@triton.jit
def _hidden_of(start, stop, low, high):
    """How many of the keys ``start .. stop - 1`` lie between ``low`` and ``high``."""
    return tl.maximum(tl.minimum(stop, high) - tl.maximum(start, low), 0)


@triton.jit
def put_shared(
    part, parts, follows, own, out, length, found, position, size, unit, first, last, low, high,
    UNITS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Write the list of a unit that shares the ``size`` keys of anchor ``found``, which stands at ``position``, or
    below 0 reads what ``first`` and ``last`` leave, to ``out``, by ``parts`` programs, each a piece of it; none where
    ``part`` is below 0. Stretches of known lengths come first, each without its keys from ``low`` to ``high``: the
    first keys; what the anchor shares; the keys that were local then; the last ones. What has moved along with the best
    keys comes behind, by the program that ``follows``. Gives where this one's piece begins and ends, where the
    stretches end, and where the list ends, which only who follows knows."""
    at = tl.arange(0, SPAN)
    from_first = first - _hidden_of(0, first, low, high)
    skipped, at_skip, from_gap, left = 0, 0, 0, 0
    keys = out
    end = length
    place = tl.full([], 0, tl.int64)
    if found >= 0:
        end = length - tl.minimum(tl.load(own + W.local), 1 << 30).to(tl.int32)  # of what is not forced
        place = (found * UNITS + unit).to(tl.int64)
        keys = tl.load(own + W.keys).to(tl.pointer_type(tl.int32)) + place * tl.load(own + W.capacity)
        left = position + 1 - (length - end)  # the first of the keys that were local then
        if high > low:
            at_skip = _below(keys, size, low)
            skipped = _below(keys, size, high) - at_skip
        from_gap = tl.maximum(end - left, 0)
        from_gap -= tl.minimum(_hidden_of(left, end, low, high), from_gap)
    shared = size - skipped
    straight = from_first + shared + from_gap + length - last
    each = tl.cdiv(tl.cdiv(straight, parts), PIECE) * PIECE
    begins = tl.minimum(tl.maximum(part, 0) * each, straight)
    ends = tl.where(part < 0, begins, tl.minimum(begins + each, straight))
    for start in tl.range(begins, ends, SPAN):
        number = start + at
        key = number + tl.where(number >= low, high - low, 0)
        number -= from_first
        taken = (number >= 0) & (number < shared)
        listed = tl.load(keys + number + tl.where(number >= at_skip, skipped, 0), mask=taken, other=0)
        key = tl.where(number >= 0, listed, key)
        number -= shared
        gone = left + number
        gone += tl.where(gone >= low, _hidden_of(left, end, low, high), 0)
        key = tl.where(number >= 0, gone, key)
        number -= from_gap
        key = tl.where(number >= 0, last + number, key)
        tl.store(out + start + at, key, mask=start + at < ends)
    placed = straight
    if follows:  # noqa: SIM102 (scalars are not joined by `and` in a kernel)
        if found >= 0:
            sinks = tl.minimum(tl.load(own + W.sinks), 1 << 30).to(tl.int32)
            follow = tl.minimum(tl.load(own + W.follow), length.to(tl.int64)).to(tl.int32)
            if follow >= 0:
                most = tl.load(own + W.most)
                moving = tl.load(own + W.moving).to(tl.pointer_type(tl.int32)) + place * most
                steps = length - 1 - position
                wide = 2 * follow + 1
                for start in tl.range(0, most.to(tl.int32) * wide, SPAN):
                    number = (start + at) // wide
                    inside = number < most
                    best = tl.load(moving + number, mask=inside, other=2147483647)
                    before = tl.load(moving + number - 1, mask=inside & (number > 0), other=-2147483647)
                    inside = inside & (best != 2147483647)
                    best = tl.where(inside, best, 0)
                    away = steps + (start + at) % wide - follow
                    key = best + away
                    seen = inside & (key >= sinks) & (key < end) & ((key < low) | (key >= high))
                    # Not what the best key before this one brings, nor what is listed already.
                    seen = seen & ((number == 0) | (key - steps - follow > before))
                    seen = seen & ((key < left) | (key >= end))
                    seen = seen & (_listed_at(keys, size, tl.where(seen, key, 0)) == 0)
                    tl.store(out + placed + tl.cumsum(seen.to(tl.int32), 0) - 1, key, mask=seen)
                    placed += tl.sum(seen.to(tl.int32), 0)
    return begins, ends, straight, placed
