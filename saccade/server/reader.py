"""Reads one choice's text: thoughts, then text and calls of tools, in the order in which the model wrote them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from saccade.server.reasoning import ReasoningReader
from saccade.server.tool_json import Call
from saccade.server.tools import Part


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

    @property
    def calls(self) -> list[Call]:
        return [part for part in self.parts if isinstance(part, Call)]

    def __bool__(self) -> bool:
        return bool(self.thoughts or self.content or self.calls)


class Reader:
    """``thoughts`` and ``parts``: None for answers without. ``single``: all calls but the first are left out."""

    def __init__(self, thoughts: ReasoningReader | None, parts: Parts | None = None, single: bool = False) -> None:
        self._thoughts, self._parts, self._single = thoughts, parts, single
        self.called = 0  # calls so far

    def feed(self, text: str, final: bool) -> Delta:
        thoughts = ""
        if self._thoughts is not None:
            thoughts, text = self._thoughts.feed(text, final)
        parts: list[Part] = [text] if text else []
        if self._parts is not None:
            parts = [part for part in self._parts.feed(text, final) if self._kept(part)]
        return Delta(thoughts, parts)

    def _kept(self, part: Part) -> bool:
        if isinstance(part, str):
            return True
        if self._single and self.called:
            return False
        self.called += 1
        return True
