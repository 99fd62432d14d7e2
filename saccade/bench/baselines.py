"""The same attention by torch's own kernels: what a user would pick instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.bench.inputs import Problem
from saccade.bench.timing import median_ms

TILE_ROWS = 512


def best_prefill(problem: Problem, repeats: int) -> tuple[str, float]:
    """(name, ms) of the fastest dense causal prefill that torch offers, over all heads.

    It is timed on one KV head's group and scaled: every head costs the same, and torch needs minutes for all of them.
    """
    group = problem.shape.group
    q, k, v = problem.q[:group], problem.k[:1], problem.v[:1]
    calls: dict[str, Callable[[], object]] = {}
    for dtype in {problem.q.dtype, torch.float32}:
        name = str(dtype).removeprefix("torch.")
        tensors = (q.to(dtype), k.to(dtype), v.to(dtype))
        calls[f"sdpa/{name}"] = partial(_sdpa, *tensors)
        calls[f"bmm/{name}"] = partial(_tiled, *tensors, problem.scale)
    times = {name: median_ms([call], repeats) for name, call in calls.items()}
    best = min(times, key=times.__getitem__)
    return best, times[best] * problem.shape.kv_heads


def best_decode(problem: Problem, repeats: int) -> tuple[str, float]:
    """(name, ms) of the fastest dense decode by torch.bmm: torch's bfloat16 SDPA is far slower for one query row."""
    times: dict[str, float] = {}
    for dtype in {problem.q.dtype, torch.float32}:
        q = problem.q.to(dtype).unflatten(0, (problem.shape.kv_heads, -1)).squeeze(2)  # [G, g, d]
        copies = 2 if len(problem.views) > 1 else 1
        pairs = [(problem.k.to(dtype, copy=True), problem.v.to(dtype, copy=True)) for _ in range(copies)]
        steps = [partial(_bmm_decode, q, k, v, problem.scale) for k, v in pairs]
        times[f"bmm/{str(dtype).removeprefix('torch.')}"] = median_ms(steps, repeats)
    best = min(times, key=times.__getitem__)
    return best, times[best]


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)


def _tiled(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Dense causal attention by matrix products over tiles of rows, keys after a tile left out."""
    group, n, _ = q.shape
    out = torch.empty_like(q)
    for start in range(0, n, TILE_ROWS):
        stop = min(start + TILE_ROWS, n)
        scores = (q[:, start:stop].flatten(0, 1) @ k[0, :stop].T).float().unflatten(0, (group, -1)) * scale
        causal = torch.arange(stop)[None, :] <= torch.arange(start, stop)[:, None]
        weights = torch.softmax(scores.masked_fill_(~causal, -torch.inf), -1).to(q.dtype)
        out[:, start:stop] = (weights.flatten(0, 1) @ v[0, :stop]).unflatten(0, (group, -1))
    return out


def _bmm_decode(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)).float() * scale, -1)
    return torch.bmm(weights.to(q.dtype), v)
