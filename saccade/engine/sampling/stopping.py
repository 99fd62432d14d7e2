"""When a request's text ends, and how much of it may be shown already."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Watches growing text for stop strings; holds back a tail that could still become one. ``keep``: the one that was
    met stays in the text."""

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        self.stops = tuple(stops)
        self._beginnings = [_Beginning(stop) for stop in self.stops]
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
        for one in self._beginnings:
            one.add(piece)
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
        held = 0 if final else max((one.length for one in self._beginnings), default=0)
        start, self.shown = self.shown, max(self.shown, len(self.text) - held)  # what stopped it may be cut off already
        return self.text[start : self.shown]


class _Beginning:
    """The longest beginning of ``stop``, itself aside, that some growing text ends with (Knuth, Morris and Pratt, SIAM
    J. Comput. 6(2), 1977): each letter is looked at once, whatever the stop string repeats."""

    def __init__(self, stop: str) -> None:
        self._stop, self._shorter = stop, [0, 0]  # by length of a beginning: the next shorter one that it ends with
        self.length = 0

    def add(self, piece: str) -> None:
        for letter in piece:
            self.length = self._after(self.length, letter)
            if self.length == len(self._stop):
                self.length = self._next_shorter(self.length)

    def _after(self, length: int, letter: str) -> int:
        while length and self._stop[length] != letter:
            length = self._next_shorter(length)
        return length + (self._stop[length] == letter)

    def _next_shorter(self, length: int) -> int:
        """Of a beginning of ``length``; made as far as a text has come."""
        while len(self._shorter) <= length:
            last = len(self._shorter) - 1
            self._shorter.append(self._after(self._shorter[last], self._stop[last]))
        return self._shorter[length]
