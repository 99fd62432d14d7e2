"""Whether the thread that drives an engine gets on, as another thread sees it."""

from __future__ import annotations

import threading
import time
from pathlib import Path


def waited(task: str) -> float:
    """Seconds that a thread or process, a folder in /proc, was ready to run and other programs had the processors; 0
    where the system does not say."""
    try:
        return int(Path(f"/proc/{task}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class EndedError(BaseException):
    """An engine ends in the midst of a step: no mistake of a request's, and for no request to hear of."""


class Pulse:
    """The driving thread calls :meth:`beat` whenever it has got something done: a step, a layer of it, a message. Any
    thread may look. A step that computes takes as long as it takes; one that hangs neither gets on nor uses a
    processor, nor waits for one."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._thread: tuple[int, int] | None = None  # its number of Python's, and the system's
        self.beats = 0  # so far
        self.over = False  # whether the engine is to end, at the latest with the layer at hand

    def beat(self) -> None:
        """Something is done, and the next is begun."""
        self._since, self._thread = time.monotonic(), (threading.get_ident(), threading.get_native_id())
        self.beats += 1

    def layer(self) -> None:
        """A layer begins: a beat. EndedError where the engine is to end: a chunk of a long prompt may take minutes."""
        if self.over:
            raise EndedError
        self.beat()

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
        """Processor seconds of the driving thread, and those for which it waited while others had the processors; None
        while there is nothing to do, or where the system does not say."""
        thread, clock = self._thread, getattr(time, "pthread_getcpuclockid", None)
        if thread is None or clock is None:
            return None
        try:
            return time.clock_gettime(clock(thread[0])) + waited(f"self/task/{thread[1]}")
        except OSError:  # it has ended
            return None
