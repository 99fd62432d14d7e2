"""Tiles of keys under a tile of query rows: one at a time by an online softmax, or a row of plain ones with the next
product under way while the softmax of the one before runs."""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.ops.triton.common import cap_logits, pool_rows


@triton.jit
def _tile(pointers, there, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=there, other=0.0)


@triton.jit
def step(
    acc, weight, top, q, position, start, limit, k_pool, v_pool, table, kv_head, window, sinks, scale_log2, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, BANDED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """One tile of keys from ``start`` on: online softmax with maximum ``top``, sum ``weight``, output ``acc``."""
    key = start + tl.arange(0, KEYS)
    channel = tl.arange(0, D_PAD)
    piece = (kv_head * limit + start).to(tl.int32)
    at = 0
    there = (key < limit)[:, None] & (channel[None, :] < D)
    if COPIED:
        k = k_pool.load([piece, 0])
    else:
        row = pool_rows(table, key, (key < limit) if MASKED else (key >= 0), kv_head, KV_HEADS, PAGE)
        at = row[:, None] * D + channel[None, :]
        k = _tile(k_pool + at, there, D == D_PAD and not MASKED)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAPPED:
        scores, scale_log2 = cap_logits(scores, scale_log2, softcap, True), 1.0
    if MASKED:
        seen = key[None, :] <= position[:, None]
        if BANDED:
            seen = seen & ((key[None, :] < sinks) | (position[:, None] - key[None, :] < window))
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale_log2)  # the scale is above 0: it may come after the maximum
    anchor = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    shrink = tl.exp2(top - anchor)
    p = tl.exp2(scores * scale_log2 - anchor[:, None])
    weight = weight * shrink + tl.sum(p, 1)
    if COPIED:
        v = v_pool.load([piece, 0])
    else:
        v = _tile(v_pool + at, there, D == D_PAD and not MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, weight, higher


@triton.jit
def _place(ids, i, KEYS: tl.constexpr, SIZE: tl.constexpr, LISTED: tl.constexpr):
    """Where the keys of tile ``i`` begin."""
    if LISTED:
        per: tl.constexpr = SIZE // KEYS
        return tl.load(ids + i // per) * SIZE + (i % per) * KEYS
    else:
        return i * KEYS


@triton.jit
def _weigh(scores, acc, weight, top, scale_log2, softcap, like, CAPPED: tl.constexpr):
    """Online softmax of one unmasked tile; its weights as bits, since what a product takes from the turn before as it
    is would go through shared memory."""
    if CAPPED:
        scores, scale_log2 = cap_logits(scores, scale_log2, softcap, True), 1.0
    higher = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    shrink = tl.exp2(top - higher)
    p = tl.exp2(scores * scale_log2 - higher[:, None])
    weight = weight * shrink + tl.sum(p, 1)
    bits: tl.constexpr = tl.int16 if like.dtype.primitive_bitwidth == 16 else tl.int32
    return p.to(like.dtype).to(bits, bitcast=True), acc * shrink[:, None], weight, higher


@triton.jit
def plain_tiles(
    acc, weight, top, q, k_tiles, v_tiles, ids, count, from_row, scale_log2, softcap,
    KEYS: tl.constexpr, SIZE: tl.constexpr, LISTED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """``count`` tiles that need no mask, of keys in one piece. The product with the next tile's keys runs while this
    tile's softmax does, as in FlashAttention-3 (Shah et al., 2024, section 3.2)."""
    if count > 0:
        last = count - 1
        here = (from_row + _place(ids, 0, KEYS, SIZE, LISTED)).to(tl.int32)
        after = (from_row + _place(ids, tl.minimum(1, last), KEYS, SIZE, LISTED)).to(tl.int32)
        scores = tl.dot(q, tl.trans(k_tiles.load([here, 0])), input_precision=PRECISION)
        p, acc, weight, top = _weigh(scores, acc, weight, top, scale_log2, softcap, q, CAPPED)
        scores = tl.dot(q, tl.trans(k_tiles.load([after, 0])), input_precision=PRECISION)
        for i in tl.range(1, count, num_stages=STAGES):
            here = (from_row + _place(ids, i - 1, KEYS, SIZE, LISTED)).to(tl.int32)
            v = v_tiles.load([here, 0])
            acc = tl.dot(p.to(v.dtype, bitcast=True), v, acc, input_precision=PRECISION)
            after = (from_row + _place(ids, tl.minimum(i + 1, last), KEYS, SIZE, LISTED)).to(tl.int32)
            following = tl.dot(q, tl.trans(k_tiles.load([after, 0])), input_precision=PRECISION)
            p, acc, weight, top = _weigh(scores, acc, weight, top, scale_log2, softcap, q, CAPPED)
            scores = following
        here = (from_row + _place(ids, last, KEYS, SIZE, LISTED)).to(tl.int32)
        v = v_tiles.load([here, 0])
        acc = tl.dot(p.to(v.dtype, bitcast=True), v, acc, input_precision=PRECISION)
    return acc, weight, top
