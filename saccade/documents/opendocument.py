"""The text of OpenDocument files: ODT, ODS and ODP (OASIS OpenDocument 1.3, part 3)."""

from __future__ import annotations

import re
from itertools import islice
from xml.etree import ElementTree

from saccade.documents.notes import Notes
from saccade.documents.parts import MarkupError, Parts, attribute, local
from saccade.documents.tidy import cells, tidied

MOST_AGAIN = 100  # times that a row, a cell or a space stands for itself
MOST_COPIES = 10_000  # of elements that are repeated so: they may hold others that are
_LEFT_OUT = frozenset(
    ("tracked-changes", "annotation", "annotation-end", "sequence-decls", "forms", "settings", "notes", "ruby-text")
)
_SPACES = re.compile(r"[ \t\r\n]+")


def opendocument_text(parts: Parts) -> str:
    """Paragraphs by lines, cells apart by tabs, sheets and slides under their names, footnotes at the end. What was
    deleted, remarks and speakers' notes are left out."""
    manifest = "META-INF/manifest.xml"
    if manifest in parts.names and any(local(one.tag) == "encryption-data" for one in parts.tree(manifest).iter()):
        raise MarkupError("is locked by a password; save it without one, then give it again")
    notes = Notes()
    body = tidied(_Reader(notes).lines(parts.tree("content.xml")))
    return tidied(body + notes.at_end())


class _Reader:
    """Reads elements; ``copies``: how many more may stand for others."""

    def __init__(self, notes: Notes) -> None:
        self._notes, self._copies = notes, MOST_COPIES
        self._out: list[str] = []
        # An element or a text, whether the element's parts are behind us, and whether text in it is shown.
        self._stack: list[tuple[ElementTree.Element | str, bool, bool]] = []

    def lines(self, element: ElementTree.Element) -> str:
        self._out, self._stack = [], [(element, False, False)]
        while self._stack:  # a loop, since files nest as deeply as they like
            one, done, shown = self._stack.pop()
            if isinstance(one, str):
                self._out.append(_SPACES.sub(" ", one))
                continue
            tag = local(one.tag)
            if done:
                self._out.append("\t" if tag == "table-cell" else "\n")
            elif tag in ("tab", "line-break", "s"):
                self._out.append({"tab": "\t", "line-break": "\n"}.get(tag) or " " * _again(one, "c"))
            elif tag == "note":
                text = "".join(_Reader(Notes()).lines(part) for part in one if local(part.tag) == "note-body")
                self._out.append(self._notes.mark("note", attribute(one, "id") or str(id(one)), text))
            elif tag not in _LEFT_OUT:
                self._open(tag, one, shown or tag in ("p", "h"))
        return cells("".join(self._out))

    def _open(self, tag: str, one: ElementTree.Element, shown: bool) -> None:
        """An element's parts go on the stack, with the text between them where it is some."""
        if tag in ("table", "page") and (name := attribute(one, "name")):
            self._out.append(f"\n{name}\n\n" if tag == "page" or _is_sheet(one) else "")
        for _ in range(self._times(tag, one)):
            if tag in ("p", "h", "table-row", "table-cell"):
                self._stack.append((one, True, shown))
            for child in reversed(one):
                if shown and child.tail:
                    self._stack.append((child.tail, False, shown))
                self._stack.append((child, False, shown))
            if shown and one.text:
                self._stack.append((one.text, False, shown))

    def _times(self, tag: str, one: ElementTree.Element) -> int:
        """How often a row or a cell stands there: once where nothing is in it, or too much for a copy."""
        if tag not in ("table-row", "table-cell"):
            return 1
        times = _again(one, "number-rows-repeated" if tag == "table-row" else "number-columns-repeated")
        inside = list(islice(one.iter(), self._copies + 1)) if times > 1 else []
        if (times - 1) * len(inside) > self._copies or not any(part.text for part in inside):
            return 1
        self._copies -= (times - 1) * len(inside)
        return times


def _is_sheet(table: ElementTree.Element) -> bool:
    """Whether its cells say what they are, as those of spreadsheets do."""
    cell = table.find(".//{*}table-cell")
    return cell is not None and attribute(cell, "value-type") is not None


def _again(one: ElementTree.Element, name: str) -> int:
    text = attribute(one, name) or "1"
    return min(MOST_AGAIN, int(text)) if text.isdecimal() and len(text) < 10 else 1
