"""Decode: one query row per sequence over all keys, selected blocks or selected tokens, split over the keys; or
the last few rows of each over all keys, which are read once for them all.

A program serves the query heads of one sequence that share a KV head and a list of keys, over one share of that list:
every so many-th tile of it. A second kernel merges the shares by log-sum-exp. Shares are cut on the device, from
lengths it knows itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.row_formats import format_of
from saccade.ops.layout import rows
from saccade.ops.triton.batch import KeyLists, Pages, even_splits
from saccade.ops.triton.code_products import add_values, lines_for, no_values, products, put_sums, queries
from saccade.ops.triton.common import LOG2E, begin, cap_logits, launched, pad, pool_places, precision, processors
from saccade.ops.triton.key_runs import listed, seen_of, spread
from saccade.ops.triton.latents import attend_latents, share_of
from saccade.ops.triton.merge import merge
from saccade.ops.triton.readers import key_codes, value_codes


class Tiles(NamedTuple):
    """How a launch is cut: keys of a tile, warps of a program, tiles on their way, how many registers a thread has at
    most where a tile of keys is small, and programs to a processor."""

    keys: int
    warps: int
    stages: int
    registers: int | None
    resident: int


PLAIN = Tiles(keys=32, warps=4, stages=3, registers=96, resident=4)
# Codes take half the time on their way, and work that warps of a program would share; one waits for no others.
CODES = Tiles(keys=32, warps=1, stages=3, registers=None, resident=8)
# Of up to 8 rows of a product, of e4m3; and of int8, where all keys are read: rows at multiples of 4 bytes come in
# small pieces through the first cache, which holds what few keys share.
FEW_CODES = Tiles(keys=32, warps=1, stages=2, registers=None, resident=12)
FEW_SCALED = Tiles(keys=16, warps=1, stages=3, registers=None, resident=16)
SOME_CODES = Tiles(keys=64, warps=4, stages=3, registers=None, resident=2)  # of 33 to 64 rows of a product
MANY_CODES = Tiles(keys=64, warps=8, stages=3, registers=None, resident=2)
SHARED = 231_424  # bytes of a Hopper GPU's shared memory that a program's tiles and queries may take
QUERIES = 1 << 16  # of these, of queries


def most_lines(q: Tensor) -> int:
    """Rows of a product whose queries leave shared memory to keys."""
    return QUERIES // _held(q)


def _held(q: Tensor) -> int:
    """Bytes of shared memory that a row of a product takes: float32's in two parts, for its three products."""
    return pad(q.shape[-1]) * q.element_size() * (2 if q.dtype == torch.float32 else 1)


def fitting(tiles: Tiles, q: Tensor, lines: int) -> Tiles:
    """``tiles`` with as few stages, then keys, as there is shared memory for beside ``lines`` rows of a product."""
    row = pad(q.shape[-1]) * q.element_size()
    if row > 512:
        tiles = tiles._replace(keys=min(tiles.keys, 32), stages=2)
    room = SHARED - pad(lines) * _held(q)
    while 2 * tiles.keys * row * tiles.stages > room and tiles.keys > 16:
        less = {"stages": tiles.stages - 1} if tiles.stages > 2 else {"keys": tiles.keys // 2}
        tiles = tiles._replace(**less)
    return tiles


def tiles_for(q: Tensor, pages: Pages, lines: int, everything: bool) -> Tiles:
    """For ``lines`` rows of a product with ``everything`` or with lists: what was measured on a Hopper GPU
    (docs/performance-gpu.md)."""
    if not format_of(pages.k, q.dtype).coded:
        return PLAIN
    if pad(lines) > 32:
        return SOME_CODES if pad(lines) <= 64 else MANY_CODES
    if pad(lines) > 16 or q.dtype == torch.float32:
        return PLAIN._replace(registers=None)
    if pad(q.shape[2]) > 128:
        return CODES._replace(warps=2)
    if lines > 8:
        return CODES
    if pages.k.dtype != torch.int8:
        return FEW_CODES
    return FEW_SCALED if everything else CODES


def attend_decode(
    q: Tensor,
    pages: Pages,
    lists: KeyLists | None,
    *,
    scale: float,
    softcap: float | None = None,
    splits: int | None = None,
    tiles: Tiles | None = None,
    limits: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``q`` [batch, heads, head_dim] -> ``out`` like q, ``lse`` float32 [batch, heads] (natural log).

    Without ``lists`` every key is read. ``splits`` defaults to what fills the device evenly. Split-KV is
    FlashDecoding's (Dao et al., 2023).

    ``limits`` int32 [batch * n]: every sequence has n rows, one after the other in ``q`` [batch * n, heads, head_dim],
    and each reads as many of the sequence's first keys; none where that is 0. There are no ``lists`` then. Of latents
    (``pages.value_dim``) tiles are those of ``latents.tiles_for``, and the first channels of ``out`` count.

    ``window``: a row reads the last so many keys alone of those that it would read without. Others are not looked up,
    whatever lies there, but for those beside the first row's first one that may share its page. SaccadeError unless it
    is at least 1, where there are ``lists``, and of latents.
    """
    if window is not None and (window < 1 or lists is not None or pages.value_dim is not None):
        raise SaccadeError(f"window must be at least 1, got {window}, without lists, and of keys that are no latents")
    if limits is not None and len(limits) == len(pages.lengths):  # a row of each, which is as long as it reads
        pages, limits = replace(pages, lengths=limits.contiguous()), None
    if pages.value_dim is not None:
        return attend_latents(q, pages, lists, scale=scale, softcap=softcap, splits=splits, limits=limits)
    q = rows(q)
    batch, heads, head_dim = q.shape
    each = 1
    if limits is not None:
        each, batch = batch // len(pages.lengths), len(pages.lengths)
    kv_heads = pages.k.shape[1]
    most = pages.longest if lists is None else lists.longest * lists.size
    if window is not None:
        most = min(most, window + each - 1)
    units = kv_heads if lists is None else lists.units
    together = heads // max(kv_heads, units)
    if together * each > most_lines(q):
        together = share_of(together, max(1, most_lines(q) // each))
    programs, per = heads // together, together * each
    keys, warps, stages, registers, resident = fitting(tiles or tiles_for(q, pages, per, lists is None), q, per)
    if splits is None:
        # With less than three tiles of its own, one costs more than it reads.
        highest = max(1, min(-(-most // (3 * keys)), 128))
        splits = even_splits(batch * programs, resident * processors(q.device), highest)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    many = splits > 1
    part_out = (
        torch.empty(batch, programs, splits, per, head_dim, dtype=torch.float32, device=q.device) if many else lse
    )
    part_lse = torch.empty(batch, programs, splits, per, dtype=torch.float32, device=q.device) if many else lse
    # Keys that lie side by side, whatever the list says: one look-up serves them. Of plain rows, which take longer to
    # come, looking each up costs nothing.
    coded = format_of(pages.k, q.dtype).coded
    run = min(keys, pages.k.shape[2], keys if lists is None else lists.size)
    none = pages.lengths  # unused pointers must still be pointers
    starts = None if lists is None or lists.starts is None else lists.starts.contiguous()
    counts = None if lists is None or lists.counts is None else lists.counts.contiguous()
    _decode[(splits, programs, batch)](
        q,
        pages.k,
        pages.v,
        pages.tables,
        pages.lengths,
        none if limits is None else limits,
        none if starts is None else starts,
        none if counts is None else counts,
        none if lists is None else lists.indices.contiguous(),
        part_out,
        part_lse,
        out,
        lse,
        q.stride(0),
        q.stride(1),
        *pages.table_strides,
        0 if lists is None else lists.longest,
        scale * LOG2E,
        softcap or 0.0,
        *pages.far,
        FAR=pages.host is not None,
        HEADS=heads,
        KV_HEADS=kv_heads,
        UNITS=units,
        PER=per,
        PER_PAD=lines_for(per, pages.k, q.dtype),
        ROWS=each,
        D=head_dim,
        D_PAD=pad(head_dim),
        PAGE=pages.k.shape[2],
        SIZE=0 if lists is None else lists.size,
        SPACED=starts is None,
        COUNTED=counts is not None,
        KEYS=keys,
        RUN=run if coded and keys <= 2 * run else 1,
        MANY=many,
        CAPPED=softcap is not None,
        PRECISION=precision(q.dtype),
        WINDOW=window or 0,
        num_warps=warps,
        num_stages=stages,
        maxnreg=registers if keys * pad(head_dim) * pages.k.element_size() <= 1 << 13 else None,
        **launched(q.device),
    )
    if many:
        merge(part_out, part_lse, out, lse, programs=splits, rows=each)
    return out, lse


@triton.jit(
    do_not_specialize=["table_stride", "table_head", "longest", "far_k", "far_v"],
    do_not_specialize_on_alignment=["tables", "lengths", "limits", "starts", "counts", "indices"],
)
def _decode(
    q_ptr, k_pool, v_pool, tables, lengths, limits, starts, counts, indices, part_out, part_lse, out, lse, q_batch,
    q_head, table_stride, table_head, longest, scale_log2, softcap, far_k, far_v, FAR: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, PER: tl.constexpr, PER_PAD: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
    SPACED: tl.constexpr, COUNTED: tl.constexpr, KEYS: tl.constexpr, RUN: tl.constexpr, MANY: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    split, program, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(0)
    OWN: tl.constexpr = PER // ROWS  # query heads
    kv_head = program * OWN // (HEADS // KV_HEADS)
    table = tables + batch.to(tl.int64) * table_stride + kv_head.to(tl.int64) * table_head
    begin(EARLY)
    length = tl.load(lengths + batch)
    ids = indices
    count = length
    most = length
    if SIZE > 0:
        entry = batch * UNITS + program * OWN // (HEADS // UNITS)
        if SPACED:
            ids = indices + entry.to(tl.int64) * longest
        else:
            ids = indices + tl.load(starts + entry)
        if COUNTED:
            count = tl.load(counts + entry).to(tl.int32) * SIZE
        else:
            count = (tl.load(starts + entry + 1) - tl.load(starts + entry)).to(tl.int32) * SIZE
        # Where lists lie apart, the first numbers can be had before it is known how many count.
        most = longest * SIZE if SPACED else count
    member = tl.arange(0, PER_PAD)
    mine = member < PER
    head = program * OWN + member % OWN
    line = batch.to(tl.int64) * ROWS + member // OWN
    channel = tl.arange(0, D_PAD)
    limit = length + tl.zeros([PER_PAD], tl.int32)
    if ROWS > 1:
        limit = tl.load(limits + line, mask=mine, other=0)
    q = tl.load(
        q_ptr + line[:, None] * q_batch + head[:, None] * q_head + channel[None, :],
        mask=mine[:, None] & (channel[None, :] < D),
        other=0.0,
    )
    step = tl.arange(0, KEYS)
    number, hop = split * KEYS, splits * KEYS
    if WINDOW > 0:  # tiles begin where the first row does, or the run of keys that it begins in
        count = tl.max(limit)
        most = count
        start = tl.min(tl.where(limit > 0, tl.maximum(limit - WINDOW, 0), count)) // RUN * RUN
        number += start
    if RUN == 1:
        number += step
    key, other = listed(ids, number, most, RUN, KEYS, SIZE)
    after, after_other = listed(ids, number + hop, most, RUN, KEYS, SIZE)
    seen = seen_of(number, count, key, other, length, step, RUN, KEYS)
    # The numbers behind a list may not be written.
    real = (number < most) & (key >= 0) & (key < length)
    k_row, v_row = pool_places(table, key, real, kv_head, far_k, far_v, KV_HEADS, PAGE, FAR)
    k_more, v_more = k_row, v_row
    if RUN > 1 and RUN < KEYS:
        real = (number + RUN < most) & (other >= 0) & (other < length)
        k_more, v_more = pool_places(table, other, real, kv_head, far_k, far_v, KV_HEADS, PAGE, FAR)
    TYPE: tl.constexpr = q.dtype
    q, rise = queries(q, k_pool, D)
    acc, odd_acc, grain = no_values(v_pool, PER_PAD, D, D_PAD, TYPE)
    weight = tl.zeros([PER_PAD], tl.float32)
    top = tl.full([PER_PAD], float("-inf"), tl.float32)
    tiles = tl.cdiv(count, KEYS)
    if WINDOW > 0:
        tiles = tl.cdiv(count - start, KEYS)
    # Where the next keys lie is looked up while a tile is on its way, and their numbers one tile before that. These
    # loads must not be made stages of the pipeline, where they would wait for the keys before them: hence no num_stages
    # here, which would, but at the launch, which concerns what products read.
    for _ in tl.range(split, tiles, splits):
        k_rows, v_rows = spread(k_row, k_more, step, RUN, KEYS), spread(v_row, v_more, step, RUN, KEYS)
        k, k_scale = key_codes(k_pool, k_rows[:, None], channel[None, :], seen[:, None], D, TYPE, PER_PAD)
        v, odd, v_scale = value_codes(v_pool, v_rows[:, None], channel[None, :], seen[:, None], D, D_PAD, TYPE, PER_PAD)
        valid, at = seen, spread(number, number + RUN, step, RUN, KEYS)
        number += hop
        seen = seen_of(number, count, after, after_other, length, step, RUN, KEYS)
        there = (number < count) & (after < length)
        k_row, v_row = pool_places(table, after, there, kv_head, far_k, far_v, KV_HEADS, PAGE, FAR)
        k_more, v_more = k_row, v_row
        if RUN > 1 and RUN < KEYS:
            there = (number + RUN < count) & (after_other < length)
            k_more, v_more = pool_places(table, after_other, there, kv_head, far_k, far_v, KV_HEADS, PAGE, FAR)
        after, after_other = listed(ids, number + hop, count, RUN, KEYS, SIZE)
        scores = cap_logits(products(q, rise, k, k_scale, PRECISION), scale_log2, softcap, CAPPED)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        if ROWS > 1:
            scores = tl.where(at[None, :] < limit[:, None], scores, float("-inf"))
        if WINDOW > 0:
            scores = tl.where(at[None, :] >= limit[:, None] - WINDOW, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - anchor)
        p = tl.exp2(scores - anchor[:, None])
        weight = weight * shrink + tl.sum(p, 1)
        acc, odd_acc, grain = add_values(acc, odd_acc, grain, shrink, p, v, odd, v_scale, PRECISION)
        top = higher
    total = tl.where(weight == 0.0, 1.0, weight)
    log = tl.where(weight == 0.0, float("-inf"), top + tl.log2(total))
    place = line * HEADS + head
    if MANY:
        part = (batch * tl.num_programs(1) + program).to(tl.int64) * splits + split
        if split < tiles:  # others had nothing to read
            put_sums(
                part_out + (part * PER + member)[:, None] * D, acc, odd_acc, grain, 1.0 / total, mine[:, None], D, D_PAD
            )
        tl.store(part_lse + part * PER + member, log, mask=mine)
    else:
        put_sums(out + place[:, None] * D, acc, odd_acc, grain, 1.0 / total, mine[:, None], D, D_PAD)
        tl.store(lse + place, log * 0.6931471805599453, mask=mine)
