"""Whether an engine hangs, and how often a lost one is started anew."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from saccade.engine.watch.pulse import waited

STEP_LIMIT = 10.0  # seconds
SHARE = 0.05  # of a processor: an engine that uses more is at work
PATIENCE = 12  # times the limit that an engine may be at work on one layer
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

MOST_STARTS = 5  # within so many seconds; an engine that is lost more often stays lost
WINDOW = 600.0


class EngineWatch:
    """Hears of an engine now and then, and says when it hangs: after ``limit`` seconds in which it neither got on
    (a step, a layer) nor used a processor, and after ``PATIENCE`` times as many in which it did not get on. A large
    chunk of a prompt, a kernel that is compiled, a model on a slow machine are work, and no hanging; nor is waiting
    for a processor that other programs have, which counts as use of it. ``used`` tells such seconds of its process,
    None where that cannot be known."""

    def __init__(
        self,
        limit: float,
        used: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit, self.used, self._clock = limit, used, clock
        self.every = min(1.0, limit / 4)  # seconds between two looks, and between two signs of life
        self.begin()

    def begin(self) -> None:
        """It is well now."""
        now = self._clock()
        self._heard = self._progress = self._worked = self._looked = now
        self._processor: dict[str, tuple[float, float]] = {}  # seconds, and when they were told

    def heard(self, quiet: float, processor: float | None) -> None:
        """A sign of life: it got on ``quiet`` seconds ago. ``processor``: seconds of its thread."""
        now = self._clock()
        self._heard, self._progress = now, max(self._progress, now - quiet)
        self._works("thread", processor, now)

    def look(self) -> str | None:
        """Why it hangs; None while it does not."""
        now = self._clock()
        late, self._looked = now - self._looked > 4 * self.every, now
        if late:  # this thread was held up, and signs of life wait to be read
            return None
        silent = now - self._heard
        if silent > 2 * self.every:
            self._works("process", self.used(), now)
        idle, quiet = now - max(self._progress, self._worked), now - self._progress
        if idle <= self.limit and quiet <= PATIENCE * self.limit:
            return None
        if silent > 2 * self.every:
            return f"the engine's process has given no sign of life for {silent:.1f} seconds"
        return f"the engine hangs: its step has not got on for {quiet:.1f} seconds"

    def _works(self, whose: str, processor: float | None, now: float) -> None:
        if processor is None:
            self._processor.pop(whose, None)
            return
        before, then = self._processor.get(whose, (processor, now))
        if processor - before > SHARE * (now - then):
            self._worked = now
        self._processor[whose] = processor, now


async def look_after(look: Callable[[], object], seconds: float) -> None:
    """Call ``look`` again and again, so many seconds apart."""
    while True:
        await asyncio.sleep(seconds)
        look()


class Starts:
    """When a lost engine may be started anew: at once, then after 1, 2, 4, 8 seconds, and ``MOST_STARTS`` times within
    ``WINDOW`` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque()

    def next(self) -> float | None:
        """Seconds to wait before the next start; None where there is to be none."""
        now = self._clock()
        while self._times and self._times[0] <= now - WINDOW:
            self._times.popleft()
        if len(self._times) >= MOST_STARTS:
            return None
        self._times.append(now)
        return 0.0 if len(self._times) == 1 else 2.0 ** (len(self._times) - 2)


def processor_seconds(pid: int) -> float | None:
    """Of a process, all its threads, with the seconds for which they waited for one (``waited``); None where the system
    does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        tasks = os.listdir(f"/proc/{pid}/task")
        used = (int(fields[11]) + int(fields[12])) / _TICKS
    except (OSError, ValueError, IndexError):
        return None
    return used + sum(waited(f"{pid}/task/{task}") for task in tasks)
