"""Links in the documents resolve: relative paths to files of the repository, anchors to headings of the page."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Pages name files in code spans too: `docs/claims.md`, `tests/helpers.py`.
PATH = re.compile(
    r"`((?:docs|saccade|tests|csrc|benchmarks|train|plugins)/[\w./-]+\.(?:md|py|h|cpp|sh|html|json|csv|png))`"
)


@cache
def anchors(page: Path) -> set[str]:
    """What a reader may link to: the headings as GitHub turns them into anchors."""
    lines = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL).splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path):
    text = page.read_text(encoding="utf-8")
    broken = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):  # elsewhere on the web
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    broken += [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    assert not broken, f"{page.name} points at what is not there: {broken}"


def test_anchors_are_those_of_github(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# 5. PrHS: CIS, PSAW and ETF\n## `auto`\n```\n# no heading\n```\n")
    assert anchors(page) == {"5-prhs-cis-psaw-and-etf", "auto"}


def test_the_readme_is_short_and_shows_a_picture():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    assert "](docs/results/heads.png)" in text


def test_claims_agree_with_their_measurement():
    """Both pages give the factors of LFPS's decode step from the same three runs."""
    names = ("claims.md", "results/claims-decode.md")
    summary, page = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in names)
    row = re.search(r"^\| `lfps`, per KV head, 2 % \|[^|]*\| ([^|]*) \| ([^|]*) \|", page, re.MULTILINE)
    claimed = [line for line in (summary + page).splitlines() if line.startswith("| 22.8x over full attention")]
    assert len(claimed) == len(names)
    for runs in row.groups():
        low, middle, high = sorted(runs.split(", "), key=float)
        for said in claimed:
            assert f"{middle}x" in said
            assert f"{low}x to {high}x" in said


def test_every_family_is_named():
    from saccade.models.families import FAMILIES

    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    table = text.partition("| layers with windows |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", table.partition("\n")[2])) == sorted(FAMILIES)
    assert f"{len(FAMILIES)} families" in (ROOT / "README.md").read_text(encoding="utf-8")
