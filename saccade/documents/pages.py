"""The text of HTML pages, and of the chapters of books, which are such."""

from __future__ import annotations

import re

from saccade.documents.encodings import decoded_page
from saccade.documents.html_tokens import Token, tokens
from saccade.documents.tidy import tidied

_HIDDEN = frozenset(("script", "style", "template", "noscript", "svg", "math", "nav", "head", "iframe", "object"))
_APART = frozenset(
    ("p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "dl", "table", "blockquote", "pre", "figure", "section", "hr")
)
_LINES = _APART | frozenset(
    (
        *("div", "br", "li", "dt", "dd", "tr", "article", "header", "footer", "main", "aside", "title", "address"),
        "figcaption",
    )
)
_SPACES = re.compile(r"[ \t\r\n\f]+")


def html_text(data: bytes) -> str:
    """The text of an HTML page: what a reader sees of it, paragraphs apart by empty lines, without scripts, styles and
    navigation; marks of footnotes in brackets. Its encoding is by its mark, its own declaration, or UTF-8, else
    Windows-1252, as browsers have it."""
    page = _Page()
    for token in tokens(decoded_page(data)):
        page.take(token)
    return page.text()


class _Page:
    """Collects the words of a page, and where lines end."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._hidden: list[str] = []  # open elements that are not shown, outermost first
        self._first: dict[str, int] = {}  # where each of them is there for the first time
        self._kept = 0  # <pre> that are open
        self._due = 0  # line ends before what comes next
        self._fresh = False  # whether a mark of a list stands before it, so that its own line has begun
        self._mark = False  # whether the mark of a footnote is open

    def take(self, token: Token) -> None:
        kind, tag, attributes = token
        if kind == "text":
            self._words(tag)
        elif kind == "start":
            self._start(tag, attributes)
        elif kind == "end":
            self._end(tag)
        else:
            self._break(tag)

    def text(self) -> str:
        return tidied("".join(self._parts))

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        if tag in _HIDDEN:
            self._first.setdefault(tag, len(self._hidden))
            self._hidden.append(tag)
        elif tag == "body":  # also ends a head that nothing closed
            self._hidden.clear()
            self._first.clear()
        self._kept += tag == "pre"
        self._break(tag)
        if self._hidden:
            return
        if tag == "li":
            self._add("- ")
            self._fresh = True
        elif tag in ("td", "th"):
            self._add("" if self._due else "\t")
        elif tag == "a" and "noteref" in f"{attributes.get('epub:type', '')} {attributes.get('role', '')}":
            self._mark = True
            self._add("[")

    def _end(self, tag: str) -> None:
        if (first := self._first.get(tag)) is not None:
            for other in self._hidden[first:]:
                if self._first.get(other, -1) >= first:
                    del self._first[other]
            del self._hidden[first:]
        self._kept = max(0, self._kept - (tag == "pre"))
        if tag == "a" and self._mark:
            self._mark = False
            self._add("]")
        self._break(tag)

    def _words(self, data: str) -> None:
        if self._hidden:
            return
        if self._kept:
            self._add(data)
            return
        text = _SPACES.sub(" ", data.strip("[]") if self._mark else data)
        if self._due or self._fresh:
            text = text.lstrip(" ")
        if text:
            self._add(text)

    def _add(self, text: str) -> None:
        self._parts += ["\n" * self._due, text]
        self._due, self._fresh = 0, False

    def _break(self, tag: str) -> None:
        if tag in _LINES and not self._hidden and not self._fresh:
            self._due = min(2, self._due + 1) if tag == "br" else max(self._due, 2 if tag in _APART else 1)
