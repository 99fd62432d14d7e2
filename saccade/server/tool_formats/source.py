"""Text that comes piece by piece, for readers that are written as if it were whole.

Readers are generators. Where one needs more text it yields, and goes on once there is some, or nothing comes any more.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
LONGEST_NAME = 512  # characters of a name, or of white space between two marks
_SPACE = re.compile(r"[ \t\n\r]*+")


class Malformed(Exception):
    """What is read is no call, or ends before it is whole."""


class Source:
    """``rest``: what has come and was not taken. ``final``: nothing comes behind it. ``seen``: characters so far;
    ``marks``: how many places were remembered."""

    def __init__(self) -> None:
        self.rest, self.final = "", False
        self.seen = self.marks = 0
        self._kept: list[str] = []

    def feed(self, text: str, final: bool) -> None:
        self.rest += text
        self.seen += len(text)
        self.final = final

    def take(self, size: int) -> str:
        """The next ``size`` characters."""
        taken, self.rest = self.rest[:size], self.rest[size:]
        self._kept.append(taken)
        return taken

    def mark(self) -> None:
        """Remember this place."""
        self._kept = []
        self.marks += 1

    def since_mark(self) -> str:
        """What was taken since then."""
        return "".join(self._kept)

    def back(self) -> None:
        """Go back there."""
        self.rest = self.since_mark() + self.rest
        self._kept = []

    def more(self) -> Reading[None]:
        """Wait for more text. Malformed if none comes."""
        if self.final:
            raise Malformed
        yield

    def first(self) -> Reading[str]:
        """The next character, which is not taken; nothing at the end."""
        while not self.rest and not self.final:
            yield
        return self.rest[:1]

    def space(self) -> Reading[None]:
        """Take white space."""
        while True:
            self.take(_SPACE.match(self.rest).end())  # type: ignore[union-attr]
            if self.rest or self.final:
                return
            yield

    def skip(self, *texts: str) -> Reading[str | None]:
        """Take the longest of ``texts`` that comes next; None if none does."""
        while True:
            open_ = [text for text in texts if len(text) > len(self.rest) and text.startswith(self.rest)]
            if not open_ or self.final:
                break
            yield
        found = max((text for text in texts if self.rest.startswith(text)), key=len, default=None)
        if found is not None:
            self.take(len(found))
        return found

    def expect(self, *texts: str) -> Reading[str]:
        """Take one of ``texts``. Malformed where something else comes."""
        found = yield from self.skip(*texts)
        if found is None:
            raise Malformed
        return found

    def upto(self, *ends: str, most: int = LONGEST_NAME) -> Reading[str]:
        """What comes before the first of ``ends``, which is not taken. Malformed beyond ``most`` characters."""
        while True:
            found = min((at for end in ends if (at := self.rest.find(end)) >= 0), default=-1)
            if 0 <= found <= most:
                return self.take(found)
            if found >= 0 or len(self.rest) > most + max(map(len, ends)):
                raise Malformed
            yield from self.more()

    def close(self, end: str) -> Reading[None]:
        """Take the mark ``end``, which may be missing where the answer ends, or be cut. Malformed for other text."""
        if (yield from self.skip(end)) is None:
            if not self.final or not end.startswith(self.rest):
                raise Malformed
            self.take(len(self.rest))


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``marker``."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)
