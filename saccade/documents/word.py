"""The text of Word files (DOCX: ECMA-376, part 1, 17)."""

from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

from saccade.documents.notes import Notes
from saccade.documents.parts import Parts, attribute, local
from saccade.documents.tidy import cells, tidied

_LEFT_OUT = frozenset(("del", "moveFrom", "instrText", "Fallback", "pPr", "tabs"))
_NOTES = {"footnoteReference": ("footnotes", "footnote"), "endnoteReference": ("endnotes", "endnote")}


def word_text(parts: Parts, main: str) -> str:
    """Paragraphs of the body by lines, cells of a table apart by tabs, footnotes and endnotes at the end. What was
    deleted is left out."""
    stored = {kind: part for kind, part in parts.related(main).values() if part in parts.names}
    texts: dict[str, dict[str, str]] = {}

    def note(reference: str, name: str) -> str:
        kind, element = _NOTES[reference]
        if kind not in texts:
            found = parts.tree(stored[kind]).iterfind(f"{{*}}{element}") if kind in stored else ()
            texts[kind] = {attribute(one, "id") or "": _lines(one, lambda *_: "") for one in found}
        return notes.mark(kind, name, texts[kind].get(name, ""))

    notes = Notes()
    body = tidied(_lines(parts.tree(main), note))
    return tidied(body + notes.at_end())


def _lines(element: ElementTree.Element, note: Callable[[str, str], str]) -> str:
    out: list[str] = []
    stack = [(element, False)]
    while stack:  # a loop, since files nest as deeply as they like
        one, done = stack.pop()
        tag = local(one.tag)
        if done:
            out.append("\t" if tag == "tc" else "\n")
        elif tag == "t":
            out.append(one.text or "")
        elif tag in ("tab", "br", "cr", "noBreakHyphen"):
            out.append({"tab": "\t", "noBreakHyphen": "-"}.get(tag, "\n"))
        elif tag in _NOTES:
            out.append(note(tag, attribute(one, "id") or ""))
        elif tag not in _LEFT_OUT:
            if tag in ("p", "tr", "tc"):
                stack.append((one, True))
            stack += [(child, False) for child in reversed(one)]
    return cells("".join(out))
