"""The outputs of one request on their way from the engine's thread to a reader."""

from __future__ import annotations

import threading
from collections.abc import Callable

from saccade.engine.messages import StepOutput


class Stream:
    """The outputs of one request. What its reader has not taken yet is joined, so a slow reader costs no memory.
    ``arrived`` is set when something came; ``wake`` is called then too, by the loop's thread."""

    def __init__(self, request_id: int, wake: Callable[[], None] | None = None) -> None:
        self.request_id = request_id
        self.arrived = threading.Event()
        self._wake = wake
        self._lock = threading.Lock()
        self._pending: StepOutput | None = None

    def put(self, output: StepOutput) -> None:
        """Hand over an output; called by the loop."""
        with self._lock:
            self._pending = output if self._pending is None else self._pending.joined(output)
        self.arrived.set()
        if self._wake is not None:
            self._wake()

    def take(self) -> StepOutput | None:
        """What came since the last time, as one output; None if nothing did."""
        with self._lock:
            output, self._pending = self._pending, None
        return output

    def wait(self) -> StepOutput:
        """What came since the last time, or what comes next."""
        while (output := self.take()) is None:
            self.arrived.wait()
            self.arrived.clear()
        return output
