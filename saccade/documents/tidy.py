"""Collected words in the shape of a text file."""

from __future__ import annotations

import re

_TAB = re.compile(r"(?<! ) *\t *")  # from where a run of spaces begins alone: it may be long
_CELL = re.compile(r"(?<!\n)\n+\t")
_LINES = re.compile(r"\n{3,}")


def tidied(text: str) -> str:
    """No spaces at ends of lines and around tabs, one empty line at most, and a line break at the end; "" for a text
    of spaces."""
    lines = "\n".join(line.rstrip(" \t") for line in _TAB.sub("\t", text).split("\n"))
    text = _LINES.sub("\n\n", lines).strip()
    return text + "\n" if text else ""


def cells(text: str) -> str:
    """``text`` whose cells end with a tab: the last paragraph of one ends no line."""
    return _CELL.sub("\t", text)
