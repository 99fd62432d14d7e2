"""Decode: one query row per sequence over all keys, selected blocks or selected tokens, split over the keys.

A program serves the query heads of one sequence that share a KV head and a list of keys, over one share of that list; a
second kernel merges the shares by log-sum-exp. Shares are cut on the device, from lengths it knows itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.common import LN2, LOG2E, cap_logits, pad, pool_rows, precision, processors


@dataclass(frozen=True)
class Pages:
    """Keys of a batch: pools [slots, kv_heads, page, head_dim], block tables int32 [batch, blocks], lengths int32
    [batch], all on the device; ``longest`` bounds the lengths."""

    k: Tensor
    v: Tensor
    tables: Tensor
    lengths: Tensor
    longest: int


@dataclass(frozen=True)
class KeyLists:
    """Which keys each unit of each sequence reads: list ``b * units + u`` is ``counts`` entries of ``indices`` from
    ``starts`` on (both int [batch * units]), each entry a block of ``size`` keys or, with ``size=1``, a key.
    ``longest`` bounds the counts. Entries are unique; their order is free."""

    starts: Tensor
    counts: Tensor
    indices: Tensor
    units: int
    size: int
    longest: int


def attend_decode(
    q: Tensor,
    pages: Pages,
    lists: KeyLists | None,
    *,
    scale: float,
    softcap: float | None = None,
    splits: int | None = None,
    keys: int = 64,
    warps: int = 4,
    stages: int = 3,
) -> tuple[Tensor, Tensor]:
    """``q`` [batch, heads, head_dim] -> ``out`` like q, ``lse`` float32 [batch, heads] (natural log).

    Without ``lists`` every key is read. ``splits`` defaults to what fills the device evenly. Split-KV is
    FlashDecoding's (Dao et al., 2023).
    """
    batch, heads, head_dim = q.shape
    kv_heads = pages.k.shape[1]
    most = pages.longest if lists is None else lists.longest * lists.size
    units = kv_heads if lists is None else lists.units
    programs = max(kv_heads, units)
    if pad(head_dim) * q.element_size() > 512:
        keys, stages = min(keys, 32), 2
    if splits is None:
        resident = (3 if lists is not None and lists.size == 1 else 4) * processors(q.device)
        splits = even_splits(batch * programs, resident, max(1, min(-(-most // (2 * keys)), 128)))
    part_out = torch.empty(batch, heads, splits, head_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(batch, heads, splits, dtype=torch.float32, device=q.device)
    none = pages.lengths  # unused pointers must still be pointers
    _decode[(splits, programs, batch)](
        q,
        pages.k,
        pages.v,
        pages.tables,
        pages.lengths,
        none if lists is None else lists.starts,
        none if lists is None else lists.counts,
        none if lists is None else lists.indices,
        part_out,
        part_lse,
        q.stride(0),
        q.stride(1),
        pages.tables.stride(0),
        scale * LOG2E,
        softcap or 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        UNITS=units,
        PER=heads // programs,
        PER_PAD=pad(heads // programs),
        D=head_dim,
        D_PAD=pad(head_dim),
        PAGE=pages.k.shape[2],
        SIZE=0 if lists is None else lists.size,
        KEYS=keys,
        CAPPED=softcap is not None,
        PRECISION=precision(q.dtype),
        STAGES=stages,
        num_warps=warps,
    )
    if splits == 1 and q.dtype == torch.float32:
        return part_out[:, :, 0], part_lse[:, :, 0] * LN2
    return merge_parts(part_out, part_lse, q.dtype)


@cache
def even_splits(lists: int, resident: int, most: int) -> int:
    """Into how many parts, at most ``most``, to cut each of ``lists`` for a device that holds ``resident`` programs at
    once: the fewest that fill its last round nearly as well as any number does, in two rounds at most."""
    choices = range(1, max(1, min(most, 2 * resident // lists)) + 1)
    filled = [lists * splits / (-(-lists * splits // resident) * resident) for splits in choices]
    return next(splits for splits, share in zip(choices, filled) if share >= 0.96 * max(filled))


def merge_parts(part_out: Tensor, part_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge float32 partial results ``part_out`` [batch, heads, parts, head_dim] with base-2 ``part_lse`` [batch,
    heads, parts] into ``out`` [batch, heads, head_dim] of ``dtype`` and natural ``lse`` [batch, heads]."""
    batch, heads, parts, head_dim = part_out.shape
    out = torch.empty(batch, heads, head_dim, dtype=dtype, device=part_out.device)
    lse = torch.empty(batch, heads, dtype=torch.float32, device=part_out.device)
    _merge[(batch * heads,)](
        part_out,
        part_lse,
        out,
        lse,
        parts,
        LN2,
        D=head_dim,
        D_PAD=pad(head_dim),
        PARTS=min(32, pad(parts, 1)),
        num_warps=4,
    )
    return out, lse


@triton.jit(do_not_specialize=["table_stride"])
def _decode(
    q_ptr, k_pool, v_pool, tables, lengths, starts, counts, indices, part_out, part_lse, q_batch, q_head, table_stride,
    scale_log2, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, PER: tl.constexpr, PER_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    split, program, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(0)
    kv_head = program * PER // (HEADS // KV_HEADS)
    length = tl.load(lengths + batch)
    table = tables + batch.to(tl.int64) * table_stride
    ids = indices
    count = length
    if SIZE > 0:
        entry = batch * UNITS + program * PER // (HEADS // UNITS)
        count = tl.load(counts + entry).to(tl.int32) * SIZE
        ids = indices + tl.load(starts + entry)
    share = tl.cdiv(tl.cdiv(count, KEYS), splits) * KEYS
    low = split * share
    high = tl.minimum(low + share, count)
    head = program * PER + tl.arange(0, PER_PAD)
    mine = tl.arange(0, PER_PAD) < PER
    channel = tl.arange(0, D_PAD)
    q = tl.load(
        q_ptr + batch.to(tl.int64) * q_batch + head[:, None] * q_head + channel[None, :],
        mask=mine[:, None] & (channel[None, :] < D),
        other=0.0,
    )
    acc = tl.zeros([PER_PAD, D_PAD], tl.float32)
    weight = tl.zeros([PER_PAD], tl.float32)
    top = tl.full([PER_PAD], float("-inf"), tl.float32)
    for at in tl.range(low, high, KEYS, num_stages=STAGES):
        number = at + tl.arange(0, KEYS)
        valid = number < high
        if SIZE == 0:
            key = number
        elif SIZE == 1:
            key = tl.load(ids + number, mask=valid, other=0)
        else:
            key = tl.load(ids + number // SIZE, mask=valid, other=0) * SIZE + number % SIZE
        valid = valid & (key < length)
        row = pool_rows(table, key, valid, kv_head, KV_HEADS, PAGE)
        there = valid[:, None] & (channel[None, :] < D)
        offset = row[:, None] * D + channel[None, :]
        k = tl.load(k_pool + offset, mask=there, other=0.0)
        scores = cap_logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale_log2, softcap, CAPPED)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - anchor)
        p = tl.exp2(scores - anchor[:, None])
        weight = weight * shrink + tl.sum(p, 1)
        v = tl.load(v_pool + offset, mask=there, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = higher
    total = tl.where(weight == 0.0, 1.0, weight)
    part = (batch * HEADS + head).to(tl.int64) * splits + split
    tl.store(
        part_out + part[:, None] * D + channel[None, :],
        acc / total[:, None],
        mask=mine[:, None] & (channel[None, :] < D),
    )
    tl.store(part_lse + part, tl.where(weight == 0.0, float("-inf"), top + tl.log2(total)), mask=mine)


@triton.jit(do_not_specialize=["parts"])
def _merge(
    part_out, part_lse, out, lse, parts, ln2, D: tl.constexpr, D_PAD: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, D_PAD)
    acc = tl.zeros([D_PAD], tl.float32)
    weight = 0.0
    top = float("-inf")
    for first in tl.range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        logs = tl.load(part_lse + row * parts + part, mask=part < parts, other=float("-inf"))
        higher = tl.maximum(top, tl.max(logs, 0))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - anchor)
        p = tl.exp2(logs - anchor)
        rows = tl.load(
            part_out + (row * parts + part)[:, None] * D + channel[None, :],
            mask=(part < parts)[:, None] & (channel[None, :] < D),
            other=0.0,
        )
        acc = acc * shrink + tl.sum(p[:, None] * rows, 0)
        weight = weight * shrink + tl.sum(p, 0)
        top = higher
    total = tl.where(weight == 0.0, 1.0, weight)
    tl.store(out + row * D + channel, (acc / total).to(out.dtype.element_ty), mask=channel < D)
    tl.store(lse + row, tl.where(weight == 0.0, float("-inf"), top + tl.log2(total)) * ln2)
