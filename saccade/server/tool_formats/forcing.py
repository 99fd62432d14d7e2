"""Grammars of forced calls. Each tool's parameters are a document of its own: what a schema refers to is looked up in
that schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade.server.grammar import json_grammar
from saccade.server.grammar_parts import joined, named
from saccade.server.tool_formats.parts import JSON
from saccade.server.tool_formats.schema_values import kinds_of, properties_of, target_of
from saccade.server.tool_formats.words import Words

_PLACE = "#/$defs/parameters"  # where all parameters lie in the schema of a single one
_VALUES = {"const", "enum", "default", "examples"}  # what is no schema, whatever it looks like
_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_REFERENCES = 64  # of a schema to the next one


@dataclass(frozen=True)
class Frame:
    """What stands around calls. ``{name}`` in ``before`` is the function's, ``{number}`` any number. ``marks``: texts
    that may be tokens."""

    before: str
    after: str = ""
    start: str = ""
    between: str = ""
    end: str = ""
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Members:
    """How arguments are written one by one: ``{key}`` in ``before`` is the argument's name, ``fits`` says whether it
    may be, ``{text}`` is true or false as the value is text or JSON, in formats that say so. ``text``: whether a value
    that is text stands there as it is, up to ``after``."""

    before: str
    after: str
    fits: Callable[[str], object]
    between: str = ""
    text: bool = True
    literals: tuple[str, str, str] = ("true", "false", "null")


def forced(
    functions: Sequence[JSON], most: int | None, frame: Frame, words: Words, members: Members | None = None
) -> str:
    """Calls of ``functions``, one at least and ``most`` at most, as llguidance writes it. The arguments are an object
    of JSON, or ``members``. ValueError for parameters that cannot be written so."""

    def text(written: str) -> str:
        return words(written, frame.marks)

    rules, parts, calls = [], [], []
    for index, function in enumerate(functions):
        schema = arguments_schema(function)
        if members is None:
            inside = f"@arguments{index}"
            parts.append(_document(schema, inside[1:]))
        else:
            inside = f"arguments{index}"
            rules += _member_rules(schema, inside, members, frame, words, parts)
        head = [text(piece.replace("{name}", function["name"])) for piece in frame.before.split("{number}")]
        calls.append(f"{' /[0-9]{1,3}/ '.join(head)} {inside} {text(frame.after)}")
    more = "" if most == 1 else f" ({text(frame.between)} call)*"
    start = f"start: {text(frame.start)} call{more} {text(frame.end)}\ncall: {' | '.join(calls)}\n"
    return joined(start + "".join(rules), *parts)


def arguments_schema(function: JSON) -> JSON:
    """What the arguments of a function must be: an object, and one without members where it has no parameters."""
    parameters: JSON | None = function.get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**parameters, "type": "object"}


def _document(schema: Any, name: str) -> list[JSON]:
    return named(json_grammar(schema), name)


def _member_rules(
    schema: JSON, name: str, members: Members, frame: Frame, words: Words, parts: list[list[JSON]]
) -> list[str]:
    """Rules of the arguments ``name``: those that are required, and others, in the order of the schema."""
    properties = properties_of(schema)
    needed = _required(schema)
    rules: list[str] = []
    must: list[str] = []
    may: list[str] = []
    for number, (key, one) in enumerate(properties.items()):
        if not members.fits(key):
            if key in needed:
                raise ValueError(f"an argument called {key!r} cannot be written in this model's format of calls")
            continue
        rule = f"{name}_{number}"
        more = one, key, schema, rule, members, frame, words, parts, rules
        rules.append(f"{rule}: {_told(*more) if '{text}' in members.before else _headed(None, *more)}\n")
        (must if key in needed else may).append(rule)
    if not properties and schema.get("additionalProperties", True) is not False and members.text:
        rules.append(_open(name, members, frame, words))
        return rules
    rules.append(f"{name}: {_sequence(must, may, words(members.between, frame.marks))}\n")
    return rules


def _told(one: Any, key: str, schema: JSON, *more: Any) -> str:
    """An argument whose head says whether its value is text: one way for each that it may be."""
    kinds = kinds_of(one, schema)
    ways = [_headed(True, one, key, schema, *more)] if kinds is not None and "string" in kinds else []
    if kinds != {"string"}:
        ways.append(_headed(False, one, key, schema, *more))
    return " | ".join(ways)


def _headed(
    text: bool | None, one: Any, key: str, schema: JSON, rule: str, members: Members, frame: Frame, words: Words,
    parts: list[list[JSON]], rules: list[str],
) -> str:  # fmt: skip
    """An argument and what stands before it. ``text``: what that says of the value; None where it says nothing."""
    spelt = members.before.replace("{key}", key).replace("{text}", "true" if text else "false")
    some = members if text is not False else replace(members, text=False)
    value = _value(one, key, schema, rule, some, frame, words, parts, rules, text is True)
    return f"{words(spelt, frame.marks)} {value}"


def _sequence(must: Sequence[str], may: Sequence[str], between: str) -> str:
    """All of ``must``, and any of ``may`` in order, ``between`` them."""
    if must or not between:
        rest = "".join(f" ({between} {one})?" for one in may)
        return f" {between} ".join(must) + rest or '""'
    ways = [f"{one}{''.join(f' ({between} {other})?' for other in may[at + 1 :])}" for at, one in enumerate(may)]
    return f"({' | '.join(ways)})?" if ways else '""'


def _open(name: str, members: Members, frame: Frame, words: Words) -> str:
    """Any arguments, as text, where a schema names none and closes none out."""
    head, tail = members.before.replace("{text}", "true").split("{key}")
    body = f"{words(head, frame.marks)} /[A-Za-z_][A-Za-z0-9_]{{0,31}}/ {words(tail, frame.marks)}"
    return f"{name}: ({body} {name}_text)*\n{_text_rule(f'{name}_text', members, frame, words)}"


def _value(
    one: Any, key: str, schema: JSON, rule: str, members: Members, frame: Frame, words: Words,
    parts: list[list[JSON]], rules: list[str], alone: bool,
) -> str:  # fmt: skip
    """The value of one argument, and what stands behind it. ``alone``: of its values those that are text."""
    kinds, behind = kinds_of(one, schema), words(members.after, frame.marks)
    resolved = _resolved(one, schema)
    values = [resolved["const"]] if "const" in resolved else resolved.get("enum")
    if members.text and kinds is not None and "string" in kinds:
        if isinstance(values, list):
            spoken = [value for value in values if isinstance(value, str) or not alone]
            texts = [value if isinstance(value, str) else json.dumps(value) for value in spoken]
            return f"({' | '.join(json.dumps(text) for text in texts)}) {behind}"
        rules.append(_text_rule(f"{rule}_text", members, frame, words, resolved if kinds == {"string"} else {}))
        return f"{rule}_text"
    if kinds is not None and kinds <= {"boolean", "null"} and not isinstance(values, list):
        true, false, null = members.literals
        spelt = ([true, false] if "boolean" in kinds else []) + ([null] if "null" in kinds else [])
        return f"({' | '.join(map(json.dumps, spelt))}) {behind}"
    parts.append(_document(_single(key, schema), f"{rule}_json"))
    return f"@{rule}_json {behind}"


def _text_rule(rule: str, members: Members, frame: Frame, words: Words, schema: JSON | None = None) -> str:
    """Text up to the mark behind it, which ends it wherever it comes first."""
    schema = schema or {}
    least, most = schema.get("minLength"), schema.get("maxLength")
    size = f"{{{least or 0},{'' if most is None else most}}}" if least or most is not None else "*"
    text = f"(?s:.{size})"
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and size == "*":
        text = ("" if pattern.startswith("^") else "(?s:.*)") + f"({pattern.removeprefix('^').removesuffix('$')})"
        text += "" if pattern.endswith("$") else "(?s:.*)"
    head = next((mark for mark in frame.marks if members.after.lstrip().startswith(mark)), members.after.strip())
    space = members.after[: len(members.after) - len(members.after.lstrip())]
    behind = members.after[len(space) + len(head) :]
    name, escaped = rule.upper(), text.replace("/", "\\/")
    tail = words(behind, frame.marks)
    if words.token(head) is not None:  # a token ends it, or the text of one
        return f"{rule}: ({name}? {words(space)} {words(head, frame.marks)}) {tail}\n{name}: /{escaped}/\n"
    return f"{rule}: {rule}_upto {tail}\n{rule}_upto[lazy]: {name}\n{name}: /{escaped}/ {json.dumps(space + head)}\n"


def _single(key: str, schema: JSON) -> JSON:
    """The schema of one argument, in which references mean what they mean among all parameters."""
    pointer = "/properties/" + key.replace("~", "~0").replace("/", "~1")
    if not isinstance(schema.get("properties"), dict):
        pointer = str(schema["$ref"]).removeprefix("#") + pointer
    head = {name: schema[name] for name in ("$schema", "$id", "id") if isinstance(schema.get(name), str)}
    inner = {name: value for name, value in schema.items() if name not in head}
    return {**head, "$ref": f"{_PLACE}{pointer}", "$defs": {"parameters": _moved(inner)}}


def _moved(given: Any, names: bool = False) -> Any:
    """A schema whose references to its own root follow it to ``_PLACE``. ``names``: a map of schemas by name."""
    if isinstance(given, list):
        return [_moved(one) for one in given]
    if not isinstance(given, dict) or (not names and isinstance(given.get("$id"), str)):  # another root
        return given
    made = {}
    for key, value in given.items():
        if not names and key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            made[key] = _PLACE + value[1:]
        elif not names and key in _VALUES:
            made[key] = value
        else:
            made[key] = _moved(value, not names and key in _MAPS)
    return made


def _resolved(one: Any, schema: JSON) -> JSON:
    """A schema behind its references within ``schema``."""
    for _ in range(_REFERENCES):
        reference = one.get("$ref") if isinstance(one, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        one = target_of(reference[2:], schema)
    return one if isinstance(one, dict) else {}


def _required(schema: JSON) -> set[str]:
    found = _resolved(schema, schema).get("required") if "$ref" in schema else schema.get("required")
    return {one for one in found if isinstance(one, str)} if isinstance(found, list) else set()
