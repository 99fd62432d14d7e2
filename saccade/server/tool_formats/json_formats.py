"""Calls whose arguments are JSON: Hermes, Granite, Mistral, DeepSeek, Kimi, and lists of JSON alone."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence

from saccade.server.tool_formats.base import ToolFormat, names_of
from saccade.server.tool_formats.forcing import Frame, forced
from saccade.server.tool_formats.json_reading import json_calls, json_object
from saccade.server.tool_formats.parts import JSON
from saccade.server.tool_formats.reading import Out
from saccade.server.tool_formats.source import LONGEST_NAME, Malformed, Reading, Source
from saccade.server.tool_formats.words import Words

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NUMBERED = re.compile(rf"(?:functions\.)?({NAME.pattern}):[0-9]{{1,9}}")


class JsonFormat(ToolFormat):
    """``frame``: what stands around arguments, which are an object of JSON."""

    frame: Frame

    def grammar(self, functions: Sequence[JSON], most: int | None, words: Words) -> str:
        return forced(functions, most if self.several else 1, self.frame, words)


class JsonList(JsonFormat):
    """A list of ``{"name", "arguments"}`` and nothing else: for models of which nothing else is known."""

    name = "json"
    bare = "[{"
    frame = Frame('{"name": "{name}", "arguments": ', "}", "[", ", ", "]")

    def fits(self, template: str) -> bool:
        return False

    def calls(self, source: Source, out: Out, tools: list[JSON], begin: str) -> Reading[None]:
        yield from self.bare_calls(source, out, tools)

    def bare_calls(self, source: Source, out: Out, tools: list[JSON]) -> Reading[None]:
        """Without a mark only the names of tools tell calls from other JSON."""
        yield from json_calls(source, out, names_of(tools))
        if source.rest:
            raise Malformed


class Hermes(JsonFormat):
    """``<tool_call>`` {"name", "arguments"} ``</tool_call>``: Hermes, Qwen 2.5 and 3, Granite 4, and many more."""

    name = "hermes"
    begins = ("<tool_call>",)
    marks = ("<tool_call>", "</tool_call>")
    frame = Frame('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", between="\n", marks=marks)

    def fits(self, template: str) -> bool:
        return "<tool_call>" in template and "arguments" in template

    def calls(self, source: Source, out: Out, tools: list[JSON], begin: str) -> Reading[None]:
        yield from json_calls(source, out)
        yield from source.close("</tool_call>")


class Granite(JsonFormat):
    """``<|tool_call|>`` and a list: Granite 3."""

    name = "granite"
    begins = ("<|tool_call|>",)
    marks = begins
    frame = Frame('{"name": "{name}", "arguments": ', "}", "<|tool_call|>[", ", ", "]", marks)

    def fits(self, template: str) -> bool:
        return "<|tool_call|>" in template and "<|/tool_call|>" not in template

    def calls(self, source: Source, out: Out, tools: list[JSON], begin: str) -> Reading[None]:
        yield from json_calls(source, out, one=True)


class Mistral(JsonFormat):
    """``[TOOL_CALLS]`` and a list of {"name", "arguments"}. What :class:`MistralArgs` forces is read, too."""

    name = "mistral"
    begins = ("[TOOL_CALLS]",)
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    frame = Frame('{"name": "{name}", "arguments": ', "}", "[TOOL_CALLS] [", ", ", "]", marks)

    def fits(self, template: str) -> bool:
        return "[TOOL_CALLS]" in template

    def calls(self, source: Source, out: Out, tools: list[JSON], begin: str) -> Reading[None]:
        yield from source.space()
        if (yield from source.first()) in ("[", "{"):
            yield from json_calls(source, out, one=True)
            return
        name = (yield from source.upto("[", "{")).strip()
        if not NAME.fullmatch(name):
            raise Malformed
        if (yield from source.skip("[CALL_ID]")):
            yield from source.upto("[", "{")
        yield from source.skip("[ARGS]")
        out.begin(name)
        yield from json_object(source, out)

    def call_id(self) -> str:
        """Nine letters and digits: templates of Mistral's refuse others."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class MistralArgs(Mistral):
    """``[TOOL_CALLS]name[ARGS]{...}``: Mistral's from tokenizers of version 11 on."""

    name = "mistral_args"
    frame = Frame("[TOOL_CALLS]{name}[ARGS]", marks=Mistral.marks)

    def fits(self, template: str) -> bool:
        return "[TOOL_CALLS]" in template and "[ARGS]" in template


class DeepSeek31(JsonFormat):
    """DeepSeek V3.1: the name, a mark, and an object."""

    name = "deepseek_v31"
    begins = ("<｜tool▁calls▁begin｜>",)
    marks = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    )
    frame = Frame(f"{marks[2]}{{name}}{marks[4]}", marks[3], marks[0], "", marks[1], marks)

    def fits(self, template: str) -> bool:
        return self.marks[0] in template and self.marks[4] in template

    def calls(self, source: Source, out: Out, tools: list[JSON], begin: str) -> Reading[None]:
        _, close, call, call_end, _ = self.marks
        yield from source.space()
        yield from source.expect(call)
        while True:
            yield from self._call(source, out)
            yield from source.space()
            yield from source.close(call_end)
            yield from source.space()
            if (yield from source.skip(call)) is None:
                yield from source.close(close)
                return
            out.end()

    def _call(self, source: Source, out: Out) -> Reading[None]:
        yield from self._begin(source, out, self.marks[4])
        yield from json_object(source, out)

    def _begin(self, source: Source, out: Out, end: str) -> Reading[None]:
        name = (yield from source.upto(end)).strip()
        if not NAME.fullmatch(name):
            raise Malformed
        yield from source.expect(end)
        out.begin(name)


class DeepSeek3(DeepSeek31):
    """DeepSeek V3 and R1: ``function``, a mark, the name, and an object in a fence of JSON."""

    name = "deepseek_v3"
    frame = Frame(
        f"{DeepSeek31.marks[2]}function{DeepSeek31.marks[4]}{{name}}\n```json\n",
        f"\n```{DeepSeek31.marks[3]}",
        DeepSeek31.marks[0],
        "\n",
        DeepSeek31.marks[1],
        DeepSeek31.marks,
    )

    def fits(self, template: str) -> bool:
        return super().fits(template) and "```json" in template

    def _call(self, source: Source, out: Out) -> Reading[None]:
        yield from source.upto(self.marks[4], most=LONGEST_NAME)
        yield from source.expect(self.marks[4])
        yield from self._begin(source, out, "\n")
        yield from source.space()
        yield from source.expect("```json")
        yield from json_object(source, out)
        yield from source.space()
        yield from source.close("```")


class KimiK2(JsonFormat):
    """Kimi K2: ``functions.name:0``, the call's id, a mark, and an object. Its template shows earlier calls by their
    ids, so clients are told the model's own."""

    name = "kimi_k2"
    begins = ("<|tool_calls_section_begin|>",)
    marks = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    )
    frame = Frame(f"{marks[2]}functions.{{name}}:{{number}}{marks[3]}", marks[4], marks[0], "", marks[1], marks)

    def fits(self, template: str) -> bool:
        return self.begins[0] in template

    def calls(self, source: Source, out: Out, tools: list[JSON], begin: str) -> Reading[None]:
        _, close, call, arguments, call_end = self.marks
        yield from source.space()
        yield from source.expect(call)
        while True:
            id = (yield from source.upto(arguments)).strip()
            yield from source.expect(arguments)
            if (found := _NUMBERED.fullmatch(id)) is not None:
                out.begin(found[1], id)
            elif NAME.fullmatch(id):
                out.begin(id.removeprefix("functions."))
            else:
                raise Malformed
            yield from json_object(source, out)
            yield from source.space()
            yield from source.close(call_end)
            yield from source.space()
            if (yield from source.skip(call)) is None:
                yield from source.close(close)
                return
            out.end()
