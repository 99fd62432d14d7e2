"""PSA by keys in decode steps of many rows on a CPU: what csrc/label_guess.h is told of each layer's labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from saccade.methods.device_state import Opening
from saccade.methods.host_state import HostState
from saccade.methods.psa.recorded import RecordedKeys
from saccade.ops.cpu_readings import Guessed, block_choice
from saccade.selection.readings import Choice

if TYPE_CHECKING:
    from saccade.methods.base import WindowMethod


class HostKeys(HostState):
    """Of ``Labels`` of all channels, which the kernels go on with where they are, as recorded steps do; rows read by
    ``choice``."""

    def __init__(self, opening: Opening, choice: Choice) -> None:
        self._labels, self._choice = RecordedKeys(opening, choice.source.bits), block_choice(choice)
        self._units = choice.units
        super().__init__(opening)
        self.room = self._labels.room

    def lay_out(self) -> None:
        self.layers = [labels.known() for labels in self._labels.states]

    def reads(self, length: int, window: WindowMethod | None = None) -> Guessed:
        return Guessed(self._choice, self.layers, self._units)

    def grow(self, length: int) -> None:
        self._labels.grow(length)
        self.room = self._labels.room
        self.lay_out()

    def settle(self, length: int) -> list[Any]:
        return self._labels.settle(length)
