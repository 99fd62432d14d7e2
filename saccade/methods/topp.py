"""Exact top-p: the fewest keys that hold a share of the true weight, the oracle of threshold methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from saccade.methods.base import Chunk, Query
from saccade.methods.device_state import Opening
from saccade.methods.dial import Dial
from saccade.methods.options import require_choice, require_number, require_whole
from saccade.methods.whole import WholeMethod
from saccade.ops.scores import needed_shares, row_logits
from saccade.selection import Dense, Selection, Tokens
from saccade.selection.forms import MOST

TILE_ROWS = 64  # rows sorted at once
TINY = 1e-12  # p = 0 reads the heaviest key, where no other is forced


@dataclass(frozen=True)
class TopP(WholeMethod):
    """The fewest keys whose softmax weights reach ``p``, ties to the lower index. The first ``sinks`` and last
    ``local`` keys are always read; the others are added by weight until all read together reach ``p``.

    ``unit="kv_head"`` takes one set per KV head by the group's mean weight. It scores every key; ``prefill=true``
    applies it to prefill rows too. ``p=1`` is dense. Decode rows of up to ``dense_upto`` keys read
    everything.
    """

    name: ClassVar[str] = "topp"
    paper: ClassVar[str] = "oracle"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    dial: ClassVar[Dial | None] = Dial("p", "share")
    rows_only: ClassVar[str | None] = "no batched kernel finds the fewest keys that hold a share of the weight"

    p: float = 0.95
    sinks: int = 0
    local: int = 0
    unit: str = "q_head"
    prefill: bool = False

    def __post_init__(self) -> None:
        require_number("p", self.p, 0.0, 1.0)
        require_whole("sinks", self.sinks, 0)
        require_whole("local", self.local, 0)
        require_choice("unit", self.unit, ("q_head", "kv_head"))
        require_choice("prefill", self.prefill, (False, True))
        self.check_dense_upto()
        if self.prefill:
            object.__setattr__(self, "phases", ("prefill", "decode"))

    @property
    def row_by_row(self) -> bool:
        return self.prefill

    def select_prefill(self, chunk: Chunk) -> Selection:
        return self.select_decode(chunk) if self.prefill else Dense(chunk.shape)

    def whole_upto(self, opening: Opening) -> int:
        return MOST if self.p >= 1 else max(self.dense_upto, self.sinks + self.local)

    def select_decode(self, query: Chunk, state: Any = None) -> Selection:
        shape, forced = query.shape, self.sinks + self.local
        if self.p >= 1 or shape.k_len <= (max(self.dense_upto, forced) if isinstance(query, Query) else forced):
            return Dense(shape)
        query.cost.scored += shape.causal_pairs
        lists: list[list[torch.Tensor]] = []  # [kv head and unit within][row]
        for kv_head in range(shape.kv_heads):
            units: list[list[torch.Tensor]] = [[] for _ in range(shape.group if self.unit == "q_head" else 1)]
            for start in range(0, shape.q_len, TILE_ROWS):
                stop = min(start + TILE_ROWS, shape.q_len)
                scores = row_logits(query.q, query.kv, shape, kv_head, start, stop, query.scale, query.softcap)
                for unit, mask in zip(
                    units, self._heaviest(torch.softmax(scores, -1).double(), shape.rows[start:stop])
                ):
                    unit += [row.nonzero()[:, 0].to(torch.int32) for row in mask]
            lists += units
        return Tokens.from_lists(shape, [row for unit in lists for row in unit])

    def _heaviest(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """bool [units of the KV head, rows, k_len]: what ``rows`` (positions) of its group's ``weights`` read."""
        if self.unit == "kv_head":
            weights = weights.mean(0, keepdim=True)
        keys, rows = torch.arange(weights.shape[-1], device=rows.device), rows[:, None]
        forced = ((keys < self.sinks) | (rows - keys < self.local)) & (keys <= rows)
        read = (weights * forced).sum(-1, keepdim=True)
        heavier = read + needed_shares(weights.masked_fill(forced, 0.0)) * (1 - read)
        return (forced | (heavier < max(self.p, TINY))) & (keys <= rows)
