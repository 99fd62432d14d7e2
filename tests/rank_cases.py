"""Scores that orders of blocks are tested with, and the order that a stable sort gives them."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.ops.triton.batch import Pages

KINDS = ("random", "tied", "equal", "falling", "rising", "zeros", "infinite", "close")


def scores_of(kind: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=rng)
    if kind == "tied":
        return drawn.mul(2).round()
    if kind == "equal":
        return torch.full(shape, -1.5)
    if kind in ("falling", "rising"):
        return drawn.sort(-1, descending=kind == "falling").values
    if kind == "zeros":
        return torch.where(drawn > 0, 0.0, -0.0)
    if kind == "infinite":
        return torch.where(drawn > 0.8, torch.inf, torch.where(drawn < -0.8, -torch.inf, drawn))
    if kind == "close":  # neighbours among floats, and some far away
        return torch.where(drawn > 2, 1e30 * drawn, 1 + (drawn * 8).round() * 2.0**-23)
    return drawn


def pages_of(lengths: list[int], longest: int, device: str = "cpu") -> Pages:
    """Of rows of ``lengths`` keys, without any."""
    none = torch.empty(1, 1, 16, 16, device=device)
    table = torch.zeros(len(lengths), 1, 8, dtype=torch.int32, device=device)
    return Pages(none, none, table, torch.tensor(lengths, dtype=torch.int32, device=device), longest)


def ordered(scores: Tensor, first: int, stop: int) -> list[int]:
    """Blocks from ``first`` to ``stop`` of one list, by falling score, ties to the lower block."""
    return (torch.sort(scores[first:stop], descending=True, stable=True).indices + first).tolist()
