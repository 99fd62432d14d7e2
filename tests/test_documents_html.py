"""HTML is cut as the standard library cuts it where pages are sound, and in one pass where they are not."""

from __future__ import annotations

import random
from html.parser import HTMLParser

import pytest

from saccade.documents import text_of
from saccade.documents.html_tokens import tokens
from saccade.errors import RequestError


class Oracle(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, str, dict[str, str]]] = []

    def handle_starttag(self, tag, attrs):
        self.found.append(("start", tag, {name: value or "" for name, value in reversed(attrs)}))

    def handle_startendtag(self, tag, attrs):
        self.found.append(("both", tag, {name: value or "" for name, value in reversed(attrs)}))

    def handle_endtag(self, tag):
        self.found.append(("end", tag, {}))

    def handle_data(self, data):
        if self.found and self.found[-1][0] == "text":
            data = self.found.pop()[1] + data
        self.found.append(("text", data, {}))


def joined(page: str) -> list[tuple[str, str, dict[str, str]]]:
    found: list[tuple[str, str, dict[str, str]]] = []
    for kind, value, attributes in tokens(page):
        if kind == "text" and found and found[-1][0] == "text":
            value = found.pop()[1] + value
        found.append((kind, value, dict(attributes)))
    return found


# fmt: off
PIECES = (
    "<p>", "</p>", "<br/>", "<br>", "<A HREF='x&amp;y'>", '<a href="a>b" class=c-d>', "</a >", "words ",
    "a < b ", "&eacute;", "&#233;", "&#x1F600;", "& co ", "<!-- hidden <p> -->", "<!---->", "<!doctype html>",
    "<?php x ?>",
    "<script>if (a < b) '</p>'</script>",
    "<style>p > a { }</style>", "<td colspan = 2 hidden>", "<img src=a.png alt='it''s'>",
    "\n", "<h1 id=x\n  title=\"two\nlines\">",
)
# fmt: on


def test_sound_pages_are_cut_as_the_standard_library_cuts_them():
    for seed in range(400):
        page = "".join(random.Random(seed).choices(PIECES, k=30))
        oracle = Oracle()
        oracle.feed(page)
        oracle.close()
        assert joined(page) == oracle.found, page


@pytest.mark.parametrize(
    ("page", "cut"),
    [
        ("a<!-- b", [("text", "a", {})]),
        ("a<!-->b", [("text", "ab", {})]),
        ("a<!-- x --!>b", [("text", "ab", {})]),
        ("<p a='1' a='2'>", [("start", "p", {"a": "1"})]),
        ("a<p b='c", [("text", "a", {})]),
        ("<title>a<p>b", [("start", "title", {}), ("text", "a", {}), ("start", "p", {}), ("text", "b", {})]),
        ("<title>a&lt;</title>", [("start", "title", {}), ("text", "a<", {}), ("end", "title", {})]),
        ("<script>a</p></SCRIPT >", [("start", "script", {}), ("text", "a</p>", {}), ("end", "script", {})]),
        ("<plaintext><p>", [("start", "plaintext", {}), ("text", "<p>", {})]),
        ("a<3 </ b>c", [("text", "a<3 c", {})]),
        ("&#99999999999999999999;", [("text", "\ufffd", {})]),
        ("<!DOCTYPE html [<!ENTITY a '>'>]><p>", [("start", "p", {})]),
    ],
)  # fmt: skip
def test_what_is_not_sound_is_cut_as_browsers_do(page, cut):
    assert joined(page) == cut


@pytest.mark.parametrize(
    "piece",
    ["<!-- a", "<!a", "<?a", "</a", "<a b", "<a b='", '<a b="', "<a =", "&#", "&#1", "<title>", "<textarea>",
     "<script>", "<script></script ", "<svg>", "<svg></nav>", "<svg><nav></svg>", "<pre>", "<", "<![CDATA[",
     "<!doctype [",
     "<pre>     ", "\t  ", "<a/ "],
)  # fmt: skip
def test_no_piece_takes_longer_the_more_of_it_was_before(piece):
    """Each took the square of its number at one time, or does so in html.parser: minutes for as many."""
    try:
        text = text_of(f"<html><body>it begins {piece * 60_000}".encode(), "a.html")
    except RequestError as error:
        raise AssertionError(piece) from error
    assert text.startswith("it begins")


@pytest.mark.parametrize("space", [" ", "\n", "\t", " \n", "\t "])
def test_long_runs_of_spaces_take_no_longer_than_letters(space):
    assert text_of(f"<html><pre>a{space * 1_000_000}b".encode(), "a.html").startswith("a")
