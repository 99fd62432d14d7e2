"""PSA by keys in recorded steps: addresses of a sequence's labels and of their frame (ops/triton/batched_labels.py)."""

from __future__ import annotations

from saccade.methods.device_state import Opening
from saccade.methods.labels import Labels
from saccade.methods.labels.recorded import RecordedLabels
from saccade.methods.psa.estimates import keys_in_few_bits


class RecordedKeys(RecordedLabels):
    """Of ``Labels`` of all channels in ``bits`` bits, made here where a layer has none yet."""

    def __init__(self, opening: Opening, bits: int) -> None:
        made = [
            keys_in_few_bits(opening.view(layer), bits) if state is None else state
            for layer, state in enumerate(opening.states)
        ]
        super().__init__(opening, made)
        self.states: list[Labels] = made
