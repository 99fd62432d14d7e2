"""Arguments that stand one by one between tags."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.server.tool_formats.json_reading import is_plain_json
from saccade.server.tool_formats.parts import JSON
from saccade.server.tool_formats.reading import Out
from saccade.server.tool_formats.schema_values import is_text, json_of, quoted
from saccade.server.tool_formats.source import LONGEST_NAME, Malformed, Reading, Source, overlap

# What must follow a closing tag, white space aside: for each way one tag after the other, the alternatives of each.
Follows = Sequence[Sequence[Sequence[str]]]


def tagged_value(
    source: Source,
    out: Out,
    key: str,
    schema: JSON,
    close: str,
    follows: Follows,
    lines: bool,
    spoken: bool | None = None,
) -> Reading[None]:
    """A value up to the tag ``close``, as JSON. A value may hold such tags itself: the first one counts that one of
    ``follows`` stands behind, at whose end the answer may be cut. ``lines``: a line break behind the opening tag and
    one before the closing one are the format's. ``spoken``: whether the value is text, where the format says so; else
    the tool's schema does. Text is told as it comes, what may be JSON once it is whole."""
    text, held = is_text(key, schema) if spoken is None else spoken, []

    def put(piece: str) -> None:
        if text:
            out.more(quoted(piece)[1:-1])
        else:
            held.append(piece)

    if text:
        out.more('"')
    if lines:
        yield from source.skip("\n")
    at = 0
    while True:
        found = source.rest.find(close, at)
        if found < 0 and source.final:
            raise Malformed
        if found < 0:
            ready = len(source.rest) - overlap(source.rest, close)
            if lines and source.rest[:ready].endswith("\n"):
                ready -= 1
            put(source.take(ready))
            at = max(0, at - ready)
            yield from source.more()
            continue
        told = _decided(source.rest[found + len(close) :][: LONGEST_NAME * 2], source.final, follows)
        if told is None:
            at = found
            yield from source.more()
        elif told:
            value = source.take(found)
            source.take(len(close))
            put(value.removesuffix("\n") if lines else value)
            break
        else:
            at = found + 1
    if text:
        out.more('"')
        return
    value = "".join(held)
    out.more(json_of(value, key, schema) if spoken is None or not is_plain_json(value.strip()) else value.strip())


def _decided(rest: str, final: bool, follows: Follows) -> bool | None:
    """Whether ``rest`` begins in one of the ways; None while more of it may tell."""
    open_ = False
    for tags in follows:
        behind = rest
        for number, alternatives in enumerate(tags):
            behind = behind.lstrip(" \t\r\n")
            tag = next((one for one in alternatives if behind.startswith(one)), None)
            if tag is not None:
                behind = behind[len(tag) :]
                continue
            begun = any(one.startswith(behind) for one in alternatives)
            if begun and not final and len(rest) < LONGEST_NAME:
                open_ = True
            elif begun and final and number and number == len(tags) - 1:
                return True  # the last mark is cut
            break
        else:
            return True
    return None if open_ else False
