"""Softmax weights of some rows over all their keys: what LoopServe covers. One kernel finds every row's log-sum-exp,
split over the keys, a second writes the weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.layout import flat
from saccade.ops.layout import rows as in_rows
from saccade.ops.triton.common import LOG2E, cap_logits, pad, pool_rows, precision, processors
from saccade.ops.triton.readers import load_keys
from saccade.selection import Shape

ROWS, KEYS = 64, 64  # of a tile


def row_weights(
    q: Tensor, kv: KVView, shape: Shape, heads: range, rows: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """``ops.scores.row_weights`` of query heads ``heads`` of ``q`` [heads, q_len, head_dim]: fp32 [len(heads), r,
    k_len] of rows ``rows`` (int64 [r], numbers within the call), acausal entries 0."""
    given, rows, paged = in_rows(q), flat(rows, torch.int64), kv.paged()
    m, n, tiles = rows.numel(), shape.k_len, triton.cdiv(rows.numel(), ROWS)
    splits = max(1, min(4 * processors(q.device) // (len(heads) * tiles), -(-n // 512), 64))
    logs = torch.empty(len(heads), splits, m, dtype=torch.float32, device=q.device)
    weights = torch.empty(len(heads), m, n, dtype=torch.float32, device=q.device)
    shared = (given, paged.k, paged.block_table, rows)
    numbers = (
        heads.start, given.stride(0), given.stride(1), paged.head_stride, m, shape.q_start, n, scale * LOG2E,
        softcap or 0.0,
    )  # fmt: skip
    static = {
        "GROUP": shape.group, "KV_HEADS": kv.kv_heads, "D": q.shape[2], "D_PAD": pad(q.shape[2]),
        "PAGE": kv.block_size, "ROWS": ROWS, "KEYS": KEYS, "CAPPED": softcap is not None,
        "PRECISION": precision(q.dtype), "num_warps": 4,
    }  # fmt: skip
    _logs[(splits, tiles, len(heads))](*shared, logs, *numbers, **static)
    row_log = torch.logsumexp(logs * (1 / LOG2E), 1) * LOG2E
    _weights[(triton.cdiv(n, KEYS), tiles, len(heads))](*shared, row_log, weights, *numbers, **static)
    return weights


@triton.jit
def _rows_of(q_ptr, rows, head, q_head, q_row, m, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr):
    """The tile's rows: their numbers from the first of all on, queries and places within the call (-1: none)."""
    own = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    place = tl.load(rows + own, mask=own < m, other=-1)
    channel = tl.arange(0, D_PAD)
    q = tl.load(
        q_ptr + head.to(tl.int64) * q_head + place[:, None] * q_row + channel[None, :],
        mask=(place >= 0)[:, None] & (channel < D)[None, :],
        other=0.0,
    )
    return own, q, place


@triton.jit
def _logits(
    q, k_pool, table, kv_head, key, position, n, scale_log2, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Base-2 logits [rows, keys], -inf where acausal."""
    channel = tl.arange(0, D_PAD)
    at = pool_rows(table, key, key < n, kv_head, KV_HEADS, PAGE)[:, None]
    k = load_keys(k_pool, at, channel[None, :], (key < n)[:, None], D, q.dtype)
    scores = cap_logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale_log2, softcap, CAPPED)
    return tl.where(key[None, :] <= position[:, None], scores, float("-inf"))


@triton.jit(
    do_not_specialize=["head_from", "table_head", "m", "q_start", "n"], do_not_specialize_on_alignment=["table"]
)
def _logs(
    q_ptr, k_pool, table, rows, logs, head_from, q_head, q_row, table_head, m, q_start, n, scale_log2, softcap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = head_from + tl.program_id(2)
    kv_head = head // GROUP
    table += kv_head.to(tl.int64) * table_head
    own, q, place = _rows_of(q_ptr, rows, head, q_head, q_row, m, D, D_PAD, ROWS)
    position = tl.where(place >= 0, q_start + place, -1)
    end = tl.max(position, 0).to(tl.int32) + 1
    share = tl.cdiv(tl.cdiv(end, KEYS), tl.num_programs(0)) * KEYS
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    begin = tl.program_id(0) * share
    for at in tl.range(begin, tl.minimum(begin + share, end), KEYS, num_stages=3):
        scores = _logits(
            q, k_pool, table, kv_head, at + tl.arange(0, KEYS), position, n, scale_log2, softcap, KV_HEADS, D, D_PAD,
            PAGE, CAPPED, PRECISION,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weight = weight * tl.exp2(top - anchor) + tl.sum(tl.exp2(scores - anchor[:, None]), 1)
        top = higher
    found = tl.where(weight == 0.0, float("-inf"), top + tl.log2(tl.where(weight == 0.0, 1.0, weight)))
    tl.store(logs + (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * m + own, found, mask=own < m)


@triton.jit(
    do_not_specialize=["head_from", "table_head", "m", "q_start", "n"], do_not_specialize_on_alignment=["table"]
)
def _weights(
    q_ptr, k_pool, table, rows, row_log, weights, head_from, q_head, q_row, table_head, m, q_start, n, scale_log2,
    softcap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = head_from + tl.program_id(2)
    kv_head = head // GROUP
    table += kv_head.to(tl.int64) * table_head
    own, q, place = _rows_of(q_ptr, rows, head, q_head, q_row, m, D, D_PAD, ROWS)
    position = tl.where(place >= 0, q_start + place, -1)
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    found = tl.zeros([ROWS, KEYS], tl.float32)
    if tl.program_id(0) * KEYS <= tl.max(position, 0):
        scores = _logits(
            q, k_pool, table, kv_head, key, position, n, scale_log2, softcap, KV_HEADS, D, D_PAD, PAGE, CAPPED,
            PRECISION,
        )  # fmt: skip
        known = tl.load(row_log + tl.program_id(2) * m + own, mask=own < m, other=0.0)
        found = tl.exp2(scores - known[:, None])
    line = weights + (tl.program_id(2).to(tl.int64) * m + own)[:, None] * n + key[None, :]
    tl.store(line, found, mask=(own < m)[:, None] & (key < n)[None, :])
