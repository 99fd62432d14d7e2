"""Calls of tools, read out of a model's answer.

Formats: ``hermes`` (Qwen 2.5 and 3 write it too), ``qwen3_coder`` (XML of Qwen3-Coder), ``llama3_json``. What only
looks like a call, or was cut short, stays text, whole. Parts are the same however an answer comes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from saccade.server.reasoning import overlap
from saccade.server.tool_json import JSON, Call, is_json, json_calls, leading_calls
from saccade.server.tool_xml import xml_calls

Part = str | Call  # of an answer: text, or a call
_PYTHON = "<|python_tag|>"
_CHUNK = 256  # characters
_RETREATS = 8  # how often an answer is read again from a marker inside of quotes: each time may take its whole length


def _hermes(text: str, tools: list[JSON]) -> list[Call] | None:
    return json_calls(text)


def _coder(text: str, tools: list[JSON]) -> list[Call] | None:
    return xml_calls(text, tools) or json_calls(text)


def _unmarked(text: str, tools: list[JSON]) -> list[Call] | None:
    """Calls that are a whole answer. Without a marker only the names of tools tell them from other JSON."""
    if text.startswith(_PYTHON):
        return json_calls(text.removeprefix(_PYTHON))
    return json_calls(text, {tool["function"]["name"] for tool in tools})


@dataclass(frozen=True)
class ToolFormat:
    """Calls stand between ``begin`` and ``end``; where ``begin`` is empty, an answer that is JSON is calls. ``xml``:
    they may be XML."""

    begin: str
    end: str
    read: Callable[[str, list[JSON]], list[Call] | None]
    xml: bool = False


FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", _hermes),
    "qwen3_coder": ToolFormat("<tool_call>", "</tool_call>", _coder, xml=True),
    "llama3_json": ToolFormat("", "", _unmarked),
}


def _chunks(text: str) -> list[str]:
    """``text`` in pieces, the last one first: what is left behind a call is copied, which must not be all."""
    return [text[at : at + _CHUNK] for at in range(0, len(text), _CHUNK)][::-1]


class ToolReader:
    """Reads one answer piece by piece: text, and calls, each whole. White space before the first text is told with
    that text; beside calls alone it is none."""

    def __init__(self, format: ToolFormat, tools: list[JSON]) -> None:
        self._format, self._tools = format, tools
        self._blank: list[str] = []  # white space before the first text
        self._spoken = self._called = False
        self._held = ""  # what may still become `begin`
        self._inside: _Inside | None = None  # the call that is being read
        self._whole: list[str] | None = None  # an answer that may be JSON, where calls have no markers
        self._retreats = 0

    def feed(self, text: str, final: bool = False) -> list[Part]:
        """What may be told now, in order."""
        parts: list[Part] = []
        if self._format.begin:
            self._marked(text, final, parts)
        else:
            self._unmarked(text, final, parts)
        if final and not self._called:
            parts += ["".join(self._blank)] if self._blank else []
        return parts

    def _say(self, parts: list[Part], text: str) -> None:
        if self._spoken or text.strip():
            parts += ["".join([*self._blank, text])] if text else []
            self._blank, self._spoken = [], True
        elif text:
            self._blank.append(text)

    def _marked(self, text: str, final: bool, parts: list[Part]) -> None:
        pending = _chunks(text)
        while True:
            while pending:
                pending += _chunks(self._step(pending.pop(), parts))
            if not final:
                return
            if self._inside is None:
                self._say(parts, self._held)
                self._held = ""
                return
            pending = _chunks(self._close(self._inside, None, parts))

    def _step(self, text: str, parts: list[Part]) -> str:
        """Read on; what is left of ``text`` behind a marker."""
        if self._inside is not None:
            found = self._inside.feed(text)
            return "" if found is None else self._close(self._inside, found, parts)
        before, marker, rest = (self._held + text).partition(self._format.begin)
        kept = len(before) - (0 if marker else overlap(before, self._format.begin))
        self._say(parts, before[:kept])
        self._held = before[kept:]
        if marker:
            self._inside = _Inside(self._format.end, self._retreats < _RETREATS, self._format.xml)
        return rest

    def _close(self, inside: _Inside, found: int | None, parts: list[Part]) -> str:
        """Take what stands before the end marker that was ``found``, or before the answer's end, as calls or as text;
        what is left behind it. Where it is no call, the first marker of all ends it."""
        end, written = self._format.end, inside.text
        self._inside = None
        stop = len(written) if found is None else found
        calls = self._read(written[:stop], cut=found is None)
        if calls is not None:
            parts += calls
            self._called = True
        else:
            first = written.find(end)
            self._retreats += inside.quotes and first not in (-1, found)
            stop = len(written) if first < 0 else first
            self._say(parts, self._format.begin + written[: stop + len(end)])
        return written[stop + len(end) :]

    def _read(self, inside: str, cut: bool) -> list[Call] | None:
        """Calls; where the answer was ``cut`` behind them, the end marker may be cut too."""
        kept = overlap(inside, self._format.end) if cut else 0
        calls = self._format.read(inside, self._tools)
        return self._format.read(inside[:-kept], self._tools) if calls is None and kept else calls

    def _unmarked(self, text: str, final: bool, parts: list[Part]) -> None:
        if self._spoken:
            self._say(parts, text)
            return
        if self._whole is None:
            if not self._held:
                bare = text.lstrip()
                self._say(parts, text[: len(text) - len(bare)])
                text = bare
            self._held += text
            if not self._held.startswith(("{", "[", _PYTHON)):
                if final or not _PYTHON.startswith(self._held):
                    self._say(parts, self._held)
                    self._held = ""
                return
            text, self._held, self._whole = self._held, "", []
        self._whole.append(text)
        if not final:
            return
        written, self._whole = "".join(self._whole), None
        calls = self._format.read(written.strip(), self._tools)
        if calls is None:
            self._say(parts, written)
        else:
            parts += calls
            self._called = True


class _Inside:
    """Looks for the end of one call in text that comes piece by piece, in time linear in it. A marker does not end a
    call inside of its strings, where it is JSON and ``quotes`` are heeded, nor before ``</function>``, where it is
    ``xml``."""

    def __init__(self, end: str, quotes: bool, xml: bool) -> None:
        self.quotes, self._xml = quotes, xml
        self._end, self._pieces, self._base = end, [""], 0
        self._rest = ""  # seen, and not passed: part of a marker, or half of an escape
        self._head = ""  # the first letters, without white space before them
        self._string = False
        self._tail = ""  # the last letters that have been passed, white space behind them as one space
        self._marker, self._either = re.compile(re.escape(end)), re.compile(f'"|{re.escape(end)}')

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def feed(self, text: str) -> int | None:
        """Where the end marker stands in all that was fed; None while it has not come."""
        self._pieces.append(text)
        rest, at = self._rest + text, 0
        if len(self._head) < len(_FUNCTION):
            self._head = (self._head + text).lstrip()[: len(_FUNCTION)]
            self.quotes = self.quotes and self._head[:1] in ("", "{", "[")
        while True:
            if self._string:
                at = _IN_STRING.match(rest, at).end()  # type: ignore[union-attr]
                if rest[at : at + 1] != '"':  # half of an escape, or nothing
                    break
                self._string, at = False, at + 1
            found = (self._either if self.quotes else self._marker).search(rest, at)
            if found is None:
                at = self._pass(rest, at, max(at, len(rest) - overlap(rest[at:], self._end)))
                break
            if found[0] == '"':
                self._string, at = True, found.end()
                continue
            self._pass(rest, at, found.start())
            if not (self._xml and self._head == _FUNCTION) or self._tail.rstrip().endswith(_FUNCTION_END):
                return self._base + found.start()
            at = self._pass(rest, found.start(), found.end())
        self._base, self._rest = self._base + at, rest[at:]
        return None

    def _pass(self, rest: str, start: int, stop: int) -> int:
        if self._xml:
            passed = self._tail + rest[start:stop]
            self._tail = passed.rstrip()[-len(_FUNCTION_END) :] + (" " if passed[-1:].isspace() else "")
        return stop


_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*+', re.DOTALL)
_FUNCTION, _FUNCTION_END = "<function=", "</function>"


class ForcedReader:
    """Reads an answer that a grammar made a call: the arguments of ``name``, or a list of calls where it is None. What
    was cut short stays text."""

    def __init__(self, name: str | None) -> None:
        self._name, self._held = name, [""]

    def feed(self, text: str, final: bool = False) -> list[Part]:
        self._held.append(text)
        if not final:
            return []
        written = "".join(self._held)
        if self._name is not None:
            parts: list[Part] = [Call(self._name, written)] if is_json(written) else [written]
            return parts if written else []
        calls, end = leading_calls(written)
        rest = written[end:].lstrip(" \t\r\n,") if calls else written
        return [*calls, rest] if rest else list(calls)
