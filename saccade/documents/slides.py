"""The text of PowerPoint files (PPTX: ECMA-376, part 1, 19)."""

from __future__ import annotations

from xml.etree import ElementTree

from saccade.documents.parts import Parts, attribute, local
from saccade.documents.tidy import cells, tidied


def slides_text(parts: Parts, main: str) -> str:
    """Slides in their order, each under its number: paragraphs by lines, cells of a table apart by tabs, and what the
    speaker has noted."""
    related = parts.related(main)
    order = [related.get(_relation(one), ("", "")) for one in parts.tree(main).iterfind(".//{*}sldIdLst/{*}sldId")]
    slides = list(dict.fromkeys(part for kind, part in order if kind == "slide"))
    out = []
    for number, slide in enumerate(slides, 1):
        text = _paragraphs(parts.tree(slide))
        notes = [part for kind, part in parts.related(slide).values() if kind == "notesSlide" and part in parts.names]
        said = "".join(_paragraphs(parts.tree(part), notes=True) for part in notes)
        if text.strip() or said.strip():
            out.append(f"Slide {number}\n\n{text}" + (f"\nNotes: {said}" if said.strip() else ""))
    return tidied("\n\n".join(out))


def _relation(one: ElementTree.Element) -> str:
    """Its r:id, beside which it has an id of its own."""
    return next((value for name, value in one.attrib.items() if name.endswith("relationships}id")), "")


def _paragraphs(slide: ElementTree.Element, notes: bool = False) -> str:
    out: list[str] = []
    stack = [(slide, False)]
    while stack:
        one, done = stack.pop()
        tag = local(one.tag)
        if done:
            out.append("\t" if tag == "tc" else "\n")
        elif tag == "t":
            out.append(one.text or "")
        elif tag in ("br", "tab"):
            out.append("\n" if tag == "br" else "\t")
        elif tag == "sp" and notes and _kind(one) != "body":
            continue  # the slide's picture and number
        elif tag != "Fallback":
            if tag in ("p", "tr", "tc"):
                stack.append((one, True))
            stack += [(child, False) for child in reversed(one)]
    return cells("".join(out))


def _kind(shape: ElementTree.Element) -> str | None:
    holder = shape.find(".//{*}nvPr/{*}ph")
    return None if holder is None else attribute(holder, "type") or "body"
