"""Tools: what a model may call, and its calls, read out of its answer.

Formats: ``hermes`` (Qwen 2.5 and 3 write it too), ``qwen3_coder`` (XML of Qwen3-Coder), ``llama3_json``.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from saccade.errors import shown
from saccade.server.errors import bad_request
from saccade.server.protocol import ChatRequest
from saccade.server.reasoning import overlap

JSON = dict[str, Any]
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass
class Call:
    """``arguments``: JSON as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def as_dict(self) -> JSON:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def _call(value: Any) -> Call | None:
    """A call of an object that names a function and its arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return Call(value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _json_calls(text: str) -> list[Call] | None:
    """The calls of JSON objects, one after the other or in a list, semicolons between them; None for anything else."""
    decoder, calls, at = json.JSONDecoder(), [], 0
    text = text.strip()
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            for one in value if isinstance(value, list) else [value]:
                call = _call(one)
                if call is None:
                    return None
                calls.append(call)
            while at < len(text) and text[at] in "; \n\t\r,":
                at += 1
    except (ValueError, RecursionError):
        return None
    return calls or None


_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _xml_calls(text: str, tools: list[JSON]) -> list[Call] | None:
    """Qwen3-Coder's: values are JSON where the tool's schema says that they are no text."""
    types = {
        tool["function"]["name"]: (tool["function"].get("parameters") or {}).get("properties") or {} for tool in tools
    }
    calls = []
    for name, inside in _FUNCTION.findall(text):
        arguments = {}
        for key, value in _PARAMETER.findall(inside):
            known = types.get(name, {}).get(key)
            arguments[key] = value if not isinstance(known, dict) or known.get("type") == "string" else _value(value)
        calls.append(Call(name, json.dumps(arguments, ensure_ascii=False)))
    return calls or None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


@dataclass(frozen=True)
class ToolFormat:
    """Calls stand between ``begin`` and ``end``; where ``begin`` is empty, an answer that is JSON is calls."""

    begin: str
    end: str
    read: Callable[[str, list[JSON]], list[Call] | None]


FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", lambda text, tools: _json_calls(text)),
    "qwen3_coder": ToolFormat(
        "<tool_call>", "</tool_call>", lambda text, tools: _xml_calls(text, tools) or _json_calls(text)
    ),
    "llama3_json": ToolFormat("", "", lambda text, tools: _json_calls(text.removeprefix("<|python_tag|>"))),
}


class ToolReader:
    """Reads one answer piece by piece: text, and calls, each whole. What only looks like a call stays text."""

    def __init__(self, format: ToolFormat, tools: list[JSON]) -> None:
        self._format, self._tools, self._held, self._inside = format, tools, "", False
        self._lead = True  # nothing but white space came yet

    def feed(self, text: str, final: bool = False) -> tuple[str, list[Call]]:
        """(text, calls) of what may be told now."""
        self._held += text
        if self._lead and not final and not self._held.strip():
            return "", []
        if not self._format.begin:
            return self._whole(final)
        said, calls = "", []
        while True:
            if not self._inside:
                before, marker, rest = self._held.partition(self._format.begin)
                if not marker:
                    cut = len(self._held) - (0 if final else overlap(self._held, self._format.begin))
                    said += self._held[:cut]
                    self._held = self._held[cut:]
                    break
                said, self._held, self._inside = said + before, rest, True
            inside, marker, rest = self._held.partition(self._format.end)
            if not marker and not final:
                break
            found = self._format.read(inside, self._tools)
            if found is None:
                said += self._format.begin + inside + marker
            else:
                calls += found
            self._held, self._inside = rest, False
            if not marker:
                break
        self._lead = self._lead and not said.strip()
        return said, calls

    def _whole(self, final: bool) -> tuple[str, list[Call]]:
        bare = self._held.lstrip()
        if not bare.startswith(("{", "[", "<|python_tag|>"[: len(bare)] or "<")) or not self._lead:
            self._lead = False
            said, self._held = self._held, ""
            return said, []
        if not final:
            return "", []
        said, self._held = self._held, ""
        calls = self._format.read(said.strip(), self._tools)
        return (said, []) if calls is None else ("", calls)


class ForcedReader:
    """Reads an answer that a grammar made a call: the arguments of ``name``, or a list of calls where it is None."""

    def __init__(self, name: str | None) -> None:
        self._name, self._held = name, ""

    def feed(self, text: str, final: bool = False) -> tuple[str, list[Call]]:
        self._held += text
        if not final:
            return "", []
        calls = [Call(self._name, self._held)] if self._name is not None else _json_calls(self._held)
        return ("", calls) if calls else (self._held, [])


@dataclass
class ToolChoice:
    """What a request says of tools. ``tools``: those that the template shows. ``schema``: what the answer must follow
    where a call is asked for. ``name``: the function that must be called."""

    tools: list[JSON]
    schema: Any = None
    name: str | None = None

    @property
    def forced(self) -> bool:
        return self.schema is not None


def tool_choice(body: ChatRequest) -> ToolChoice:
    """400 for tools that are none, and for a choice among none."""
    tools, choice = body.tools or [], body.tool_choice
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise bad_request(f"tools[{index}] must be {{'type': 'function', 'function': {{...}}}}", "tools")
        if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
            raise bad_request(f"tools[{index}].function.name={shown(function.get('name'))} is no name", "tools")
        if not isinstance(function.get("parameters", {}), (dict, type(None))):
            raise bad_request(f"tools[{index}].function.parameters must be a JSON schema", "tools")
    names = [tool["function"]["name"] for tool in tools]
    if choice in (None, "auto", "none"):
        return ToolChoice([] if choice == "none" else tools)
    if not tools:
        raise bad_request("tool_choice needs tools", "tool_choice")
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"} for tool in tools}
    if choice == "required":
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schemas[name]},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name in names
        ]
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        return ToolChoice(tools, schema | ({"maxItems": 1} if body.parallel_tool_calls is False else {}))
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        raise bad_request(
            f"tool_choice={shown(choice)} must be auto, none, required or name one of: {', '.join(names)}",
            "tool_choice",
        )
    return ToolChoice(tools, schemas[name], name)
