"""A journal of what layers that keep a state did with drafted rows, so that after a rejection the state can be computed
again from the accepted rows alone.

The products of a layer are not repeated: only the rule by which rows change the state is, with the inputs that the
layer gave it. That reads and writes a state once, however many rows there are; a copy of the state after each row would
cost as many states.
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
