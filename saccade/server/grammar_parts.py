"""Grammars made of others. Each part is a document of its own: what a schema refers to is looked up in that schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from saccade.server.grammar import json_grammar

JSON = dict[str, Any]
_SPACE = r"SPACE: /[ \n\t]{1,16}/"  # as in json_grammar
# What a model thinks. The first end marker ends it, wherever a token begins.
THOUGHTS = "(?s:.*)"


def after_thoughts(source: str, begin: str, end: str, opened: bool) -> str:
    """``source``, a grammar as llguidance writes it, behind thoughts that go on to ``end``. Where the prompt has not
    ``opened`` them they may be left out, and begin with ``begin``."""
    thoughts = "thoughts" if opened else f"({json.dumps(begin)} thoughts)?"
    lark = f"start: {thoughts} @answer\nthoughts[lazy]: THOUGHTS\nTHOUGHTS: /{THOUGHTS}/ {json.dumps(end)}\n"
    return _joined(lark, _named(source, "answer"))


def calls_grammar(functions: Sequence[JSON], most: int | None) -> str:
    """A JSON list of at least one call, ``{"name": ..., "arguments": ...}``, and ``most`` at most: each of one of
    ``functions``, with arguments that are valid under its ``parameters``."""
    calls = [
        " SPACE? ".join(
            [_text("name"), '":"', _text(one["name"]), '","', _text("arguments"), '":"', f"@arguments{index}"]
        )
        for index, one in enumerate(functions)
    ]
    more = "" if most == 1 else ' (SPACE? "," SPACE? call)*'
    return _joined(
        f'start: "[" SPACE? call{more} SPACE? "]"\ncall: "{{" SPACE? ({" | ".join(calls)}) SPACE? "}}"\n{_SPACE}\n',
        *_arguments(functions),
    )


def arguments_grammar(functions: Sequence[JSON]) -> str:
    """The arguments of one of ``functions`` alone."""
    return _joined(
        f"start: {' | '.join(f'@arguments{index}' for index in range(len(functions)))}\n", *_arguments(functions)
    )


def _arguments(functions: Sequence[JSON]) -> list[list[JSON]]:
    return [_named(json_grammar(arguments_schema(one)), f"arguments{index}") for index, one in enumerate(functions)]


def arguments_schema(function: JSON) -> JSON:
    """What the arguments of a function must be: an object, and one without members where it has no parameters."""
    parameters: JSON | None = function.get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**parameters, "type": "object"}


def _text(name: str) -> str:
    """A JSON string as a text of a grammar."""
    return json.dumps(json.dumps(name))


def _named(source: str, name: str) -> list[JSON]:
    """The grammars of ``source``, of which the first is called ``name``."""
    try:
        first, *others = json.loads(source)["grammars"]
    except (ValueError, TypeError, KeyError):  # Lark's syntax
        first, others = {"lark_grammar": source}, []
    return [{**first, "name": name}, *others]


def _joined(lark: str, *parts: list[JSON]) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}, *(one for part in parts for one in part)]})
