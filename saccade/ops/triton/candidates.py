"""Which candidates a decode step reads, chosen on the device: exact scores, the best of every unit, their lists. Means
what ops/candidates.py means."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.layout import flat, rows
from saccade.ops.triton import batched_best
from saccade.ops.triton.batched_best import find_best
from saccade.ops.triton.best_parts import BOUNDS, WORDS, bounds_at, known_at, part_at
from saccade.ops.triton.common import LOG2E, also, begin, launched, processors
from saccade.ops.triton.radix_select import taken_of
from saccade.ops.triton.weights import KEYS, constants, logits
from saccade.selection import Candidates, Tokens


def choose(
    q: Tensor,
    kv: KVView,
    selection: Candidates,
    *,
    scale: float,
    softcap: float | None = None,
    room: int | None = None,
) -> Tokens:
    """What ``q`` [heads, 1, head_dim] reads: the forced keys and the best candidates of every unit; one list a unit, or
    one a query head where some are idle.

    ``room`` bounds how many keys a list holds; the indices behind the last list then mean nothing. Without it the
    device is asked for their number.
    """
    shape, units, device = selection.shape, selection.units, q.device
    heads = shape.heads
    per = heads // units
    first, last = selection.forced
    lost = selection.hidden[1] - selection.hidden[0]
    all_keys = last - first - lost
    width = all_keys if selection.full is not None else min(all_keys, selection.indices.numel())
    forced = first + shape.k_len - last
    ends = forced if per > 1 else 0  # several heads rank by weights, of which the forced keys have their part
    scores = torch.empty(heads, width + ends, dtype=torch.float32, device=device)
    q, k = rows(q), flat(selection.k, torch.int64)
    listed, keys = flat(selection.offsets, torch.int64), flat(selection.indices, torch.int32)
    full = listed if selection.full is None else flat(selection.full, torch.bool)
    idle = listed if selection.idle is None else flat(selection.idle, torch.bool)
    if width:
        programs = max(units, shape.kv_heads)
        tiles = triton.cdiv(width + ends, KEYS)
        paged = kv.paged()
        _score[(min(tiles, triton.cdiv(16 * processors(device), programs)), programs)](
            q,
            paged.k,
            paged.block_table,
            listed,
            keys,
            full,
            k,
            scores,
            q.stride(0),
            paged.head_stride,
            width + ends,
            ends,
            first,
            last,
            selection.hidden[0],
            lost,
            scale * LOG2E,
            softcap or 0.0,
            FULL=selection.full is not None,
            num_stages=1,
            **constants(q, kv, shape, units, softcap),
            **launched(device),
        )
    if per > 1:
        top = scores.amax(1, keepdim=True)
        scores = torch.exp2(scores - top)
        scores /= scores.sum(1, keepdim=True)
        if selection.idle is not None:
            scores = scores.masked_fill(selection.idle[:, None], 0.0)
        scores = scores.view(units, per, -1).sum(1)
    lists = units if selection.idle is None else heads
    longest = max(width + forced, min(selection.idle_keys, shape.k_len)) if room is None else room
    offsets = torch.empty(lists + 1, dtype=torch.int64, device=device)
    indices = torch.empty(lists * longest, dtype=torch.int32, device=device)
    bounds = torch.empty(units, BOUNDS, dtype=torch.int32, device=device)
    _bound[(units,)](
        k, listed, full, bounds, all_keys, FULL=selection.full is not None, num_warps=1, **launched(device)
    )
    best = find_best(scores[None], bounds)
    _pick[(best.parts, lists)](
        scores,
        bounds,
        best.words,
        best.taken,
        k,
        listed,
        keys,
        full,
        idle,
        offsets,
        indices,
        scores.shape[1],
        first,
        last,
        shape.k_len,
        selection.hidden[0],
        lost,
        min(selection.idle_keys, shape.k_len),
        LISTS=lists,
        PER_LIST=lists // units,
        FULL=selection.full is not None,
        IDLE=selection.idle is not None,
        PARTS=triton.next_power_of_2(best.parts),
        WORDS=WORDS,
        SPAN=batched_best.SPAN,
        num_warps=8,
        **launched(device),
    )
    return Tokens(shape, offsets, indices if room is not None else indices[: int(offsets[-1])].clone())


@triton.jit
def _candidate(number, valid, listed, first, hidden, lost, everything, FULL: tl.constexpr):
    """The ``number``-th candidate of a list that begins at ``listed``, or of all keys but the hidden ones."""
    key = tl.load(listed + number, mask=also(valid, everything == 0) if FULL else valid, other=0)
    if FULL:
        plain = first + number
        key = tl.where(everything != 0, plain + tl.where(plain >= hidden, lost, 0), key)
    return key


@triton.jit
def _sizes(offsets, full, k, unit, valid, all_keys, FULL: tl.constexpr):
    """How many candidates each ``unit`` has, and how many of them it reads."""
    after, start = tl.load(offsets + unit + 1, mask=valid, other=0), tl.load(offsets + unit, mask=valid, other=0)
    count = (after - start).to(tl.int32)
    if FULL:
        count = tl.where(tl.load(full + unit, mask=valid, other=0) != 0, all_keys, count)
    return count, tl.minimum(tl.load(k + unit, mask=valid, other=0).to(tl.int32), count)


@triton.jit(
    do_not_specialize=["table_head", "width", "ends", "first", "last", "hidden", "lost"],
    do_not_specialize_on_alignment=["table", "offsets", "indices", "full", "k"],
)
def _score(
    q_ptr, k_pool, table, offsets, indices, full, k, scores, q_head, table_head, width, ends, first, last, hidden, lost,
    scale_log2, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, PER: tl.constexpr, PER_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, FULL: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    program = tl.program_id(1)
    unit = program * PER // (HEADS // UNITS)
    table += (program * PER // (HEADS // KV_HEADS)).to(tl.int64) * table_head
    count, reads = _sizes(offsets, full, k, unit, True, last - first - lost, FULL)
    everything = 0
    if FULL:
        everything = tl.load(full + unit).to(tl.int32)
    listed = indices + tl.load(offsets + unit)
    mine = tl.arange(0, PER_PAD)
    out = scores + (program * PER + mine).to(tl.int64)[:, None] * width
    tiles = tl.cdiv(width, KEYS)
    if reads == count:
        tiles = 0  # all are read, whatever they score
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        number = tile * KEYS + tl.arange(0, KEYS)
        key = _candidate(number, number < count, listed, first, hidden, lost, everything, FULL)
        end = number - count  # the forced keys come behind the candidates
        key = tl.where(end < 0, key, tl.where(end < first, end, end - first + last))
        valid = number < count + ends
        found = logits(
            q_ptr, k_pool, table, program, key, valid, q_head, scale_log2, softcap, HEADS, KV_HEADS, PER, PER_PAD, D,
            D_PAD, PAGE, CAPPED, PRECISION,
        )  # fmt: skip
        stored = (mine < PER)[:, None] & (number < width)[None, :]
        tl.store(out + number[None, :], tl.where(valid[None, :], found, float("-inf")), mask=stored)


@triton.jit(do_not_specialize=["all_keys"], do_not_specialize_on_alignment=["k", "offsets", "full", "bounds"])
def _bound(k, offsets, full, bounds, all_keys, FULL: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    unit = tl.program_id(0)
    count, wanted = _sizes(offsets, full, k, unit, True, all_keys, FULL)
    tl.store(bounds + unit * 5, 0)
    tl.store(bounds + unit * 5 + 1, count)
    tl.store(bounds + unit * 5 + 2, 0)
    tl.store(bounds + unit * 5 + 3, 0)
    tl.store(bounds + unit * 5 + 4, wanted)


@triton.jit(
    do_not_specialize=["width", "first", "last", "k_len", "hidden", "lost", "few"],
    do_not_specialize_on_alignment=["bounds", "words", "taken", "offsets", "indices", "full", "k", "idle"],
)
def _pick(
    scores, bounds, words, taken, k, offsets, indices, full, idle, starts, out, width, first, last, k_len, hidden,
    lost, few,
    LISTS: tl.constexpr, PER_LIST: tl.constexpr, FULL: tl.constexpr, IDLE: tl.constexpr, PARTS: tl.constexpr,
    WORDS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One part of a list: keys in rising order, sinks first, window last. An idle head's list are the first ``few``
    keys."""
    begin(EARLY)
    part, one = tl.program_id(0), tl.program_id(1)
    unit = one // PER_LIST
    forced = first + k_len - last
    before = tl.arange(0, triton.next_power_of_2(LISTS))
    real = before < one
    _, reads = _sizes(offsets, full, k, before // PER_LIST, real, last - first - lost, FULL)
    reads += forced
    start, end, _low, _high, wanted, between = bounds_at(bounds, unit, 1)
    size = wanted + forced
    resting = 0
    if IDLE:
        resting = tl.load(idle + one).to(tl.int32)
        reads = tl.where(tl.load(idle + before, mask=real, other=0) != 0, few, reads)
        size = tl.where(resting != 0, few, size)
    behind = tl.sum(tl.where(real, reads, 0).to(tl.int64), 0)  # the lists before
    if part == 0:
        tl.store(starts + one, behind)  # the next list's program stores where this one ends
        if one == LISTS - 1:
            tl.store(starts + LISTS, behind + size)
    hop = tl.num_programs(0) * SPAN
    at = tl.arange(0, SPAN)
    place = out + behind
    leading = tl.where(resting != 0, size, first)
    for begins in tl.range(part * SPAN, leading, hop):
        tl.store(place + begins + at, begins + at, mask=begins + at < leading)
    if resting == 0:
        place += first
        everything = 0
        if FULL:
            everything = tl.load(full + unit).to(tl.int32)
        listed = indices + tl.load(offsets + unit)
        row = scores + unit.to(tl.int64) * width
        begins, ends = part_at(start, end, part, SPAN)
        if (wanted > 0) & (begins < ends):
            bound, spare, level, placed = known_at(words, taken, unit, part, begins, wanted, between, PARTS, WORDS)
            for number in tl.range(begins, ends, SPAN):
                chosen, level = taken_of(row, number + at, number + at < ends, bound, spare, level)
                key = _candidate(number + at, chosen, listed, first, hidden, lost, everything, FULL)
                tl.store(place + placed + tl.cumsum(chosen.to(tl.int32), 0) - 1, key, mask=chosen)
                placed += tl.sum(chosen.to(tl.int32), 0)
        place += wanted
        for begins in tl.range(part * SPAN, k_len - last, hop):
            tl.store(place + begins + at, last + begins + at, mask=begins + at < k_len - last)
