"""Reads answers: text, and calls in the format of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from saccade.server.tool_formats.parts import JSON, Arguments, Begun, Broken, Ended, Part
from saccade.server.tool_formats.source import Malformed, Reading, Source, overlap

if TYPE_CHECKING:
    from saccade.server.tool_formats.base import ToolFormat

_AGAIN = 8  # how often, on the whole, text is read again that looked like a call and was none


class Out:
    """What a reader tells. White space before the first text is told with that text; beside calls alone it is none."""

    def __init__(self, new_id: Callable[[], str], source: Source) -> None:
        self.parts: list[Part] = []
        self._new_id, self._source = new_id, source
        self._blank: list[str] = []  # white space before the first text
        self._ids: set[str] = set()
        self._spoken = self._called = self._open = False

    def say(self, text: str) -> None:
        if self._spoken or text.strip():
            if text:
                self.parts.append("".join([*self._blank, text]))
            self._blank, self._spoken = [], True
        elif text:
            self._blank.append(text)

    def begin(self, name: str, id: str | None = None) -> None:
        """A call begins. ``id``: the model's own, where its format has one that no call of the answer had before."""
        self._open = True
        id = self._new_id() if id is None or id in self._ids else id
        self._ids.add(id)
        self.parts.append(Begun(id, name))

    def more(self, text: str) -> None:
        """More of its arguments."""
        if text:
            self.parts.append(Arguments(text))

    def end(self) -> None:
        """The call is whole, whatever comes behind it."""
        assert self._open
        self._open, self._called = False, True
        self.parts.append(Ended())
        self._source.mark()

    def broken(self) -> None:
        """What looked like a call is none."""
        self._open = False
        self.parts.append(Broken())

    @property
    def open(self) -> bool:
        return self._open

    def finish(self) -> None:
        """At the end of an answer without calls white space is its text."""
        if not self._called and self._blank:
            self.parts.append("".join(self._blank))
            self._blank = []

    def taken(self) -> list[Part]:
        parts, self.parts = self.parts, []
        return parts


class PieceReader:
    """Reads one answer piece by piece into ``out``: ``_read`` goes on where the last piece ended."""

    def __init__(self, source: Source, out: Out) -> None:
        self._source, self._out = source, out
        self._run: Reading[None] | None = self._read()

    def _feed(self, text: str, final: bool) -> list[Part]:
        """What may be told now, in order."""
        self._source.feed(text, final)
        if self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None
        if final:
            self._out.finish()
        return self._out.taken()

    def _read(self) -> Reading[None]:
        raise NotImplementedError


class CallReader(PieceReader):
    """Reads one answer piece by piece. Parts are the same however it comes, joined where they are neighbours."""

    def __init__(self, format: ToolFormat, tools: list[JSON]) -> None:
        self._format, self._tools = format, tools
        self._again = 0  # characters that were read again
        source = Source()
        super().__init__(source, Out(format.call_id, source))

    def feed(self, text: str, final: bool = False) -> list[Part]:
        """What may be told now, in order."""
        return self._feed(text, final)

    def _read(self) -> Reading[None]:
        source, out, format = self._source, self._out, self._format
        yield from source.first()
        if format.bare:
            yield from self._bare()
        while True:
            begin = yield from self._text()
            if begin is None:
                return
            marks = source.marks
            try:
                yield from format.calls(source, out, self._tools, begin)
                if out.open:
                    out.end()
            except Malformed:
                self._give_up(begin if source.marks == marks else "")

    def _bare(self) -> Reading[None]:
        """An answer that may begin with calls, without a mark that says so."""
        source, out = self._source, self._out
        yield from source.space()
        out.say(source.since_mark())
        source.mark()
        if not source.rest or source.rest[0] not in self._format.bare:
            return
        try:
            yield from self._format.bare_calls(source, out, self._tools)
            if out.open:
                out.end()
        except Malformed:
            self._give_up("")

    def _text(self) -> Reading[str | None]:
        """Text up to a mark that calls begin with, which is taken; None at the end."""
        source, begins = self._source, self._format.begins
        while True:
            found = min(((at, -len(one)) for one in begins if (at := source.rest.find(one)) >= 0), default=None)
            if found is not None:
                at, size = found
                self._out.say(source.take(at))
                source.mark()
                return source.take(-size)
            held = 0 if source.final else max((overlap(source.rest, one) for one in begins), default=0)
            self._out.say(source.take(len(source.rest) - held))
            source.mark()
            if source.final:
                return None
            yield

    def _give_up(self, begin: str) -> None:
        """What was read since the mark is no call. ``begin`` is text; what stands behind it is looked at again, as long
        as this takes time linear in the answer."""
        source, out = self._source, self._out
        out.broken()
        written = source.since_mark()
        self._again += len(written)
        if self._again > _AGAIN * source.seen:
            out.say(written)
            source.mark()
            return
        source.back()
        out.say(source.take(len(begin)))
