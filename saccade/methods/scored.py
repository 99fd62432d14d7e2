"""Methods that are a score of blocks and a budget: for a method's first hour, and for comparing scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.errors import PolicyError
from saccade.kv.summaries import PARTS
from saccade.methods.base import Query
from saccade.methods.options import require_choice, require_whole
from saccade.methods.tails import BlockMethod
from saccade.selection import Blocks, Dense, Selection

SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class ScoredBlocks(BlockMethod):
    """Base of decode methods that read the blocks of the highest ``score``: ``budget`` keys in blocks of
    ``block_size``, of which the ``sinks`` first and the ``recent`` last blocks are read anyway. Shorter contexts are
    read whole. A subclass has a ``name`` and a :meth:`score`; ``summary`` names what is kept of each block: ``mean``,
    ``minmax``, ``cuboid``, ``moments`` (:mod:`saccade.kv.summaries`). The row path serves it, on a CPU and a GPU.
    """

    phases: ClassVar[tuple[str, ...]] = ("decode",)
    summary: ClassVar[str] = "mean"
    rows_only: ClassVar[str | None] = "its score is torch's"

    budget: int = 1024
    block_size: int = 32
    sinks: int = 1
    recent: int = 1

    def __post_init__(self) -> None:
        require_choice("block_size", self.block_size, SIZES)
        require_whole("sinks", self.sinks, 0)
        require_whole("recent", self.recent, 1)
        require_whole("budget", self.budget, (self.sinks + self.recent) * self.block_size)
        self.check_tail()
        if self.summary not in PARTS:
            raise PolicyError(f"summary={self.summary!r} of '{self.name}' is unknown; known: {', '.join(PARTS)}")

    @classmethod
    def lacks_score(cls) -> bool:
        """Whether the class would fail at its first decode step: it has neither a score nor a ``select_decode``."""
        return cls.score is ScoredBlocks.score and cls.select_decode is ScoredBlocks.select_decode

    def score(self, query: Query, q: Tensor, summary: Tensor) -> Tensor:
        """How much each full block is worth to this row, the highest first.

        ``q`` float32 [kv_heads, group, head_dim], the query heads of each KV head; ``summary`` float32 [blocks, parts,
        kv_heads, head_dim]. Returns floats [lists, blocks], a list for each KV head, for each query head, or one for
        all.
        """
        raise NotImplementedError(f"method '{self.name}' has no score")

    def select_decode(self, query: Query, state: Any) -> Selection:
        shape, size = query.shape, self.block_size
        blocks, full = -(-shape.k_len // size), shape.k_len // size
        take = self.budget // size - self.sinks - self.recent
        if blocks <= self.budget // size:
            return Dense(shape)
        q = query.q[:, 0].float().unflatten(0, (shape.kv_heads, -1))
        score = self.score(query, q, query.kv.summary(self.summary, size).float())
        if score.ndim != 2 or len(score) not in (shape.kv_heads, shape.heads, 1) or score.shape[1] != full:
            raise PolicyError(
                f"the score of '{self.name}' is {list(score.shape)}; it must be [lists, {full} blocks], with "
                f"{shape.kv_heads}, {shape.heads} or 1 lists"
            )
        if bool(score.isnan().any()):
            raise PolicyError(f"the score of '{self.name}' is not a number for some blocks of layer {query.layer}")
        query.cost.estimated += blocks - self.sinks - self.recent
        ours = score[:, self.sinks : blocks - self.recent]
        best = ours.topk(min(take, ours.shape[1]), 1).indices + self.sinks
        every = torch.arange(blocks, device=score.device)
        ends = torch.cat([every[: self.sinks], every[blocks - self.recent :]]).expand(len(score), -1)
        pages = torch.cat([ends, best], 1).sort(1).values.int()
        lists = torch.arange(len(pages) + 1, device=pages.device) * pages.shape[1]
        return self.with_tail(query, Blocks(shape, size, lists, pages.flatten()), size)
