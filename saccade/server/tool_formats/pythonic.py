"""Calls as Python writes them, ``[name(key=value)]``: Llama 3.2 and 4 by such templates, LFM 2, OLMo 3."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Sequence

from saccade.server.tool_formats.base import ToolFormat, names_of
from saccade.server.tool_formats.forcing import Frame, Members, forced
from saccade.server.tool_formats.json_formats import NAME
from saccade.server.tool_formats.json_reading import is_plain_json, json_calls
from saccade.server.tool_formats.parts import JSON
from saccade.server.tool_formats.reading import Out
from saccade.server.tool_formats.schema_values import quoted
from saccade.server.tool_formats.source import LONGEST_NAME, Malformed, Reading, Source
from saccade.server.tool_formats.words import Words

_PLAIN = re.compile(r"[^'\"()\[\]{},]*+")
_STRING = {quote: re.compile(rf"{quote}(?:[^{quote}\\\n]|\\.)*+", re.DOTALL) for quote in "'\""}
_SHOWN = re.compile(r"\[\w+\(\w+=")  # how templates show it
_DEEPEST = 56


class Pythonic(ToolFormat):
    """A list of calls that is a whole answer."""

    name = "pythonic"
    bare = "["
    between: tuple[str, str] = ("", "")  # marks around the list

    def fits(self, template: str) -> bool:
        return _SHOWN.search(template) is not None

    def grammar(self, functions: Sequence[JSON], most: int | None, words: Words) -> str:
        begin, end = self.between
        frame = Frame("{name}(", ")", f"{begin}[", ", ", f"]{end}", self.marks)
        literals = ("True", "False", "None")
        return forced(functions, most, frame, words, Members("{key}=", "", str.isidentifier, ", ", False, literals))

    def calls(self, source: Source, out: Out, tools: list[JSON], begin: str) -> Reading[None]:
        yield from source.space()
        yield from source.expect("[")
        if (yield from source.first()) == "{":  # some models write JSON between the same marks
            yield from json_calls(source, out, listed=True)
        else:
            yield from python_calls(source, out, None)
        yield from source.space()
        if self.between[1]:
            yield from source.close(self.between[1])

    def bare_calls(self, source: Source, out: Out, tools: list[JSON]) -> Reading[None]:
        yield from source.expect("[")
        yield from python_calls(source, out, names_of(tools))
        yield from source.space()
        if source.rest:
            raise Malformed


class Llama4Pythonic(Pythonic):
    """The same, also between ``<|python_start|>`` and ``<|python_end|>``: Llama 4."""

    name = "llama4_pythonic"
    begins = ("<|python_start|>",)
    marks = between = ("<|python_start|>", "<|python_end|>")

    def fits(self, template: str) -> bool:
        return super().fits(template) and self.marks[0] in template


class Lfm2(Pythonic):
    """The same between ``<|tool_call_start|>`` and ``<|tool_call_end|>``: LFM 2."""

    name = "lfm2"
    bare = ""
    begins = ("<|tool_call_start|>",)
    marks = between = ("<|tool_call_start|>", "<|tool_call_end|>")

    def fits(self, template: str) -> bool:
        return "<|tool_list_start|>" in template or self.marks[0] in template


def python_calls(source: Source, out: Out, names: Collection[str] | None) -> Reading[None]:
    """Calls up to the end of the list that has begun. The last one is not ended. Malformed for other names than
    ``names``."""
    while True:
        yield from source.space()
        name = yield from source.upto("(", "[", "{", ",", "]", "\n")
        yield from source.expect("(")
        if not NAME.fullmatch(name) or (names is not None and name not in names):
            raise Malformed
        out.begin(name)
        yield from python_arguments(source, out)
        yield from source.space()
        if not source.rest:
            return
        if (yield from source.expect(",", "]")) == "]":
            return
        out.end()


def python_arguments(source: Source, out: Out) -> Reading[None]:
    """``key=value, ...)`` behind the bracket that opens a call, as the arguments of the call that has begun."""
    out.more("{")
    first = True
    while True:
        yield from source.space()
        if (yield from source.skip(")")) is not None:
            out.more("}")
            return
        key = (yield from source.upto("=", ")", "(", most=LONGEST_NAME)).strip()
        yield from source.expect("=")
        if not key.isidentifier():
            raise Malformed
        text = yield from _literal(source)
        out.more(f"{'' if first else ', '}{quoted(key)}: {json_of_literal(text)}")
        first = False
        yield from source.skip(",")


def _literal(source: Source) -> Reading[str]:
    """A value up to the comma or the bracket behind it."""
    pieces: list[str] = []
    open_: list[str] = []
    while True:
        pieces.append(source.take(_PLAIN.match(source.rest).end()))  # type: ignore[union-attr]
        mark = yield from source.first()
        if not mark:
            raise Malformed
        if _PLAIN.match(mark).end():  # type: ignore[union-attr]
            continue
        if mark in "'\"":
            while True:
                size = _STRING[mark].match(source.rest).end()  # type: ignore[union-attr]
                if source.rest[size : size + 1] == mark:
                    break
                if source.rest[size : size + 1] == "\n":
                    raise Malformed
                yield from source.more()
            pieces.append(source.take(size + 1))
            continue
        if not open_ and mark in ",)":
            return "".join(pieces)
        if mark in "([{":
            open_.append({"(": ")", "[": "]", "{": "}"}[mark])
            if len(open_) > _DEEPEST:
                raise Malformed
        elif mark != "," and (not open_ or open_.pop() != mark):
            raise Malformed
        pieces.append(source.take(1))


def json_of_literal(text: str) -> str:
    """JSON as it was written, and of what only Python reads the same value. Malformed for what is no value."""
    bare = text.strip()
    if is_plain_json(bare):
        return bare
    try:
        value = ast.literal_eval(bare)
        made = json.dumps(list(value) if isinstance(value, (set, frozenset)) else value, ensure_ascii=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise Malformed from None
    if not is_plain_json(made):
        raise Malformed
    return made
