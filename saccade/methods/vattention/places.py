"""Where a decode step's keys are read exactly, what may be sampled, and draws of that."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.methods.base import Query
from saccade.ops.reference import logits, soft_capped


class Middle(NamedTuple):
    """Blocks ``first .. last - 1`` of ``size`` keys lie whole between the keys that are always read; ``length`` keys in
    all."""

    size: int
    first: int
    last: int
    length: int

    @classmethod
    def of(cls, length: int, size: int, sinks: int, local: int) -> Middle:
        first = -(-min(sinks, length) // size)
        return cls(size, first, max(first, max(0, length - local) // size), length)

    @property
    def blocks(self) -> int:
        return self.last - self.first

    def exact(self, blocks: Tensor) -> Tensor:
        """int64: positions of the keys outside of the middle and of its ``blocks`` (numbers from 0, any order)."""
        at, device = self.first * self.size, blocks.device
        ends = torch.arange(at, device=device), torch.arange(self.last * self.size, self.length, device=device)
        return torch.cat([ends[0], self.keys(blocks.sort().values), ends[1]])

    def keys(self, blocks: Tensor) -> Tensor:
        """int64: positions of all keys of ``blocks``, in their order."""
        within = torch.arange(self.size, device=blocks.device)
        return ((blocks[:, None] + self.first) * self.size + within).flatten()

    def others(self, blocks: Tensor) -> Tensor:
        """int64, rising: the middle's blocks that are not among ``blocks``."""
        left = torch.ones(self.blocks, dtype=torch.bool, device=blocks.device)
        left[blocks] = False
        return left.nonzero()[:, 0]


class Read(NamedTuple):
    """Keys that one KV head's query heads read: ``scores`` fp32 [group, m] their logits, ``values`` fp32 [m,
    head_dim]."""

    scores: Tensor
    values: Tensor

    @classmethod
    def of(cls, query: Query, kv_head: int, positions: Tensor) -> Read:
        shape = query.shape
        heads = slice(kv_head * shape.group, (kv_head + 1) * shape.group)
        k, v = query.kv.take(positions, kv_head)
        return cls(logits(query.q[heads, 0].float(), k.float(), query.scale, query.softcap), v.float())


def upper_bounds(query: Query, summary: Tensor, kv_head: int) -> Tensor:
    """What no logit of a block exceeds, fp32 [group, blocks], by its keys' extremes: ``summary`` [blocks, 2, kv_heads,
    head_dim], highest and lowest of each channel (Quest's bound)."""
    shape = query.shape
    q = query.q[kv_head * shape.group : (kv_head + 1) * shape.group, 0].float() * query.scale
    high, low = summary[:, 0, kv_head].float(), summary[:, 1, kv_head].float()
    bound = q.clamp(min=0) @ high.T + q.clamp(max=0) @ low.T
    bound += 1e-5 * (q.abs() @ torch.maximum(high.abs(), low.abs()).T)  # what the products' rounding may take away
    return soft_capped(bound, query.softcap)


def draws(seed: int, stage: int, query: Query, kv_head: int, count: int) -> Tensor:
    """float64 [count] in [0, 1) on the query's device: they hang on the seed, the stage of the method, the row's place,
    the layer and the KV head alone (Philox)."""
    place = [0, query.shape.q_start, query.layer, query.part.global_head(kv_head, query.shape.kv_heads)]
    random = np.random.Generator(np.random.Philox(key=[seed, stage], counter=place))
    return torch.from_numpy(random.random(count)).to(query.q.device)


def counted(places: Tensor) -> tuple[Tensor, Tensor]:
    """What was drawn, rising, and how often each."""
    found, times = torch.unique(places, return_counts=True)
    return found, times


def ordered(positions: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the order of rising positions."""
    order = positions.argsort()
    return positions[order], bias[order]
