"""H2O: keep the keys that gathered the most attention so far, and recent ones (Zhang et al., 2023).

Every key sums up the weights that all rows gave it, those of the prefill among them. What a step evicts is read by no
later step or turn (see :mod:`saccade.methods.eviction`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.methods.base import Chunk, Method, Query
from saccade.methods.device_state import DeviceState, Opening
from saccade.methods.eviction import FORGOTTEN, Kept, alive, alive_weights, heaviest
from saccade.methods.fitting import Fitting, Sizes
from saccade.methods.host_state import HostState
from saccade.methods.measured import Measured
from saccade.methods.options import budget_keys, require_budget, require_choice, require_number
from saccade.ops.scores import line_sums
from saccade.selection import Selection, Tokens
from saccade.selection.forms import PlanSpec
from saccade.selection.plan import DevicePlan
from saccade_contrib.heavy_on_device import HeavyKeys, HeavyLists
from saccade_contrib.heavy_on_host import HostHeavy

TILE_ROWS = 128  # prefill rows weighed at once


@dataclass
class Heavy(Kept):
    """``sums`` fp32, one list per unit beside ``positions``: the weight each key gathered, meaned over the unit's query
    heads. A unit keeps at most ``budget`` keys, the last ``recent`` positions among them."""

    sums: list[Tensor]
    budget: int
    recent: int

    def fit(self, sizes: Sizes, fitting: Fitting) -> None:
        """See MethodState."""
        super().fit(sizes, fitting)
        fitting.require(len(self.sums) == len(self.positions), f"has sums of {len(self.sums)} units")
        for kept, sums in zip(self.positions, self.sums):
            fitting.tensor("sums", sums, torch.float32, len(kept))
        fitting.within("budget", self.budget, 1, 2**31)
        fitting.within("recent", self.recent, 0, self.budget)

    def holds(self, length: int) -> bool:
        return length == self.length

    def learnt(self) -> int:
        return self.length

    def add(self, positions: Tensor, unit: int, weights: Tensor) -> None:
        self.sums[unit].index_add_(0, torch.searchsorted(self.positions[unit], positions.long()), weights)

    def shrink(self) -> bool:
        """Evict what is over the budget: the lightest keys that are not recent, of equal ones the later. Whether there
        was any."""
        evicted = False
        for unit, (kept, sums) in enumerate(zip(self.positions, self.sums)):
            if kept.numel() <= self.budget:
                continue
            old = int((kept < self.length - self.recent).sum())
            heavy = heaviest(sums[:old], max(0, self.budget - (kept.numel() - old)))
            keep = torch.cat([heavy, torch.arange(old, kept.numel(), device=kept.device)])
            self.positions[unit], self.sums[unit] = kept[keep], sums[keep]
            evicted = True
        return evicted


@dataclass(frozen=True)
class H2O(Method):
    """``budget`` keys (a number, or below 1 a fraction of the context when decoding begins), of which the share
    ``heavy`` goes to those of most accumulated weight and the rest, ``max(1, budget - round(heavy budget))``, to the
    last positions. Evictions of a step apply from the next. The published evaluation of a successor uses ``heavy=0.8``.

    ``unit="kv_head"`` accumulates and evicts per KV head, by the group's mean; ``"q_head"`` per query head. Prefill
    rows are weighed exactly, whatever the prefill method read: quadratic work, counted as scored.
    """

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "H2O, arXiv:2306.14048"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    evicts: ClassVar[bool] = True
    wants_weights: ClassVar[bool] = True
    watches: ClassVar[bool] = True
    measured: ClassVar[Measured | None] = Measured("h2o(budget={value})", "share")

    budget: float = 0.2
    heavy: float = 0.5
    unit: str = "kv_head"

    def __post_init__(self) -> None:
        require_budget("budget", self.budget)
        require_number("heavy", self.heavy, 0.0, 1.0)
        require_choice("unit", self.unit, ("q_head", "kv_head"))

    def watch(self, chunk: Chunk) -> Tensor:
        """The weight that every key has gathered by now, fp32 [units, k_len]."""
        shape, units = chunk.shape, self._units(chunk)
        sums = self._meaned(self._columns(chunk), units)
        if isinstance(chunk.past, Heavy) and len(chunk.past.positions) == units:
            for unit, (kept, before) in enumerate(zip(chunk.past.positions, chunk.past.sums)):
                sums[unit, kept] += before
        elif isinstance(chunk.past, Tensor):
            sums[:, : chunk.past.shape[1]] += chunk.past
        chunk.cost.scored += shape.causal_pairs
        return sums

    def begin(self, segment: Chunk) -> Heavy:
        sums = segment.past if isinstance(segment.past, Tensor) else self.watch(segment)
        length = segment.shape.k_len
        budget = budget_keys(self.budget, length) if self.budget < 1 else int(self.budget)
        recent = max(1, budget - math.floor(self.heavy * budget + 0.5))
        left = [mask.nonzero()[:, 0] for mask in alive(segment, self._units(segment))]
        state = Heavy(left, length, [row[kept] for row, kept in zip(sums, left)], budget, recent)
        if state.shrink():
            segment.cost.notes.append(f"decode: '{self.name}' {FORGOTTEN}")
        return state

    def select_decode(self, query: Query, state: Any) -> Selection:
        return state.select(query.shape)

    def observe(self, query: Query, selection: Selection, weights: Tensor | None, state: Any) -> None:
        assert weights is not None
        later = torch.arange(state.length, query.shape.k_len, device=weights.device)
        state.length = query.shape.k_len
        units = len(state.positions)
        for unit in range(units):
            state.positions[unit] = torch.cat([state.positions[unit], later])
            state.sums[unit] = torch.nn.functional.pad(state.sums[unit], (0, later.numel()))
        if isinstance(selection, Tokens) and selection.units == units:
            bounds, meaned = selection.offsets.tolist(), weights.mean(0)
            for unit, (first, last) in enumerate(pairwise(bounds)):
                state.add(selection.indices[first:last], unit, meaned[first:last])
        else:  # read whole, perhaps within a window
            for unit, row in enumerate(self._meaned(weights, units)):
                state.sums[unit] += row[state.positions[unit]]
        if state.shrink():
            query.cost.notes.append(f"decode: '{self.name}' {FORGOTTEN}")

    def device_plan(self, spec: PlanSpec) -> DevicePlan | None:
        return DevicePlan.alike(self, spec, HeavyKeys(spec.heads if self.unit == "q_head" else spec.kv_heads))

    def device_state(self, opening: Opening) -> DeviceState:
        return HeavyLists(opening, f"decode: '{self.name}' {FORGOTTEN}")

    def host_state(self, opening: Opening) -> HostState | None:
        if not HostHeavy.serves(opening):
            return None
        return HostHeavy(opening, f"decode: '{self.name}' {FORGOTTEN}")

    def _units(self, chunk: Chunk) -> int:
        return chunk.shape.heads if self.unit == "q_head" else chunk.shape.kv_heads

    @staticmethod
    def _meaned(rows: Tensor, units: int) -> Tensor:
        return rows.unflatten(0, (units, -1)).mean(1)

    @staticmethod
    def _columns(chunk: Chunk) -> Tensor:
        """Weights of all rows of the chunk summed by key: fp32 [heads, k_len]."""
        shape = chunk.shape
        if chunk.gone is None:
            return line_sums(chunk.q, chunk.kv, shape, shape.q_len, chunk.scale, chunk.softcap)[0]
        sums = torch.zeros(shape.heads, shape.k_len, device=chunk.q.device)
        for kv_head in range(shape.kv_heads):
            heads = slice(kv_head * shape.group, (kv_head + 1) * shape.group)
            for start in range(0, shape.q_len, TILE_ROWS):
                sums[heads] += alive_weights(chunk, kv_head, start, min(start + TILE_ROWS, shape.q_len)).sum(1)
        return sums
