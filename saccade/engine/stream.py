"""The outputs of one request on their way from the engine's thread to a reader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from saccade.engine.messages import StepOutput
from saccade.errors import EngineLost, SaccadeError


class Stream:
    """The outputs of one request. What its reader has not taken yet is joined, so a slow reader costs no memory.
    ``arrived`` is set when something came. ``wake`` is called then too, by the loop's thread, unless what came before
    still waits to be taken. ``ended``: the last output has come."""

    def __init__(self, request_id: int, wake: Callable[[], None] | None = None) -> None:
        self.request_id = request_id
        self.arrived = threading.Event()
        self.ended = False
        self.lost: str | None = None  # why nothing will come any more
        self._wake = wake
        self._lock = threading.Lock()
        self._pending: list[StepOutput] = []  # each worth more than twice the next: see put

    def put(self, output: StepOutput) -> None:
        """Hand over an output; called by the loop."""
        with self._lock:
            first = not self._pending
            self._pending.append(output)
            # Joined in pairs of like size: with all before it at each step, a reader that sleeps would cost the square.
            while len(self._pending) > 1 and len(self._pending[-2].new_tokens) <= 2 * len(self._pending[-1].new_tokens):
                later = self._pending.pop()
                self._pending[-1] = self._pending[-1].joined(later)
            self.ended = output.finished
        self.arrived.set()
        if first and self._wake is not None:
            self._wake()

    def lose(self, why: str) -> None:
        """Let the reader know that the writer is gone, and perhaps a lock with it: in a forked process."""
        self._lock, self.arrived = threading.Lock(), threading.Event()
        self.lost = why

    def take(self) -> StepOutput | None:
        """What came since the last time, as one output; None if nothing did."""
        with self._lock:
            pending, self._pending = self._pending, []
        output = pending.pop() if pending else None
        while pending:
            output = pending.pop().joined(output)  # type: ignore[arg-type]
        return output

    def wait(self) -> StepOutput:
        """What came since the last time, or what comes next. SaccadeError where nothing can come any more."""
        while (output := self.take()) is None:
            if self.lost is not None:
                raise SaccadeError(self.lost)
            self.arrived.wait()
            self.arrived.clear()
        return output


class AsyncOutputs:
    """The outputs of some requests for one asyncio task. ``cancel`` ends requests by their ids, without waiting.
    ``threads``: whether outputs are put by another thread than the event loop's.

    A reader that is done early calls :meth:`close`; what was not taken by then is lost.
    """

    def __init__(
        self, request_ids: Sequence[int], cancel: Callable[[Sequence[int]], None], threads: bool = True
    ) -> None:
        self._arrived, loop = asyncio.Event(), asyncio.get_running_loop()
        self._lost: EngineLost | None = None

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._arrived.set)

        self.streams = [Stream(request_id, wake if threads else self._arrived.set) for request_id in request_ids]
        self._live = {stream.request_id: stream for stream in self.streams}
        self._cancel = cancel

    @property
    def finished(self) -> bool:
        """Whether every request has ended and its last output was taken."""
        return not self._live

    async def take(self) -> list[StepOutput]:
        """What came since the last time, or what comes next: at least one output, and one for a request at most; none
        once all have ended. EngineLost where nothing can come any more."""
        while self._live:
            outputs = [output for stream in list(self._live.values()) if (output := stream.take()) is not None]
            if outputs:
                for output in outputs:
                    if output.finished:
                        del self._live[output.request_id]
                return outputs
            if self._lost is not None:
                raise type(self._lost)(str(self._lost))
            await self._arrived.wait()
            self._arrived.clear()
        return []

    def lose(self, why: EngineLost) -> None:
        """Nothing will come any more. Called by the event loop's thread."""
        self._lost = why
        self._arrived.set()

    def close(self) -> None:
        """Cancel what has not ended. Its last outputs can still be taken."""
        if self._live:
            self._cancel(list(self._live))
