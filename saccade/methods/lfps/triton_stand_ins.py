"""What stands for keys that a decode step does not read, on the device: LFPS's estimates of what heads leave out, and
mean keys of blocks scored against the query. Nothing is read back to the host."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.layout import flat, rows
from saccade.ops.triton.common import cap_logits, pad, pool_rows
from saccade.selection import Shape


def sink_share(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    sinks: int,
    local: int,
    mean_key: Tensor,
    spread: Tensor,
    log_count: float,
    scale: float,
    softcap: float | None,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """``stand_ins.sink_share``: fp32 [heads, 3]; and whose share of the first part exceeds ``epsilon``, bool
    [heads]."""
    q, mean_key, spread = rows(q), flat(mean_key, torch.float32), flat(spread, torch.float32)
    lse = torch.empty(shape.heads, 3, dtype=torch.float32, device=q.device)
    idle = torch.empty(shape.heads, dtype=torch.bool, device=q.device)
    paged = kv.paged()
    _sink_share[(shape.heads,)](
        q,
        paged.k,
        paged.block_table,
        mean_key,
        spread,
        lse,
        idle.view(torch.uint8),
        q.stride(0),
        paged.head_stride,
        min(sinks, shape.q_start + 1),
        max(shape.q_start + 1 - local, sinks, 0),
        shape.q_start + 1,
        log_count,
        scale,
        softcap or 0.0,
        epsilon,
        **_static(q, kv),
        CAPPED=softcap is not None,
        num_warps=2,
    )
    return lse, idle


def sampled_rest(
    q: Tensor,
    kv: KVView,
    offsets: Tensor,
    marks: Tensor,
    first: int,
    probes: Tensor,
    bypassed: tuple[Tensor, Tensor] | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """``stand_ins.sampled_rest`` for the keys ``first .. first + m - 1``, of which ``marks`` (int8 [units, m]) are
    listed: fp32 [heads]. ``probes`` as :func:`probe_places` gives them. ``bypassed`` (bool [heads], fp32 [heads]) says
    what stands for whom instead."""
    q, offsets, marks = rows(q), flat(offsets, torch.int64), flat(marks, torch.int8)
    probes = flat(probes, torch.float32)
    units, size = marks.shape
    heads = q.shape[0]
    lse = torch.empty(heads, dtype=torch.float32, device=q.device)
    idle, instead = lse, lse
    if bypassed is not None:
        idle, instead = flat(bypassed[0], torch.bool), bypassed[1].float()
    paged = kv.paged()
    _sampled_rest[(heads,)](
        q,
        paged.k,
        paged.block_table,
        offsets,
        marks,
        probes,
        idle.view(torch.uint8),
        instead,
        lse,
        q.stride(0),
        paged.head_stride,
        instead.stride(0),
        first,
        size,
        min(probes.numel(), size),
        scale,
        softcap or 0.0,
        **_static(q, kv),
        PER=heads // units,
        PROBES=pad(probes.numel()),
        FEW=size <= probes.numel(),
        IDLE=bypassed is not None,
        CAPPED=softcap is not None,
        num_warps=4,
    )
    return lse


@lru_cache(maxsize=8)
def probe_places(count: int, golden: float, device: torch.device) -> Tensor:
    """fp32 [count]: where probes stand, as shares of the whole."""
    return ((torch.arange(count, device="cpu") + 0.5) * golden % 1.0).to(device)


def mean_scores(q: Tensor, means: Tensor, units: int) -> Tensor:
    """Dot products of ``q`` [heads, head_dim] with ``means`` [blocks, kv_heads, head_dim], meaned over a unit's query
    heads: fp32 [units, blocks]."""
    q, means = rows(q), rows(means)
    blocks, kv_heads, head_dim = means.shape
    heads = q.shape[0]
    scores = torch.empty(units, blocks, dtype=torch.float32, device=q.device)
    programs = min(units, kv_heads)  # several units of one KV head, or several KV heads of one unit
    _mean_scores[(triton.cdiv(blocks, 64), programs)](
        q,
        means,
        scores,
        q.stride(0),
        means.stride(0),
        means.stride(1),
        blocks,
        HEADS=heads // programs,
        HEADS_PAD=pad(heads // programs, 1),
        UNITS=units // programs,
        GROUP=heads // kv_heads,
        D=head_dim,
        D_PAD=pad(head_dim),
        num_warps=4,
    )
    return scores


def _static(q: Tensor, kv: KVView) -> dict[str, int]:
    return {
        "KV_HEADS": kv.kv_heads,
        "GROUP": q.shape[0] // kv.kv_heads,
        "D": kv.head_dim,
        "D_PAD": pad(kv.head_dim),
        "PAGE": kv.block_size,
    }


@triton.jit
def _row(q_ptr, head, q_head, D: tl.constexpr, D_PAD: tl.constexpr):
    channel = tl.arange(0, D_PAD)
    return tl.load(q_ptr + head.to(tl.int64) * q_head + channel, mask=channel < D, other=0.0).to(tl.float32)


@triton.jit
def _logits(
    q, k_pool, table, key, valid, kv_head, scale, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Base-2 logits of one row, -inf where not ``valid``."""
    channel = tl.arange(0, D_PAD)
    at = pool_rows(table, key, valid, kv_head, KV_HEADS, PAGE)[:, None] * D + channel[None, :]
    k = tl.load(k_pool + at, mask=valid[:, None] & (channel < D)[None, :], other=0.0).to(tl.float32)
    found = cap_logits(tl.sum(k * q[None, :], 1), scale * 1.4426950408889634, softcap, CAPPED)
    return tl.where(valid, found, float("-inf"))


@triton.jit
def _add_up(scores):
    """Natural log-sum-exp of base-2 ``scores``."""
    top = tl.max(scores, 0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(scores - anchor), 0)
    found = anchor + tl.log2(tl.where(total > 0.0, total, 1.0))
    return tl.where(total > 0.0, found * 0.6931471805599453, float("-inf"))


@triton.jit
def _span(
    q, k_pool, table, start, stop, kv_head, scale, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Natural log-sum-exp over the keys ``start .. stop - 1``."""
    top = tl.full([16], float("-inf"), tl.float32)
    weight = tl.zeros([16], tl.float32)
    for begin in tl.range(start, stop, 16):
        key = begin + tl.arange(0, 16)
        scores = _logits(
            q, k_pool, table, key, key < stop, kv_head, scale, softcap, KV_HEADS, D, D_PAD, PAGE, CAPPED
        )  # fmt: skip
        higher = tl.maximum(top, scores)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weight = weight * tl.exp2(top - anchor) + tl.exp2(scores - anchor)
        top = higher
    return _add_up(tl.where(weight > 0.0, top + tl.log2(tl.where(weight > 0.0, weight, 1.0)), float("-inf")))


@triton.jit(do_not_specialize=["table_head", "sinks", "recent", "end"], do_not_specialize_on_alignment=["table"])
def _sink_share(
    q_ptr, k_pool, table, mean_key, spread, lse, idle, q_head, table_head, sinks, recent, end, log_count, scale,
    softcap, epsilon,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    kv_head = head // GROUP
    table += kv_head.to(tl.int64) * table_head
    q = _row(q_ptr, head, q_head, D, D_PAD)
    first = _span(q, k_pool, table, 0, sinks, kv_head, scale, softcap, KV_HEADS, D, D_PAD, PAGE, CAPPED)
    last = _span(q, k_pool, table, recent, end, kv_head, scale, softcap, KV_HEADS, D, D_PAD, PAGE, CAPPED)
    mean = _row(mean_key, kv_head, D, D, D_PAD)
    middle = tl.sum(q * mean, 0) * scale + 0.5 * tl.sum(q * q, 0) * tl.load(spread + head) + log_count
    tl.store(lse + head * 3, first)
    tl.store(lse + head * 3 + 1, middle)
    tl.store(lse + head * 3 + 2, last)
    top = tl.maximum(middle, tl.maximum(first, last))
    total = tl.exp(first - top) + tl.exp(middle - top) + tl.exp(last - top)
    tl.store(idle + head, (tl.exp(first - top) / total > epsilon).to(tl.uint8))


@triton.jit(do_not_specialize=["table_head", "first", "size", "count"], do_not_specialize_on_alignment=["table"])
def _sampled_rest(
    q_ptr, k_pool, table, offsets, marks, probes, idle, instead, lse, q_head, table_head, instead_row, first, size,
    count, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    PER: tl.constexpr, PROBES: tl.constexpr, FEW: tl.constexpr, IDLE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    unit = (head // PER).to(tl.int64)
    table += (head // GROUP).to(tl.int64) * table_head
    resting = 0
    if IDLE:
        resting = tl.load(idle + head).to(tl.int32)
    if resting != 0:
        if IDLE:
            tl.store(lse + head, tl.load(instead + head * instead_row))
    else:
        number = tl.arange(0, PROBES)
        asked = number < count
        place = number
        if not FEW:
            place = (tl.load(probes + number, mask=asked, other=0.0) * size.to(tl.float32)).to(tl.int32)
            other = tl.where(asked, place, -1)  # two probes may fall on one key: the later one does not count
            twice = (other[:, None] == other[None, :]) & (number[None, :] < number[:, None])
            asked = asked & (tl.sum(twice.to(tl.int32), 1) == 0)
        out = asked & (tl.load(marks + unit * size + place, mask=asked, other=1) == 0)
        q = _row(q_ptr, head, q_head, D, D_PAD)
        scores = _logits(
            q, k_pool, table, first + place, out, head // GROUP, scale, softcap, KV_HEADS, D, D_PAD, PAGE, CAPPED
        )  # fmt: skip
        listed = tl.load(offsets + unit + 1) - tl.load(offsets + unit)
        share = (size - listed).to(tl.float32) / tl.maximum(tl.sum(out.to(tl.int32), 0), 1)
        tl.store(lse + head, _add_up(scores) + tl.log(tl.maximum(share, 1e-30)))


@triton.jit(do_not_specialize=["blocks"])
def _mean_scores(
    q_ptr, means, scores, q_head, mean_block, mean_head, blocks,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, UNITS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr,
):  # fmt: skip
    """``HEADS`` query heads, which make ``UNITS`` units."""
    program = tl.program_id(1)
    block = tl.program_id(0) * 64 + tl.arange(0, 64)
    channel = tl.arange(0, D_PAD)
    total = tl.zeros([64], tl.float32)
    for number in tl.static_range(HEADS):
        head = program * HEADS + number
        q = _row(q_ptr, head, q_head, D, D_PAD)
        at = block.to(tl.int64)[:, None] * mean_block + (head // GROUP) * mean_head + channel[None, :]
        mean = tl.load(means + at, mask=(block < blocks)[:, None] & (channel < D)[None, :], other=0.0).to(tl.float32)
        total += tl.sum(mean * q[None, :], 1)
        if (number + 1) % (HEADS // UNITS) == 0:
            unit = program * UNITS + number // (HEADS // UNITS)
            tl.store(scores + unit.to(tl.int64) * blocks + block, total / (HEADS // UNITS), mask=block < blocks)
            total = tl.zeros([64], tl.float32)
