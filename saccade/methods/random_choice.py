"""Keys drawn at random: the baseline below which a selection has learnt nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from saccade.methods.base import Chunk, Method, Query
from saccade.methods.device_state import Opening
from saccade.methods.options import require_whole
from saccade.methods.topk import TopK
from saccade.selection import Dense, Selection, Tokens


@dataclass(frozen=True)
class RandomChoice(Method):
    """The row's own key and others drawn uniformly without replacement, ``k`` in all (a number, or a fraction of the
    visible keys when below 1, as in ``topk``). One set per KV head and row, drawn from ``seed``, the layer and the
    row's position alone, so that chunks and batches make no difference."""

    name: ClassVar[str] = "random"
    paper: ClassVar[str] = "chance"
    phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    numbers_heads: ClassVar[bool] = True
    rows_only: ClassVar[str | None] = "its keys are drawn on the host"

    k: float = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        TopK(k=self.k)  # refuses a budget out of range
        require_whole("seed", self.seed, 0)

    @property
    def row_by_row(self) -> bool:
        return True

    def select_prefill(self, chunk: Chunk) -> Selection:
        shape, budget = chunk.shape, TopK(k=self.k).budget
        if budget(shape.k_len) >= shape.k_len:
            return Dense(shape)
        lists: list[list[torch.Tensor]] = [[] for _ in range(shape.kv_heads)]
        own = chunk.part.units(shape.kv_heads)
        places = {head: at for at, head in enumerate(own)}
        for row in shape.rows.tolist():
            rng = np.random.default_rng([self.seed, chunk.layer, row])
            for head in range(max(own) + 1):  # draws go on from head to head of the model
                others = rng.choice(row, budget(row + 1) - 1, replace=False) if row else np.empty(0, dtype=np.int64)
                if head in places:
                    lists[places[head]].append(torch.from_numpy(np.append(others, row).astype(np.int32)))
        tokens = Tokens.from_lists(shape, [row for kv_head in lists for row in kv_head])
        return tokens.to(shape.device)

    def whole_upto(self, opening: Opening) -> int:
        return int(self.k) if self.k >= 1 else 0

    def select_decode(self, query: Query, state: Any) -> Selection:
        return self.select_prefill(query)
