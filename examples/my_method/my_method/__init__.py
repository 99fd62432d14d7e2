"""A method of one's own: blocks whose mean key the query likes best. Copy this folder and change ``score``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from saccade.methods import Query, ScoredBlocks


@dataclass(frozen=True)
class MeanKey(ScoredBlocks):
    """The blocks whose mean key scores highest for the best of the query heads that share a KV head."""

    name: ClassVar[str] = "mean_key"
    paper: ClassVar[str] = "mine"
    summary: ClassVar[str] = "mean"

    def score(self, query: Query, q: Tensor, summary: Tensor) -> Tensor:
        return torch.einsum("kgd,bkd->kgb", q, summary[:, 0]).amax(1)
