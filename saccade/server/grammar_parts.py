"""Grammars made of others, each part a document of its own."""

from __future__ import annotations

import json
from typing import Any

JSON = dict[str, Any]
# What a model thinks. The first end marker ends it, wherever a token begins.
THOUGHTS = "(?s:.*)"


def after_thoughts(source: str, before: str, begin: str, end: str, opened: bool, token: bool = False) -> str:
    """``source``, a grammar as llguidance writes it, behind thoughts. ``begin``, ``end``: what stands around them, as
    Lark has it; ``token``: ``end`` begins with a token. ``before``: what stands between them and the answer. Where the
    prompt has not ``opened`` thoughts they may be left out."""
    inside = f"THOUGHTS? {end}" if token else "upto"
    thoughts = inside if opened else f"({begin} {inside})?"
    terminal = f"THOUGHTS: /{THOUGHTS}/\n" if token else f"upto[lazy]: THOUGHTS\nTHOUGHTS: /{THOUGHTS}/ {end}\n"
    return joined(f"start: {thoughts} {before} @answer\n{terminal}", named(source, "answer"))


def named(source: str, name: str) -> list[JSON]:
    """The grammars of ``source``, of which the first is called ``name``."""
    try:
        first, *others = json.loads(source)["grammars"]
    except (ValueError, TypeError, KeyError):  # Lark's syntax
        first, others = {"lark_grammar": source}, []
    return [{**first, "name": name}, *others]


def joined(lark: str, *parts: list[JSON]) -> str:
    """A grammar of ``lark``'s rules, which name ``parts``."""
    return json.dumps({"grammars": [{"lark_grammar": lark}, *(one for part in parts for one in part)]})
