"""What these methods learn of a model offline (saccade calibrate channels, saccade calibrate skew)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from saccade.methods.base import Chunk
from saccade.methods.offline import Calibration


class ChannelMeans(Calibration):
    """Mean |q| (over rows and the group's heads) and mean |k| of every channel: fp32 [kv_heads, head_dim]. Their
    product is the mean |q k| over all pairs (Double Sparsity)."""

    of_channels: ClassVar[bool] = True

    def __init__(self) -> None:
        self.rows = 0
        self.q: Tensor | float = 0.0
        self.k: Tensor | float = 0.0

    @staticmethod
    def shapes(heads: int, kv_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys("qk", (kv_heads, head_dim))

    def add(self, chunk: Chunk) -> None:
        q, k = chunk.q, _keys(chunk)
        self.rows += k.shape[1]
        self.q = self.q + q.double().abs().sum(1).unflatten(0, (k.shape[0], -1)).mean(1)
        self.k = self.k + k.double().abs().sum(1)

    def result(self) -> dict[str, Tensor]:
        return {name: (torch.as_tensor(sums) / self.rows).float() for name, sums in (("q", self.q), ("k", self.k))}


class Skew(Calibration):
    """The right singular vectors of a group's queries, by falling singular value: an orthogonal fp32 [kv_heads,
    head_dim, head_dim] whose first columns carry most of the queries' weight (InfiniGen). The order of its
    columns, which the paper takes from the keys too, does not matter: channels are picked by weight."""

    of_channels: ClassVar[bool] = True

    def __init__(self) -> None:
        self.gram: Tensor | float = 0.0

    @staticmethod
    def shapes(heads: int, kv_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"skew": (kv_heads, head_dim, head_dim)}

    def add(self, chunk: Chunk) -> None:
        rows = chunk.q.double().unflatten(0, (chunk.shape.kv_heads, -1)).flatten(1, 2)  # [G, g * rows, d]
        self.gram = self.gram + rows.transpose(1, 2) @ rows

    def result(self) -> dict[str, Tensor]:
        _, vectors = torch.linalg.eigh(torch.as_tensor(self.gram))
        return {"skew": vectors.flip(-1).float()}


def _keys(chunk: Chunk) -> Tensor:
    """Of the chunk's own rows, [kv_heads, rows, head_dim]."""
    return chunk.kv.keys(chunk.shape.q_start, chunk.shape.q_start + chunk.shape.q_len)
