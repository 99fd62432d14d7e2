"""What an answer is made of: text, and calls of tools, which come in pieces."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

JSON = dict[str, Any]


@dataclass(frozen=True)
class Begun:
    """A call begins."""

    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the arguments of the call that has begun: a piece of JSON, the model's own text."""

    text: str


@dataclass(frozen=True)
class Ended:
    """The call that has begun is whole."""


@dataclass(frozen=True)
class Broken:
    """What looked like a call is none, or was cut short: text that follows has all that the model wrote of it."""


Part = str | Begun | Arguments | Ended | Broken


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def settled(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts of an answer that has ended, without calls that came to nothing. Neighbouring texts are one, and so are
    the arguments of a call."""
    text: list[str] = []
    call: Begun | None = None
    arguments: list[str] = []
    for part in parts:
        if isinstance(part, str):
            text.append(part)
        elif isinstance(part, Begun):
            call, arguments = part, []
        elif isinstance(part, Arguments):
            arguments.append(part.text)
        elif isinstance(part, Ended) and call is not None:
            if text:
                yield "".join(text)
            yield from (call, Arguments("".join(arguments)), part)
            text, call = [], None
        else:
            call = None
    if text:
        yield "".join(text)


def is_json(text: str) -> bool:
    """Whether ``text`` is one JSON value; NaN and Infinity are none."""
    try:
        _decoder.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


# Numbers stay text: nothing is asked of them but their form.
_decoder = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_refuse)
