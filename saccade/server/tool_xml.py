"""Calls of tools as Qwen3-Coder writes them: XML, whose values are text or JSON as the tool's schema says."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import unquote

from saccade.server.tool_json import JSON, Call, is_json

# A value may hold closing tags itself: those count that the next tag, or the end, follows.
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>(?=\s*(?:<function=|\Z))\s*", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))\s*",
    re.DOTALL,
)
_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


def xml_calls(text: str, tools: list[JSON]) -> list[Call] | None:
    """Calls, and nothing besides; None for anything else."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    functions = _all(_FUNCTION, text)
    if not functions:
        return None
    calls = []
    for name, inside in functions:
        parameters = _all(_PARAMETER, inside)
        if parameters is None:
            return None
        schema = schemas.get(name, {})
        members = [f"{_quoted(key)}: {_value(value, key, schema)}" for key, value in parameters]
        calls.append(Call(name, "{" + ", ".join(members) + "}"))
    return calls


def _all(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]] | None:
    """What ``pattern`` finds one after the other, white space aside; None where something else is left."""
    found, at = [], 0
    while at < len(text) and (match := pattern.match(text, at)):
        found.append((match[1], match[2]))
        at = match.end()
    return found if not text[at:].strip() else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _value(text: str, key: str, schema: JSON) -> str:
    """A value as JSON: what the model wrote, where that is JSON of a kind that the schema has and is no text."""
    properties = schema.get("properties")
    known = properties.get(key) if isinstance(properties, dict) else None
    if not isinstance(known, (dict, bool)):  # nothing says that it is anything but text
        return _quoted(text)
    kinds = _kinds(known, schema)
    if kinds is not None and "string" in kinds and _kind(text) not in kinds - {"string"}:
        return _quoted(text)
    bare = text.strip()
    return bare if is_json(bare) else _quoted(text)


def _kind(text: str) -> str | None:
    """The type that a text has as JSON; None if it is none."""
    bare = text.strip()
    if not is_json(bare):
        return None
    return _KINDS.get(bare[0]) or ("integer" if bare.lstrip("-").isdigit() else "number")


def _kinds(schema: Any, root: JSON) -> set[str] | None:
    """The types that a schema allows; None where it does not say."""
    kinds: set[str] = set()
    seen: set[int] = set()
    left = [schema]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if not isinstance(one, dict):
            return None
        reference = one.get("$ref")
        if (given := one.get("type")) is not None:
            kinds |= {kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)}
        elif "const" in one or isinstance(one.get("enum"), list):
            values = [one["const"]] if "const" in one else one["enum"]
            kinds |= {kind for value in values if (kind := _kind(json.dumps(value))) is not None}
        elif isinstance(choice := one.get("anyOf", one.get("oneOf")), list):
            left += choice
        elif isinstance(reference, str) and reference.startswith("#/"):
            left.append(_target(reference[2:], root))
        else:
            return None
    return kinds | {"integer"} if "number" in kinds else kinds


def _target(pointer: str, root: JSON) -> Any:
    target: Any = root
    for part in pointer.split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, dict) else None
    return target
