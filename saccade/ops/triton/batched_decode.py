"""What a decode step of many sequences needs beside attention, in a few launches a layer: new rows into the pages,
block summaries, scores of blocks against them, and lists of the best.

A row stands for one sequence's token of the step. ``lengths`` int32 [rows] count the keys that it sees, its own among
them; a row of length 0 is padding, which is neither stored nor read. What the form of a reading fixes is compiled in
(see selection.readings); its numbers come in buffers, an entry a row. The host is never asked for what only the device
knows, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.layout import flat, rows
from saccade.ops.triton.batch import KeyLists, Pages
from saccade.ops.triton.block_summaries import CHANNELS, MOST_CHANNELS, parts
from saccade.ops.triton.common import begin, launched, pad, pool_rows, precision
from saccade.ops.triton.latent_scores import score_latents
from saccade.ops.triton.low_rank import record_pages
from saccade.ops.triton.radix_select import best_of
from saccade.ops.triton.readers import load_keys, store_rows
from saccade.selection.readings import Choice


@dataclass(frozen=True)
class Summaries:
    """Where each row's summaries of full blocks lie: ``pointers`` int64 [rows] to [blocks, 2, kv_heads, head_dim] of
    the keys' dtype, contiguous, with room for the block that the row may fill; ``kind`` "cuboid", "minmax" or
    "moments", or "stored_mean" with one part instead of two (see kv.summaries). "low_rank": bytes, as many parts as a
    record has rows."""

    pointers: Tensor
    size: int
    kind: str


def append_rows(
    k: Tensor, v: Tensor, pages: Pages, summaries: Summaries | None = None, limits: Tensor | None = None
) -> None:
    """Store each row's ``k``, ``v`` [rows, kv_heads, head_dim] (``k`` alone where values are part of it) as the last of
    its keys and, where it fills a block of ``summaries``, summarize that block. ``limits`` int32 [rows]: as in
    :func:`attend_decode`, the keys of each of several rows of a sequence."""
    count, kv_heads, head_dim = k.shape
    if summaries is not None and summaries.kind == "low_rank":
        append_rows(k, v, pages, None, limits)
        record_pages(pages, summaries.pointers, summaries.size, limits)
        return
    if limits is not None and summaries is not None:
        # All rows first: a block may have several of them, which one of its last row's programs reads back.
        append_rows(k, v, pages, None, limits)
    k, v = rows(k), rows(v)
    # Wide rows are split: a summary's channels have nothing to do with each other.
    channels = pad(head_dim) if head_dim <= MOST_CHANNELS else CHANNELS
    _append[(kv_heads, count, triton.cdiv(head_dim, channels))](
        k,
        v,
        pages.k,
        pages.v,
        pages.tables,
        pages.lengths if limits is None else limits,
        pages.lengths if summaries is None else summaries.pointers,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *pages.table_strides,
        KV_HEADS=kv_heads,
        ROWS=count // len(pages.lengths),
        D=head_dim,
        D_PAD=channels,
        JOINED=pages.value_dim is not None,
        PAGE=pages.k.shape[2],
        SIZE=0 if summaries is None else summaries.size,
        CUBOID=summaries is not None and summaries.kind == "cuboid",
        MEAN=summaries is not None and summaries.kind == "stored_mean",
        MOMENTS=summaries is not None and summaries.kind == "moments",
        num_warps=2,
        **launched(k.device),
    )


def score_tiles(many: bool, row_bytes: int) -> tuple[int, int, int]:
    """Blocks a program, warps, stages: of ``many`` scores, and where rows of channels have ``row_bytes``. Wider rows
    than 512 bytes in as many stages exceed a multiprocessor's shared memory."""
    if row_bytes > 512:
        return 32, 4, 2
    return (64, 4, 3) if many else (32, 4, 4)


def score_blocks(
    q: Tensor,
    pages: Pages,
    summaries: Summaries,
    choice: Choice,
    tiles: tuple[int, int, int] | None = None,
) -> Tensor:
    """``q`` [rows, heads, head_dim] -> float32 [rows, units, n]: ArkVale's and Quest's score of each block
    (ops.scores.cuboid_scores), meaned over a unit's query heads; -inf where a block is not to be chosen. ``n`` is what
    ``pages.longest`` keys make. ``tiles``: blocks a program, warps, stages."""
    q = rows(q)
    batch, heads, head_dim = q.shape
    kv_heads = pages.k.shape[1]
    blocks = -(-pages.longest // choice.size)
    if pages.value_dim is not None:
        pointers, size, ends = summaries.pointers, choice.size, (choice.first, choice.last)
        return score_latents(q, pages.lengths, pointers, blocks, size, *ends, choice.ruled)
    scores = torch.empty(batch, choice.units, blocks, dtype=torch.float32, device=q.device)
    many = batch * choice.units * blocks >= 64 * 1024
    tile, warps, stages = tiles or score_tiles(many, pad(head_dim) * q.element_size())
    _score[(triton.cdiv(blocks, tile), choice.units, batch)](
        q,
        pages.lengths,
        summaries.pointers,
        scores,
        q.stride(0),
        q.stride(1),
        blocks,
        HEADS=heads,
        KV_HEADS=kv_heads,
        UNITS=choice.units,
        D=head_dim,
        D_PAD=pad(head_dim),
        G_PAD=pad(heads // kv_heads),
        SIZE=choice.size,
        FIRST=choice.first,
        LAST=choice.last,
        AFTER_FULL=choice.ruled,
        TILE=tile,
        STAGES=stages,
        PRECISION=precision(q.dtype),
        num_warps=warps,
        **launched(q.device),
    )
    return scores


def room_for(choice: Choice, pages: Pages) -> int:
    """Most blocks that a list of ``choice`` can have over these pages."""
    return min(choice.longest, -(-pages.longest // choice.size))


def choose_best(scores: Tensor, pages: Pages, choice: Choice, take: Tensor, dense_upto: Tensor) -> KeyLists:
    """Lists of the blocks that each row's ``choice`` reads, from its ``scores``, ties to the lower block. ``take`` and
    ``dense_upto`` int32 [rows] are each row's own, of which those of ``choice`` are the bounds."""
    scores = flat(scores, torch.float32)
    batch, units, blocks = scores.shape
    longest = room_for(choice, pages)
    counts = torch.empty(batch * units, dtype=torch.int32, device=scores.device)
    indices = torch.empty(batch * units, longest, dtype=torch.int32, device=scores.device)
    width = pad(max(blocks, longest))
    _choose_best[(units, batch)](
        scores,
        pages.lengths,
        take,
        dense_upto,
        counts,
        indices,
        blocks,
        longest,
        UNITS=units,
        SIZE=choice.size,
        FIRST=choice.first,
        LAST=choice.last,
        TAKES=bool(choice.take),
        WIDTH=width,
        num_warps=4 if width <= 1024 else 8,
        **launched(scores.device),
    )
    return KeyLists(None, counts, indices, units, choice.size, longest)


def band_lists(pages: Pages, sinks: Tensor, window: Tensor, longest: int) -> KeyLists:
    """Lists of each row's first ``sinks`` and last ``window`` keys (int32 [rows]), together at most ``longest``."""
    batch, longest = pages.lengths.shape[0], min(longest, pages.longest)
    counts = torch.empty(batch, dtype=torch.int32, device=pages.lengths.device)
    indices = torch.empty(batch, longest, dtype=torch.int32, device=pages.lengths.device)
    _band[(triton.cdiv(longest, 1024), batch)](
        pages.lengths, sinks, window, counts, indices, longest, WIDTH=1024, num_warps=4, **launched(counts.device)
    )
    return KeyLists(None, counts, indices, 1, 1, longest)


@triton.jit(do_not_specialize=["k_row", "k_head", "v_row", "v_head", "table_stride", "table_head"])
def _append(
    k_new, v_new, k_pool, v_pool, tables, lengths, pointers, k_row, k_head, v_row, v_head, table_stride, table_head,
    KV_HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, JOINED: tl.constexpr,
    PAGE: tl.constexpr, SIZE: tl.constexpr, CUBOID: tl.constexpr, MEAN: tl.constexpr, MOMENTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    kv_head, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    if length > 0:
        table = tables + (row // ROWS).to(tl.int64) * table_stride + kv_head.to(tl.int64) * table_head
        at = length - 1
        channel = tl.program_id(2) * D_PAD + tl.arange(0, D_PAD)
        real = channel < D
        k = tl.load(k_new + row.to(tl.int64) * k_row + kv_head * k_head + channel, mask=real, other=0.0)
        place = pool_rows(table, at, None, kv_head, KV_HEADS, PAGE)
        k = store_rows(k_pool, place, channel, k, None, D)
        if not JOINED:
            v = tl.load(v_new + row.to(tl.int64) * v_row + kv_head * v_head + channel, mask=real, other=0.0)
            store_rows(v_pool, place, channel, v, None, D)
        if SIZE > 0:  # noqa: SIM102 (without summaries the rest must not be compiled)
            if length % SIZE == 0:
                key = at - SIZE + 1 + tl.arange(0, SIZE)
                before = key < at  # the new key is at hand; reading it back would need a barrier
                behind = pool_rows(table, key, before, kv_head, KV_HEADS, PAGE)[:, None]
                keys = load_keys(k_pool, behind, channel[None, :], before[:, None], D, k.dtype)
                keys = tl.where(before[:, None], keys.to(tl.float32), k.to(tl.float32)[None, :])
                high, low = parts(keys, SIZE, CUBOID, MEAN, MOMENTS)
                PARTS: tl.constexpr = 1 if MEAN else 2
                base = tl.load(pointers + row // ROWS).to(tl.pointer_type(k.dtype))
                block = (at // SIZE).to(tl.int64)
                tl.store(base + (block * PARTS * KV_HEADS + kv_head) * D + channel, high.to(k.dtype), mask=real)
                if not MEAN:
                    tl.store(base + ((block * 2 + 1) * KV_HEADS + kv_head) * D + channel, low.to(k.dtype), mask=real)


@triton.jit(do_not_specialize=["blocks"])
def _score(
    q_ptr, lengths, pointers, scores, q_row, q_head, blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    G_PAD: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, AFTER_FULL: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PER: tl.constexpr = KV_HEADS // UNITS
    unit, row = tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    stop = tl.cdiv(length, SIZE) - LAST
    if AFTER_FULL:
        stop = length // SIZE - LAST
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    wanted = (block >= FIRST) & (block < stop)
    out = scores + (row * UNITS + unit).to(tl.int64) * blocks + block
    if (tl.program_id(0) * TILE < stop) & (length > 0):
        base = tl.multiple_of(tl.load(pointers + row).to(tl.pointer_type(q_ptr.dtype.element_ty)), 16)
        channel = tl.arange(0, D_PAD)
        member = tl.arange(0, G_PAD)
        there = wanted[:, None] & (channel[None, :] < D)
        total = tl.zeros([TILE, G_PAD], tl.float32)
        for kv_head in tl.range(unit * PER, unit * PER + PER, num_stages=STAGES):
            q = tl.load(
                q_ptr + row.to(tl.int64) * q_row + (kv_head * GROUP + member)[:, None] * q_head + channel[None, :],
                mask=(member < GROUP)[:, None] & (channel[None, :] < D),
                other=0.0,
            )
            at = base + (block[:, None].to(tl.int64) * 2 * KV_HEADS + kv_head) * D + channel[None, :]
            high = tl.load(at, mask=there, other=0.0)
            low = tl.load(at + KV_HEADS * D, mask=there, other=0.0)
            above, below = tl.maximum(q, 0.0).to(q.dtype), tl.minimum(q, 0.0).to(q.dtype)
            total = tl.dot(high, tl.trans(above), total, input_precision=PRECISION)
            total = tl.dot(low, tl.trans(below), total, input_precision=PRECISION)
        mean = tl.sum(total, 1) / (GROUP * PER)
        tl.store(out, tl.where(wanted, mean, float("-inf")), mask=block < blocks)
    else:
        tl.store(out, tl.full([TILE], float("-inf"), tl.float32), mask=block < blocks)


@triton.jit(do_not_specialize=["blocks", "longest"], do_not_specialize_on_alignment=["lengths", "takes", "denses"])
def _choose_best(
    scores, lengths, takes, denses, counts, indices, blocks, longest,
    UNITS: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, TAKES: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(0), tl.program_id(1)
    entry = row * UNITS + unit
    length = tl.load(lengths + row)
    pages = tl.cdiv(length, SIZE)
    block = tl.arange(0, WIDTH)
    out = indices + entry.to(tl.int64) * longest
    if length <= tl.load(denses + row):
        tl.store(out + block, block, mask=block < pages)
        tl.store(counts + entry, pages)
    else:
        taken = (block < FIRST) | (block >= pages - LAST)
        if TAKES:
            take = tl.load(takes + row)
            score = tl.load(scores + entry.to(tl.int64) * blocks + block, mask=block < blocks, other=float("-inf"))
            taken = taken | best_of(score, take)
        taken = taken & (block < pages)
        listed = taken.to(tl.int32)
        tl.store(out + tl.cumsum(listed, 0) - 1, block, mask=taken)
        tl.store(counts + entry, tl.sum(listed, 0))


@triton.jit(do_not_specialize=["longest"], do_not_specialize_on_alignment=["lengths", "all_sinks", "windows"])
def _band(lengths, all_sinks, windows, counts, indices, longest, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    row = tl.program_id(1)
    length, sinks, window = tl.load(lengths + row), tl.load(all_sinks + row), tl.load(windows + row)
    count = tl.minimum(sinks + window, length)
    number = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    key = tl.where((number < sinks) | (count == length), number, length - count + number)
    tl.store(indices + row.to(tl.int64) * longest + number, key, mask=number < count)
    if tl.program_id(0) == 0:
        tl.store(counts + row, count)
