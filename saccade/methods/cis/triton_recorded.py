"""CIS in recorded steps: who resembles whom, and what sharers read, for many rows at once (triton_keeping.py: what
searchers will share). Means what sharing.py means. Anchors lie in the rows' states, one place for each step of a block,
so that a step writes its own place alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.cis.triton_row_words import WORDS, budget_at, place_of
from saccade.ops.triton import batched_best
from saccade.ops.triton.batched_best import find_best
from saccade.ops.triton.batched_lists import put_best
from saccade.ops.triton.batched_rows import LayerRows, hidden_at
from saccade.ops.triton.best_parts import BOUNDS
from saccade.ops.triton.best_parts import WORDS as BEST_WORDS
from saccade.ops.triton.common import begin, launched, pad
from saccade.ops.triton.decode import KeyLists


class Resembled(NamedTuple):
    """int8 [rows * units] who is ``searching``; int32 [rows * units] the place of ``whose`` keys it shares, -2 where a
    row reads everything; ``bounds`` as ops.triton.batched_lists.choose_keys takes them; ``hidden`` int32 [rows, 2] as
    LayerRows.hidden gives it."""

    searching: Tensor
    whose: Tensor
    bounds: Tensor
    hidden: Tensor


def resemble(rows: LayerRows, units: int) -> Resembled:
    """Write each row's directions to its place, and find the latest anchor of its block that each unit resembles."""
    q = rows.q if rows.q.stride(-1) == 1 else rows.q.contiguous()
    count, heads, head_dim = q.shape
    device = q.device
    found = Resembled(
        torch.empty(count * units, dtype=torch.int8, device=device),
        torch.empty(count * units, dtype=torch.int32, device=device),
        torch.empty(count, BOUNDS, dtype=torch.int32, device=device),
        torch.empty(count, 2, dtype=torch.int32, device=device),
    )
    _resemble[(units, count)](
        q,
        rows.words,
        rows.reals,
        rows.cones,
        rows.pages.lengths,
        *found,
        q.stride(0),
        q.stride(1),
        rows.words.stride(0),
        rows.reals.stride(0),
        rows.cones.stride(0),
        **WORDS,
        HEAD=head_dim,
        EACH=heads // units,
        UNITS=units,
        WIDTH=pad(heads // units * head_dim),
        num_warps=4,
        **launched(device),
    )
    return found


def lists_of(
    rows: LayerRows, units: int, found: Resembled, scores: Tensor, counts: Tensor, indices: Tensor
) -> KeyLists:
    """What every unit reads: searchers the best by ``scores``, as batched_lists.choose_keys says, and the others what
    they share."""
    best = find_best(scores, found.bounds, found.searching)
    _lists[(best.parts, units, rows.count)](
        rows.words,
        rows.pages.lengths,
        *found[:3],
        counts,
        indices,
        scores,
        best.words,
        best.taken,
        rows.words.stride(0),
        indices.shape[1],
        scores.stride(0),
        scores.stride(1),
        **WORDS,
        UNITS=units,
        PARTS=triton.next_power_of_2(best.parts),
        KNOWN_WORDS=BEST_WORDS,
        SPAN=batched_best.SPAN,
        num_warps=8,
        maxnreg=64,
        **launched(rows.q.device),
    )
    return KeyLists(None, counts, indices, units, 1, indices.shape[1])


@triton.jit(
    do_not_specialize=["word_row", "real_row", "cone_row"],
    do_not_specialize_on_alignment=["words", "reals", "cones", "lengths", "searching", "whose", "bounds", "hidden"],
)
def _resemble(
    q_ptr, words, reals, cones, lengths, searching, whose, bounds, hidden, q_row, q_head, word_row, real_row, cone_row,
    W_TURN: tl.constexpr, W_STEPS: tl.constexpr, W_POS: tl.constexpr, W_K: tl.constexpr, W_SINKS: tl.constexpr,
    W_LOCAL: tl.constexpr, W_REACH: tl.constexpr, W_BEST: tl.constexpr, W_FOLLOW: tl.constexpr, W_GAP: tl.constexpr,
    W_DIR: tl.constexpr, W_HAS: tl.constexpr, W_COUNTS: tl.constexpr, W_KEYS: tl.constexpr, W_AT: tl.constexpr,
    W_MOVING: tl.constexpr, W_CAP: tl.constexpr, W_MOST: tl.constexpr,
    HEAD: tl.constexpr, EACH: tl.constexpr, UNITS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    entry = row * UNITS + unit
    length = tl.load(lengths + row)
    low, high = hidden_at(cones, row, cone_row, length)
    first, last, take = length, length, tl.full([], 0, tl.int32)
    found, search = tl.full([], -2, tl.int32), tl.full([], 0, tl.int32)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        reals += row.to(tl.int64) * real_row
        sinks = tl.minimum(tl.load(own + W_SINKS), 1 << 30).to(tl.int32)
        local = tl.minimum(tl.load(own + W_LOCAL), 1 << 30).to(tl.int32)
        k = budget_at(own, reals, length, W_K)
        at = place_of(own, length, W_TURN, W_STEPS, W_POS)
        has = tl.load(own + W_HAS).to(tl.pointer_type(tl.int8))
        positions = tl.load(own + W_AT).to(tl.pointer_type(tl.int64))
        if length.to(tl.int64) > sinks.to(tl.int64) + k + local:
            CHANNELS: tl.constexpr = HEAD * EACH
            directions = tl.load(own + W_DIR).to(tl.pointer_type(tl.float32))
            channel = tl.arange(0, WIDTH)
            real = channel < CHANNELS
            head = unit * EACH + channel // HEAD
            q = tl.load(
                q_ptr + row.to(tl.int64) * q_row + head.to(tl.int64) * q_head + channel % HEAD, mask=real, other=0.0
            ).to(tl.float32)
            direction = q / tl.maximum(tl.sqrt(tl.sum(q * q, 0)), 1e-38)
            tl.store(directions + (at * UNITS + unit).to(tl.int64) * CHANNELS + channel, direction, mask=real)
            tau = tl.load(reals).to(tl.float32)
            found = tl.full([], -1, tl.int32)
            for number in tl.range(0, at):
                place = number * UNITS + unit
                other = tl.load(directions + place.to(tl.int64) * CHANNELS + channel, mask=real, other=0.0)
                alike = (tl.sum(direction * other, 0) > tau) & (tl.load(has + place) != 0)
                found = tl.where(alike, number, found)
            search = (found < 0).to(tl.int32)
            first, take = sinks, k
            last = length - local
            if high > 0:
                first, last = tl.minimum(sinks, low), tl.maximum(last, high)
        tl.store(has + at * UNITS + unit, search.to(tl.int8))
        tl.store(positions + at, length.to(tl.int64) - 1)
    tl.store(searching + entry, search.to(tl.int8))
    tl.store(whose + entry, found)
    tl.store(bounds + row * 5, first)  # by all units alike
    tl.store(bounds + row * 5 + 1, last)
    tl.store(bounds + row * 5 + 2, low)
    tl.store(bounds + row * 5 + 3, high)
    tl.store(bounds + row * 5 + 4, take)
    tl.store(hidden + row * 2, low)
    tl.store(hidden + row * 2 + 1, high)


@triton.jit
def _listed_at(keys, count, key):
    """Whether each ``key`` is among the first ``count`` of ``keys``, which rise."""
    left = tl.zeros(key.shape, tl.int32)
    size = tl.zeros(key.shape, tl.int32) + count
    for _ in tl.range(0, 32):
        half = size // 2
        middle = tl.load(keys + left + half, mask=size > 0, other=0)
        right = (size > 0) & (middle < key)
        left = tl.where(right, left + half + 1, left)
        size = tl.where(right, size - half - 1, half)
    return (left < count) & (tl.load(keys + left, mask=left < count, other=0) == key)


@triton.jit(
    do_not_specialize=["word_row", "room", "score_row", "score_unit"],
    do_not_specialize_on_alignment=[
        "words",
        "lengths",
        "searching",
        "whose",
        "bounds",
        "counts",
        "indices",
        "known",
        "taken",
    ],
)
def _lists(
    words, lengths, searching, whose, bounds, counts, indices, scores, known, taken, word_row, room, score_row,
    score_unit,
    W_TURN: tl.constexpr, W_STEPS: tl.constexpr, W_POS: tl.constexpr, W_K: tl.constexpr, W_SINKS: tl.constexpr,
    W_LOCAL: tl.constexpr, W_REACH: tl.constexpr, W_BEST: tl.constexpr, W_FOLLOW: tl.constexpr, W_GAP: tl.constexpr,
    W_DIR: tl.constexpr, W_HAS: tl.constexpr, W_COUNTS: tl.constexpr, W_KEYS: tl.constexpr, W_AT: tl.constexpr,
    W_MOVING: tl.constexpr, W_CAP: tl.constexpr, W_MOST: tl.constexpr,
    UNITS: tl.constexpr, PARTS: tl.constexpr, KNOWN_WORDS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    part, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = row * UNITS + unit
    if tl.load(searching + entry) != 0:
        put_best(
            scores, bounds, lengths, known, taken, counts, indices, score_row, score_unit, room, UNITS, PARTS,
            KNOWN_WORDS, SPAN,
        )  # fmt: skip
    elif part == 0:  # what is shared is listed by one program
        length, found = tl.load(lengths + row), tl.load(whose + entry)
        first, last = tl.load(bounds + row * 5), tl.load(bounds + row * 5 + 1)
        low, high = tl.load(bounds + row * 5 + 2), tl.load(bounds + row * 5 + 3)
        out = indices + entry.to(tl.int64) * room
        at = tl.arange(0, SPAN)
        placed = 0
        for start in tl.range(0, first, SPAN):  # everything, where the row reads everything
            key = start + at
            seen = (key < first) & ((key < low) | (key >= high))
            tl.store(out + placed + tl.cumsum(seen.to(tl.int32), 0) - 1, key, mask=seen)
            placed += tl.sum(seen.to(tl.int32), 0)
        if found >= 0:
            own = words + row.to(tl.int64) * word_row
            local = tl.minimum(tl.load(own + W_LOCAL), 1 << 30).to(tl.int32)
            sinks = tl.minimum(tl.load(own + W_SINKS), 1 << 30).to(tl.int32)
            capacity, most = tl.load(own + W_CAP), tl.load(own + W_MOST)
            position = tl.load(tl.load(own + W_AT).to(tl.pointer_type(tl.int64)) + found).to(tl.int32)
            place = (found * UNITS + unit).to(tl.int64)
            size = tl.load(tl.load(own + W_COUNTS).to(tl.pointer_type(tl.int32)) + place)
            keys = tl.load(own + W_KEYS).to(tl.pointer_type(tl.int32)) + place * capacity
            for start in tl.range(0, size, SPAN):
                key = tl.load(keys + start + at, mask=start + at < size, other=0)
                seen = (start + at < size) & ((key < low) | (key >= high))
                tl.store(out + placed + tl.cumsum(seen.to(tl.int32), 0) - 1, key, mask=seen)
                placed += tl.sum(seen.to(tl.int32), 0)
            end = length - local  # of what is not forced
            left = tl.where(tl.load(own + W_GAP) != 0, position + 1 - local, end)  # keys that were local then
            for start in tl.range(left, end, SPAN):
                key = start + at
                seen = (key < end) & ((key < low) | (key >= high))
                tl.store(out + placed + tl.cumsum(seen.to(tl.int32), 0) - 1, key, mask=seen)
                placed += tl.sum(seen.to(tl.int32), 0)
            follow = tl.minimum(tl.load(own + W_FOLLOW), length.to(tl.int64)).to(tl.int32)
            if follow >= 0:
                moving = tl.load(own + W_MOVING).to(tl.pointer_type(tl.int32)) + place * most
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
        for start in tl.range(last, length, SPAN):
            tl.store(out + placed + start - last + at, start + at, mask=start + at < length)
        tl.store(counts + entry, placed + length - last)
