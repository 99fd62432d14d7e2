"""The C++ kernels of decode by blocks: progressive attention over a ranking, and blocks ranked by their summaries."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from saccade.kv.block_codes import BlockCodes
from saccade.kv.view import KVView
from saccade.ops import cpu
from saccade.ops.call import Call, Result
from saccade.ops.cpu_structs import STORAGE, Reads, address, codes_of, native, output_of
from saccade.selection import Blocks, Ranking


def serves(q: Tensor, kv: KVView, ranking: Ranking) -> str | None:
    """Why :func:`attend_ranking` cannot run this call; None where it can: units and KV heads that do not cut across
    each other."""
    return cpu.uneven(ranking.units, kv.kv_heads) or cpu.serves(q, kv)


def attend_ranking(call: Call) -> Result:
    """:func:`saccade.ops.progressive.attend_ranking`. Of a begun ranking the rest is asked for where the rule goes
    past what it names."""
    q, ranking = call.q, call.selection
    assert isinstance(ranking, Ranking)
    shape, units = ranking.shape, ranking.units
    reads = Reads(q, call.kv, shape, call.scale, call.softcap, call.threads)
    always, order = ranking.always.int().contiguous(), ranking.order.int().contiguous()
    estimates = None if ranking.estimates is None else ranking.estimates.float().contiguous()
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2])
    used, coverage = torch.empty(units, dtype=torch.int64), torch.empty(units)
    offsets = torch.empty(units + 1, dtype=torch.int64)
    indices = torch.empty(always.numel() + order.numel() + 1, dtype=torch.int32)
    ranked = native.Progressive(
        block_size=ranking.block_size,
        units=units,
        always_count=always.shape[1],
        ranked=ranking.total,
        listed=order.shape[1],
        microbatch=ranking.microbatch,
        always=always.data_ptr(),
        order=order.data_ptr(),
        epsilon=ranking.epsilon,
        least=ranking.rest == "min",
        mean=ranking.stop == "mean",
        estimates=address(estimates),
        margin=ranking.margin,
        used=used.data_ptr(),
        coverage=coverage.data_ptr(),
        offsets=offsets.data_ptr(),
        indices=indices.data_ptr(),
    )
    cpu.kernels().progressive(reads.threads, reads.pool, reads.table, reads.queries(), ranked, output_of(out, lse))
    if ranking.total > order.shape[1]:
        all_read = offsets.diff() - always.shape[1] == order.shape[1]
        if bool((all_read & ~(coverage > ranking.epsilon)).any()):
            return attend_ranking(replace(call, selection=ranking.whole()))
    read = Blocks(shape, ranking.block_size, offsets, indices[: int(offsets[-1])])
    return Result(out, lse, read, f"cpu/{cpu.isa()}", coverage=coverage)


def serves_summary(q: Tensor, summary: Tensor, units: int) -> str | None:
    """Why :func:`rank_blocks` and, with a unit for each KV head, :func:`estimate_blocks` cannot run this call; None
    where they can."""
    if not cpu.available():
        return cpu.why_unavailable()
    if not q.device.type == summary.device.type == "cpu":
        return f"q lies on {q.device} and the summaries on {summary.device}, not on the CPU"
    if q.dtype not in STORAGE or summary.dtype not in STORAGE:
        return f"its kernels read float32 or bfloat16; got {q.dtype} and {summary.dtype}"
    if q.shape[1] % 16 or not summary.is_contiguous():
        return f"it reads contiguous summaries of a multiple of 16 channels; got {q.shape[1]}"
    return cpu.uneven(units, summary.shape[2])


def rank_blocks(
    q: Tensor,
    summary: Tensor,
    units: int,
    first: int,
    last: int,
    count: int,
    tail: Tensor | None = None,
    codes: BlockCodes | None = None,
    falling: bool = False,
) -> Tensor:
    """Blocks ``first .. last - 1`` by :func:`saccade.ops.block_scores.block_scores`: the ``count`` best, rising or by
    falling score, or for ``count=0`` all by falling score; int32 [units, ...]. Needs 0 <= count < last - first. With
    ``codes`` of the first blocks most others are passed over; the result is the same."""
    coded = {} if codes is None or not codes.blocks else {"coded": codes_of(codes)}
    q = q if q.stride(-1) == 1 else q.contiguous()
    tail = None if tail is None else tail.to(summary.dtype).contiguous()
    best = torch.empty(units, count or last - first, dtype=torch.int32)
    heads, head_dim = q.shape
    _, parts, kv_heads, _ = summary.shape
    cpu.kernels().rank_blocks(
        native.BlockRanking(
            threads=torch.get_num_threads(),
            storage=STORAGE[q.dtype],
            summary_storage=STORAGE[summary.dtype],
            q=q.data_ptr(),
            head_stride=q.stride(0),
            summary=summary.data_ptr(),
            tail=address(tail),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            units=units,
            parts=parts,
            first=first,
            last=last,
            count=count,
            out=best.data_ptr(),
            falling=falling,
            **coded,
        )
    )
    return best


def estimate_blocks(q: Tensor, summary: Tensor, size: int, scale: float) -> Tensor:
    """:func:`saccade.methods.psa.estimates.block_estimates` without a cap."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty(q.shape[0], summary.shape[0])
    heads, head_dim = q.shape
    cpu.kernels().block_estimates(
        native.BlockEstimates(
            threads=torch.get_num_threads(),
            storage=STORAGE[q.dtype],
            summary_storage=STORAGE[summary.dtype],
            q=q.data_ptr(),
            head_stride=q.stride(0),
            summary=summary.data_ptr(),
            heads=heads,
            kv_heads=summary.shape[2],
            head_dim=head_dim,
            first=0,
            last=summary.shape[0],
            scale=scale,
            log_size=math.log(size),
            out=out.data_ptr(),
        )
    )
    return out


def serves_estimates(estimates: Tensor) -> str | None:
    """Why :func:`order_estimates` cannot run this call; None where it can."""
    if not cpu.available():
        return cpu.why_unavailable()
    if estimates.device.type != "cpu" or estimates.dtype != torch.float32 or not estimates.is_contiguous():
        return f"it orders contiguous float32 on the CPU; got {estimates.dtype} on {estimates.device}"
    return None if estimates.shape[1] else "there is no block to order"


def order_estimates(estimates: Tensor, units: int) -> tuple[Tensor, Tensor]:
    """:func:`saccade.methods.psa.estimates.ranked_by_estimate`; estimates fp32."""
    order, ranked = torch.empty(units, estimates.shape[1], dtype=torch.int32), torch.empty_like(estimates)
    heads, blocks = estimates.shape
    cpu.kernels().rank_estimates(
        native.EstimateRanking(
            threads=torch.get_num_threads(),
            estimates=estimates.data_ptr(),
            heads=heads,
            units=units,
            blocks=blocks,
            order=order.data_ptr(),
            ranked=ranked.data_ptr(),
        )
    )
    return order, ranked
