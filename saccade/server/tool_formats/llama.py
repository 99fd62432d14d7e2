"""Llama's own calls: JSON that is a whole answer, and what stands behind ``<|python_tag|>``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from saccade.server.tool_formats.base import names_of
from saccade.server.tool_formats.forcing import Frame
from saccade.server.tool_formats.json_formats import JsonList
from saccade.server.tool_formats.json_reading import json_calls
from saccade.server.tool_formats.parts import JSON
from saccade.server.tool_formats.pythonic import python_arguments
from saccade.server.tool_formats.reading import Out
from saccade.server.tool_formats.schema_values import kinds_of, properties_of, schema_of
from saccade.server.tool_formats.source import Malformed, Reading, Source

# Names of tools that code behind the tag is for.
INTERPRETERS = ("code_interpreter", "python", "ipython", "python_interpreter")
_BUILT_IN = re.compile(r"\s*([A-Za-z0-9_.-]+)\.call\(")


class Llama3Json(JsonList):
    """Llama 3. Behind ``<|python_tag|>``: JSON, ``tool.call(key=value)``, or code for an interpreter among the
    tools."""

    name = "llama3_json"
    begins: tuple[str, ...] = ("<|python_tag|>",)
    marks = begins
    several = False  # the template shows one call
    frame = Frame('{"name": "{name}", "parameters": ', "}")
    header = "<|start_header_id|>"
    end = ""

    def fits(self, template: str) -> bool:
        return '"parameters"' in template and self.header in template

    def calls(self, source: Source, out: Out, tools: list[JSON], begin: str) -> Reading[None]:
        yield from source.space()
        if (yield from source.first()) in ("{", "["):
            yield from json_calls(source, out)
            yield from source.space()
            if self.end:
                yield from source.skip(self.end)
            if source.rest:
                raise Malformed
            return
        while not source.final and not (self.end and self.end in source.rest):
            yield
        size = source.rest.find(self.end) if self.end and self.end in source.rest else len(source.rest)
        code = source.take(size)
        if self.end:
            yield from source.skip(self.end)
        _code(code, out, tools)


class Llama4Json(Llama3Json):
    """Llama 4, whose mark is ``<|python_start|>``."""

    name = "llama4_json"
    begins = ("<|python_start|>",)
    marks = ("<|python_start|>", "<|python_end|>")
    several = True
    header = "<|header_start|>"
    end = "<|python_end|>"


def _code(code: str, out: Out, tools: Sequence[JSON]) -> None:
    """Code as a call. Malformed where no tool is meant by it."""
    names = names_of(list(tools))
    built_in = _BUILT_IN.match(code)
    if built_in is not None and built_in[1] in names:
        inner = Source()
        inner.feed(code[built_in.end() :].rstrip(), True)
        out.begin(built_in[1])
        for _ in python_arguments(inner, out):
            pass
        if inner.rest:
            raise Malformed
        return
    name = next((one for one in INTERPRETERS if one in names), None)
    if name is None or not code.strip():
        raise Malformed
    schema = schema_of(list(tools), name)
    texts = [key for key, one in properties_of(schema).items() if kinds_of(one, schema) in (None, {"string"})]
    out.begin(name)
    out.more("{" + json.dumps(texts[0] if texts else "code") + ": " + json.dumps(code, ensure_ascii=False) + "}")
