"""HTML cut into tags and text, as the standard has it (html.spec.whatwg.org, 13.2.5), in one pass: what is never closed
goes on to the page's end. html.parser looks for that end again at each of them, which takes a minute for a page of
100,000 comments that nothing closes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from typing import NamedTuple

_NAME = re.compile(r"[^\s/>]+")
# An attribute with its value, or the one letter that is none of them, so that a search never looks far ahead in vain.
_ATTRIBUTE = re.compile(r"""[\s/]*([^\s/>=][^\s/>=]*)(?:\s*=\s*("[^"]*"|'[^']*'|[^\s"'>][^\s>]*)?)?""")
_RAW = ("script", "style", "xmp", "iframe", "noembed", "noframes", "noscript")  # whose text has no tags
_TEXT = ("title", "textarea")  # likewise, but characters by their names
_ENDS = {name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE) for name in (*_RAW, *_TEXT)}
_NUMBER = re.compile(r"&#(?:[0-9]{8,}|[xX][0-9a-fA-F]{7,});?")  # of no character; int() refuses long ones
_COMMENT = re.compile("--!?>")  # its end
_DOCTYPE = re.compile(r"<!doctype[^>\[]*\[", re.IGNORECASE)


class Token(NamedTuple):
    """``kind``: ``text``, whose ``value`` has its characters in place of their names; ``start`` or ``end`` of an
    element of that name, in small letters; ``both`` where the tag closes itself."""

    kind: str
    value: str
    attributes: dict[str, str] = {}  # noqa: RUF012  (never written to)


def tokens(page: str) -> Iterator[Token]:
    """A page's tags and text. Comments, declarations and instructions are left out."""
    at, length = 0, len(page)
    open_ended: set[str] = set()  # elements whose end was looked for in vain
    while at < length:
        start = page.find("<", at)
        if start != at:
            yield Token("text", characters(page[at : start if start >= 0 else length]))
        if start < 0:
            return
        following = page[start + 1 : start + 2]
        if following in "!?" and following:
            at = _behind_comment(page, start)
        elif following == "/":
            if not page[start + 2 : start + 3].isalpha():
                at = _behind(page, ">", start + 2)
                continue
            name, _, _, at = _tag(page, start + 2)
            if at <= length:
                yield Token("end", name)
        elif following.isalpha() and following.isascii():
            name, attributes, closed, at = _tag(page, start + 1)
            if at > length:  # the page ends within it
                return
            yield Token("both" if closed else "start", name, attributes)
            if name == "plaintext":
                yield Token("text", page[at:])
                return
            if name in _ENDS and not closed and name not in open_ended:
                found = _ENDS[name].search(page, at)
                if found is None and name in _TEXT:  # a title that nothing closes would hide the page
                    open_ended.add(name)
                    continue
                inside = page[at : found.start() if found else length]
                if inside:
                    yield Token("text", characters(inside) if name in _TEXT else inside)
                at = found.start() if found else length
        else:
            yield Token("text", "<")
            at = start + 1


def characters(text: str) -> str:
    """``text`` with the characters that ``&amp;``, ``&#38;`` and so on name."""
    return unescape(_NUMBER.sub("\ufffd", text)) if "&" in text else text


def _behind(page: str, end: str, at: int) -> int:
    found = page.find(end, at)
    return len(page) if found < 0 else found + len(end)


def _behind_comment(page: str, start: int) -> int:
    """Where a comment, a declaration or an instruction that begins at ``start`` has ended."""
    if page.startswith("<!--", start):
        if page.startswith((">", "->"), start + 4):
            return _behind(page, ">", start + 4)
        found = _COMMENT.search(page, start + 4)
        return len(page) if found is None else found.end()
    if _DOCTYPE.match(page, start, start + 1000):  # of XHTML, with declarations inside
        return _behind(page, ">", _behind(page, "]", start))
    return _behind(page, ">", start)


def _tag(page: str, at: int) -> tuple[str, dict[str, str], bool, int]:
    """A tag whose name begins at ``at``: the name, its attributes, whether it closes itself, and where it has ended;
    beyond the page's end where it does not."""
    named = _NAME.match(page, at)
    assert named is not None, "a tag begins with a letter"
    name, at = named[0].lower(), named.end()
    attributes: dict[str, str] = {}
    while found := _ATTRIBUTE.match(page, at):
        value = found[2] or ""
        attributes.setdefault(found[1].lower(), characters(value[1:-1] if value[:1] in ("'", '"') else value))
        at = found.end()
        if page[at : at + 1] in ("'", '"') and page[at - 1] in "= \t\r\n\f":  # a quote that nothing closes
            return name, attributes, False, len(page) + 1
    end = page.find(">", at)
    return name, attributes, page[max(at, end - 1) : end] == "/" and end > at, len(page) + 1 if end < 0 else end + 1
