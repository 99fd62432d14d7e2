"""The C++ kernels of decode by blocks: progressive attention over a ranking, and blocks ranked by their summaries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops import cpu
from saccade.selection import Blocks, Ranking


def supports(q: Tensor, kv: KVView, ranking: Ranking) -> bool:
    """Whether :func:`attend_ranking` can serve this call: units and KV heads that do not cut across each other."""
    few, many = sorted((ranking.units, kv.kv_heads))
    return ranking.shape.q_len == 1 and many % few == 0 and cpu.reads(q, kv)


def attend_ranking(
    q: Tensor,
    kv: KVView,
    ranking: Ranking,
    *,
    scale: float,
    softcap: float | None = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor, Blocks, Tensor]:
    """:func:`saccade.ops.progressive.attend_ranking`. A unit is one task: there is no more to share between threads."""
    shape, units = ranking.shape, ranking.units
    call = cpu._Call(q, kv, shape, scale, softcap, threads)
    always, order = ranking.always.int().contiguous(), ranking.order.int().contiguous()
    estimates = None if ranking.estimates is None else ranking.estimates.float().contiguous()
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2])
    used, coverage = torch.empty(units, dtype=torch.int64), torch.empty(units)
    offsets = torch.empty(units + 1, dtype=torch.int64)
    indices = torch.empty(always.numel() + order.numel() + 1, dtype=torch.int32)
    cpu._kernels.progressive(
        *call.geometry(0, 1),
        out.data_ptr(),
        lse.data_ptr(),
        ranking.block_size,
        units,
        always.shape[1],
        order.shape[1],
        ranking.microbatch,
        always.data_ptr(),
        order.data_ptr(),
        0 if estimates is None else estimates.data_ptr(),
        ranking.margin,
        ranking.epsilon,
        ranking.rest == "min",
        ranking.stop == "mean",
        used.data_ptr(),
        coverage.data_ptr(),
        offsets.data_ptr(),
        indices.data_ptr(),
    )
    return out, lse, Blocks(shape, ranking.block_size, offsets, indices[: int(offsets[-1])]), coverage


def ranks(q: Tensor, summary: Tensor, units: int) -> bool:
    """Whether :func:`rank_blocks` can serve this call."""
    few, many = sorted((units, summary.shape[2]))
    return (
        cpu.available()
        and q.device.type == summary.device.type == "cpu"
        and q.dtype in cpu._STORAGE
        and summary.dtype in cpu._STORAGE
        and summary.is_contiguous()
        and q.shape[1] % 16 == 0
        and many % few == 0
    )


def rank_blocks(
    q: Tensor, summary: Tensor, units: int, first: int, last: int, count: int, tail: Tensor | None = None
) -> Tensor:
    """Blocks ``first .. last - 1`` by :func:`saccade.ops.block_scores.block_scores`: the ``count`` best, rising, or for
    ``count=0`` all by falling score; int32 [units, ...]. Needs 0 <= count < last - first."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    tail = None if tail is None else tail.to(summary.dtype).contiguous()
    best = torch.empty(units, count or last - first, dtype=torch.int32)
    cpu._kernels.rank_blocks(
        cpu._isa_index(),
        torch.get_num_threads(),
        cpu._STORAGE[q.dtype],
        cpu._STORAGE[summary.dtype],
        q.data_ptr(),
        q.stride(0),
        summary.data_ptr(),
        0 if tail is None else tail.data_ptr(),
        q.shape[0],
        summary.shape[2],
        q.shape[1],
        units,
        summary.shape[1],
        first,
        last,
        count,
        best.data_ptr(),
    )
    return best


def estimates_blocks(q: Tensor, summary: Tensor) -> bool:
    """Whether :func:`estimate_blocks` can serve this call."""
    return ranks(q, summary, summary.shape[2])


def estimate_blocks(q: Tensor, summary: Tensor, size: int, scale: float) -> Tensor:
    """:func:`saccade.ops.block_estimates.block_estimates` without a cap."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty(q.shape[0], summary.shape[0])
    cpu._kernels.block_estimates(
        cpu._isa_index(),
        torch.get_num_threads(),
        cpu._STORAGE[q.dtype],
        cpu._STORAGE[summary.dtype],
        q.data_ptr(),
        q.stride(0),
        summary.data_ptr(),
        q.shape[0],
        summary.shape[2],
        q.shape[1],
        0,
        summary.shape[0],
        scale,
        math.log(size),
        out.data_ptr(),
    )
    return out


def orders(estimates: Tensor) -> bool:
    """Whether :func:`order_estimates` can serve this call."""
    return cpu.available() and estimates.device.type == "cpu" and estimates.is_contiguous() and estimates.shape[1] > 0


def order_estimates(estimates: Tensor, units: int) -> tuple[Tensor, Tensor]:
    """:func:`saccade.ops.block_estimates.ranked_by_estimate`; estimates fp32."""
    order, ranked = torch.empty(units, estimates.shape[1], dtype=torch.int32), torch.empty_like(estimates)
    cpu._kernels.rank_estimates(
        cpu._isa_index(),
        torch.get_num_threads(),
        estimates.data_ptr(),
        estimates.shape[0],
        units,
        estimates.shape[1],
        order.data_ptr(),
        ranked.data_ptr(),
    )
    return order, ranked
