"""H2O in recorded steps (h2o.py): the sums of a step's weights are taken in by the step after, so that a step
that breaks off adds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saccade.methods.device_state import DeviceState, Opening
from saccade.selection.readings import OwnReading
from saccade_contrib.heavy_words import HeavyWords

if TYPE_CHECKING:
    from saccade_contrib.h2o import Heavy


@dataclass(frozen=True)
class HeavyKeys(OwnReading[None]):
    """The keys that each of ``units`` has left, and the row's own."""

    units: int

    def read(self, rows: Any) -> Any:
        from saccade.ops.triton.batched_weights import weigh_lists
        from saccade_contrib.triton_heavy import advance

        lists, pending = advance(rows, self.units)
        read = rows.attended(lists)
        weigh_lists(rows, lists, read.lse, rows.pages.lengths.view(torch.float32), pending)
        return read


@dataclass(eq=False)
class _Layer:
    """Lists with room for one entry more than the budget: see triton_heavy.advance."""

    keys: Tensor
    sums: Tensor
    pending: Tensor
    marks: Tensor


class HeavyLists(DeviceState):
    """Of ``Heavy`` states, which end with it: ``settle`` makes new ones."""

    def __init__(self, opening: Opening, forgotten: str) -> None:
        super().__init__(opening)
        self._forgotten = forgotten
        # Up to which length a row reads everything, and none is evicted.
        whole = [all(len(kept) == state.length for kept in state.positions) for state in self.states]
        self._all_upto = max((state.budget + 1 for state, all_kept in zip(self.states, whole) if all_kept), default=0)
        free = [state.budget - max(map(len, state.positions)) + state.length for state in self.states]
        self._none_gone_upto = min(free)
        self._layers = [_opened(state, opening.device) for state in self.states]

    def words(self, layer: int) -> Sequence[int]:
        own, state = self._layers[layer], self.states[layer]
        return HeavyWords(
            keys=own.keys.data_ptr(),
            sums=own.sums.data_ptr(),
            pending=own.pending.data_ptr(),
            marks=own.marks.data_ptr(),
            width=own.keys.shape[1],
            budget=state.budget,
            recent=state.recent,
        )

    def reads_all(self, length: int) -> bool:
        return length <= self._all_upto

    def notes(self, length: int) -> Sequence[str]:
        return (self._forgotten,) if length > self._none_gone_upto else ()

    @torch.inference_mode()
    def settle(self, length: int) -> list[Any]:
        return [_settled(own, state, length) for own, state in zip(self._layers, self.states)]


def _opened(state: Heavy, device: torch.device) -> _Layer:
    units, room = len(state.positions), state.budget + 2
    own = _Layer(
        torch.zeros(units, room, dtype=torch.int32, device=device),
        torch.zeros(units, room, device=device),
        torch.zeros(units, room, device=device),
        torch.zeros(units, 3, dtype=torch.int64, device=device),
    )
    for unit, (kept, sums) in enumerate(zip(state.positions, state.sums)):
        own.keys[unit, : len(kept)] = kept.to(torch.int32)
        own.sums[unit, : len(kept)] = sums
    sizes = [[len(kept), state.length, state.length] for kept in state.positions]
    own.marks.copy_(torch.tensor(sizes, dtype=torch.int64, device="cpu"))
    return own


def _settled(own: _Layer, state: Heavy, length: int) -> Heavy:
    positions, sums = [], []
    for unit, (count, known, weighed) in enumerate(own.marks.tolist()):
        keys, order = own.keys[unit, :count].sort()
        sum_ = own.sums[unit, :count] + (own.pending[unit, :count] if weighed < known <= length else 0.0)
        left = keys < length  # a step that failed has listed its own key
        positions.append(keys[left].long())
        sums.append(sum_[order][left])
    made = type(state)(positions, length, sums, state.budget, state.recent)
    made.shrink()
    return made
