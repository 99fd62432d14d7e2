"""Keys that a method keeps for good, in recorded steps: each row's lists lie in its state and grow by the keys that
come (SnapKV, AdaKV)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from saccade.methods.device_state import DeviceState, Opening
from saccade.ops.row_words import KeptWords
from saccade.selection.readings import OwnReading

AHEAD = 1024  # keys that room is made for at a time


@dataclass(frozen=True)
class KeptKeys(OwnReading[None]):
    """The keys that each of ``units`` keeps, and all that came since."""

    units: int

    def read(self, rows: Any) -> Any:
        from saccade.ops.triton.batched_lists import kept_lists

        return rows.attended(kept_lists(rows, self.units))


class KeptLists(DeviceState):
    """Of states with ``positions`` and ``length`` (eviction.Kept), which decoding leaves as they are."""

    def __init__(self, opening: Opening) -> None:
        super().__init__(opening)
        self._counts = [
            torch.tensor([len(one) for one in state.positions], dtype=torch.int64, device="cpu").to(opening.device)
            for state in self.states
        ]
        self._device = opening.device
        self._whole = any(all(len(kept) == state.length for kept in state.positions) for state in self.states)
        self.grow(opening.length)

    def words(self, layer: int) -> Sequence[int]:
        lists = self._lists[layer]
        return KeptWords(
            lists.data_ptr(), lists.shape[1], counts=self._counts[layer].data_ptr(), since=self.states[layer].length
        )

    def reads_all(self, length: int) -> bool:
        return self._whole

    def grow(self, length: int) -> None:
        self.room = length + AHEAD
        self._lists = [self._listed(state) for state in self.states]

    def _listed(self, state: Any) -> torch.Tensor:
        later = torch.arange(state.length, self.room, dtype=torch.int32, device=self._device)
        lists = [torch.cat([kept.to(torch.int32), later]) for kept in state.positions]
        return torch.nn.utils.rnn.pad_sequence(lists, batch_first=True)
