"""Where a step's time goes: named stretches of the executor's work, added up while it is watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Clock:
    """``with clock("selection"): ...`` adds to ``clock.seconds["selection"]``; a stretch inside another counts only for
    the inner one. ``now`` reads seconds, by default of the wall; on a GPU they are those of launching work."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    def begin(self, name: str) -> None:
        self._turn()
        self._open.append(name)

    def end(self, shares: Mapping[str, float] | None = None) -> None:
        """The stretch that began last ends; these ``shares`` of the time since the clock was turned belong to
        others."""
        before = self.seconds.get(self._open[-1], 0.0)
        self._turn()
        name = self._open.pop()
        since = self.seconds[name] - before
        for other, share in (shares or {}).items():
            self.seconds[name] -= share * since
            self.seconds[other] = self.seconds.get(other, 0.0) + share * since

    def _turn(self) -> None:
        now = self.now()
        if self._open:
            name = self._open[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.begin(name)
        try:
            yield
        finally:
            self.end()


_UNTIMED: AbstractContextManager[None] = nullcontext()


def timed(clock: Clock | None, name: str) -> AbstractContextManager[None]:
    """A stretch of ``clock``, if there is one."""
    return _UNTIMED if clock is None else clock(name)
