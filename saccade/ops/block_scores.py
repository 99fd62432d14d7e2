"""Blocks ranked by what their summaries say of a decode step's query, without a look at their keys."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kv.block_codes import BlockCodes
from saccade.ops import cpu_blocks
from saccade.ops.scores import cuboid_scores, top_places

RARELY = 64  # so many times as many blocks pay for a ranking that is only begun: of fewer, rules often go past it


def block_scores(q: Tensor, summary: Tensor, units: int) -> Tensor:
    """Criticality, meaned over a unit's query heads: of intervals ``sum_d max(q_d hi_d, q_d lo_d)`` (ArkVale, Quest;
    docs/algorithms.md 4.2), of mean keys their dot product with ``q``.
    ``q`` [heads, head_dim], ``summary`` [blocks, 2 or 1,
    kv_heads, head_dim] -> fp32 [units, blocks]."""
    if summary.shape[1] == 1:
        means = summary[:, 0].float().permute(1, 2, 0)  # [G, d, blocks]
        scores = (q.float().unflatten(0, (means.shape[0], -1)) @ means).flatten(0, 1)
    else:
        scores = cuboid_scores(q, summary.float())
    return scores.unflatten(0, (units, -1)).mean(1)


def top_blocks(
    q: Tensor,
    summary: Tensor,
    units: int,
    count: int,
    first: int,
    last: int,
    tail: Tensor | None = None,
    codes: BlockCodes | None = None,
) -> Tensor:
    """The ``count`` blocks of highest criticality among ``first .. last - 1``, ties to the lower: int32 [units, count],
    rising. ``tail`` [parts, kv_heads, head_dim] stands for block ``last - 1`` where ``summary`` ends before it;
    ``codes``: what is known of the first ones in 4 bits, which saves time."""
    if count >= last - first:
        return torch.arange(first, last, dtype=torch.int32, device=q.device).expand(units, -1)
    if count > 0 and cpu_blocks.serves_summary(q, summary, units) is None:
        return cpu_blocks.rank_blocks(q, summary, units, first, last, count, tail, codes)
    parts = summary[first:last] if tail is None else torch.cat([summary[first:], tail[None].to(summary.dtype)])
    return (top_places(block_scores(q, parts, units), count) + first).to(torch.int32)


def first_ranked(
    q: Tensor, summary: Tensor, units: int, count: int, first: int, last: int, codes: BlockCodes | None
) -> Tensor | None:
    """The first ``count`` of what :func:`ranked_blocks` gives, where they can be had for much less: None else."""
    if codes is None or min(codes.blocks, last) - first <= RARELY * count:
        return None
    if cpu_blocks.serves_summary(q, summary, units) is not None:
        return None
    return cpu_blocks.rank_blocks(q, summary, units, first, last, count, codes=codes, falling=True)


def ranked_blocks(q: Tensor, summary: Tensor, units: int, first: int, last: int) -> Tensor:
    """Blocks ``first .. last - 1`` by falling criticality, ties to the lower: int32 [units, last - first]."""
    if last > first and cpu_blocks.serves_summary(q, summary, units) is None:
        return cpu_blocks.rank_blocks(q, summary, units, first, last, 0)
    scores = block_scores(q, summary[first:last], units)
    return (torch.sort(scores, dim=1, descending=True, stable=True).indices + first).to(torch.int32)
