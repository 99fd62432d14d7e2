"""When a request's text ends, and how much of it may be shown already."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Watches growing text for stop strings; holds back a tail that could still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.text = ""
        self.shown = 0
        self.stopped = False

    def add(self, piece: str) -> bool:
        """Append text; True when a stop string was met: ``text`` then ends right before the earliest one, for good."""
        if self.stopped:
            return True
        scan_from = max(0, len(self.text) - max((len(stop) for stop in self.stops), default=0) + 1)
        self.text += piece
        hits = [at for at in (self.text.find(stop, scan_from) for stop in self.stops) if at >= 0]
        if hits:
            self.text = self.text[: min(hits)]
            self.stopped = True
        return self.stopped

    def release(self, final: bool) -> str:
        """The text that may be shown now and was not before."""
        end = len(self.text) if final else len(self.text) - self._held()
        fresh = self.text[self.shown : end]
        self.shown = max(self.shown, end)
        return fresh

    def _held(self) -> int:
        longest = 0
        for stop in self.stops:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
