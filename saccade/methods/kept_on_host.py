"""Keys that evicting methods have left, in decode steps of many rows on a CPU: what csrc/keeping_row.h is told of each
layer's lists. The counterpart of kept_on_device.py and heavy_on_device.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.methods.device_state import Opening
from saccade.methods.host_state import HostState
from saccade.ops.cpu_readings import Kept
from saccade.ops.cpu_structs import address, native

if TYPE_CHECKING:
    from saccade.methods.base import WindowMethod

AHEAD = 1024  # keys that room is made for at a time


class HostKept(HostState):
    """Of states with ``positions`` and ``length`` (eviction.Kept), which decoding leaves as they are. By layer:
    ``_lists`` int32 [units, room], of which ``_counts`` int64 [units] are there."""

    def __init__(self, opening: Opening) -> None:
        states = opening.states
        self._units, self.room = len(states[0].positions), opening.length + AHEAD
        later = torch.arange(states[0].length, opening.length - 1, device="cpu")
        kept = [[torch.cat([one, later]).to(torch.int32) for one in state.positions] for state in states]
        self._lists = [self._padded(lists) for lists in kept]
        self._counts = [torch.tensor([len(one) for one in lists], device="cpu") for lists in kept]
        self._keys = native.KeptKeys(units=self._units)
        super().__init__(opening)

    @classmethod
    def serves(cls, opening: Opening) -> bool:
        """Whether all layers know what they keep, of as many units and since the same length."""
        states = opening.states
        if opening.windowed or any(state is None for state in states):
            return False
        return len({(len(state.positions), state.length) for state in states}) == 1

    def lay_out(self) -> None:
        self.layers = [
            native.KeptLayer(
                tally=tally.data_ptr(), keys=address(keys), counts=address(counts), sums=address(sums), room=self.room
            )
            for tally, keys, counts, sums in zip(self.tally, self._lists, self._counts, self._sums())
        ]

    def reads(self, length: int, window: WindowMethod | None = None) -> Kept:
        return Kept(self._keys, self.layers)

    @torch.inference_mode()
    def grow(self, length: int) -> None:
        self.room = length + AHEAD
        self._lists = [self._padded(lists) for lists in self._lists]
        self.lay_out()

    def _sums(self) -> Sequence[Tensor | None]:
        """What each list's keys have weighed, fp32 [units, room]; None where that is not asked for."""
        return [None] * len(self._lists)

    def _padded(self, lists: Sequence[Tensor] | Tensor) -> Tensor:
        """Lists, one a unit, with room."""
        return torch.stack([pad(one, (0, self.room - len(one))) for one in lists])


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
