"""What layers that keep a state did with rows of which the last may be taken back, so that it can be done again to the
state before them with the first ones alone.

A layer's products are over by then: what is done again is the rule by which rows change the state, with the inputs that
the layer gave it. That reads a state once and writes it once, however many rows there are, where a state kept behind
each row would take as many copies of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Again = Callable[[int, int], None]


class StateJournal:
    """Of one sequence, since it was last begun. Each pass over some rows notes a call for every layer, which does the
    first ``rows`` of them again to the state in ``slot`` (``call(slot, rows)``), exactly as it did all."""

    def __init__(self) -> None:
        self._passes: list[tuple[int, list[Again]]] = []

    def begin(self, rows: int) -> list[Again]:
        """A pass over the next ``rows`` begins: where its layers note their calls."""
        calls: list[Again] = []
        self._passes.append((rows, calls))
        return calls

    @torch.inference_mode()
    def run(self, slot: int, rows: int) -> None:
        """Take the state in ``slot`` through the first ``rows``."""
        for count, calls in self._passes:
            some = min(rows, count)
            for call in calls if some else ():
                call(slot, some)
            rows -= some
