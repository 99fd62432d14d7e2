"""A document that is read in the background while the user types."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from saccade.cli.progress import Gauge, clock
from saccade.errors import SaccadeError

if TYPE_CHECKING:
    from saccade.engine.messages import AddRequest
    from saccade.llm import LLM


class Ahead:
    """Has ``llm`` run the request that ``request`` gives, if it does, which says nothing; ``done`` is
    called behind it, however it ended."""

    def __init__(self, llm: LLM, request: Callable[[], AddRequest | None], done: Callable[[], None]) -> None:
        self.llm, self._request, self._done = llm, request, done
        self._gauge = Gauge(llm)
        self._running: int | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="saccade-ahead", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until it is read. An interrupt gives it up, and what was read of it."""
        try:
            while not self.over:
                self._thread.join(0.1)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Give it up, and wait until it has ended."""
        self._stopped = True
        if self._running is not None:
            self.llm.loop.cancel([self._running])
        self._thread.join()

    def said(self) -> str:
        """How far it is, in a line; nothing where it is done."""
        if self.over:
            return ""
        seen = self._gauge.look()
        if seen is None:
            return "reading; type meanwhile"
        read, share, left = seen
        rest = "" if left is None else f", {clock(left)} left"
        return f"reading {read.about:,} of {read.total:,} tokens ({share:.0%}{rest}); type meanwhile"

    def _run(self) -> None:
        with suppress(SaccadeError):  # the message that it is for will say so
            request = self._request()
            try:
                if request is not None and not self._stopped:
                    self._read(request)
            finally:
                self._done()  # what was given up is not there any more

    def _read(self, request: AddRequest) -> None:
        with self.llm.loop.asked([request]) as (stream,):
            self._running = stream.request_id
            if self._stopped:
                return
            for _ in self.llm.loop.outputs(stream):
                pass
