"""What LFPS learns from a prompt's last rows: lines of weight, and how far logits spread (docs/algorithms.md 1.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.methods.base import Chunk
from saccade.ops import triton
from saccade.ops.scores import row_weights, slash_sums


def last_rows(segment: Chunk, units: int, rows: int, first: int) -> tuple[Tensor, Tensor]:
    """Mean softmax weights of the last ``rows`` rows of ``segment``, over the keys from ``first`` on and renormalised
    over them: by position - ``first``, and by distance from the row (LFPS eq. 4). Two fp32 [units, k_len - first];
    with a unit for each KV head its query heads' means."""
    kv, shape = segment.kv, segment.shape
    end = shape.q_start + shape.q_len
    device = segment.q.device
    which = torch.arange(shape.q_len - rows, shape.q_len, device=device)
    if segment.q.is_cuda and triton.serves_sums(segment.q, kv, rows) is None:
        segment.cost.scored += shape.causal_pairs
        from saccade.ops.triton.line_sums import token_sums

        sums = token_sums(segment.q, kv, shape, rows, segment.scale, segment.softcap, first)
        of_heads = (part / rows for part in (sums[0][:, first:end], sums[1][:, : end - first]))
        vertical, slash = (part.unflatten(0, (units, -1)).mean(1) for part in of_heads)
        return vertical, slash
    vertical, slash = torch.zeros(2, units, end - first, device=device)
    segment.cost.scored += shape.causal_pairs
    for g in range(shape.kv_heads):
        own = slice(g * units // shape.kv_heads, (g + 1) * units // shape.kv_heads)
        weights = row_weights(segment.q, kv, shape, g, which, segment.scale, segment.softcap)[..., :end]
        weights[..., :first] = 0.0
        weights /= weights.sum(-1, keepdim=True).clamp(min=1e-38) * rows
        lines = torch.stack([weights.sum(1)[:, first:], slash_sums(weights, end - rows)[:, : end - first]])
        if units == shape.kv_heads:
            lines = lines.mean(1, keepdim=True)
        vertical[own], slash[own] = lines
    return vertical, slash


def last_spread(segment: Chunk, first: int) -> Tensor:
    """Variance of the last row's logits over the keys from ``first`` on, over the square of its query's norm: fp32
    [heads] (LFPS eq. 5)."""
    kv, shape = segment.kv, segment.shape
    end = shape.q_start + shape.q_len
    spread = torch.zeros(shape.heads, device=segment.q.device)
    for g in range(shape.kv_heads if end > first else 0):
        heads = slice(g * shape.group, (g + 1) * shape.group)
        last = segment.q[heads, -1].float()
        scores = last @ kv.head_keys(g, end)[first:].float().T * segment.scale
        spread[heads] = scores.var(-1, correction=0) / last.square().sum(-1).clamp(min=1e-38)
    return spread
