"""CIS in recorded steps: who resembles whom, and what sharers read, for many rows at once (triton_keeping.py: what
searchers will share). Means what sharing.py means. Anchors lie in the rows' states, one place for each step of a block,
so that a step writes its own place alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.cis.recorded import MOST_STEPS
from saccade.methods.cis.triton_row_words import WORDS
from saccade.methods.cis.triton_shared import anchor_at, put_shared, resembled, searchable_at
from saccade.ops.triton import batched_best
from saccade.ops.triton.batched_best import find_best
from saccade.ops.triton.batched_lists import put_best
from saccade.ops.triton.batched_rows import LayerRows, hidden_at
from saccade.ops.triton.best_parts import BOUNDS
from saccade.ops.triton.best_parts import WORDS as BEST_WORDS
from saccade.ops.triton.common import begin, launched, pad


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
        PLACES=MOST_STEPS,
        num_warps=4,
        **launched(device),
    )
    return found


def lists_of(rows: LayerRows, units: int, found: Resembled, scores: Tensor, counts: Tensor, indices: Tensor) -> None:
    """List what every unit reads: searchers the best by ``scores``, as batched_lists.choose_keys says, and the others
    what they share."""
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


@triton.jit(
    do_not_specialize=["word_row", "real_row", "cone_row"],
    do_not_specialize_on_alignment=["words", "reals", "cones", "lengths", "searching", "whose", "bounds", "hidden"],
)
def _resemble(
    q_ptr, words, reals, cones, lengths, searching, whose, bounds, hidden, q_row, q_head, word_row, real_row, cone_row,
    W_TURN: tl.constexpr, W_STEPS: tl.constexpr, W_POS: tl.constexpr, W_K: tl.constexpr, W_SINKS: tl.constexpr,
    W_LOCAL: tl.constexpr, W_REACH: tl.constexpr, W_BEST: tl.constexpr, W_FOLLOW: tl.constexpr, W_GAP: tl.constexpr,
    W_ANY: tl.constexpr, W_DIR: tl.constexpr, W_HAS: tl.constexpr, W_COUNTS: tl.constexpr, W_KEYS: tl.constexpr,
    W_AT: tl.constexpr, W_MOVING: tl.constexpr, W_CAP: tl.constexpr, W_MOST: tl.constexpr,
    HEAD: tl.constexpr, EACH: tl.constexpr, UNITS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
    EARLY: tl.constexpr,
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
        chooses, at, first, last, take = searchable_at(
            own, reals, length, low, high, W_TURN, W_STEPS, W_POS, W_K, W_SINKS, W_LOCAL
        )
        if chooses:
            own_found, _position, _size = resembled(
                q_ptr + row.to(tl.int64) * q_row, own, at, tl.load(reals).to(tl.float32), unit, 1, unit >= 0, q_head,
                W_ANY, W_DIR, W_HAS, W_COUNTS, W_AT, UNITS, HEAD, EACH, WIDTH, 1, PLACES,
            )  # fmt: skip
            found = tl.max(own_found, 0)
            search = (found < 0).to(tl.int32)
        has = tl.load(own + W_HAS).to(tl.pointer_type(tl.int8))
        positions = tl.load(own + W_AT).to(tl.pointer_type(tl.int64))
        passes_on = (found >= 0) & (tl.load(own + W_ANY) != 0)
        tl.store(has + at * UNITS + unit, ((search != 0) | passes_on).to(tl.int8))
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
    W_ANY: tl.constexpr, W_DIR: tl.constexpr, W_HAS: tl.constexpr, W_COUNTS: tl.constexpr, W_KEYS: tl.constexpr,
    W_AT: tl.constexpr, W_MOVING: tl.constexpr, W_CAP: tl.constexpr, W_MOST: tl.constexpr,
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
    else:
        own = words + row.to(tl.int64) * word_row
        found = tl.load(whose + entry)
        position, size = anchor_at(own, found, unit, W_COUNTS, W_AT, UNITS)
        _begins, _ends, _straight, placed = put_shared(
            part, tl.num_programs(0), part == 0, own, indices + entry.to(tl.int64) * room, tl.load(lengths + row),
            found, position, size, unit, tl.load(bounds + row * 5), tl.load(bounds + row * 5 + 1),
            tl.load(bounds + row * 5 + 2), tl.load(bounds + row * 5 + 3), W_SINKS, W_LOCAL, W_FOLLOW, W_GAP, W_KEYS,
            W_MOVING, W_CAP, W_MOST, UNITS, SPAN,
        )  # fmt: skip
        if part == 0:
            tl.store(counts + entry, placed)
