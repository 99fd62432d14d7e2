"""What recorded decode steps know of one sequence: numbers, and memory of its own that kernels find by address.

A method's readings (selection.readings.OwnReading) get, a row and layer each, so many ``words`` and ``reals``: numbers
of the method, and addresses of tensors that the state holds, by names that host and kernels share
(ops/triton/state_words.py). What kernels write is idempotent: a step that broke off and runs again, here or on the host
path, finds what it would have found at first. So a kernel overwrites what belongs to its own position, and what cannot
be overwritten (a sum) is done by the step after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from saccade.kv.sequence import SequenceKV
from saccade.kv.view import KVView
from saccade.selection.forms import MOST, LayersSpec, PlanSpec

WORDS = 32  # int64 a row and layer, at most
REALS = 8  # float64


@dataclass(frozen=True, eq=False)
class Opening:
    """What a device state is opened with: ``states``, the row path's, one a layer; the sequence's ``kv``; the model's
    ``spec``; the position ``turn`` of the turn's first decode row; ``length``, the keys of the row that comes next;
    and ``windowed``, whether rows are to keep to a policy's window. ``layers``: the numbers of the layers whose states
    these are, where they are not all: then ``spec`` is of these, and ``every`` has the states of all."""

    states: Sequence[Any]
    kv: SequenceKV
    spec: PlanSpec
    turn: int
    length: int
    windowed: bool = False
    layers: tuple[int, ...] | None = None
    every: Sequence[Any] = ()

    def of(self, layers: tuple[int, ...]) -> Opening:
        """The same for ``layers`` alone, of one that is for all."""
        states = [self.states[layer] for layer in layers]
        spec = LayersSpec.of(self.spec, len(layers))
        return replace(self, states=states, spec=spec, layers=layers, every=self.states)

    def places(self) -> dict[int, int]:
        """Where in ``states`` that of a layer is, by the layer's number."""
        numbers = range(len(self.states)) if self.layers is None else self.layers
        return {layer: place for place, layer in enumerate(numbers)}

    def view(self, place: int) -> KVView:
        """The keys and values of the layer whose state is ``states[place]``."""
        return self.kv.view(place if self.layers is None else self.layers[place])

    @property
    def device(self) -> torch.device:
        return self.kv.pool.storage.device


class DeviceState:
    """Base: without numbers and memory. ``room``: rows of up to so many keys need no :meth:`grow`. ``length``: the
    tokens that steps have stored, told by the backend once a step has ended well."""

    room: int = MOST

    def __init__(self, opening: Opening) -> None:
        self.states, self.length = list(opening.states), opening.length - 1

    def words(self, layer: int) -> Sequence[int]:
        """Whole numbers and addresses, at most ``WORDS``."""
        return ()

    def reals(self, layer: int) -> Sequence[float]:
        """At most ``REALS``."""
        return ()

    def grow(self, length: int) -> None:
        """Make room for rows of ``length`` keys; addresses may change."""

    def reads_all(self, length: int) -> bool:
        """Whether a row of ``length`` keys reads everything although its reading does not know: where the state has
        left nothing out yet."""
        return False

    def notes(self, length: int) -> Sequence[str]:
        """Sentences for the report of a request that has come to ``length`` keys."""
        return ()

    def settle(self, length: int) -> list[Any]:
        """The states of all layers as the row path has them when ``length`` tokens are stored, whatever a step that
        broke off has written since; this one is done."""
        return self.states


class ActingState(DeviceState):
    """Of a sequence in whose other layers a window of their own rules: what ``opened`` makes for the layers ``acting``
    alone. The states of the others stay as they are."""

    def __init__(self, opening: Opening, acting: tuple[int, ...], opened: Callable[[Opening], DeviceState]) -> None:
        super().__init__(opening)
        self._own = opened(opening.of(acting)) if acting else DeviceState(opening.of(acting))
        self._places = opening.of(acting).places()
        self.room = self._own.room

    def words(self, layer: int) -> Sequence[int]:
        place = self._places.get(layer)
        return () if place is None else self._own.words(place)

    def reals(self, layer: int) -> Sequence[float]:
        place = self._places.get(layer)
        return () if place is None else self._own.reals(place)

    def grow(self, length: int) -> None:
        self._own.grow(length)
        self.room = self._own.room

    def reads_all(self, length: int) -> bool:
        return self._own.reads_all(length)

    def notes(self, length: int) -> Sequence[str]:
        return self._own.notes(length)

    def settle(self, length: int) -> list[Any]:
        for layer, state in zip(self._places, self._own.settle(length)):
            self.states[layer] = state
        return self.states
