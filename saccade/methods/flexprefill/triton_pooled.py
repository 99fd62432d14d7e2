"""Pooled attention of query-aware heads in one launch: mean queries of a few query blocks, their products with mean
keys, and the softmax. Heads that go by lines cost nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.layout import flat
from saccade.ops.layout import rows as in_rows
from saccade.ops.triton.common import pad, pool_rows, precision
from saccade.ops.triton.readers import load_keys
from saccade.selection import Shape

# The fastest of nine on a Hopper GPU at 32K and 128K keys; they fit other GPUs' shared memory.
ROWS = 16  # query blocks of a program, as few as a product takes
KEYS = 64  # mean keys of a product
WIDE = 512  # key blocks brought to a sum of 1 at a time
WARPS = 4
STAGES = 1  # pipeline depth of the products


def pooled_shares(
    q: Tensor, kv: KVView, means: Tensor, shape: Shape, block_size: int, scale: float, active: Tensor
) -> Tensor:
    """Causal softmax of the logits of mean queries and mean keys by block: fp32 [heads, q_blocks, k_blocks], of the
    heads that are ``active`` (bool [heads]); what it holds of others means nothing. ``q`` [heads, q_len, head_dim];
    ``means`` fp32 [full blocks, 1, kv_heads, head_dim]: the summary "mean" of ``kv``. A last block that is not full has
    the mean of the keys there are."""
    heads, q_len, head_dim = q.shape
    first, full, k_blocks = shape.q_start // block_size, kv.length // block_size, -(-kv.length // block_size)
    q_blocks = (shape.q_start + q_len - 1) // block_size - first + 1
    shares = torch.empty(heads, q_blocks, k_blocks, dtype=torch.float32, device=q.device)
    means, paged, given = in_rows(means), kv.paged(), in_rows(q)
    _pool[(triton.cdiv(q_blocks, ROWS), heads)](
        given, means, flat(active, torch.bool), shares, paged.k, paged.block_table, given.stride(0), given.stride(1),
        means.stride(0), means.stride(2), paged.head_stride, first, shape.q_start % block_size, q_len, q_blocks,
        k_blocks, full, kv.length, scale,
        GROUP=heads // kv.kv_heads, KV_HEADS=kv.kv_heads, D=head_dim, D_PAD=pad(head_dim), PAGE=kv.block_size,
        SIZE=block_size, ROWS=ROWS, KEYS=KEYS, WIDE=min(WIDE, pad(k_blocks)), PRECISION=precision(torch.float32),
        STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return shares


@triton.jit
def mean_rows(rows, head_at, row_stride, low, high, D: tl.constexpr, D_PAD: tl.constexpr, SIZE: tl.constexpr):
    """Mean of rows ``low .. high - 1``, at most SIZE, of one head; zeros where there are none: fp32 [D_PAD]."""
    channel = tl.arange(0, D_PAD)
    total = tl.zeros([D_PAD], tl.float32)
    for half in tl.static_range(2):
        row = low + half * (SIZE // 2) + tl.arange(0, SIZE // 2)
        at = rows + head_at + row[:, None].to(tl.int64) * row_stride + channel[None, :]
        values = tl.load(at, mask=(row < high)[:, None] & (channel < D)[None, :], other=0.0)
        total += tl.sum(values.to(tl.float32), 0)
    return total / tl.maximum(high - low, 1)


@triton.jit
def mean_tail(
    k_pool, table, kv_head, begin, k_len,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Mean key of the block from ``begin`` on, which ends at ``k_len``: fp32 [D_PAD]."""
    key, channel = begin + tl.arange(0, SIZE), tl.arange(0, D_PAD)
    there = key < k_len
    at = pool_rows(table, key, there, kv_head, KV_HEADS, PAGE)[:, None]
    keys = load_keys(k_pool, at, channel[None, :], there[:, None], D, tl.float32).to(tl.float32)
    return tl.sum(keys, 0) / tl.maximum(k_len - begin, 1)


@triton.jit
def mean_keys(means, tail, block, kv_head, mean_block, mean_head, full, D: tl.constexpr, D_PAD: tl.constexpr):
    """Mean keys of ``block`` [m]: what is kept of full blocks, ``tail`` of block ``full``, zeros beyond: fp32 [m,
    D_PAD]."""
    channel = tl.arange(0, D_PAD)
    at = means + block[:, None].to(tl.int64) * mean_block + kv_head * mean_head + channel[None, :]
    keys = tl.load(at, mask=(block < full)[:, None] & (channel < D)[None, :], other=0.0)
    return tl.where((block == full)[:, None], tail[None, :], keys)


@triton.jit(do_not_specialize=["table_head", "first", "ahead", "q_len", "q_blocks", "k_blocks", "full", "k_len"])
def _pool(
    q_ptr, means, active, shares, k_pool, table, q_head, q_row, mean_block, mean_head, table_head, first, ahead, q_len,
    q_blocks, k_blocks, full, k_len, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """``ROWS`` query blocks of one head; query block 0 is block ``first`` and begins ``ahead`` rows before the first
    row."""
    head = tl.program_id(1)
    if tl.load(active + head) != 0:
        kv_head = head // GROUP
        begin, turn = tl.program_id(0) * ROWS, tl.arange(0, ROWS)
        q = tl.zeros([ROWS, D_PAD], tl.float32)
        for number in tl.range(0, ROWS):
            start = (begin + number) * SIZE - ahead
            low, high = tl.maximum(start, 0), tl.minimum(start + SIZE, q_len)
            mean = mean_rows(q_ptr, head.to(tl.int64) * q_head, q_row, low, high, D, D_PAD, SIZE)
            q = tl.where((turn == number)[:, None], mean[None, :], q)
        own = first + begin + turn
        seen = tl.minimum(first + begin + ROWS, k_blocks)  # blocks that some row sees
        tail = tl.zeros([D_PAD], tl.float32)
        if seen > full:
            tail = mean_tail(
                k_pool, table + kv_head.to(tl.int64) * table_head, kv_head, full * SIZE, k_len, KV_HEADS, D, D_PAD,
                PAGE, SIZE,
            )  # fmt: skip
        top = tl.full([ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        line = shares + (head.to(tl.int64) * q_blocks + begin + turn)[:, None] * k_blocks
        there = (begin + turn < q_blocks)[:, None]
        for start in tl.range(0, seen, KEYS, num_stages=STAGES):
            block = start + tl.arange(0, KEYS)
            keys = mean_keys(means, tail, block, kv_head, mean_block, mean_head, full, D, D_PAD)
            score = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
            causal = (block[None, :] <= own[:, None]) & (block < k_blocks)[None, :]
            score = tl.where(causal, score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            weight = weight * tl.exp(top - higher) + tl.sum(tl.exp(score - higher[:, None]), 1)
            top = higher
            tl.store(line + block[None, :], score, mask=there & (block < k_blocks)[None, :])
        tl.debug_barrier()  # other threads may have stored what one reads
        for start in tl.range(0, k_blocks, WIDE):
            other = start + tl.arange(0, WIDE)
            inside = there & (other < k_blocks)[None, :]
            score = tl.load(line + other[None, :], mask=inside & (other < seen)[None, :], other=float("-inf"))
            tl.store(line + other[None, :], tl.exp(score - top[:, None]) / weight[:, None], mask=inside)
