"""Items of responses, and messages of conversations: one into the other."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from saccade.errors import shown
from saccade.server.errors import bad_request
from saccade.server.tool_formats.parts import Begun

JSON = dict[str, Any]
_COMPACTED = "saccade1:"  # the form of encrypted_content
_SUMMARY = "Summary of our conversation so far:\n"


def messages_of(given: str | Sequence[JSON]) -> list[JSON]:
    """A conversation for a chat template. What a model thought before is left out, as templates do. 400 for items of
    other kinds."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[JSON] = []
    for index, item in enumerate(given):
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            _add_message(messages, item, after=given[index - 1] if index else {})
        elif kind == "function_call" and item.get("status") == "incomplete":
            continue  # it was told while it was written, and is text behind
        elif kind == "function_call":
            _add_call(messages, item, index)
        elif kind == "compaction":
            messages.append({"role": "user", "content": _SUMMARY + summary_of(item, f"input[{index}]")})
        elif kind == "function_call_output":
            output = _parts(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind != "reasoning":
            raise bad_request(
                f"input[{index}] is of type {shown(kind, 60)}, which is not supported; give messages, function_call, "
                "function_call_output and compaction",
                "input",
                "unsupported_content",
            )
    return messages


def check_calls(messages: Sequence[JSON]) -> None:
    """400 for the output of a function that was not called."""
    calls = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
    called = {one for one in calls if isinstance(one, str)}
    for message in messages:
        name = message.get("tool_call_id", "")
        if "tool_call_id" in message and not (isinstance(name, str) and name in called):
            raise bad_request(
                f"there is no function_call whose call_id is {shown(name, 80)}, that of a function_call_output, in "
                "input or in what it goes on from",
                "input",
                "call_not_found",
            )


def compaction_item(summary: str) -> JSON:
    """A conversation in short. ``encrypted_content`` is opaque to clients; it holds what they said, so it is no secret
    from them, and nothing that comes back in it is trusted."""
    content = _COMPACTED + base64.b64encode(summary.encode("utf-8", "replace")).decode()
    return {"type": "compaction", "id": f"cmp_{uuid4().hex}", "encrypted_content": content}


def summary_of(item: JSON, where: str) -> str:
    """What :func:`compaction_item` holds. 400 for what no server of this kind made."""
    content = item.get("encrypted_content")
    try:
        if not isinstance(content, str) or not content.startswith(_COMPACTED):
            raise ValueError
        return base64.b64decode(content.removeprefix(_COMPACTED), validate=True).decode()
    except ValueError as error:
        raise bad_request(
            f"{where} is a compaction that was not made by POST /v1/responses/compact of this server", "input"
        ) from error


def _parts(content: Any) -> Any:
    """Refusals of earlier answers are text to a template."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("refusal")}
        if isinstance(part, dict) and part.get("type") == "refusal"
        else part
        for part in content
    ]


def _add_message(messages: list[JSON], item: JSON, after: JSON) -> None:
    """What a user says behind a summary is one message with it: many templates want turns that alternate."""
    message = {"role": item.get("role"), "content": _parts(item.get("content"))}
    if after.get("type") == "compaction" and message["role"] == "user" and isinstance(message["content"], (str, list)):
        said = message["content"]
        parts = [{"type": "text", "text": said}] if isinstance(said, str) else said
        messages[-1]["content"] = [{"type": "text", "text": f"{messages[-1]['content']}\n"}, *parts]
    else:
        messages.append(message)


def _add_call(messages: list[JSON], item: JSON, index: int) -> None:
    """Calls that follow each other are one message's."""
    if not isinstance(item.get("name"), str):
        raise bad_request(f"input[{index}] is a function_call without a name", "input")
    call = {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": item["name"], "arguments": item.get("arguments") or "{}"},
    }
    if messages and messages[-1]["role"] == "assistant":
        last = messages[-1]
        messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", []), call]}
    else:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})


def chat_tools(tools: Sequence[JSON]) -> list[JSON]:
    """Tools in the form of chats. 400 for those that only OpenAI runs."""
    made = []
    for index, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise bad_request(
                f"tools[{index}] is of type {shown(tool.get('type'), 60)}; this server knows functions alone",
                "tools",
                "unsupported_field",
            )
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        made.append({"type": "function", "function": function})
    return made


def chat_choice(choice: str | JSON | None) -> str | JSON | None:
    """``tool_choice`` in the form of chats."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def kept_items(given: str | Sequence[JSON]) -> list[JSON]:
    """What a response was asked with, as it is shown later: each item with an id, contents as lists of parts."""
    items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
    kept: list[JSON] = []
    for one in items:
        item: JSON = {"type": "message", "id": f"item_{uuid4().hex}", "status": "completed", **one}
        if isinstance(item.get("content"), str):
            text = item["content"]
            answer = item.get("role") == "assistant"
            item["content"] = [text_part(text) if answer else {"type": "input_text", "text": text}]
        kept.append(item)
    return kept


def text_part(text: str, logprobs: Sequence[JSON] = ()) -> JSON:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def message_item(status: str, content: list[JSON], item_id: str | None = None) -> JSON:
    return {
        "type": "message",
        "id": item_id or f"msg_{uuid4().hex}",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def reasoning_item(status: str, text: str, item_id: str | None = None) -> JSON:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {
        "type": "reasoning",
        "id": item_id or f"rs_{uuid4().hex}",
        "status": status,
        "summary": [],
        "content": content,
        "encrypted_content": None,
    }


def call_item(call: Begun, status: str, arguments: str, item_id: str | None = None) -> JSON:
    return {
        "type": "function_call",
        "id": item_id or f"fc_{uuid4().hex}",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": arguments,
    }
