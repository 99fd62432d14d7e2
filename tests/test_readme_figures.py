"""Every figure that the README quotes stands in the page that is linked beside it, and the record of ``make figures``
is what its page shows.

A row of a table, a paragraph or an item of a list is one piece. Its figures are looked up in the pages of ``docs`` that
it links; a row without links has those of the paragraph before its table, and the accuracy table is held by
tests/test_docs_numbers.py. Of docs/results/figures.md the newest whole measurements count, and no trial.
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
    r"|kill -9|\d+ cores|Apache-2\.0|95 % intervals|50 questions|36 samples"
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
    skipped = False
    for block in re.split(r"\n\s*\n", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        is_table = block.lstrip().startswith("|")
        if is_table:
            skipped = block.lstrip().startswith(HELD_BY_ANOTHER)
            units = [] if skipped else block.strip().splitlines()
        else:
            units = re.split(r"\n(?=\* )", block)
        for unit in units:
            pages = [page.partition("#")[0] for _, page in LINK.findall(unit) if page.startswith("docs/")]
            found.append((LINK.sub(r"\1", unit), pages or (before if is_table else [])))
        if not is_table:
            before = [page for _, pages in found[-len(units) :] for page in pages]
    return found


def quoted(words: str) -> list[str]:
    """The figures of a piece, as they are written."""
    return FIGURE.findall(NO_FIGURE.sub(" ", words))


@cache
def text_of(page: str) -> str:
    if page == "docs/results/figures.md":
        whole = figures().newest(record())
        return "\n".join(" | ".join(row) for run, name in whole for row in run["parts"][name]["rows"])
    return (ROOT / page).read_text(encoding="utf-8") if page.endswith(".md") else ""


def stands(figure: str, page: str) -> bool:
    """Whether a page has the number; ``2.70`` is also 2.7 there, never the other way round."""
    return re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", text_of(page)) is not None


def wrong(text: str) -> list[str]:
    """Figures without their page."""
    bad = []
    for words, pages in pieces(text):
        for figure in quoted(words):
            if not any(stands(figure, page) for page in pages):
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
        ("[296](docs/server.md)", "[286](docs/server.md)"),
        ("[0.89x and 0.95x](docs/performance-gpu.md)", "[0.89x and 0.95x](docs/performance.md)"),
    ],
)
def test_a_figure_that_changes_is_found(good, other):
    assert README.count(good) == 1
    assert len(wrong(README.replace(good, other))) >= 1


def test_the_page_of_the_record_is_written_from_it():
    page = (RECORD.parent / "figures.md").read_text(encoding="utf-8")
    assert page == figures().page(record()), "python tools/figures.py writes both"
