"""Whether the thread that drives an engine gets on, as another thread sees it."""

from __future__ import annotations

import threading
import time


class Pulse:
    """The driving thread calls :meth:`beat` whenever it has got something done: a step, a layer of it, a message. Any
    thread may look. A step that computes takes as long as it takes; one that hangs neither gets on nor uses a
    processor."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._thread: int | None = None
        self.beats = 0  # so far

    def beat(self) -> None:
        """Something is done, and the next is begun."""
        self._since, self._thread = time.monotonic(), threading.get_ident()
        self.beats += 1

    def rest(self) -> None:
        """There is nothing to do."""
        self._since = self._thread = None

    @property
    def quiet(self) -> float:
        """Seconds since the last beat; 0 while there is nothing to do."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def processor(self) -> float | None:
        """Processor seconds of the driving thread; None while there is nothing to do, or where the system does not
        say."""
        thread, clock = self._thread, getattr(time, "pthread_getcpuclockid", None)
        if thread is None or clock is None:
            return None
        try:
            return time.clock_gettime(clock(thread))
        except OSError:  # it has ended
            return None
