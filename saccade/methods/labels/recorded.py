"""Best keys in recorded steps, by logits or labels (triton_recorded.py): a reading, and the words of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from saccade.methods.device_state import DeviceState, Opening
from saccade.methods.labels.store import Labels
from saccade.ops.row_words import KeyWords
from saccade.selection.forms import Known, Room
from saccade.selection.readings import OwnReading

AHEAD = 1024  # keys that room is made for at a time


class Budgeted(Protocol):
    """A method that reads ``budget`` of ``k`` keys, or a share of them, the first ``sinks`` and the last ``local`` ones
    among them, and everything of up to ``dense_upto``."""

    @property
    def k(self) -> float: ...
    @property
    def sinks(self) -> int: ...
    @property
    def local(self) -> int: ...
    @property
    def dense_upto(self) -> int: ...

    def budget(self, visible: int) -> int: ...


@dataclass(frozen=True)
class BestKeys(OwnReading[Budgeted]):
    """What ``method`` reads, as many keys as ``room`` says for each of ``units``: those of the highest logits, or with
    ``channels`` of the best score of labels, so many channels in ``bits`` bits each."""

    units: int
    room: Room
    channels: int = 0
    bits: int = 0

    def cost(self, length: int, step: int = 0) -> Known:
        if self.method.budget(length) >= length:
            return Known("dense", 0, 0)
        return Known("tokens", 0, length, 0) if self.channels else Known("tokens", 0, 0, length)

    def read(self, rows: Any) -> Any:
        from saccade.methods.labels.triton_recorded import score_labels
        from saccade.methods.triton_topk import bounds_of
        from saccade.ops.triton.batched_labels import label_keys
        from saccade.ops.triton.batched_lists import choose_keys, new_lists
        from saccade.ops.triton.batched_tokens import score_keys

        if self.channels:
            label_keys(rows.pages, rows.words, self.channels, self.bits)
            scores = score_labels(rows, self.units, self.channels, self.bits)
        else:
            scores = score_keys(rows, self.units)
        room = new_lists(rows, self.units, self.room.upto(rows.pages.longest))
        return rows.attended(choose_keys(scores, bounds_of(rows), rows.pages.lengths, *room))


class RecordedLabels(DeviceState):
    """Of states with ``labels``, None where a layer has none, and the numbers of ``method``, if it goes by these."""

    def __init__(self, opening: Opening, labels: Sequence[Labels | None], method: Budgeted | None = None) -> None:
        super().__init__(opening)
        self._labels, self._by = list(labels), method
        self._catch_up(opening)
        self.grow(opening.length)

    def words(self, layer: int) -> KeyWords:
        """See DeviceState."""
        labels, by = self._labels[layer], self._by
        words = KeyWords() if labels is None else labels.words()
        if by is None:
            return words
        return words._replace(k=int(by.k) if by.k >= 1 else 0, sinks=by.sinks, local=by.local, dense_upto=by.dense_upto)

    def reals(self, layer: int) -> Sequence[float]:
        return () if self._by is None else (self._by.k,)

    @torch.inference_mode()
    def grow(self, length: int) -> None:
        self.room = length + AHEAD
        for labels in self._labels:
            if labels is not None:
                labels.length = length - 1  # what kernels have labelled since
                labels.reserve(self.room)

    @torch.inference_mode()
    def settle(self, length: int) -> list[Any]:
        for labels in self._labels:
            if labels is not None:
                labels.length = length
        return self.states

    def _catch_up(self, opening: Opening) -> None:
        """Label what the row path has left to its next choice."""
        for layer, labels in enumerate(self._labels):
            if labels is not None:
                labels.extend(opening.view(layer))
