"""Values of arguments that models write as text, between tags: JSON or text, as the tool's schema says."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

from saccade.server.tool_formats.json_reading import is_plain_json
from saccade.server.tool_formats.parts import JSON, is_json

_PYTHON = {"True": "true", "False": "false", "None": "null"}
_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


def schema_of(tools: list[JSON], name: str) -> JSON:
    """The parameters of the tool ``name``, of the last one if there are several; an empty schema for another name."""
    found = [tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name]
    return found[-1] if found and isinstance(found[-1], dict) else {}


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def is_text(key: str, schema: JSON) -> bool:
    """Whether a value is text, whatever it reads like: nothing says that it may be anything else."""
    known = _property(key, schema)
    return known is None or kinds_of(known, schema) == {"string"}


def json_of(text: str, key: str, schema: JSON) -> str:
    """A value as JSON: what the model wrote, where that is JSON of a kind that the schema has and is no text."""
    known = _property(key, schema)
    if known is None:
        return quoted(text)
    kinds = kinds_of(known, schema)
    if kinds is not None and "string" in kinds and _kind(text) not in kinds - {"string"}:
        return quoted(text)
    bare = text.strip()
    if kinds is not None and "string" not in kinds:
        bare = _PYTHON.get(bare, bare)  # some templates write True for true
    return bare if is_plain_json(bare) else quoted(text)


def properties_of(schema: JSON) -> JSON:
    """The properties of a schema, or of the one that it refers to."""
    seen: set[int] = set()
    one: Any = schema
    while isinstance(one, dict) and id(one) not in seen:
        seen.add(id(one))
        if isinstance(one.get("properties"), dict):
            return dict(one["properties"])
        reference = one.get("$ref")
        one = target_of(reference[2:], schema) if isinstance(reference, str) and reference[:2] == "#/" else None
    return {}


def _property(key: str, schema: JSON) -> JSON | bool | None:
    known = properties_of(schema).get(key)
    return known if isinstance(known, (dict, bool)) else None


def _kind(text: str) -> str | None:
    """The type that a text has as JSON; None if it is none."""
    bare = text.strip()
    if not is_json(bare):
        return None
    return _KINDS.get(bare[0]) or ("integer" if bare.lstrip("-").isdigit() else "number")


def kinds_of(schema: Any, root: JSON) -> set[str] | None:
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
            left.append(target_of(reference[2:], root))
        else:
            return None
    return kinds | {"integer"} if "number" in kinds else kinds


def target_of(pointer: str, root: JSON) -> Any:
    """What ``#/pointer`` refers to; None for nothing."""
    target: Any = root
    for part in pointer.split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, dict) else None
    return target
