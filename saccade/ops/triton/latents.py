"""Decode over latents (multi-head latent attention, DeepSeek-V2, 2024): one row a token serves all query heads as key,
and its first channels as value. All keys, selected blocks or selected tokens, split over the keys.

A program serves some query heads of one sequence, or of its last few rows, over one share of the list. A tile of rows
is loaded once: scores come of all of its channels, and its first ones are then weighed by them. Programs of the same
share follow each other, so that they find the rows in the L2 cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.layout import rows
from saccade.ops.triton import latents_wide
from saccade.ops.triton.batch import KeyLists, Pages, even_splits, listed_keys
from saccade.ops.triton.common import (
    LOG2E,
    begin,
    cap_logits,
    is_hopper,
    launched,
    pad,
    pool_places,
    precision,
    processors,
)
from saccade.ops.triton.merge import merge
from saccade.ops.triton.readers import load_keys


class Tiles(NamedTuple):
    """Query heads and keys of a tile, warps, pipeline depth, and how many programs a processor holds."""

    heads: int
    keys: int
    warps: int
    stages: int
    resident: int
    wide: bool = False  # by the kernel of latents_wide.py


def tiles_for(members: int, q: Tensor, value_dim: int) -> Tiles:
    """For so many query heads of a list: few of them wait for memory, many for products."""
    if q.element_size() > 2:
        return Tiles(16, 16, 4, 2, 1)
    if members <= 16:
        return Tiles(16, 32, 4, 3, 2)
    if members <= 32 or not is_hopper(q.device):
        return Tiles(32, 32, 8, 2, 1)
    if latents_wide.serves(q, value_dim):
        return Tiles(latents_wide.HEADS, latents_wide.KEYS, latents_wide.WARPS, 1, 1, wide=True)
    return Tiles(64, 64, 8, 2, 1)


def share_of(members: int, most: int) -> int:
    """Into what number of heads to cut ``members``: the largest of at most ``most`` that divides them."""
    return next(count for count in range(min(most, members), 0, -1) if members % count == 0)


def attend_latents(
    q: Tensor,
    pages: Pages,
    lists: KeyLists | None,
    *,
    scale: float,
    softcap: float | None = None,
    splits: int | None = None,
    tiles: Tiles | None = None,
    limits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``q`` [batch, heads, width] -> ``out`` of its shape, of which the first ``pages.value_dim`` channels are written,
    and ``lse`` float32 [batch, heads] (natural log). ``pages`` have one KV head. The rest is as in
    ``decode.attend_decode``."""
    q = rows(q)
    assert pages.value_dim is not None
    lines, heads, width = q.shape
    batch = len(pages.lengths)
    each = 1 if limits is None else lines // batch
    units = 1 if lists is None else lists.units
    members = heads * each // units
    tiles = tiles or tiles_for(members, q, pages.value_dim)
    per = share_of(members, tiles.heads)
    programs = heads * each // per
    most = pages.longest if lists is None else lists.longest * lists.size
    if splits is None:
        highest = max(1, min(-(-most // (3 * tiles.keys)), 128))
        splits = even_splits(batch * programs, tiles.resident * processors(q.device), highest)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    many = splits > 1
    part_out, part_lse = lse, lse
    if many:
        shape = batch, programs, splits, per
        part_out = torch.empty(*shape, pages.value_dim, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    none = pages.lengths  # unused pointers must still be pointers
    starts = None if lists is None or lists.starts is None else lists.starts.contiguous()
    counts = None if lists is None or lists.counts is None else lists.counts.contiguous()
    if tiles.wide and (q.data_ptr() % 16 or q.stride(0) % 16 or q.stride(1) % 16):
        q = q.clone(memory_format=torch.contiguous_format)  # its copies take 16 bytes at once
    kernel = latents_wide.latents if tiles.wide else _latents
    kernel[(programs, splits, batch)](
        q,
        pages.k,
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
        pages.table_strides[0],
        0 if lists is None else lists.longest,
        scale * LOG2E,
        softcap or 0.0,
        pages.far[0],
        FAR=pages.host is not None,
        HEADS=heads,
        UNITS=units,
        PER=per,
        PER_PAD=tiles.heads if tiles.wide else pad(per),
        ROWS=each,
        D=width,
        V=pages.value_dim,
        V_PAD=pad(pages.value_dim),
        REST_PAD=pad(width - pages.value_dim),
        PAGE=pages.k.shape[2],
        SIZE=0 if lists is None else lists.size,
        SPACED=starts is None,
        COUNTED=counts is not None,
        KEYS=tiles.keys,
        MANY=many,
        CAPPED=softcap is not None,
        PRECISION=precision(q.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launched(q.device),
    )
    if many:
        flat = (batch, heads * each)
        merge(part_out, part_lse, out.view(*flat, width), lse.view(flat), programs=splits)
    return out, lse


@triton.jit(
    do_not_specialize=["table_stride", "longest", "far"],
    do_not_specialize_on_alignment=["tables", "lengths", "limits", "starts", "counts", "indices"],
)
def _latents(
    q_ptr, k_pool, tables, lengths, limits, starts, counts, indices, part_out, part_lse, out, lse, q_line, q_head,
    table_stride, longest, scale_log2, softcap, far, FAR: tl.constexpr, HEADS: tl.constexpr, UNITS: tl.constexpr,
    PER: tl.constexpr, PER_PAD: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    V_PAD: tl.constexpr, REST_PAD: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, SPACED: tl.constexpr,
    COUNTED: tl.constexpr, KEYS: tl.constexpr, MANY: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    program, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    table = tables + batch.to(tl.int64) * table_stride
    begin(EARLY)
    length = tl.load(lengths + batch)
    ids = indices
    count = length
    most = length
    if SIZE > 0:
        entry = batch * UNITS + program * PER // (HEADS // UNITS)
        if SPACED:
            ids = indices + entry.to(tl.int64) * longest
        else:
            ids = indices + tl.load(starts + entry)
        if COUNTED:
            count = tl.load(counts + entry).to(tl.int32) * SIZE
        else:
            count = (tl.load(starts + entry + 1) - tl.load(starts + entry)).to(tl.int32) * SIZE
        most = longest * SIZE if SPACED else count
    member = tl.arange(0, PER_PAD)
    mine = member < PER
    head = (program * PER + member) % HEADS
    line = batch.to(tl.int64) * ROWS + (program * PER + member) // HEADS
    channel, beyond = tl.arange(0, V_PAD), V + tl.arange(0, REST_PAD)
    limit = length + tl.zeros([PER_PAD], tl.int32)
    if ROWS > 1:
        limit = tl.load(limits + line, mask=mine, other=0)
    q_row = (q_ptr + line * q_line + head * q_head)[:, None]
    q = tl.load(q_row + channel[None, :], mask=mine[:, None] & (channel[None, :] < V), other=0.0)
    q_rest = tl.load(q_row + beyond[None, :], mask=mine[:, None] & (beyond[None, :] < D), other=0.0)
    number = split * KEYS + tl.arange(0, KEYS)
    hop = splits * KEYS
    key = listed_keys(ids, number, number < most, SIZE)
    after = listed_keys(ids, number + hop, number + hop < most, SIZE)
    seen = (number < count) & (key < length)
    real = (number < most) & (key >= 0) & (key < length)  # the numbers behind a list may not be written
    row, _ = pool_places(table, key, real, 0, far, far, 1, PAGE, FAR)
    acc = tl.zeros([PER_PAD, V_PAD], tl.float32)
    weight = tl.zeros([PER_PAD], tl.float32)
    top = tl.full([PER_PAD], float("-inf"), tl.float32)
    tiles = tl.cdiv(count, KEYS)
    # As in decode._decode: where the next rows lie is looked up while a tile is on its way.
    for _ in tl.range(split, tiles, splits):
        there = seen[:, None] & (channel[None, :] < V)
        k = load_keys(k_pool, row[:, None], channel[None, :], there, D, q.dtype)
        rest = load_keys(k_pool, row[:, None], beyond[None, :], seen[:, None] & (beyond[None, :] < D), D, q.dtype)
        valid, at = seen, number
        number += hop
        seen = (number < count) & (after < length)
        row, _ = pool_places(table, after, seen, 0, far, far, 1, PAGE, FAR)
        after = listed_keys(ids, number + hop, number + hop < count, SIZE)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision=PRECISION)
        scores = cap_logits(scores, scale_log2, softcap, CAPPED)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        if ROWS > 1:
            scores = tl.where(at[None, :] < limit[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - anchor)
        p = tl.exp2(scores - anchor[:, None])
        weight = weight * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(k.dtype), k, acc * shrink[:, None], input_precision=PRECISION)
        top = higher
    total = tl.where(weight == 0.0, 1.0, weight)
    acc = acc / total[:, None]
    log = tl.where(weight == 0.0, float("-inf"), top + tl.log2(total))
    written = mine[:, None] & (channel[None, :] < V)
    place = line * HEADS + head
    if MANY:
        part = (batch * tl.num_programs(0) + program).to(tl.int64) * splits + split
        if split < tiles:  # others had nothing to read
            tl.store(part_out + (part * PER + member)[:, None] * V + channel[None, :], acc, mask=written)
        tl.store(part_lse + part * PER + member, log, mask=mine)
    else:
        tl.store(out + place[:, None] * D + channel[None, :], acc.to(out.dtype.element_ty), mask=written)
        tl.store(lse + place, log * 0.6931471805599453, mask=mine)
