"""Going back: where the decode states of a sequence stood while rows that may be rejected are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saccade.errors import SaccadeError
from saccade.methods.state import snapshot


class StateHistory:
    """The states of one sequence's layers at marked lengths.

    A state is marked when the sequence holds ``length`` tokens and every one of them was observed: before the first
    row in doubt, and after each. Layers may be marked one by one, as a step with several rows computes them. A mark
    copies only what the state writes to in place (see ``MethodState``); None, and states that decoding leaves as they
    are, cost nothing.
    """

    def __init__(self) -> None:
        self._marks: dict[int, dict[int, Any]] = {}  # by length and layer

    @property
    def lengths(self) -> list[int]:
        """The marked lengths, rising."""
        return sorted(self._marks)

    def mark(self, length: int, states: Sequence[Any]) -> None:
        """Remember the states of all layers."""
        for layer, state in enumerate(states):
            self.mark_layer(length, layer, state)

    def mark_layer(self, length: int, layer: int, state: Any) -> None:
        """Remember the state of one layer."""
        self._marks.setdefault(length, {})[layer] = snapshot(state)

    def at(self, length: int, layers: int) -> list[Any]:
        """The states of ``layers`` layers as they were, None where a layer has no mark there, to be read alone: what a
        row's query shows of the layers before its own (``Chunk.states``)."""
        marks = self._marks.get(length, {})
        return [marks.get(layer) for layer in range(layers)]

    def rollback(self, length: int, layers: int) -> list[Any]:
        """The states of ``layers`` layers as they were at ``length`` tokens. They are the caller's to go on with, in
        place of those that saw more; this mark and all later ones are gone. SaccadeError where not all are marked."""
        marks = self._marks.get(length, {})
        missing = [layer for layer in range(layers) if layer not in marks]
        if missing:
            raise SaccadeError(
                f"no mark of layers {missing} at {length} tokens to go back to; marked lengths: {self.lengths}"
            )
        self._marks = {marked: states for marked, states in self._marks.items() if marked < length}
        return [marks[layer] for layer in range(layers)]

    def clear(self) -> None:
        """Forget all marks: the rows were accepted."""
        self._marks.clear()
