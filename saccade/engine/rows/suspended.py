"""A pass over one request's chunk that can stop between two layers, so that steps of other requests run, and continue
later."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from saccade.engine.rows.layers_pass import LayersPass
from saccade.engine.steps.step import StepResult


@dataclass(frozen=True)
class Advanced:
    """How far a suspended pass has come: ``layers`` that have run, in ``seconds`` together; ``result`` once it is over,
    with the request's error if it failed."""

    layers: int
    seconds: float
    result: StepResult | None = None


class SuspendedPass:
    """A planned pass over the rows of one request, whose layer loop stops between layers on ``device``.

    All that a pass needs is its own: hidden states, what is planned of its attention, counts. It shares nothing with
    passes that run meanwhile but blocks and weights.
    """

    def __init__(self, planned: LayersPass, device: torch.device) -> None:
        self.step, self.result, self.device = planned.step, planned.result, device
        self._steps = planned.steps()
        self._layers, self._seconds = 0, 0.0

    def advance(self, seconds: float) -> Advanced:
        """Run at least one layer, and more while the next one, if it takes as long as the last, is over after
        ``seconds``. Raises what a layer raises: the pass is lost then."""
        began = last = time.perf_counter()
        (one,) = self.step.scheduled
        own = self.result.requests[one.request_id]
        ended = False
        while True:
            try:
                self._layers = next(self._steps)
            except StopIteration:
                ended = True
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # a launch says nothing of what it takes
            now = time.perf_counter()
            if own.error is not None and not ended:
                self.close()
                ended = True
            if ended or now - began + (now - last) > seconds:
                break
            last = now
        self._seconds += now - began
        self.result.seconds = self._seconds
        return Advanced(self._layers, self._seconds, self.result if ended else None)

    def close(self) -> None:
        """End it where it stands."""
        self._steps.close()
