"""Anthropic's blocks of content, tools and choices in the form of chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saccade.errors import shown
from saccade.server.anthropic_protocol import Choice
from saccade.server.errors import ApiError, bad_request

JSON = dict[str, Any]
ERROR = "Error: "  # before the result of a tool that failed: templates have no other place for it
_ROLES = ("user", "assistant", "system")


def chat_messages(messages: Sequence[JSON]) -> list[JSON]:
    """A conversation for a chat template. Results of tools are messages of their own, ``thinking`` is the message's
    ``reasoning_content``. 400 for what is no text."""
    made: list[JSON] = []
    called: dict[str, str] = {}  # names of functions, by the ids of their calls
    for index, message in enumerate(messages):
        where, role, content = f"messages[{index}]", message.get("role"), message.get("content")
        if role not in _ROLES:
            raise bad_request(f"{where}.role={shown(role, 40)} must be user or assistant", "messages")
        if isinstance(content, str):
            made.append({"role": role, "content": content})
        elif not isinstance(content, list):
            raise bad_request(f"{where}.content must be text or a list of blocks", "messages")
        elif role == "assistant":
            made.append(_answer(content, where, called))
        else:
            made += _turn(role, content, where, called)
    return made


def texts(blocks: Any, where: str, param: str = "messages") -> list[str]:
    """The texts of blocks that must be text."""
    if not isinstance(blocks, list):
        raise bad_request(f"{where} must be text or a list of blocks", param)
    return [_text(block, f"{where}[{index}]", param) for index, block in enumerate(blocks)]


def chat_tools(tools: Sequence[JSON]) -> list[JSON]:
    """Tools in the form of chats. 400 for those that only Anthropic runs."""
    made = []
    for index, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            raise bad_request(
                f"tools[{index}] is of type {shown(tool['type'], 60)}; this server knows tools with an input_schema "
                "alone, which the client runs",
                "tools",
                "unsupported_field",
            )
        if not isinstance(tool.get("input_schema"), dict):
            raise bad_request(f"tools[{index}].input_schema must be a JSON schema", "tools")
        names = {"name": "name", "description": "description", "parameters": "input_schema"}  # in the usual order
        function = {ours: tool[theirs] for ours, theirs in names.items() if tool.get(theirs) is not None}
        made.append({"type": "function", "function": function})
    return made


def chat_choice(choice: Choice | None) -> str | JSON | None:
    """``tool_choice`` in the form of chats."""
    if choice is None or choice.type in ("auto", "none"):
        return None if choice is None else choice.type
    return "required" if choice.type == "any" else {"type": "function", "function": {"name": choice.name}}


def renamed_tool(error: ApiError) -> ApiError:
    """An error about a tool, in the words that Anthropic has for its parts."""
    message = error.message.replace(".function.parameters", ".input_schema").replace(".function.name", ".name")
    return ApiError(error.status, message, error.code, error.param, error.headers)


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else block


def _text(block: Any, where: str, param: str = "messages") -> str:
    """The text of a block, or of a document of plain text."""
    kind = _kind(block)
    if kind == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    source = block.get("source") if kind == "document" else None
    if isinstance(source, dict) and source.get("type") == "text" and isinstance(source.get("data"), str):
        title = block.get("title")
        return f"{title}\n{source['data']}" if isinstance(title, str) and title else str(source["data"])
    named = f"an {kind}" if kind == "image" else f"of type {shown(kind, 60)}"
    raise bad_request(f"{where} is {named}; this model reads text alone", param, "unsupported_content")


def _turn(role: str, blocks: list[Any], where: str, called: dict[str, str]) -> list[JSON]:
    """What a user says and what tools gave, in order."""
    made: list[JSON] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        if _kind(block) == "tool_result":
            made.append(_result(block, place, called))
        elif made and "tool_call_id" not in made[-1]:
            made[-1]["content"].append({"type": "text", "text": _text(block, place)})
        else:
            made.append({"role": role, "content": [{"type": "text", "text": _text(block, place)}]})
    return made or [{"role": role, "content": ""}]


def _result(block: JSON, where: str, called: dict[str, str]) -> JSON:
    name, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(name, str) or name not in called:
        raise bad_request(
            f"{where} is the result of {shown(name, 80)}, but no tool_use before it has that id", "messages"
        )
    said = [content] if isinstance(content, str) else texts([] if content is None else content, f"{where}.content")
    if block.get("is_error") is True:
        said = [ERROR + "\n".join(said)]
    parts = [{"type": "text", "text": text} for text in said]
    return {"role": "tool", "tool_call_id": name, "name": called[name], "content": parts}


def _answer(blocks: list[Any], where: str, called: dict[str, str]) -> JSON:
    """What the model said before: text, thoughts and calls."""
    message: JSON = {"role": "assistant", "content": []}
    thoughts, calls = [], []
    for index, block in enumerate(blocks):
        place, kind = f"{where}.content[{index}]", _kind(block)
        if kind == "thinking":
            if not isinstance(block.get("thinking"), str):
                raise bad_request(f"{place}.thinking must be text", "messages")
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            name, given, number = block.get("name"), block.get("input"), block.get("id")
            if not isinstance(name, str) or not isinstance(given, dict) or not isinstance(number, str):
                raise bad_request(f"{place} must have an id, a name and an input, which is an object", "messages")
            called[number] = name
            calls.append({"id": number, "type": "function", "function": {"name": name, "arguments": given}})
        elif kind != "redacted_thinking":  # only the service that wrote them can read those
            message["content"].append({"type": "text", "text": _text(block, place)})
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message
