"""What a format of calls is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from saccade.server.tool_formats.parts import JSON, call_id
from saccade.server.tool_formats.reading import CallReader, Out
from saccade.server.tool_formats.source import Malformed, Reading, Source
from saccade.server.tool_formats.words import Words


class ToolFormat(ABC):
    """How models of a family write calls of tools: how they are read from text, how they are forced, and how a chat
    template shows that its model writes them so.

    ``marks``: texts that may be tokens of their own. ``begins``: those that calls begin with. ``bare``: first letters
    of an answer that may be calls without one. ``several``: whether an answer may have more than one call by its
    template.
    """

    name: ClassVar[str]
    marks: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    bare: str = ""
    several: bool = True

    @abstractmethod
    def fits(self, template: str) -> bool:
        """Whether a chat template that knows tools writes calls so."""

    @abstractmethod
    def calls(self, source: Source, out: Out, tools: list[JSON], begin: str) -> Reading[None]:
        """Read calls behind ``begin``, which has been taken. Malformed for what is none."""

    @abstractmethod
    def grammar(self, functions: Sequence[JSON], most: int | None, words: Words) -> str:
        """At least one call, ``most`` at most, each of one of ``functions`` with arguments that are valid under its
        ``parameters``, as llguidance writes it: what the chat template would show of them."""

    def bare_calls(self, source: Source, out: Out, tools: list[JSON]) -> Reading[None]:
        """Read calls that begin with no mark."""
        raise Malformed
        yield

    def call_id(self) -> str:
        """The id of a new call."""
        return call_id()

    def reader(self, tools: list[JSON]) -> CallReader:
        """A reader of one answer."""
        return CallReader(self, tools)


def names_of(tools: list[JSON]) -> set[str]:
    """The functions of ``tools``."""
    return {tool["function"]["name"] for tool in tools}
