"""Every figure that the README quotes stands in the page that is linked beside it, and the record of ``make figures``
is what its page shows.

A row of a table or a sentence is one piece. Its figures are looked up in the pages of ``docs`` that it links: a
sentence without links has its paragraph's, a row those of the paragraph before its table; the accuracy table is held by
tests/test_docs_numbers.py. A figure must stand beside another one of its piece: in one row or paragraph of the page, or
in one table if it has three digits. Of docs/results/figures.md the newest whole measurements count, and no trial.
"""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECORD = ROOT / "docs" / "results" / "figures.json"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
FIGURE = re.compile(r"(?<![\w.,-])(\d+(?:,\d{3})*(?:\.\d+)?)(?:x\b|(?!\w))")
# Sizes, dates, names and what other tests hold; the rest of the numbers are figures.
NO_FIGURE = re.compile(
    r"`[^`]*`"
    r"|\b\d{4}-\d\d-\d\d\b"
    r"|\b\d+(?:\.\d+)?[KMB]\b|\bQwen2\.5-Coder\S*|\bFlashAttention-4|\bFP8|\b(?:4|8|16)[- ]bits?\b|\bLlama-3\S*"
    r"|Python \d\.\d+|C\+\+17|http\S+|\b\d+ families"
    r"|kill -9|\d+ cores|Apache-2\.0|95 % intervals|50 questions|36 samples|points of 100"
)
HELD_BY_ANOTHER = "| policy | keys read, 4K |"


@cache
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "tools" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record() -> list[dict]:
    runs: list[dict] = json.loads(RECORD.read_text(encoding="utf-8"))["runs"]
    return runs


def pieces(text: str) -> list[tuple[str, list[str]]]:
    """(words, linked pages of docs) of every piece of a Markdown text, code blocks left out."""
    found: list[tuple[str, list[str]]] = []
    before: list[str] = []
    for block in re.split(r"\n\s*\n", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        is_table, own = block.lstrip().startswith("|"), linked(block)
        if block.lstrip().startswith(HELD_BY_ANOTHER):
            continue
        cut = r"\n" if is_table else r"(?<=[.:;])\s+(?=[A-Z*`])|\n(?=\* )"
        for piece in re.split(cut, block):
            found.append((LINK.sub(r"\1", piece), linked(piece) or (before if is_table else own)))
        before = before if is_table else own
    return found


def linked(text: str) -> list[str]:
    return [page.partition("#")[0] for _, page in LINK.findall(text) if page.startswith("docs/")]


def quoted(words: str) -> list[str]:
    """The figures of a piece, as they are written."""
    return FIGURE.findall(NO_FIGURE.sub(" ", words))


@cache
def places(page: str) -> list[tuple[str, str]]:
    """(row or paragraph, the whole table or the same) of a page."""
    if page == "docs/results/figures.md":
        tables = [run["parts"][name]["rows"] for run, name in figures().newest(record())]
        blocks = ["\n".join(f"| {' | '.join(row)} |" for row in rows) for rows in tables]
    else:
        blocks = re.split(r"\n\s*\n|\n(?=\* )", (ROOT / page).read_text(encoding="utf-8"))
    return [(one, block) for block in blocks for one in (block.split("\n") if block.startswith("|") else [block])]


def has(text: str, figure: str) -> bool:
    """Whether a text has a number; a percentage may stand there as a share, and thousands without commas."""
    ways = [re.escape(figure)] + ([figure.replace(",", "")] if "," in figure else [])
    if re.fullmatch(r"\d{1,2}\.\d", figure):
        ways.append(re.escape(f"{float(figure) / 100:.3f}"))
    return any(re.search(rf"(?<![\d.,]){way}(?!\d|[.,]\d)", text) for way in ways)


def stands(figure: str, others: list[str], page: str) -> bool:
    """Whether a page has a figure of a piece beside another one of it."""
    known = sum(digit.isdigit() for digit in figure) >= 3
    for row, block in places(page):
        beside = block if known else row
        if has(row, figure) and (not others or any(has(beside, one) for one in others)):
            return True
    return False


def wrong(text: str) -> list[str]:
    """Figures that are not in their pages."""
    bad = []
    for words, pages in pieces(text):
        found = quoted(words)
        for figure in found:
            others = [one for one in found if one != figure]
            if not any(stands(figure, others, page) for page in pages):
                bad.append(f"{figure} is in none of {pages or 'no page'}: {words.strip()[:100]}")
    return bad


def test_figures_of_the_readme_are_those_of_their_pages():
    bad = wrong(README)
    assert not bad, "\n".join(bad)


def test_the_readme_quotes_figures():
    """Without this the test above would prove nothing."""
    found = [figure for words, _ in pieces(README) for figure in quoted(words)]
    assert len(found) > 30
    assert {"8.1", "2.9", "14.2", "4.58", "0.26", "95.7"} <= set(found)


@pytest.mark.parametrize(
    ("good", "other"),
    [
        ("| 8.1x |", "| 8.2x |"),
        ("| 34 to 38 |", "| 35 to 38 |"),
        ("| 12.00 s |", "| 13.00 s |"),
        ("[0.26 s](docs/sessions.md)", "[0.28 s](docs/sessions.md)"),
        ("[1.2 GB of disk](docs/results/figures.md)", "[1.3 GB of disk](docs/results/figures.md)"),
        ("[296.3](docs/results", "[286.3](docs/results"),
        ("[0.89x and 0.95x](docs/performance-gpu.md)", "[0.89x and 0.95x](docs/performance.md)"),
    ],
)
def test_a_figure_that_changes_is_found(good, other):
    assert README.count(good) == 1
    assert len(wrong(README.replace(good, other))) >= 1


def test_the_page_of_the_record_is_written_from_it():
    page = (RECORD.parent / "figures.md").read_text(encoding="utf-8")
    assert page == figures().page(record()), "python tools/figures.py writes both"
