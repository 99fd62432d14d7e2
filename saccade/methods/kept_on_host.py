"""Keys that evicting methods have left, in decode steps of many rows on a CPU: what csrc/keeping_row.h is told of each
layer's lists. The counterpart of kept_on_device.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
