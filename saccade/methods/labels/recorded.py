"""Labels in recorded steps: the numbers and addresses of a sequence's labels (triton_recorded.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from saccade.kv.sequence import SequenceKV
from saccade.methods.device_state import DeviceState, Opening
from saccade.methods.labels.store import Labels
from saccade.ops.row_words import KeyWords
from saccade.selection.forms import Room
from saccade.selection.readings import OwnReading

AHEAD = 1024  # keys that room is made for at a time


@dataclass(frozen=True)
class LabelledKeys(OwnReading):
    """The keys of best label score, as many as ``room`` says for each of ``units``, beside forced ones; labels are
    ``channels`` channels in ``bits`` each."""

    units: int
    room: Room
    channels: int
    bits: int

    def read(self, rows: Any) -> Any:
        from saccade.methods.labels.triton_recorded import score_labels
        from saccade.methods.triton_topk import bounds_of
        from saccade.ops.triton.batched_labels import label_keys
        from saccade.ops.triton.batched_lists import choose_keys, new_lists

        label_keys(rows.pages, rows.words, self.channels, self.bits)
        scores = score_labels(rows, self.units, self.channels, self.bits)
        room = new_lists(rows, self.units, self.room.upto(rows.pages.longest))
        return rows.attended(choose_keys(scores, bounds_of(rows), rows.pages.lengths, *room))


class RecordedLabels(DeviceState):
    """Of states with ``labels``, None where a layer has none."""

    def __init__(self, opening: Opening, labels: Sequence[Labels | None]) -> None:
        super().__init__(opening)
        self._labels = list(labels)
        self._catch_up(opening.kv)
        self.grow(opening.length)

    def words(self, layer: int) -> KeyWords:
        """Those of labels."""
        labels = self._labels[layer]
        return KeyWords() if labels is None else labels.words()

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

    def _catch_up(self, kv: SequenceKV) -> None:
        """Label what the host path has left to its next choice."""
        for layer, labels in enumerate(self._labels):
            if labels is not None:
                labels.extend(kv.view(layer))
