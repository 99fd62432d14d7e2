"""H2O in host steps (h2o.py): the rows' weights and evictions run in C++, over each layer's lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.methods.device_state import Opening
from saccade.methods.kept_on_host import AHEAD, HostKept
from saccade.ops.cpu_structs import native


class HostHeavy(HostKept):
    """Of states that weigh their keys and evict the lightest (h2o.Heavy), which end with it: ``settle`` makes new ones.
    ``forgotten``: what the report says once keys are evicted."""

    def __init__(self, opening: Opening, forgotten: str) -> None:
        states = opening.states
        self._forgotten = forgotten
        # Up to which length a row reads everything, and none is evicted.
        self._all_upto = min(state.budget + 1 if state.is_whole else 0 for state in states)
        self._none_gone_upto = min(state.budget - max(map(len, state.positions)) + state.length for state in states)
        self.room = opening.length + AHEAD
        self._weighed = [self._padded(state.sums) for state in states]
        super().__init__(opening)
        self._keys = native.KeptKeys(units=self._units, budget=states[0].budget, recent=states[0].recent)

    @classmethod
    def serves(cls, opening: Opening) -> bool:
        states = opening.states
        if not super().serves(opening) or states[0].length != opening.length - 1:
            return False
        return len({(state.budget, state.recent) for state in states}) == 1

    def reads_all(self, length: int) -> bool:
        return length <= self._all_upto

    def notes(self, length: int) -> Sequence[str]:
        return (self._forgotten,) if length > self._none_gone_upto else ()

    @torch.inference_mode()
    def grow(self, length: int) -> None:
        self.room = length + AHEAD
        self._weighed = [self._padded(sums) for sums in self._weighed]
        super().grow(length)

    @torch.inference_mode()
    def settle(self, length: int) -> list[Any]:
        if self.steps:
            parts = zip(self.states, self._lists, self._counts, self._weighed)
            self.states = [_settled(state, length, *of) for state, *of in parts]
            self.steps = 0
        return self.states

    def _sums(self) -> Sequence[Tensor | None]:
        return self._weighed


def _settled(state: Any, length: int, keys: Tensor, counts: Tensor, sums: Tensor) -> Any:
    """The state after steps; one that failed may have listed its own key."""
    lists = [row[:count][row[:count] < length].long() for row, count in zip(keys, counts.tolist())]
    weighed = [row[: len(kept)].clone() for row, kept in zip(sums, lists)]
    return type(state)(lists, length, weighed, state.budget, state.recent)
