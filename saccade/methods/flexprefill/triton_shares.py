"""What FlexPrefill decides by, in one launch: which heads go by pooled attention, and the share of all heavier
lines."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.view import KVView
from saccade.methods.flexprefill.triton_pooled import mean_keys, mean_rows, mean_tail
from saccade.ops.layout import flat
from saccade.ops.layout import rows as in_rows
from saccade.ops.triton.common import pad

# Not tuned: try EACH 32, SPAN 32 or 128.
EACH = 64  # lines of a program, each of which it compares with all others
SPAN = 64  # others at a time
KEYS = 64  # mean keys at a time


def decide(
    q: Tensor,
    kv: KVView,
    means: Tensor,
    block_size: int,
    scale: float,
    tau: float,
    columns: Tensor,
    slashes: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(by_pooled, vertical, groups) from what the last ``min(block_size, q_len)`` rows of ``q`` [heads, q_len,
    head_dim] weigh by key block and by group of distances, ``columns`` and ``slashes`` fp32 [heads, k_blocks].
    ``means`` fp32 [full blocks, 1, kv_heads, head_dim]: the summary "mean" of ``kv``.

    ``by_pooled`` bool [heads]: whether the root of the Jensen-Shannon divergence (``ops.scores.root_jsd``) of
    ``columns`` over the number of rows, and of the softmax of the rows' mean and mean keys, is below ``tau``.
    ``vertical``, ``groups`` fp32 [heads, k_blocks]: ``ops.scores.needed_shares`` of columns and of slashes; None
    without slashes.
    """
    heads, q_len, head_dim = q.shape
    columns = flat(columns, torch.float32)
    slashes = None if slashes is None else flat(slashes, torch.float32)
    m, rows, kinds = columns.shape[1], min(block_size, q_len), 1 if slashes is None else 3
    needed = torch.empty(kinds, heads, m, dtype=torch.float32, device=q.device)  # first: logits of mean keys
    by_pooled = torch.empty(heads, dtype=torch.bool, device=q.device)
    means, paged, given = in_rows(means), kv.paged(), in_rows(q[:, -rows:])
    _decide[(1 if slashes is None else triton.cdiv(m, EACH), kinds * heads)](
        given, means, columns, columns if slashes is None else slashes, needed, by_pooled.view(torch.uint8), paged.k,
        paged.block_table, given.stride(0), given.stride(1), means.stride(0), means.stride(2), paged.head_stride,
        heads, rows, m, kv.length // block_size, kv.length, scale, tau,
        GROUP=heads // kv.kv_heads, KV_HEADS=kv.kv_heads, D=head_dim, D_PAD=pad(head_dim), PAGE=kv.block_size,
        SIZE=block_size, WIDTH=pad(m), EACH=EACH, SPAN=min(SPAN, pad(m)), KEYS=KEYS, num_warps=4 if m <= 2048 else 8,
    )  # fmt: skip
    return (by_pooled, None, None) if slashes is None else (by_pooled, needed[1], needed[2])


@triton.jit(do_not_specialize=["table_head", "heads", "rows", "m", "full", "k_len"])
def _decide(
    q_ptr, means, columns, slashes, needed, by_pooled, k_pool, table, q_head, q_row, mean_block, mean_head, table_head,
    heads, rows, m, full, k_len, scale, tau,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, EACH: tl.constexpr, SPAN: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    part, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    line = head.to(tl.int64) * m
    if part == 0:
        if tl.program_id(0) == 0:
            kv_head = head // GROUP
            mean = mean_rows(q_ptr, head.to(tl.int64) * q_head, q_row, 0, rows, D, D_PAD, SIZE)
            tail = tl.zeros([D_PAD], tl.float32)
            if full < m:
                tail = mean_tail(
                    k_pool, table + kv_head.to(tl.int64) * table_head, kv_head, full * SIZE, k_len, KV_HEADS, D,
                    D_PAD, PAGE, SIZE,
                )  # fmt: skip
            for start in tl.range(0, m, KEYS):
                block = start + tl.arange(0, KEYS)
                keys = mean_keys(means, tail, block, kv_head, mean_block, mean_head, full, D, D_PAD)
                tl.store(needed + line + block, tl.sum(keys * mean[None, :], 1) * scale, mask=block < m)
            tl.debug_barrier()  # other threads have stored what one reads
            at = tl.arange(0, WIDTH)
            score = tl.load(needed + line + at, mask=at < m, other=float("-inf"))
            p = tl.exp(score - tl.max(score, 0))
            p = p / tl.sum(p, 0)
            q = tl.load(columns + line + at, mask=at < m, other=0.0) / rows
            middle = (p + q) / 2
            terms = _entropy(p) + _entropy(q) - 2 * _entropy(middle)
            root = tl.sqrt(tl.maximum(tl.sum(terms, 0) / 2, 0.0))
            tl.store(by_pooled + head, tl.cast(root < tau, tl.uint8))
    else:
        mass = columns + line
        if part == 2:
            mass = slashes + line
        share, mine = _needed(mass, m, EACH, SPAN)
        tl.store(needed + part * heads.to(tl.int64) * m + line + mine, share, mask=mine < m)


@triton.jit
def _entropy(p):
    """p log p, 0 for 0."""
    return tl.where(p > 0.0, p * tl.log(tl.where(p > 0.0, p, 1.0)), 0.0)


@triton.jit
def _needed(mass, m, EACH: tl.constexpr, SPAN: tl.constexpr):
    """The share of all that is heavier, fp32 [EACH], and which lines it is of: every one is compared with every
    other."""
    mine = tl.program_id(0) * EACH + tl.arange(0, EACH)
    own = tl.load(mass + mine, mask=mine < m, other=0.0)
    before = tl.zeros([EACH, SPAN], tl.float64)
    whole = tl.zeros([SPAN], tl.float64)
    for start in tl.range(0, m, SPAN):
        other = start + tl.arange(0, SPAN)
        weight = tl.load(mass + other, mask=other < m, other=0.0)
        equal = (weight[None, :] == own[:, None]) & (other[None, :] < mine[:, None])
        heavier = (weight[None, :] > own[:, None]) | equal
        before += tl.where(heavier, weight[None, :], 0.0).to(tl.float64)
        whole += weight.to(tl.float64)
    total = tl.sum(whole, 0)
    counts = (total > 0.0) & (total < float("inf"))
    share = tl.where(counts, tl.sum(before, 1) / tl.where(counts, total, 1.0), 0.0)
    return share.to(tl.float32), mine
