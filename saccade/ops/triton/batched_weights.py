"""The weights that a batched decode step gave to what it read, for methods that learn from them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.batch import KeyLists
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.code_products import lines_for, products, queries
from saccade.ops.triton.common import LOG2E, begin, cap_logits, launched, pad, pool_rows, precision, processors
from saccade.ops.triton.readers import key_codes

KEYS = 64


def weigh_lists(rows: LayerRows, lists: KeyLists, lse: Tensor, out: Tensor, starts: Tensor) -> None:
    """Softmax weights over ``lists`` of keys, whose log-sum-exp is ``lse`` [rows, heads]. The weight of entry ``e`` of
    list ``l``, meaned over its query heads, goes to place ``starts[l] + e`` of 4-byte entries from ``out`` on."""
    q = rows.q if rows.q.stride(-1) == 1 else rows.q.contiguous()
    count, heads, head_dim = q.shape
    units, kv_heads = lists.units, rows.kv_heads
    assert lists.counts is not None
    programs = max(units, kv_heads)
    per = heads // programs
    none = rows.pages.lengths
    tiles = triton.cdiv(lists.longest, KEYS)
    splits = max(1, min(tiles, triton.cdiv(8 * processors(q.device), programs * count)))
    _weigh[(splits, programs, count)](
        q,
        rows.pages.k,
        rows.pages.tables,
        rows.pages.lengths,
        none if lists.starts is None else lists.starts,
        lists.counts,
        lists.indices,
        lse,
        out,
        starts,
        q.stride(0),
        q.stride(1),
        *rows.pages.table_strides,
        lists.longest,
        rows.scale * LOG2E,
        rows.softcap or 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        UNITS=units,
        PER=per,
        PER_PAD=lines_for(per, rows.pages.k, q.dtype),
        D=head_dim,
        D_PAD=pad(head_dim),
        PAGE=rows.pages.k.shape[2],
        KEYS=KEYS,
        SPACED=lists.starts is None,
        CAPPED=rows.softcap is not None,
        PRECISION=precision(q.dtype),
        num_warps=4,
        **launched(q.device),
    )


@triton.jit(
    do_not_specialize=["table_stride", "table_head", "longest"],
    do_not_specialize_on_alignment=["tables", "lengths", "starts", "counts", "indices", "lse", "placed"],
)
def _weigh(
    q_ptr, k_pool, tables, lengths, starts, counts, indices, lse, out, placed, q_row, q_head, table_stride, table_head,
    longest, scale_log2, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, PER: tl.constexpr, PER_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SPACED: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    program, row = tl.program_id(1), tl.program_id(2)
    entry = row * UNITS + program * PER // (HEADS // UNITS)
    count = tl.load(counts + entry).to(tl.int32)
    if tl.load(lengths + row) == 0:
        count = 0
    ids = indices + entry.to(tl.int64) * longest
    if not SPACED:
        ids = indices + tl.load(starts + entry)
    to = out + tl.load(placed + entry)
    kv_head = program * PER // (HEADS // KV_HEADS)
    table = tables + row.to(tl.int64) * table_stride + kv_head.to(tl.int64) * table_head
    mine = tl.arange(0, PER_PAD)
    head = program * PER + mine
    total = tl.load(lse + row * HEADS + head, mask=mine < PER, other=0.0) * 1.4426950408889634
    channel = tl.arange(0, D_PAD)
    q = tl.load(
        q_ptr + row.to(tl.int64) * q_row + head.to(tl.int64)[:, None] * q_head + channel[None, :],
        mask=(mine < PER)[:, None] & (channel[None, :] < D),
        other=0.0,
    )
    TYPE: tl.constexpr = q.dtype
    q, rise = queries(q, k_pool, D)
    hop = tl.num_programs(0) * KEYS
    after = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    key = tl.load(ids + after, mask=after < count, other=0)
    place = pool_rows(table, key, after < count, kv_head, KV_HEADS, PAGE)
    key = tl.load(ids + after + hop, mask=after + hop < count, other=0)
    for _ in tl.range(tl.program_id(0), tl.cdiv(count, KEYS), tl.num_programs(0)):
        # Where the next keys lie is looked up while these are on their way.
        number = after
        valid = number < count
        k, k_scale = key_codes(k_pool, place[:, None], channel[None, :], valid[:, None], D, TYPE, PER_PAD)
        after += hop
        place = pool_rows(table, key, after < count, kv_head, KV_HEADS, PAGE)
        key = tl.load(ids + after + hop, mask=after + hop < count, other=0)
        found = cap_logits(products(q, rise, k, k_scale, PRECISION), scale_log2, softcap, CAPPED)
        weight = tl.exp2(found - total[:, None])
        mean = tl.sum(tl.where((mine < PER)[:, None], weight, 0.0), 0) / PER
        tl.store(to + number, mean, mask=valid)
