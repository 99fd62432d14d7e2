"""Conversations as clients send them, made ready for a chat template."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from saccade.errors import shown
from saccade.server.errors import bad_request
from saccade.server.shape import check_shape

JSON = dict[str, Any]
MOST_NESTING = 64  # brackets within brackets of arguments
_TEXT = ("text", "input_text", "output_text")


def _number(kind: Callable[[str], float]) -> Callable[[str], Any]:
    """Reads numbers; one that Python cannot hold stays text: a template would write ``Infinity`` for 1e999."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:  # thousands of digits
            return text
        return value if math.isfinite(value) else text

    return read


loads = json.JSONDecoder(parse_int=_number(int), parse_float=_number(float)).decode


def conversation(messages: Sequence[JSON]) -> list[JSON]:
    """Contents as text, arguments of calls as objects, ``developer`` as ``system``. 400 for anything but text."""
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: JSON) -> JSON:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise bad_request(f"messages[{index}] has no role; give system, user, assistant or tool", "messages")
    out = {name: value for name, value in message.items() if value is not None}
    out["role"] = "system" if role == "developer" else role
    out["content"] = _content(index, message.get("content"))
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise bad_request(f"messages[{index}].tool_calls must be a list", "messages")
        out["tool_calls"] = [_call(index, call) for call in calls]
    elif message.get("content") is None:
        raise bad_request(f"messages[{index}] ({role[:40]}) has no content", "messages")
    return out


def _content(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"messages[{index}].content must be text or a list of parts", "messages")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in _TEXT or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise bad_request(
                f"messages[{index}].content has a part of type {shown(kind, 60)}; this model reads text alone",
                "messages",
                "unsupported_content",
            )
        texts.append(part["text"])
    return "\n".join(texts)  # as vLLM joins them


def _call(index: int, call: Any) -> JSON:
    """Templates want arguments as objects; clients send JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"messages[{index}].tool_calls has a call without function.name", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        check_shape(arguments.encode("utf-8", "surrogatepass"), MOST_NESTING)  # the body's check passed over texts
        try:
            arguments = loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise bad_request(f"messages[{index}].tool_calls has arguments that are no JSON", "messages") from error
    return {**call, "function": {**function, "arguments": arguments}}
