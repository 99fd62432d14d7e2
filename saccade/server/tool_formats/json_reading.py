"""JSON out of text that comes piece by piece. It is checked as it comes, and told as the model wrote it, so that no
number is rounded, no key is dropped or moved, and no escape changes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from saccade.server.tool_formats.parts import is_json
from saccade.server.tool_formats.reading import Out
from saccade.server.tool_formats.source import Malformed, Reading, Source

DEEPEST = 56  # brackets: with those around it in a message, arguments may come back to this server
_LONGEST_SCALAR = 65_536
_SPACE = re.compile(r"[ \t\n\r]*+")
_RUN = re.compile(r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*+')
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]*+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_GIVEN = {"arguments", "parameters"}
_BARE = {"name", "type", "id", *_GIVEN}  # all that a call without marks may hold

Tell = Callable[[str], object]


def json_value(source: Source, tell: Tell) -> Reading[None]:
    """One value, told piece by piece. Malformed for what is none, or lies too deep."""
    open_: list[str] = []
    while True:
        yield from _space(source, tell)
        first = source.rest[0]
        if first in "{[":
            tell(source.take(1))
            open_.append("}" if first == "{" else "]")
            if len(open_) > DEEPEST:
                raise Malformed
            yield from _space(source, tell)
            if source.rest[0] != open_[-1]:
                if first == "{":
                    yield from _key(source, tell)
                continue
        elif first == '"':
            yield from _string(source, tell)
        else:
            yield from _scalar(source, tell)
        if (yield from _behind(source, tell, open_)):
            return


def _behind(source: Source, tell: Tell, open_: list[str]) -> Reading[bool]:
    """Go on behind a value; whether all ends there."""
    while open_:
        yield from _space(source, tell)
        mark = source.rest[0]
        if mark not in (",", open_[-1]):
            raise Malformed
        tell(source.take(1))
        if mark == ",":
            if open_[-1] == "}":
                yield from _space(source, tell)
                yield from _key(source, tell)
            return False
        open_.pop()
    return True


def _space(source: Source, tell: Tell) -> Reading[None]:
    """White space, up to something else. Malformed where nothing comes."""
    while True:
        size = _SPACE.match(source.rest).end()  # type: ignore[union-attr]
        if size:
            tell(source.take(size))
        if source.rest:
            return
        yield from source.more()


def _key(source: Source, tell: Tell) -> Reading[None]:
    yield from _string(source, tell)
    yield from _space(source, tell)
    tell((yield from source.expect(":")))


def _string(source: Source, tell: Tell) -> Reading[None]:
    tell((yield from source.expect('"')))
    while True:
        size = _RUN.match(source.rest).end()  # type: ignore[union-attr]
        if size:
            tell(source.take(size))
        if source.rest.startswith('"'):
            tell(source.take(1))
            return
        if source.rest and not _HALF_ESCAPE.fullmatch(source.rest):
            raise Malformed
        yield from source.more()


def _scalar(source: Source, tell: Tell) -> Reading[None]:
    while True:
        size = _SCALAR.match(source.rest).end()  # type: ignore[union-attr]
        if size < len(source.rest) or source.final:
            break
        if size > _LONGEST_SCALAR:
            raise Malformed
        yield
    text = source.take(size)
    if text not in ("true", "false", "null") and not _NUMBER.fullmatch(text):
        raise Malformed
    tell(text)


def is_plain_json(text: str) -> bool:
    """Whether ``text`` is one JSON value that lies no deeper than arguments may."""
    source = Source()
    source.feed(text, True)
    try:
        for _ in json_value(source, lambda piece: None):
            pass
    except Malformed:
        return False
    return not source.rest


def whole(reading: Callable[[Tell], Reading[None]]) -> Reading[str]:
    """What a reading tells, at once."""
    pieces: list[str] = []
    yield from reading(pieces.append)
    return "".join(pieces)


def json_object(source: Source, out: Out) -> Reading[None]:
    """An object as the arguments of the call that has begun."""
    yield from source.space()
    if (yield from source.first()) != "{":
        raise Malformed
    yield from json_value(source, out.more)


def json_call(source: Source, out: Out, names: Collection[str] | None = None) -> Reading[None]:
    """An object that names one function and its arguments, an object (or that as text) or null. ``names``: the
    functions that may be called, where nothing but the text itself says that it is a call. The call is not ended."""
    yield from source.space()
    yield from source.expect("{")
    name: str | None = None
    given = False
    held: str | None = None  # arguments that came before the name
    while True:
        yield from source.space()
        key = json.loads((yield from whole(lambda tell: _string(source, tell))))
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        if key in _GIVEN:
            if given:
                raise Malformed
            given = True
            if name is not None and (yield from source.first()) == "{":
                out.begin(name)
                yield from json_value(source, out.more)
            else:
                held = _object((yield from whole(lambda tell: json_value(source, tell))))
        elif key == "name":
            value = yield from whole(lambda tell: json_value(source, tell))
            if name is not None or not value.startswith('"') or value == '""':
                raise Malformed
            name = json.loads(value)
            if names is not None and name not in names:
                raise Malformed
        elif names is not None and key not in _BARE:
            raise Malformed
        else:
            yield from json_value(source, lambda text: None)
        yield from source.space()
        if (yield from source.expect(",", "}")) == "}":
            break
    if name is None or not given:
        raise Malformed
    if held is not None:
        out.begin(name)
        out.more(held)


def _object(text: str) -> str:
    """The arguments of a call that came whole. Malformed for what is neither an object nor null."""
    if text.startswith("{") or text == "null":
        return text
    inner = json.loads(text) if text.startswith('"') else ""
    if not inner.lstrip().startswith("{") or not is_json(inner):
        raise Malformed
    return str(inner)


def json_calls(
    source: Source, out: Out, names: Collection[str] | None = None, listed: bool = False, one: bool = False
) -> Reading[None]:
    """Calls one after the other or in a list, commas or semicolons between them, up to something else, which is not
    taken, or the end of the answer. ``listed``: a list has begun; ``one``: nothing behind a list is looked at. The last
    call is not ended: what comes behind it is the caller's to judge."""
    yield from source.space()
    while True:
        if not listed and (yield from source.skip("[")):
            listed = True
        yield from json_call(source, out, names)
        yield from source.space()
        if not source.rest:
            return
        if listed:
            if (yield from source.expect(",", "]")) == ",":
                yield from source.space()
                if not source.rest:
                    return
                if source.rest[0] != "{":  # a list of something else
                    raise Malformed
                out.end()
                continue
            if one:
                return
            listed = False
            yield from source.space()
        while (yield from source.skip(",", ";")):
            yield from source.space()
        if (yield from source.first()) not in ("{", "["):
            return
        out.end()
