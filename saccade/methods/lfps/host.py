"""LFPS in decode steps of many rows on a CPU: what csrc/listing.h is told of each layer's tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from saccade.methods.device_state import Opening
from saccade.methods.host_state import HostState
from saccade.methods.lfps.cpu import layer_fields, listed_keys
from saccade.methods.lfps.recorded import AHEAD
from saccade.methods.lfps.stand_ins import multiples
from saccade.selection.forms import Summarized

if TYPE_CHECKING:
    from saccade.methods.lfps.method import LFPS


class HostTables(HostState):
    """Of ``LFPSState``, whose tables the kernels write to where they are."""

    def __init__(self, opening: Opening, method: LFPS) -> None:
        self._method, self._first = method, opening.states[0].tables.first
        self._places = multiples(method.probes)
        self._kept = [(one.mean_key, one.mean_value, one.spread) for one in opening.states]
        self._kept = [tuple(part.float().contiguous() for part in kept) for kept in self._kept]
        self.states = list(opening.states)
        self._make_room(opening.length)
        super().__init__(opening)

    @classmethod
    def serves(cls, method: LFPS, opening: Opening) -> bool:
        """Whether the kernels do what the options ask for, and every layer knows its tables."""
        known = not opening.windowed and all(state is not None for state in opening.states)
        return known and method.reference_alone is None

    def known(self, layer: int) -> dict[str, Any]:
        return layer_fields(self.states[layer].tables, *self._kept[layer])

    def keys(self, length: int) -> Any:
        method, keys = self._method, length - self._first
        whole = keys <= method.budget(keys)  # all keys are forced ones, and learnt from: no head is bypassed
        self.summarized = Summarized(method.block_size, "stored_mean") if method.blocks and not whole else None
        return listed_keys(
            method,
            self.states[0].tables,
            keys if whole else min(method.local, keys),
            0 if whole else method.best(keys),
            self._places,
            blocks=0 if whole else method.blocks,
            probes=0 if whole or method.rest is None else method.probes,
            epsilon=1.0 if whole else method.epsilon,
        )

    @torch.inference_mode()
    def grow(self, length: int) -> None:
        self._make_room(length)
        self.lay_out()

    @torch.inference_mode()
    def settle(self, length: int) -> list[Any]:
        for state in self.states:
            state.seen, state.idle = length - 1, None
            state.tables.row.fill_(length - 1)
            state.tables.steps += self.steps
        self.steps = 0
        return self.states

    def _make_room(self, length: int) -> None:
        self.room = length + AHEAD
        for state in self.states:
            state.tables.grow(self.room - self._first)
