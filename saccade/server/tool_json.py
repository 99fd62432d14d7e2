"""Calls of tools that a model wrote as JSON. Their arguments are the model's own text: it is parsed, and never written
again, so that no number is rounded, no key is dropped or moved, and no escape changes."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

JSON = dict[str, Any]
_SPACE = re.compile(r"[ \t\n\r]*")
_BETWEEN = re.compile(r"[ \t\n\r;,]*")
_DATA = {"arguments", "parameters"}
_BARE = {"name", "type", "id", *_DATA}  # all that a call without markers may hold


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


# Numbers stay text: nothing is asked of them but their form.
_decoder = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_refuse)


@dataclass
class Call:
    """``arguments``: JSON as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def as_dict(self) -> JSON:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class _Member(NamedTuple):
    """One member of an object. ``source``: its value as it was written."""

    key: str
    source: str
    value: Any


def is_json(text: str) -> bool:
    """Whether ``text`` is one JSON value; NaN and Infinity are none."""
    try:
        _decoder.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def json_calls(text: str, names: Collection[str] | None = None) -> list[Call] | None:
    """The calls of JSON objects, one after the other or in a list, semicolons between them; None for anything else.
    ``names``: the functions that may be called, where nothing but the text itself says that it is a call."""
    calls, end = leading_calls(text, names)
    return calls if calls and end == len(text) else None


def leading_calls(text: str, names: Collection[str] | None = None) -> tuple[list[Call], int]:
    """The whole calls that ``text`` begins with, and where they end: ``len(text)`` if nothing else follows."""
    calls: list[Call] = []
    at, listed, told = _space(text, 0), False, 0  # told: the end of the last whole call
    try:
        while at < len(text):
            if listed and text[at] == "]":
                listed, at = False, _BETWEEN.match(text, at + 1).end()  # type: ignore[union-attr]
                continue
            if not listed and text[at] == "[":
                listed, at = True, _space(text, at + 1)
            members, end = _object(text, at)
            call = _call(members, names)
            if call is None:
                return calls, told
            calls.append(call)
            told, at = end, _space(text, end)
            if not listed:
                at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
            elif text[at : at + 1] == ",":
                at = _space(text, at + 1)
                if text[at : at + 1] == "]":
                    return calls, told
            elif text[at : at + 1] != "]":
                return calls, told
    except (ValueError, RecursionError):
        return calls, told
    return calls, told if listed else len(text)


def _space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def _object(text: str, at: int) -> tuple[list[_Member], int]:
    """The members of the object at ``at``, and where it ends. ValueError where there is none."""
    members: list[_Member] = []
    _expect(text, at, "{")
    at = _space(text, at + 1)
    if text[at : at + 1] == "}":
        return members, at + 1
    while True:
        _expect(text, at, '"')
        key, at = _decoder.raw_decode(text, at)
        at = _space(text, at)
        _expect(text, at, ":")
        start = _space(text, at + 1)
        value, at = _decoder.raw_decode(text, start)
        members.append(_Member(key, text[start:at], value))
        at = _space(text, at)
        if text[at : at + 1] == "}":
            return members, at + 1
        _expect(text, at, ",")
        at = _space(text, at + 1)


def _expect(text: str, at: int, letter: str) -> None:
    if text[at : at + 1] != letter:
        raise ValueError(f"no {letter} at {at}")


def _call(members: list[_Member], names: Collection[str] | None) -> Call | None:
    """A call of an object that names one function and its arguments, an object (or that as text) or null."""
    named = [one for one in members if one.key == "name"]
    given = [one for one in members if one.key in _DATA]
    if len(named) != 1 or len(given) != 1:
        return None
    name, [arguments] = named[0], given
    if not name.source.startswith('"') or not name.value:
        return None
    if names is not None and (name.value not in names or not {one.key for one in members} <= _BARE):
        return None
    if arguments.source.startswith("{") or arguments.source == "null":
        return Call(name.value, arguments.source)
    inner = arguments.value if arguments.source.startswith('"') else ""
    return Call(name.value, inner) if inner.lstrip().startswith("{") and is_json(inner) else None
