"""What is learnt of a model offline: the statistics of a layer's queries and keys over a calibration text.

A calibration sees the rows of each prefill chunk, ``q`` fp32 [heads, rows, head_dim] and ``k`` fp32 [kv_heads, rows,
head_dim], post-RoPE, and ends in tensors [kv_heads, head_dim, ...] by name.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from saccade.methods import infinigen, labels


class Statistics(Protocol):
    def add(self, q: Tensor, k: Tensor) -> None: ...

    def result(self) -> dict[str, Tensor]: ...


class ChannelMeans:
    """Mean |q| (over rows and the group's heads) and mean |k| of every channel: fp32 [kv_heads, head_dim]. Their
    product is the mean |q k| over all pairs (Double Sparsity, docs/algorithms.md 6.10)."""

    ranks: ClassVar[dict[str, int]] = {"q": 2, "k": 2}  # axes of the result's tensors: KV heads, then channels

    def __init__(self) -> None:
        self.rows = 0
        self.q: Tensor | float = 0.0
        self.k: Tensor | float = 0.0

    def add(self, q: Tensor, k: Tensor) -> None:
        self.rows += k.shape[1]
        self.q = self.q + q.double().abs().sum(1).unflatten(0, (k.shape[0], -1)).mean(1)
        self.k = self.k + k.double().abs().sum(1)

    def result(self) -> dict[str, Tensor]:
        return {name: (torch.as_tensor(sums) / self.rows).float() for name, sums in (("q", self.q), ("k", self.k))}


class Skew:
    """The right singular vectors of a group's queries, by falling singular value: an orthogonal fp32 [kv_heads,
    head_dim, head_dim] whose first columns carry most of the queries' weight (InfiniGen,
    docs/algorithms.md 6.13). The order
    of its columns, which the paper takes from the keys too, does not matter: channels are picked by weight."""

    ranks: ClassVar[dict[str, int]] = {"skew": 3}

    def __init__(self) -> None:
        self.gram: Tensor | float = 0.0

    def add(self, q: Tensor, k: Tensor) -> None:
        rows = q.double().unflatten(0, (k.shape[0], -1)).flatten(1, 2)  # [G, g * rows, d]
        self.gram = self.gram + rows.transpose(1, 2) @ rows

    def result(self) -> dict[str, Tensor]:
        _, vectors = torch.linalg.eigh(torch.as_tensor(self.gram))
        return {"skew": vectors.flip(-1).float()}


KINDS: dict[str, type[ChannelMeans] | type[Skew]] = {labels.CALIBRATION: ChannelMeans, infinigen.CALIBRATION: Skew}
