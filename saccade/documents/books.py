"""The text of EPUB books (EPUB 3.3, and 2)."""

from __future__ import annotations

import posixpath
from urllib.parse import unquote

from saccade.documents.pages import html_text
from saccade.documents.parts import MarkupError, Parts


def book_text(parts: Parts) -> str:
    """Chapters in reading order, each once, its footnotes where they stand."""
    root = parts.tree("META-INF/container.xml").find(".//{*}rootfile")
    if root is None:
        raise ValueError("META-INF/container.xml names no package")
    package = root.attrib["full-path"]
    opened, folder = parts.tree(package), posixpath.dirname(package)
    items = {one.attrib["id"]: one.attrib for one in opened.iterfind(".//{*}manifest/{*}item") if "id" in one.attrib}
    found: dict[str, None] = {}
    for one in opened.iterfind(".//{*}spine/{*}itemref"):
        item = items.get(one.attrib.get("idref", ""), {})
        if "nav" in item.get("properties", "").split() or "html" not in item.get("media-type", ""):
            continue
        found[posixpath.normpath(posixpath.join(folder, unquote(item["href"])))] = None
    if locked := _locked(parts) & found.keys():
        raise MarkupError(f"is locked against copying ({len(locked)} of its {len(found)} chapters are encrypted)")
    texts = (html_text(parts.read(chapter)).strip() for chapter in found)
    return "\n\n".join(text for text in texts if text) + "\n"


def _locked(parts: Parts) -> set[str]:
    if "META-INF/encryption.xml" not in parts.names:
        return set()
    found = parts.tree("META-INF/encryption.xml").iterfind(".//{*}CipherReference")
    return {unquote(one.attrib.get("URI", "")) for one in found}
