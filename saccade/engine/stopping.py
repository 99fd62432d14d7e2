"""When a request's text ends, and how much of it may be shown already."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Watches growing text for stop strings; holds back a tail that could still become one. ``keep``: the one that was
    met stays in the text."""

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        self.stops = tuple(stops)
        self.keep = keep
        self.text = ""
        self.shown = 0
        self.met: str | None = None  # the stop string that ended the text

    @property
    def stopped(self) -> bool:
        return self.met is not None

    def add(self, piece: str, counts: bool = True) -> bool:
        """Append text; True when a stop string that ends in it was met: ``text`` then ends right before the earliest
        one (or after it), for good. ``counts`` False: stop strings that end in this piece are let pass."""
        if self.stopped:
            return True
        before = len(self.text)
        self.text += piece
        if not counts or not self.stops:
            return False
        hits = [(self.text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self.stops]
        found = min((hit for hit in hits if hit[0] >= 0), key=lambda hit: hit[0], default=None)
        if found is not None:
            at, self.met = found
            self.text = self.text[: at + (len(self.met) if self.keep else 0)]
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
