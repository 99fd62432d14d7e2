"""Exact logits of listed keys, and the weights of what was read. Means what ops/weights.py means."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.layout import flat, rows
from saccade.ops.triton.common import LOG2E, begin, cap_logits, launched, pad, pool_rows, precision
from saccade.ops.triton.readers import load_keys
from saccade.selection import Shape, Tokens

KEYS = 64  # scored in one go


def read_weights(
    q: Tensor, kv: KVView, tokens: Tokens, lse: Tensor, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Softmax weights over what was read, as ``ops.weights.selected_weights`` lays them out: float32 [heads // units,
    indices], 0 where an index means nothing. ``lse`` float32 [heads, 1]."""
    shape, units, q = tokens.shape, tokens.units, rows(q)
    offsets, indices = flat(tokens.offsets, torch.int64), flat(tokens.indices, torch.int32)
    weights = torch.zeros(shape.heads // units, tokens.indices.numel(), dtype=torch.float32, device=q.device)
    longest = min(tokens.indices.numel(), shape.k_len)
    if longest:
        paged = kv.paged()
        _weigh[(triton.cdiv(longest, KEYS), max(units, shape.kv_heads))](
            q,
            paged.k,
            paged.block_table,
            offsets,
            indices,
            flat(lse, torch.float32),
            weights,
            q.stride(0),
            paged.head_stride,
            weights.stride(0),
            scale * LOG2E,
            softcap or 0.0,
            **constants(q, kv, shape, units, softcap),
            **launched(q.device),
        )
    return weights


def constants(q: Tensor, kv: KVView, shape: Shape, units: int, softcap: float | None) -> dict[str, Any]:
    """What the kernels that score keys must know when they are compiled."""
    per, head_dim = shape.heads // max(units, shape.kv_heads), q.shape[-1]
    return {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "UNITS": units,
        "PER": per,
        "PER_PAD": pad(per),
        "D": head_dim,
        "D_PAD": pad(head_dim),
        "PAGE": kv.block_size,
        "KEYS": KEYS,
        "CAPPED": softcap is not None,
        "PRECISION": precision(q.dtype),
        "num_warps": 4,
    }


@triton.jit
def logits(
    q_ptr, k_pool, table, program, key, valid, q_head, scale_log2, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PER: tl.constexpr, PER_PAD: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Base-2 logits [PER_PAD, keys] of the query heads of ``program``."""
    mine = tl.arange(0, PER_PAD)
    channel = tl.arange(0, D_PAD)
    q = tl.load(
        q_ptr + (program * PER + mine).to(tl.int64)[:, None] * q_head + channel[None, :],
        mask=(mine < PER)[:, None] & (channel[None, :] < D),
        other=0.0,
    )
    kv_head = program * PER // (HEADS // KV_HEADS)
    row = pool_rows(table, key, valid, kv_head, KV_HEADS, PAGE)
    k = load_keys(k_pool, row[:, None], channel[None, :], valid[:, None] & (channel[None, :] < D), D)
    return cap_logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale_log2, softcap, CAPPED)


@triton.jit(
    do_not_specialize=["table_head", "weight_row"], do_not_specialize_on_alignment=["table", "offsets", "indices"]
)
def _weigh(
    q_ptr, k_pool, table, offsets, indices, lse, weights, q_head, table_head, weight_row, scale_log2, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, PER: tl.constexpr, PER_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    program = tl.program_id(1)
    PER_UNIT: tl.constexpr = HEADS // UNITS
    unit = program * PER // PER_UNIT
    table += (program * PER // (HEADS // KV_HEADS)).to(tl.int64) * table_head
    start = tl.load(offsets + unit)
    count = (tl.load(offsets + unit + 1) - start).to(tl.int32)
    number = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    if tl.program_id(0) * KEYS < count:
        valid = number < count
        key = tl.load(indices + start + number, mask=valid, other=0)
        found = logits(
            q_ptr, k_pool, table, program, key, valid, q_head, scale_log2, softcap, HEADS, KV_HEADS, PER, PER_PAD, D,
            D_PAD, PAGE, CAPPED, PRECISION,
        )  # fmt: skip
        head = program * PER + tl.arange(0, PER_PAD)
        mine = tl.arange(0, PER_PAD) < PER
        total = tl.load(lse + head, mask=mine, other=0.0) * 1.4426950408889634
        out = weights + (head % PER_UNIT).to(tl.int64)[:, None] * weight_row + start + number[None, :]
        tl.store(out, tl.exp2(found - total[:, None]), mask=mine[:, None] & valid[None, :])
