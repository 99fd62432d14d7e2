"""Scores whose best are sought, and which those are by a stable sort."""

from __future__ import annotations

import torch

INF = float("inf")


def scores_of(kind: str, units: int, n: int) -> torch.Tensor:
    """[2, units, n] where other heads' scores lie between those of two units."""
    rng = torch.Generator().manual_seed(len(kind))
    drawn = torch.randn(2, 2 * units, n, generator=rng)
    if kind == "ties":
        drawn = (2 * drawn).round() / 8
    elif kind == "equal":
        drawn = torch.full_like(drawn, -0.375)
    elif kind == "close":  # but for the last bits
        drawn = 1 + torch.randint(0, 9, drawn.shape, generator=rng) * 2.0**-23
    elif kind == "one heavy":
        drawn = torch.full_like(drawn, 0.0)
        drawn[..., n // 2] = 1.0
        drawn[..., ::3] = -0.0
    elif kind == "infinite":
        drawn[drawn < 0.5] = -INF
        drawn[..., 5] = INF
    elif kind == "weights":
        drawn = torch.softmax(30 * drawn, -1)
    return drawn[:, ::2]


def best_by_sorting(line, first, last, low, high, take):
    keys = [key for key in range(first, last) if not low <= key < high]
    order = torch.sort(line[keys], descending=True, stable=True).indices[: max(0, take)]
    return sorted(keys[at] for at in order.tolist())
