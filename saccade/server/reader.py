"""Reads one choice's text: thoughts, then text and calls of tools, in the order in which the model wrote them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from saccade.server.reasoning import ReasoningReader
from saccade.server.tool_formats.parts import Arguments, Begun, Broken, Ended, Part, settled

BROKEN = "a call of a tool was malformed or cut short: what the model wrote of it is text"


class Splits(Protocol):
    """Reads thoughts, text and calls."""

    def feed(self, text: str, final: bool = False) -> tuple[str, list[Part]]:
        """(thoughts, parts) of what may be told now, in order."""
        ...


class Parts(Protocol):
    """Reads text and calls."""

    def feed(self, text: str, final: bool = False) -> list[Part]:
        """What may be told now, in order."""
        ...


@dataclass
class Delta:
    """What is new of a message: ``thoughts``, and behind them ``parts``."""

    thoughts: str = ""
    parts: list[Part] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    def __bool__(self) -> bool:
        return bool(self.thoughts or any(not isinstance(part, (Ended, Broken)) for part in self.parts))


class Joined:
    """Thoughts by one reader, and what is behind them by another; None for answers without."""

    def __init__(self, thoughts: ReasoningReader | None, parts: Parts | None = None) -> None:
        self._thoughts, self._parts = thoughts, parts

    def feed(self, text: str, final: bool = False) -> tuple[str, list[Part]]:
        thoughts = ""
        if self._thoughts is not None:
            thoughts, text = self._thoughts.feed(text, final)
        if self._parts is not None:
            return thoughts, self._parts.feed(text, final)
        return thoughts, [text] if text else []


class Reader:
    """``single``: all calls but the first are left out. ``called``: calls so far that are whole; ``begun``: those that
    began; ``broken``: those that came to nothing."""

    def __init__(self, splits: Splits, single: bool = False) -> None:
        self._splits, self._single = splits, single
        self.called = self.begun = self.broken = 0

    def feed(self, text: str, final: bool) -> Delta:
        """What is new, for a stream."""
        thoughts, parts = self._splits.feed(text, final)
        return Delta(thoughts, [part for part in parts if self._kept(part)])

    def whole(self, text: str) -> Delta:
        """A whole answer. Calls that came to nothing are text."""
        delta = self.feed(text, True)
        return Delta(delta.thoughts, list(settled(delta.parts)))

    @property
    def notes(self) -> list[str]:
        """What did not go as asked."""
        return [BROKEN] if self.broken else []

    def _kept(self, part: Part) -> bool:
        if isinstance(part, str):
            return True
        if isinstance(part, Broken):
            self.broken += 1
        if self._single and self.called:
            return False
        self.begun += isinstance(part, Begun)
        self.called += isinstance(part, Ended)
        return True


__all__ = ["Arguments", "Begun", "Broken", "Delta", "Ended", "Joined", "Part", "Reader"]
