"""What stands for keys that LFPS does not read: the estimated share of a head's sinks, which decides its bypass, and
the weight of keys that are no candidates. That is the meaning; kernels do the same."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.reference import logits
from saccade.selection import Shape

GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it, modulo 1, lie nowhere close to each other


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
    softcap: float | None = None,
) -> Tensor:
    """Three log-sum-exps of one row's logits, fp32 [heads, 3] (LFPS eq. 5): over the first ``sinks`` keys; over all
    others, from their mean key ``mean_key`` [kv_heads, head_dim] and ``spread`` [heads], the variance of their logits
    over the square of the query's norm, ``log_count`` the log of their number; and over the last ``local`` keys."""
    n = shape.q_start + 1
    row = q[:, 0].float().unflatten(0, (shape.kv_heads, -1))  # [G, g, d]
    parts = [
        torch.logsumexp(logits(row, kv.keys(start, stop).float(), scale, softcap), -1).flatten()
        for start, stop in ((0, min(sinks, n)), (max(n - local, sinks, 0), n))
        if stop > start
    ]
    none = row.new_full((shape.heads,), -torch.inf)
    first = parts[0] if sinks and n else none
    last = parts[-1] if n > max(n - local, sinks) else none
    middle = (row @ mean_key[..., None])[..., 0].flatten() * scale + 0.5 * row.square().sum(-1).flatten() * spread
    return torch.stack([first, middle + log_count, last], 1)


def sampled_rest(
    q: Tensor,
    kv: KVView,
    offsets: Tensor,
    indices: Tensor,
    first: int,
    stop: int,
    probes: int,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Estimated log-sum-exp of one row's logits over the keys ``first .. stop - 1`` that its unit does not list, fp32
    [heads]: from ``probes`` of them that a low-discrepancy sequence spreads over all, each standing for as many as were
    passed over. ``q`` [heads, 1, head_dim]; lists as for ``choosing.join_blocks``. -inf where no probe lies
    outside a list."""
    at = spread_places(stop - first, probes).to(q.device) + first
    units, heads, size = offsets.numel() - 1, q.shape[0], stop - first
    unit = torch.arange(units, device=at.device)
    keyed = indices.long() + torch.repeat_interleave(unit * stop, offsets.diff())
    asked = (at + unit[:, None] * stop).flatten()
    found = torch.searchsorted(keyed, asked).clamp(max=max(0, keyed.numel() - 1))
    out = (keyed[found] != asked if keyed.numel() else torch.ones_like(asked, dtype=torch.bool)).view(units, -1)
    keys = torch.stack([kv.take(at, kv_head)[0] for kv_head in range(kv.kv_heads)])  # [G, m, d]
    scores = logits(q[:, 0].float().unflatten(0, (kv.kv_heads, -1)), keys.float(), scale, softcap).flatten(0, 1)
    per_unit = heads // units
    total = scores.masked_fill(~out.repeat_interleave(per_unit, 0), -torch.inf).logsumexp(-1)
    share = (size - offsets.diff()) / out.sum(-1).clamp(min=1)
    return total + share.clamp(min=1e-30).log().repeat_interleave(per_unit, 0)


def spread_places(size: int, count: int) -> Tensor:
    """At most ``count`` of ``size`` places, spread evenly over them: int64, rising, on the CPU."""
    if size <= count:
        return torch.arange(size, device="cpu")
    return torch.unique_consecutive((multiples(count) * size).long())


@lru_cache(maxsize=8)
def multiples(count: int) -> Tensor:
    """Shares of all places, float64 [count], rising."""
    return torch.sort((torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) * GOLDEN % 1.0).values
