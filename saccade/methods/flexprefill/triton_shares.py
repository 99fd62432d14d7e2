"""What FlexPrefill decides by, each in one launch: pooled shares of query blocks, heads that follow them, the share of
all heavier lines. Selection for short contexts is bound by launches, not by work."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.layout import flat, written
from saccade.ops.triton.common import pad


def pooled_shares(scores: Tensor, first: int) -> Tensor:
    """Causal softmax of ``scores`` fp32 [heads, q_blocks, k_blocks], in place; query block 0 is block ``first``."""
    heads, q_blocks, k_blocks = written("scores", scores, torch.float32).shape
    _pooled[(q_blocks, heads)](scores, first, q_blocks, k_blocks, WIDTH=pad(k_blocks), num_warps=4)
    return scores


def close_to(estimate: Tensor, columns: Tensor, rows: int, tau: float) -> Tensor:
    """Whether the root of the Jensen-Shannon divergence (ops.scores.root_jsd) of softmax(``estimate``) and of
    ``columns`` / ``rows``, fp32 [heads, m] each, is below ``tau``: bool [heads]."""
    estimate, columns = flat(estimate, torch.float32), flat(columns, torch.float32)
    heads, m = columns.shape
    close = torch.empty(heads, dtype=torch.bool, device=columns.device)
    _close[(heads,)](estimate, columns, close.view(torch.uint8), m, rows, tau, WIDTH=pad(m), num_warps=4)
    return close


def needed_shares(mass: Tensor) -> Tensor:
    """``ops.scores.needed_shares`` of ``mass`` fp32 [rows, m], in float32: every entry is compared with every other."""
    mass = flat(mass, torch.float32)
    rows, m = mass.shape
    needed = torch.empty(rows, m, dtype=torch.float32, device=mass.device)
    _needed[(triton.cdiv(m, 64), rows)](mass, needed, m, EACH=64, SPAN=min(256, pad(m)), num_warps=4)
    return needed


@triton.jit(do_not_specialize=["first", "q_blocks", "k_blocks"])
def _pooled(scores, first, q_blocks, k_blocks, WIDTH: tl.constexpr):
    q_block, head = tl.program_id(0), tl.program_id(1)
    block = tl.arange(0, WIDTH)
    at = scores + (head * q_blocks + q_block).to(tl.int64) * k_blocks + block
    seen = (block < k_blocks) & (block <= first + q_block)
    score = tl.load(at, mask=seen, other=float("-inf"))
    weight = tl.exp(score - tl.max(score, 0))
    tl.store(at, weight / tl.sum(weight, 0), mask=block < k_blocks)


@triton.jit(do_not_specialize=["m", "rows"])
def _close(estimate, columns, close, m, rows, tau, WIDTH: tl.constexpr):
    head = tl.program_id(0)
    at = tl.arange(0, WIDTH)
    score = tl.load(estimate + head * m + at, mask=at < m, other=float("-inf"))
    p = tl.exp(score - tl.max(score, 0))
    p = p / tl.sum(p, 0)
    q = tl.load(columns + head * m + at, mask=at < m, other=0.0) / rows
    middle = (p + q) / 2
    terms = _entropy(p) + _entropy(q) - 2 * _entropy(middle)
    root = tl.sqrt(tl.maximum(tl.sum(terms, 0) / 2, 0.0))
    tl.store(close + head, tl.cast(root < tau, tl.uint8))


@triton.jit
def _entropy(p):
    """p log p, 0 for 0."""
    return tl.where(p > 0.0, p * tl.log(tl.where(p > 0.0, p, 1.0)), 0.0)


@triton.jit(do_not_specialize=["m"])
def _needed(mass, needed, m, EACH: tl.constexpr, SPAN: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    mine = tl.program_id(0) * EACH + tl.arange(0, EACH)
    own = tl.load(mass + row * m + mine, mask=mine < m, other=0.0)
    before = tl.zeros([EACH], tl.float64)
    whole = tl.zeros([SPAN], tl.float64)
    for start in tl.range(0, m, SPAN):
        other = start + tl.arange(0, SPAN)
        weight = tl.load(mass + row * m + other, mask=other < m, other=0.0)
        equal = (weight[None, :] == own[:, None]) & (other[None, :] < mine[:, None])
        heavier = (weight[None, :] > own[:, None]) | equal
        before += tl.sum(tl.where(heavier, weight[None, :], 0.0).to(tl.float64), 1)
        whole += weight.to(tl.float64)
    total = tl.sum(whole, 0)
    counts = (total > 0.0) & (total < float("inf"))
    share = tl.where(counts, before / tl.where(counts, total, 1.0), 0.0)
    tl.store(needed + row * m + mine, share.to(tl.float32), mask=mine < m)
