"""Harmony, in which gpt-oss writes thoughts, calls and text: messages with a channel and, for calls, a recipient.

The prompt ends with ``<|start|>assistant``; from there on an answer is

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>text

and a call a message to ``functions.name``. What ends an answer, ``<|return|>`` or ``<|call|>``, is an end token of the
model and no part of its text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from saccade.server.grammar_parts import after_thoughts, joined, named
from saccade.server.tool_formats.base import ToolFormat
from saccade.server.tool_formats.forcing import Frame, forced
from saccade.server.tool_formats.json_formats import NAME
from saccade.server.tool_formats.json_reading import json_object
from saccade.server.tool_formats.parts import JSON, Part, call_id
from saccade.server.tool_formats.reading import Out, PieceReader
from saccade.server.tool_formats.source import Malformed, Reading, Source, overlap
from saccade.server.tool_formats.words import Words

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")  # of a message's body
FUNCTIONS = "functions."
THINKS, NEXT = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
SAYS = "<|channel|>final<|message|>"
_TO = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([A-Za-z]+)")
_HEADS = ("<|start|>assistant", "<|channel|>", "to=")  # what a header may begin with
_HEADER = 512  # characters of a header, at most


class Harmony(ToolFormat):
    """Reading is :class:`HarmonyReader`'s, which reads thoughts, too."""

    name = "harmony"
    marks = MARKS
    several = False  # a call ends the answer

    def fits(self, template: str) -> bool:
        return "<|channel|>" in template and "<|message|>" in template

    def calls(self, source: Source, out: Out, tools: list[JSON], begin: str) -> Reading[None]:
        raise AssertionError("read by HarmonyReader")

    def grammar(self, functions: Sequence[JSON], most: int | None, words: Words) -> str:
        frame = Frame(f" to={FUNCTIONS}{{name}}<|channel|>commentary json<|message|>", marks=MARKS)
        return forced(functions, 1, frame, words)


def channel_grammar(source: str, words: Words, opened: bool, calls: bool) -> str:
    """``source``, a grammar of ``calls`` or of an answer's text, in its channel, behind thoughts, which the prompt has
    ``opened`` or the model may begin."""
    before, begin, end = words("" if calls else SAYS, MARKS), words(THINKS, MARKS), words(NEXT, MARKS)
    return after_thoughts(source, before, begin, end, opened, words.token("<|end|>") is not None)


def next_message(source: str, words: Words) -> str:
    """``source``, a grammar of calls, behind the end of a message that the prompt has left open."""
    return joined(f"start: {words(NEXT, MARKS)} @answer\n", named(source, "answer"))


class HarmonyReader(PieceReader):
    """Reads one answer piece by piece: (thoughts, parts) of what may be told now. ``opened``: the prompt has opened the
    body of a message in this channel. ``calls``: messages to functions are calls; else they are text. ``thinks``: the
    channel of thoughts is told apart; else it is text, too."""

    def __init__(self, opened: str | None = None, calls: bool = True, thinks: bool = True) -> None:
        self._thinks, self._calls, self._opened = thinks, calls, opened
        self._thoughts: list[str] = []
        self._thought = False  # some came before
        source = Source()
        super().__init__(source, Out(call_id, source))

    def feed(self, text: str, final: bool = False) -> tuple[str, list[Part]]:
        parts = self._feed(text, final)
        thoughts, self._thoughts = "".join(self._thoughts), []
        return thoughts, parts

    def _read(self) -> Reading[None]:
        source = self._source
        yield from source.first()
        if self._opened is not None:
            yield from self._body(self._opened)
        while source.rest or not source.final:
            source.mark()
            try:
                header = yield from self._header()
            except Malformed:  # text, up to what may be a header
                source.back()
                if self._cut():
                    return
                if source.rest.startswith("<|start|>"):
                    self._out.say(source.take(len("<|start|>")))
                yield from self._body("final")
                continue
            channel, recipient = _CHANNEL.search(header), _TO.search(header)
            name = recipient[1].removeprefix(FUNCTIONS) if recipient else ""
            if recipient and self._calls and NAME.fullmatch(name):
                yield from self._call(name)
            elif recipient:
                self._out.say(source.since_mark())
                yield from self._body("final")
            else:
                yield from self._body(channel[1] if channel else "final")

    def _header(self) -> Reading[str]:
        """What stands before a message's body. Malformed for what is no header."""
        source = self._source
        yield from source.space()
        yield from source.skip("<|start|>")
        yield from source.skip("assistant")
        yield from source.space()
        if (yield from source.skip("<|channel|>", "to=", "<|message|>")) is None:
            raise Malformed
        source.back()
        header = yield from source.upto("<|message|>", most=_HEADER)
        yield from source.expect("<|message|>")
        return header

    def _call(self, name: str) -> Reading[None]:
        """A message to a function. Where it is no object, it is text, header and all."""
        source, out = self._source, self._out
        try:
            out.begin(name)
            yield from json_object(source, out)
            yield from source.space()
            yield from self._end()
            out.end()
        except Malformed:
            out.broken()
            source.back()
            out.say(source.take(source.rest.index("<|message|>") + len("<|message|>")))
            yield from self._body("final")

    def _end(self) -> Reading[None]:
        """The mark behind a body, which may be missing where the answer ends, or be cut."""
        source = self._source
        if (yield from source.skip(*ENDS[:-1])) is None:
            if (yield from source.first()) and not source.final:
                yield from source.expect("<|start|>")
            elif not any(mark.startswith(source.rest) for mark in ENDS):
                raise Malformed
            else:
                source.take(len(source.rest))

    def _body(self, channel: str) -> Reading[None]:
        """Text or thoughts up to the mark behind them."""
        source, thinks = self._source, self._thinks and channel == "analysis"
        first = True
        while True:
            found = min((at for mark in ENDS if (at := source.rest.find(mark)) >= 0), default=-1)
            held = 0 if source.final else max(overlap(source.rest, mark) for mark in ENDS)
            piece = source.take(found if found >= 0 else len(source.rest) - held)
            if thinks and piece:
                self._thoughts.append("\n" + piece if first and self._thought else piece)
                first, self._thought = False, True
            elif not thinks:
                self._out.say(piece)
            source.mark()
            if found >= 0:
                if not source.rest.startswith("<|start|>"):
                    yield from source.skip(*ENDS)
                source.mark()
                return
            if source.final:
                return
            yield

    def _cut(self) -> bool:
        """Whether the answer ends within a header, which then heads nothing."""
        rest = self._source.rest.lstrip()
        begun = rest.startswith(_HEADS) or any(head.startswith(rest) for head in _HEADS)
        return self._source.final and begun and len(rest) <= _HEADER and "\n" not in rest and "<|message|>" not in rest
