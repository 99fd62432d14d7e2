"""What LFPS's recorded steps find out of keys before any is read: what the step before has learnt, who rests, how well
the means of blocks agree with the queries; and then which table entries stand out. Each of the first is short and waits
for memory, and none needs another, so that they share a launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.lfps.triton_row_blocks import EACH, best_blocks, mean_scores
from saccade.methods.lfps.triton_row_learning import take_in
from saccade.methods.lfps.triton_row_rest import find_rest
from saccade.methods.lfps.triton_row_words import W, budget_at, pointer, query_of, static
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.best_parts import BOUNDS
from saccade.ops.triton.common import begin, launched, pad, precision

SPAN = 4096  # entries that a program compares
LEARNT, TABLE = 512, 1024  # entries taken in, or scaled down, in one go
BITS = 16  # entries of a word
TILE = 512  # words in which a program looks for candidates


class Begun(NamedTuple):
    """``limits`` float32 [rows * units, 4]: mean and threshold of the vertical table, and of the slash table. ``idle``
    int8 [rows * heads], who is bypassed, and ``instead`` float32 [rows * heads], what stands then for all that a head
    leaves out, as log-sum-exp. ``scores`` float32 [rows, units, n] of blocks and ``bounds`` int32 [rows * units,
    BOUNDS], as ``best_blocks`` takes them; None where none name candidates."""

    limits: Tensor
    idle: Tensor
    instead: Tensor
    scores: Tensor | None
    bounds: Tensor | None


class Seen(NamedTuple):
    """``entries`` int32 [rows * units, 2, m], which stand out of a row's tables (``_scan``). ``blocks`` int8 [rows *
    units, n], 1 for the best. ``counts`` int32 [rows * units, parts] of TILE words each, zeros."""

    entries: Tensor
    blocks: Tensor | None
    counts: Tensor


def begin_step(rows: LayerRows, units: int, size: int) -> Begun:
    """Take in what the step before has learnt, and find out who rests; ``size``: score blocks of so many keys, 0: no
    blocks name candidates."""
    q, summaries, device, count = query_of(rows), rows.summaries, rows.q.device, rows.count
    limits = torch.empty(count * units, 4, dtype=torch.float32, device=device)
    idle = torch.empty(count * rows.heads, dtype=torch.int8, device=device)
    instead = torch.empty(count * rows.heads, dtype=torch.float32, device=device)
    blocks, scores, bounds, parts = 0, None, None, 0
    pointers = rows.pages.lengths  # unused pointers must still be pointers
    if size:
        assert summaries is not None
        pointers = summaries.pointers
        blocks = max(1, rows.pages.longest // size)
        scores = torch.empty(count, units, blocks, dtype=torch.float32, device=device)
        bounds = torch.empty(count * units, BOUNDS, dtype=torch.int32, device=device)
        parts = triton.cdiv(blocks, EACH)
    _begin[((units + rows.heads + parts * rows.kv_heads) * count,)](
        q, rows.pages.k, rows.pages.tables, rows.pages.lengths, rows.words, rows.reals, pointers, limits, idle,
        instead, instead if scores is None else scores, pointers if bounds is None else bounds, q.stride(0),
        q.stride(1), *rows.pages.table_strides, rows.words.stride(0), rows.reals.stride(0), blocks, count, rows.scale,
        rows.softcap or 0.0,
        **static(
            rows, UNITS=units, SIZE=size, GROUP=pad(rows.heads // rows.kv_heads), PRECISION=precision(q.dtype),
            CAPPED=rows.softcap is not None, LEARNT=LEARNT, TABLE=TABLE, num_warps=4, maxnreg=96,
        ),
    )  # fmt: skip
    return Begun(limits, idle, instead, scores, bounds)


def look(rows: LayerRows, units: int, begun: Begun) -> Seen:
    """Which table entries and which blocks are worth a look."""
    device, width, count = rows.q.device, rows.pages.longest, rows.count
    words = triton.cdiv(width, BITS)
    entries = torch.empty(count * units, 2, words, dtype=torch.int32, device=device)
    counts = torch.empty(count * units, triton.cdiv(words, TILE), dtype=torch.int32, device=device)
    _scan[(triton.cdiv(width, SPAN), units, count)](
        rows.words, rows.reals, rows.pages.lengths, begun.limits, entries, counts, rows.words.stride(0),
        rows.reals.stride(0), words, counts.shape[1], UNITS=units, SPAN=SPAN, num_warps=8, **launched(device),
    )  # fmt: skip
    if begun.scores is None or begun.bounds is None:
        return Seen(entries, None, counts)
    return Seen(entries, best_blocks(begun.scores, begun.bounds), counts)


@triton.jit(
    do_not_specialize=["table_stride", "table_head", "word_row", "real_row", "blocks", "rows"],
    do_not_specialize_on_alignment=[
        "tables", "lengths", "words", "reals", "pointers", "limits", "idle", "instead", "scores", "bounds",
    ],
)  # fmt: skip
def _begin(
    q_ptr, k_pool, tables, lengths, words, reals, pointers, limits, idle, instead, scores, bounds, q_row, q_head,
    table_stride, table_head, word_row, real_row, blocks, rows, scale, softcap,
    UNITS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr,
    LEARNT: tl.constexpr, TABLE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, PAGE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs of three kinds, those that wait for most first, of all rows: they begin in their order."""
    begin(EARLY)
    place, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    if place < UNITS:
        take_in(words, reals, lengths, limits, word_row, real_row, place, row, UNITS, LEARNT, TABLE)
    elif place < UNITS + HEADS:
        find_rest(
            q_ptr, k_pool, tables, lengths, words, reals, idle, instead, q_row, q_head, table_stride, table_head,
            word_row, real_row, scale, softcap, place - UNITS, row, HEADS, KV_HEADS, D, D_PAD, PAGE, CAPPED,
        )  # fmt: skip
    else:
        if SIZE > 0:
            number = place - UNITS - HEADS
            mean_scores(
                q_ptr, pointers, lengths, words, scores, bounds, q_row, q_head, word_row, blocks, number // KV_HEADS,
                number % KV_HEADS, row, UNITS, SIZE, GROUP, PRECISION, HEADS, KV_HEADS, D, D_PAD,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["word_row", "real_row", "width", "parts"],
    do_not_specialize_on_alignment=["words", "reals", "lengths", "limits", "seen", "counts"],
)
def _scan(
    words, reals, lengths, limits, seen, counts, word_row, real_row, width, parts,
    UNITS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of 16 entries of a table a word: which are above their threshold (the lower bits), and which above their mean
    (the others). The vertical table's words come before those of the slash table, which is read as it lies."""
    begin(EARLY)
    chunk, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = (row * UNITS + unit).to(tl.int64)
    if chunk == 0:
        for start in tl.range(0, parts, 256):
            part = start + tl.arange(0, 256)
            tl.store(counts + entry * parts + part, tl.zeros([256], tl.int32), mask=part < parts)
    # What the words say is loaded before it is known that it is of use: one wait instead of several.
    own, reals = words + row.to(tl.int64) * word_row, reals + row.to(tl.int64) * real_row
    length, first = tl.load(lengths + row), tl.load(own + W.sinks).to(tl.int32)
    line = unit * tl.multiple_of(tl.load(own + W.capacity), 16)
    verticals = tl.multiple_of(pointer(own, W.vertical, tl.float32), 16)
    slashes = tl.multiple_of(pointer(own, W.slash, tl.float32), 16)
    n, dense, _take, _local = budget_at(own, reals, length, first)
    if (length > 0) & (dense == 0) & (chunk * SPAN < n):
        word, lane = tl.arange(0, SPAN // 16)[:, None], tl.arange(0, 16)[None, :]
        at = chunk * SPAN + word * 16 + lane
        # Tables are as wide as a multiple of 16 entries: they are read by whole words.
        there = (chunk * SPAN + word * 16 < n) & (lane >= 0)
        vertical = tl.load(verticals + line + at, mask=there, other=0.0)
        slash = tl.load(slashes + line + at, mask=there, other=0.0)
        left = n - chunk * SPAN
        own_limits = limits + entry * 4
        own_seen = seen + entry * 2 * width + chunk * (SPAN // 16)
        to = tl.arange(0, SPAN // 16)
        mine = to < tl.cdiv(left, 16)
        tl.store(own_seen + to, _bits(vertical, own_limits, left, SPAN), mask=mine)
        tl.store(own_seen + width + to, _bits(slash, own_limits + 2, left, SPAN), mask=mine)


@triton.jit
def _bits(value, limits, left, SPAN: tl.constexpr):
    """Words of the entries ``value``, of which ``left`` count."""
    lane = tl.arange(0, 16)[None, :]
    at = tl.arange(0, SPAN // 16)[:, None] * 16 + lane
    mean, tau = tl.load(limits), tl.load(limits + 1)
    bits = tl.where((value > tau) & (at < left), 1 << lane, 0)
    return tl.sum(bits | tl.where((value > mean) & (at < left), 65536 << lane, 0), 1)
