"""The outputs of one request on their way from the engine's thread to a reader."""

from __future__ import annotations

import threading
from collections.abc import Callable

from saccade.engine.messages import StepOutput
from saccade.errors import SaccadeError


class Stream:
    """The outputs of one request. What its reader has not taken yet is joined, so a slow reader costs no memory.
    ``arrived`` is set when something came; ``wake`` is called then too, by the loop's thread. ``ended``: the last
    output has come."""

    def __init__(self, request_id: int, wake: Callable[[], None] | None = None) -> None:
        self.request_id = request_id
        self.arrived = threading.Event()
        self.ended = False
        self.lost: str | None = None  # why nothing will come any more
        self._wake = wake
        self._lock = threading.Lock()
        self._pending: StepOutput | None = None

    def put(self, output: StepOutput) -> None:
        """Hand over an output; called by the loop."""
        with self._lock:
            self._pending = output if self._pending is None else self._pending.joined(output)
            self.ended = output.finished
        self.arrived.set()
        if self._wake is not None:
            self._wake()

    def lose(self, why: str) -> None:
        """Let the reader know that whoever wrote is gone, and perhaps a lock with it: in a forked process."""
        self._lock, self.arrived = threading.Lock(), threading.Event()
        self.lost = why

    def take(self) -> StepOutput | None:
        """What came since the last time, as one output; None if nothing did."""
        with self._lock:
            output, self._pending = self._pending, None
        return output

    def wait(self) -> StepOutput:
        """What came since the last time, or what comes next. SaccadeError where nothing can come any more."""
        while (output := self.take()) is None:
            if self.lost is not None:
                raise SaccadeError(self.lost)
            self.arrived.wait()
            self.arrived.clear()
        return output
