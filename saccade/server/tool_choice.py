"""What a request says of tools: those that a model may call, and those of which it must call one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saccade.errors import shown
from saccade.server.errors import ApiError, bad_request
from saccade.server.grammar import constraint_of
from saccade.server.protocol import ChatRequest
from saccade.server.serving import Serving
from saccade.server.tool_formats.base import ToolFormat
from saccade.server.tool_formats.parts import JSON
from saccade.server.tool_formats.words import Words

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass
class ToolChoice:
    """``tools``: those that the template shows. ``called``: the functions of which one must be called. ``most``: how
    many calls may be made."""

    tools: list[JSON]
    called: Sequence[JSON] = ()
    most: int | None = None

    @property
    def forced(self) -> bool:
        return bool(self.called)

    def grammar(self, format: ToolFormat, words: Words) -> tuple[str, str]:
        """What an answer that must be a call follows in a model's format, as llguidance writes it, and the field that
        says so."""
        return _grammar(format, self.called, self.most, words), "tools"

    async def fault(self, serving: Serving, format: ToolFormat) -> ApiError | None:
        """The first of the tools whose parameters no grammar can be made of."""
        for index, tool in enumerate(self.tools):
            if any(tool["function"] is one for one in self.called):
                param = f"tools[{index}].function.parameters"
                try:
                    await constraint_of(serving, (_grammar(format, [tool["function"]], 1, serving.words), param))
                except ApiError as error:
                    return ApiError(error.status, error.message, error.code, "tools")
        return None


def _grammar(format: ToolFormat, functions: Sequence[JSON], most: int | None, words: Words) -> str:
    try:
        return format.grammar(functions, most, words)
    except (ValueError, KeyError, RecursionError) as error:
        raise bad_request(f"the parameters of the tools cannot be read: {error}", "tools") from error


def tool_choice(body: ChatRequest) -> ToolChoice:
    """400 for tools that are none, and for a choice among none."""
    tools, choice = body.tools or [], body.tool_choice
    for index, tool in enumerate(tools):
        _check(tool, f"tools[{index}]")
    functions = [tool["function"] for tool in tools]
    if choice in (None, "auto", "none"):
        return ToolChoice([] if choice == "none" else tools)
    if not tools:
        raise bad_request("tool_choice needs tools", "tool_choice")
    if choice == "required":
        return ToolChoice(tools, functions, 1 if body.parallel_tool_calls is False else None)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    called = [one for one in functions if one["name"] == name]
    if not called:
        names = ", ".join(one["name"] for one in functions)
        raise bad_request(
            f"tool_choice={shown(choice)} must be auto, none, required or name one of: {names}", "tool_choice"
        )
    return ToolChoice(tools, called, 1)


def _check(tool: Any, where: str) -> None:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise bad_request(f"{where} must be {{'type': 'function', 'function': {{...}}}}", "tools")
    if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
        raise bad_request(f"{where}.function.name={shown(function.get('name'))} is no name", "tools")
    parameters = function.get("parameters")
    if not isinstance(parameters, (dict, type(None))):
        raise bad_request(f"{where}.function.parameters must be a JSON schema", "tools")
    kind = "object" if parameters is None else parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise bad_request(
            f"{where}.function.parameters.type={shown(kind, 60)} must be object: arguments have names", "tools"
        )
