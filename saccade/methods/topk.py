"""Exact top-k: the oracle that every other selector is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from saccade.methods.base import Chunk, Method, Query
from saccade.methods.device_state import DeviceState, Opening
from saccade.methods.dial import Dial
from saccade.methods.host_state import HostState
from saccade.methods.labels.recorded import BestKeys, RecordedLabels
from saccade.methods.options import budget_keys, require_budget, require_choice, require_whole
from saccade.ops.cpu_structs import native
from saccade.ops.scores import row_logits
from saccade.selection import Candidates, Dense, Selection, Tokens
from saccade.selection.forms import PlanSpec, Room
from saccade.selection.plan import DevicePlan


class HostBest(HostState):
    """The numbers of ``TopK``."""

    def __init__(self, opening: Opening, method: TopK) -> None:
        super().__init__(opening)
        self._method, spec = method, opening.spec
        self._units = spec.heads if method.unit == "q_head" else spec.kv_heads

    def keys(self, length: int) -> Any | None:
        method, budget = self._method, self._method.budget(length)
        if budget >= length:
            return None
        forced = method.sinks + method.local
        return native.ListedKeys(units=self._units, sinks=method.sinks, local=method.local, best=budget - forced)


@dataclass(frozen=True)
class TopK(Method):
    """The ``k`` keys of highest exact logit, ties to the lower index.

    ``k`` is a number of keys, or a fraction of the visible ones when below 1; it counts forced keys (``sinks`` first
    keys and ``local`` last ones), which win when they already exceed it. ``unit="kv_head"`` takes one set per KV head
    by the group's mean softmax weight. It scores every key, so it saves reads of values, never scores; ``prefill=true``
    applies it to prefill rows too.
    """

    name: ClassVar[str] = "topk"
    paper: ClassVar[str] = "oracle"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    dial: ClassVar[Dial | None] = Dial("k", "keys")

    k: float = 1024
    sinks: int = 0
    local: int = 0
    unit: str = "q_head"
    prefill: bool = False

    def __post_init__(self) -> None:
        require_budget("k", self.k)
        require_whole("sinks", self.sinks, 0)
        require_whole("local", self.local, 0)
        require_choice("unit", self.unit, ("q_head", "kv_head"))
        require_choice("prefill", self.prefill, (False, True))
        if self.prefill:
            object.__setattr__(self, "phases", ("prefill", "decode"))

    @property
    def row_by_row(self) -> bool:
        return self.prefill

    def budget(self, visible: int) -> int:
        """Keys one row with ``visible`` keys attends to."""
        return max(budget_keys(self.k, visible), min(visible, self.sinks + self.local))

    def hidden_by(self, keys: int) -> str | None:
        hidden = budget_keys(self.k, keys) < min(keys, self.sinks + self.local)
        return f"sinks+local={self.sinks + self.local}" if hidden else None

    def select_prefill(self, chunk: Chunk) -> Selection:
        return self._select(chunk) if self.prefill else Dense(chunk.shape)

    def select_decode(self, query: Query, state: Any) -> Selection:
        shape = query.shape
        budget = self.budget(shape.k_len)
        if budget >= shape.k_len or query.window is not None:  # a window cuts what was chosen among all keys
            return self._select(query)
        query.cost.scored += shape.causal_pairs
        units = shape.heads if self.unit == "q_head" else shape.kv_heads
        forced = min(shape.k_len, self.sinks + self.local)
        return Candidates.all_keys(shape, units, budget - forced, self.sinks, self.local)

    def device_plan(self, spec: PlanSpec) -> DevicePlan | None:
        units = spec.heads if self.unit == "q_head" else spec.kv_heads
        room = Room.of(self.k, self.sinks + self.local)
        return DevicePlan.alike(self, spec, BestKeys(units, room, method=self))

    def device_state(self, opening: Opening) -> DeviceState:
        return RecordedLabels(opening, [None] * len(opening.states), self)

    def host_state(self, opening: Opening) -> HostState | None:
        return None if opening.windowed else HostBest(opening, self)

    def _select(self, chunk: Chunk) -> Selection:
        shape = chunk.shape
        if self.budget(shape.k_len) >= shape.k_len:
            return Dense(shape)
        chunk.cost.scored += shape.causal_pairs
        lists: list[list[torch.Tensor]] = []  # [kv head][unit within][row]
        for kv_head in range(shape.kv_heads):
            units: list[list[torch.Tensor]] = [[] for _ in range(shape.group if self.unit == "q_head" else 1)]
            for row in range(shape.q_len):
                scores = row_logits(chunk.q, chunk.kv, shape, kv_head, row, row + 1, chunk.scale, chunk.softcap)[:, 0]
                visible = shape.q_start + row + 1
                scores = scores[:, :visible]
                if self.unit == "kv_head":
                    scores = torch.softmax(scores, -1).mean(0, keepdim=True)
                scores[:, : self.sinks] = torch.inf
                scores[:, max(0, visible - self.local) :] = torch.inf
                order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
                for unit, chosen in enumerate(order[:, : self.budget(visible)]):
                    units[unit].append(chosen.to(torch.int32))  # a copy: a part would keep the whole order
            lists.extend(units)
        return Tokens.from_lists(shape, [row for unit in lists for row in unit])
