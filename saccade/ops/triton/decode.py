"""Decode: one query row per sequence over all keys, selected blocks or selected tokens, split over the keys; or
the last few rows of each over all keys, which are read once for them all.

A program serves the query heads of one sequence that share a KV head and a list of keys, over one share of that list:
every so many-th tile of it. A second kernel merges the shares by log-sum-exp. Shares are cut on the device, from
lengths it knows itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.layout import rows
from saccade.ops.triton.batch import KeyLists, Pages, even_splits, listed_keys
from saccade.ops.triton.common import LOG2E, begin, cap_logits, launched, pad, pool_places, precision, processors
from saccade.ops.triton.latents import attend_latents
from saccade.ops.triton.merge import merge
from saccade.ops.triton.readers import load_keys, load_values


def attend_decode(
    q: Tensor,
    pages: Pages,
    lists: KeyLists | None,
    *,
    scale: float,
    softcap: float | None = None,
    splits: int | None = None,
    keys: int = 32,
    warps: int = 4,
    stages: int = 3,
    registers: int | None = 96,
    resident: int = 4,
    limits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``q`` [batch, heads, head_dim] -> ``out`` like q, ``lse`` float32 [batch, heads] (natural log).

    Without ``lists`` every key is read. ``splits`` defaults to what fills the device evenly, ``resident`` programs to a
    processor. ``registers`` bounds what a thread holds where a tile of keys is small. Split-KV is FlashDecoding's (Dao
    et al., 2023).

    ``limits`` int32 [batch * n]: every sequence has n rows, one after the other in ``q`` [batch * n, heads, head_dim],
    and each reads as many of the sequence's first keys; none where that is 0. There are no ``lists`` then. Of latents
    (``pages.value_dim``) tiles are those of ``latents.tiles_for``, and the first channels of ``out`` count.
    """
    if pages.value_dim is not None:
        return attend_latents(q, pages, lists, scale=scale, softcap=softcap, splits=splits, limits=limits)
    q = rows(q)
    batch, heads, head_dim = q.shape
    each = 1
    if limits is not None:
        each, batch = batch // len(pages.lengths), len(pages.lengths)
    kv_heads = pages.k.shape[1]
    most = pages.longest if lists is None else lists.longest * lists.size
    units = kv_heads if lists is None else lists.units
    programs = max(kv_heads, units)
    per = heads // programs * each
    if pad(head_dim) * q.element_size() > 512:
        keys, stages = min(keys, 32), 2
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
        PER_PAD=pad(per),
        ROWS=each,
        D=head_dim,
        D_PAD=pad(head_dim),
        PAGE=pages.k.shape[2],
        SIZE=0 if lists is None else lists.size,
        SPACED=starts is None,
        COUNTED=counts is not None,
        KEYS=keys,
        MANY=many,
        CAPPED=softcap is not None,
        PRECISION=precision(q.dtype),
        num_warps=warps,
        num_stages=stages,
        maxnreg=registers if keys * pad(head_dim) * q.element_size() <= 1 << 13 else None,
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
    SPACED: tl.constexpr, COUNTED: tl.constexpr, KEYS: tl.constexpr, MANY: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
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
    number = split * KEYS + tl.arange(0, KEYS)
    hop = splits * KEYS
    key = listed_keys(ids, number, number < most, SIZE)
    after = listed_keys(ids, number + hop, number + hop < most, SIZE)
    seen = (number < count) & (key < length)
    real = (number < most) & (key >= 0) & (key < length)  # nobody may have written the numbers behind a list
    k_row, v_row = pool_places(table, key, real, kv_head, far_k, far_v, KV_HEADS, PAGE, FAR)
    acc = tl.zeros([PER_PAD, D_PAD], tl.float32)
    weight = tl.zeros([PER_PAD], tl.float32)
    top = tl.full([PER_PAD], float("-inf"), tl.float32)
    tiles = tl.cdiv(count, KEYS)
    # Where the next keys lie is looked up while a tile is on its way, and their numbers one tile before that. These
    # loads must not be made stages of the pipeline, where they would wait for the keys before them: hence no num_stages
    # here, which would, but at the launch, which concerns what products read.
    for _ in tl.range(split, tiles, splits):
        there = seen[:, None] & (channel[None, :] < D)
        k = load_keys(k_pool, k_row[:, None], channel[None, :], there, D)
        v = load_values(v_pool, v_row[:, None], channel[None, :], there, D)
        valid, at = seen, number
        number += hop
        seen = (number < count) & (after < length)
        k_row, v_row = pool_places(table, after, seen, kv_head, far_k, far_v, KV_HEADS, PAGE, FAR)
        after = listed_keys(ids, number + hop, number + hop < count, SIZE)
        scores = cap_logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale_log2, softcap, CAPPED)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        if ROWS > 1:
            scores = tl.where(at[None, :] < limit[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - anchor)
        p = tl.exp2(scores - anchor[:, None])
        weight = weight * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = higher
    total = tl.where(weight == 0.0, 1.0, weight)
    acc = acc / total[:, None]
    log = tl.where(weight == 0.0, float("-inf"), top + tl.log2(total))
    place = line * HEADS + head
    if MANY:
        part = (batch * tl.num_programs(1) + program).to(tl.int64) * splits + split
        if split < tiles:  # others had nothing to read
            tl.store(
                part_out + (part * PER + member)[:, None] * D + channel[None, :],
                acc,
                mask=mine[:, None] & (channel[None, :] < D),
            )
        tl.store(part_lse + part * PER + member, log, mask=mine)
    else:
        tl.store(
            out + place[:, None] * D + channel[None, :],
            acc.to(out.dtype.element_ty),
            mask=mine[:, None] & (channel[None, :] < D),
        )
        tl.store(lse + place, log * 0.6931471805599453, mask=mine)
