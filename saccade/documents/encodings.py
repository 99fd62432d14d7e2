"""How the bytes of a document are to be read as text."""

from __future__ import annotations

import codecs
import re

_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_CHARSET = re.compile(rb"""<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*=\s*["']?([-\w.:]+)""", re.IGNORECASE)


def unicode_of(data: bytes) -> str | None:
    """UTF-8 or UTF-16 by its mark, or UTF-16 without one: in most scripts of Europe every other byte is 0."""
    if marked := next((one for mark, one in _MARKS.items() if data.startswith(mark)), None):
        return marked
    even, odd = data[:2000:2], data[1:2000:2]
    if len(odd) < 2:
        return None
    if odd.count(0) > 0.7 * len(odd) and not even.count(0):
        return "utf-16-le"
    return "utf-16-be" if even.count(0) > 0.7 * len(even) and not odd.count(0) else None


def decoded_page(data: bytes) -> str:
    """An HTML page by its mark, its own declaration, or UTF-8, else Windows-1252, as browsers have it."""
    if (encoding := unicode_of(data)) is not None:
        return data.decode(encoding, "replace")
    said = _CHARSET.search(data[:4096])
    for encoding in (*([said[1].decode("ascii")] if said else ()), "utf-8"):
        try:
            # The declaration was read as ASCII, so an encoding that would not read it so is not the page's.
            if b"<\\n +AGE-".decode(encoding) == "<\\n +AGE-":
                return data.decode(encoding)
        except (LookupError, UnicodeError):
            continue
    return data.decode("cp1252", "replace")
