"""CIS in recorded steps: attention of one head over its list, by the programs that wrote it. Parts of a kernel
(triton_one_launch.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.ops.triton.code_products import add_values, no_values, products, queries, whole
from saccade.ops.triton.common import cap_logits, pool_rows
from saccade.ops.triton.readers import key_codes, value_codes

MERGED: tl.constexpr = tl.constexpr(8)  # partial results that are merged in one go


@triton.jit
def queries_at(q_ptr, head, mine, q_head, D: tl.constexpr, D_PAD: tl.constexpr):
    channel = tl.arange(0, D_PAD)
    return tl.load(
        q_ptr + head.to(tl.int64)[:, None] * q_head + channel[None, :],
        mask=mine[:, None] & (channel[None, :] < D),
        other=0.0,
    )


@triton.jit
def _number_at(turn, plain, begins, more, TILE: tl.constexpr):
    """Where tile ``turn`` of a piece begins, the first ``plain`` tiles of which lie from ``begins`` on, the others from
    ``more`` on."""
    return tl.where(turn < plain, begins + turn * TILE, more + (turn - plain) * TILE) + tl.arange(0, TILE)


@triton.jit
def attend_piece(
    q, k_pool, v_pool, table, ids, begins, ends, more, upto, length, kv_head, scale_log2, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, PER_PAD: tl.constexpr,
    TILE: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of queries ``q`` [PER_PAD, D_PAD] over entries ``begins .. ends - 1`` and ``more .. upto - 1`` of the
    list at ``ids``: values weighed and divided by their sum, and its base-2 logarithm. Read as in ops.triton.decode:
    where the next keys lie is looked up while a tile is on its way."""
    channel = tl.arange(0, D_PAD)
    plain = tl.cdiv(ends - begins, TILE)
    tiles = plain + tl.cdiv(upto - more, TILE)
    number = _number_at(0, plain, begins, more, TILE)
    seen = number < tl.where(plain > 0, ends, upto)
    row = pool_rows(table, tl.load(ids + number, mask=seen, other=0), seen, kv_head, KV_HEADS, PAGE)
    number = _number_at(1, plain, begins, more, TILE)
    key = tl.load(ids + number, mask=number < tl.where(plain > 1, ends, upto), other=0)
    TYPE: tl.constexpr = q.dtype
    q, rise = queries(q, k_pool, D)
    acc, odd_acc, grain = no_values(v_pool, PER_PAD, D, D_PAD, TYPE)
    weight = tl.zeros([PER_PAD], tl.float32)
    top = tl.full([PER_PAD], float("-inf"), tl.float32)
    for turn in tl.range(0, tiles):
        k, k_scale = key_codes(k_pool, row[:, None], channel[None, :], seen[:, None], D, TYPE, PER_PAD)
        v, odd, v_scale = value_codes(v_pool, row[:, None], channel[None, :], seen[:, None], D, D_PAD, TYPE, PER_PAD)
        valid = seen
        # Computed anew: the compiler overlaps no tiles where a mask is handed on through two turns.
        seen = _number_at(turn + 1, plain, begins, more, TILE) < tl.where(turn + 1 < plain, ends, upto)
        row = pool_rows(table, key, seen, kv_head, KV_HEADS, PAGE)
        number = _number_at(turn + 2, plain, begins, more, TILE)
        key = tl.load(ids + number, mask=number < tl.where(turn + 2 < plain, ends, upto), other=0)
        scores = cap_logits(products(q, rise, k, k_scale, PRECISION), scale_log2, softcap, CAPPED)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - anchor)
        p = tl.exp2(scores - anchor[:, None])
        weight = weight * shrink + tl.sum(p, 1)
        acc, odd_acc, grain = add_values(acc, odd_acc, grain, shrink, p, v, odd, v_scale, PRECISION)
        top = higher
    total = tl.where(weight == 0.0, 1.0, weight)
    return whole(acc, odd_acc, grain) / total[:, None], tl.where(weight == 0.0, float("-inf"), top + tl.log2(total))


@triton.jit
def put_result(acc, log, which, out, lse, D: tl.constexpr, D_PAD: tl.constexpr):
    """Store the query head that ``which`` names of what :func:`attend_piece` gives, to ``out`` [D] and the natural
    ``lse``."""
    channel = tl.arange(0, D_PAD)
    there = which[:, None] & (channel[None, :] < D)
    tl.store(out + channel[None, :] + tl.zeros(acc.shape, tl.int32), acc.to(out.dtype.element_ty), mask=there)
    tl.store(lse + tl.zeros(log.shape, tl.int32), log * 0.6931471805599453, mask=which)


@triton.jit
def merge_pieces(
    acc, log, which, turn, turns, part_out, part_lse, arrived, out, lse, D: tl.constexpr, D_PAD: tl.constexpr
):
    """As :func:`put_result`, where ``turns`` programs have a piece each: the last of them to come merges what all have
    put at ``part_out`` float32 [turns, D] and ``part_lse`` [turns], and sets their counter ``arrived`` to zero."""
    channel = tl.arange(0, D_PAD)
    there = which[:, None] & (channel[None, :] < D)
    tl.store(part_out + turn * D + channel[None, :] + tl.zeros(acc.shape, tl.int32), acc, mask=there)
    tl.store(part_lse + turn + tl.zeros(log.shape, tl.int32), log, mask=which)
    tl.debug_barrier()  # all threads' stores come before the arrival that one of them announces
    others = tl.atomic_add(arrived, tl.full([], 1, tl.int64), sem="acq_rel", scope="gpu")
    if others == turns - 1:
        whole = tl.zeros([D_PAD], tl.float32)
        weight = 0.0
        top = float("-inf")
        for start in tl.range(0, turns, MERGED):
            number = start + tl.arange(0, MERGED)
            logs = tl.load(part_lse + number, mask=number < turns, other=float("-inf"))
            rows = tl.load(
                part_out + number[:, None] * D + channel[None, :],
                mask=(number < turns)[:, None] & (channel[None, :] < D),
                other=0.0,
            )
            higher = tl.maximum(top, tl.max(logs, 0))
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp2(top - anchor)
            p = tl.exp2(logs - anchor)
            whole = whole * shrink + tl.sum(p[:, None] * rows, 0)
            weight = weight * shrink + tl.sum(p, 0)
            top = higher
        total = tl.where(weight == 0.0, 1.0, weight)
        tl.store(out + channel, (whole / total).to(out.dtype.element_ty), mask=channel < D)
        tl.store(lse, tl.where(weight == 0.0, float("-inf"), top + tl.log2(total)) * 0.6931471805599453)
        tl.store(arrived, tl.full([], 0, tl.int64))
