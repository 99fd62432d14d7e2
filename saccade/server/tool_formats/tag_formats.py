"""Calls whose arguments stand one by one between tags: Qwen3-Coder, Qwen 3.5, Seed-OSS, GLM 4.5 and later, DeepSeek
V3.2 and V4."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.server.tool_formats.base import ToolFormat
from saccade.server.tool_formats.forcing import Frame, Members, forced
from saccade.server.tool_formats.json_formats import NAME
from saccade.server.tool_formats.json_reading import json_calls
from saccade.server.tool_formats.parts import JSON
from saccade.server.tool_formats.reading import Out
from saccade.server.tool_formats.schema_values import quoted, schema_of
from saccade.server.tool_formats.source import Malformed, Reading, Source
from saccade.server.tool_formats.tagged import tagged_value
from saccade.server.tool_formats.words import Words


def _plain(key: str) -> bool:
    """Whether a name can stand within a tag."""
    return bool(key) and not any(letter in "<>" or letter.isspace() for letter in key)


class Qwen3Coder(ToolFormat):
    """``<function=name>`` with a ``<parameter=key>`` for each argument: Qwen3-Coder and Qwen 3.5. Calls that are JSON
    between the same tags are read, too."""

    name = "qwen3_coder"
    begins = ("<tool_call>",)
    marks = ("<tool_call>", "</tool_call>")
    lines = True  # a line break on either side of a value is no part of it

    def fits(self, template: str) -> bool:
        return all(tag in template for tag in (self.begins[0], "<function=", "<parameter="))

    def grammar(self, functions: Sequence[JSON], most: int | None, words: Words) -> str:
        begin, end = self.marks
        line = "\n" if self.lines else ""
        frame = Frame(f"{begin}\n<function={{name}}>\n", f"</function>\n{end}", between="\n", marks=self.marks)
        return forced(
            functions, most, frame, words, Members(f"<parameter={{key}}>{line}", f"{line}</parameter>\n", _plain)
        )

    def calls(self, source: Source, out: Out, tools: list[JSON], begin: str) -> Reading[None]:
        end = self.marks[1]
        yield from source.space()
        if (yield from source.first()) in ("{", "["):
            yield from json_calls(source, out)
            yield from source.close(end)
            return
        yield from source.expect("<function=")
        while True:
            yield from self._function(source, out, tools)
            yield from source.space()
            if (yield from source.skip("<function=")) is None:
                yield from source.close(end)
                return
            out.end()

    def _function(self, source: Source, out: Out, tools: list[JSON]) -> Reading[None]:
        name = yield from _named(source)
        schema, first = schema_of(tools, name), True
        out.begin(name)
        out.more("{")
        while True:
            yield from source.space()
            if (yield from source.expect("<parameter=", "</function>")) == "</function>":
                out.more("}")
                return
            key = yield from _named(source)
            out.more(f"{'' if first else ', '}{quoted(key)}: ")
            first = False
            follows = (("<parameter=",),), (("</function>",), ("<function=", self.marks[1]))
            yield from tagged_value(source, out, key, schema, "</parameter>", follows, self.lines)


class SeedOss(Qwen3Coder):
    """The same between tags of its own: Seed-OSS."""

    name = "seed_oss"
    begins = ("<seed:tool_call>",)
    marks = ("<seed:tool_call>", "</seed:tool_call>")
    lines = False

    def fits(self, template: str) -> bool:
        return self.begins[0] in template


class Glm45(ToolFormat):
    """The name behind ``<tool_call>``, then pairs of ``<arg_key>`` and ``<arg_value>``: GLM 4.5 and 4.6."""

    name = "glm45"
    begins = ("<tool_call>",)
    marks = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    line = "\n"  # between tags

    def fits(self, template: str) -> bool:
        return "<tool_call>" in template and "<arg_key>" in template

    def grammar(self, functions: Sequence[JSON], most: int | None, words: Words) -> str:
        line = self.line
        frame = Frame(f"<tool_call>{{name}}{line}", "</tool_call>", between=line, marks=self.marks)
        pair = Members(f"<arg_key>{{key}}</arg_key>{line}<arg_value>", f"</arg_value>{line}", _plain)
        return forced(functions, most, frame, words, pair)

    def calls(self, source: Source, out: Out, tools: list[JSON], begin: str) -> Reading[None]:
        name = (yield from source.upto("\n", "<")).strip()
        if not NAME.fullmatch(name):
            raise Malformed
        schema, first = schema_of(tools, name), True
        yield from source.space()
        if (yield from source.first()) != "<":
            raise Malformed
        out.begin(name)
        out.more("{")
        while True:
            yield from source.space()
            if (yield from source.skip("<arg_key>")) is None:
                if not source.rest.startswith("</"):  # other arguments may have been to come
                    raise Malformed
                out.more("}")
                yield from source.close("</tool_call>")
                return
            key = yield from source.upto("</arg_key>")
            yield from source.expect("</arg_key>")
            yield from source.space()
            yield from source.expect("<arg_value>")
            out.more(f"{'' if first else ', '}{quoted(key)}: ")
            first = False
            # What may be cut is the last mark of a way, so the end has one before it: the empty one.
            follows = (("<arg_key>",),), (("",), ("</tool_call>",))
            yield from tagged_value(source, out, key, schema, "</arg_value>", follows, False)


class Glm47(Glm45):
    """The same without line breaks: GLM 4.7 and later."""

    name = "glm47"
    line = ""

    def fits(self, template: str) -> bool:
        return super().fits(template) and "</arg_key><arg_value>" in template


class DeepSeek32(ToolFormat):
    """``<｜DSML｜invoke name="...">`` with a parameter for each argument, which says whether its value is text or JSON:
    DeepSeek V3.2."""

    name = "deepseek_v32"
    block = "function_calls"  # what stands around calls
    begins = ("<｜DSML｜function_calls>",)
    marks = ("｜DSML｜",)

    def fits(self, template: str) -> bool:
        return self.marks[0] in template and DeepSeek32.block in template

    def grammar(self, functions: Sequence[JSON], most: int | None, words: Words) -> str:
        frame = Frame(
            '<｜DSML｜invoke name="{name}">\n', "</｜DSML｜invoke>\n", f"<｜DSML｜{self.block}>\n",
            end=f"</｜DSML｜{self.block}>", marks=self.marks,
        )  # fmt: skip
        head = '<｜DSML｜parameter name="{key}" string="{text}">'
        return forced(functions, most, frame, words, Members(head, "</｜DSML｜parameter>\n", _quotable))

    def calls(self, source: Source, out: Out, tools: list[JSON], begin: str) -> Reading[None]:
        invoke = '<｜DSML｜invoke name="'
        yield from source.space()
        yield from source.expect(invoke)
        while True:
            yield from self._function(source, out, tools, invoke)
            yield from source.space()
            if (yield from source.skip(invoke)) is None:
                yield from source.close(f"</｜DSML｜{self.block}>")
                return
            out.end()

    def _function(self, source: Source, out: Out, tools: list[JSON], invoke: str) -> Reading[None]:
        parameter, end = '<｜DSML｜parameter name="', "</｜DSML｜invoke>"
        follows = ((parameter,),), ((end,), (invoke, f"</｜DSML｜{self.block}>"))
        name, first = (yield from source.upto('"')), True
        yield from source.expect('">')
        if not NAME.fullmatch(name):
            raise Malformed
        out.begin(name)
        out.more("{")
        while True:
            yield from source.space()
            if (yield from source.expect(parameter, end)) == end:
                out.more("}")
                return
            key, spoken = (yield from source.upto('"')), None
            if (yield from source.expect('" string="', '">')) != '">':
                spoken = (yield from source.expect("true", "false")) == "true"
                yield from source.expect('">')
            out.more(f"{'' if first else ', '}{quoted(key)}: ")
            first = False
            schema = schema_of(tools, name)
            yield from tagged_value(source, out, key, schema, "</｜DSML｜parameter>", follows, False, spoken)


class DeepSeek4(DeepSeek32):
    """The same in a block of another name: DeepSeek V4."""

    name = "deepseek_v4"
    block = "tool_calls"
    begins = ("<｜DSML｜tool_calls>",)

    def fits(self, template: str) -> bool:
        return self.marks[0] in template and DeepSeek32.block not in template


def _quotable(key: str) -> bool:
    """Whether a name can stand in quotes."""
    return bool(key) and '"' not in key and "\n" not in key


def _named(source: Source) -> Reading[str]:
    """The rest of a tag that ends with its name."""
    name = yield from source.upto(">")
    yield from source.expect(">")
    if not _plain(name):
        raise Malformed
    return name
