"""Code cites ``docs/algorithms.md`` by section. Every citation must name a section that the page has."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "algorithms.md"
FOLDERS = ("saccade", "contrib", "csrc", "tests", "benchmarks", "train", "plugins")
SUFFIXES = {".py", ".cpp", ".h", ".sh"}

NUMBER = r"\d+(?:\.\d+)?"
# A docstring may break a line anywhere within a citation, and a comment's next line begins with its mark.
GAP = r"\s(?:\s|#|//)*"
CITED = re.compile(rf"algorithms\.md(?:{GAP}({NUMBER}(?:(?:-|,{GAP}){NUMBER})*)(?:{GAP}(P\d+))?)?")


@cache
def sources() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return sorted(path for path in found if path != Path(__file__))


@cache
def citations() -> list[tuple[str, str, list[str], str | None]]:
    """(file, text, section numbers, point) of every citation; a range or a list names several sections."""
    found = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        for match in CITED.finditer(text):
            start = max(0, match.start() - len("docs/"))
            numbers = re.findall(NUMBER, match[1] or "")
            found.append((str(path.relative_to(ROOT)), text[start : match.end()], numbers, match[2]))
    return found


@cache
def sections() -> dict[str, str]:
    """Number of each heading, and the text below it up to the next heading."""
    parts = re.split(r"^#+ (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    numbered = ((re.match(rf"({NUMBER})\.? ", title), body) for title, body in zip(parts[1::2], parts[2::2]))
    return {match[1]: body for match, body in numbered if match is not None}


def test_citations_are_found():
    """Without this the tests below would prove nothing."""
    assert len({file for file, *_ in citations()}) >= 10


def test_every_citation_names_a_section():
    wrong = [
        f"{file}: {text!r} names {numbers or 'no section'}"
        for file, text, numbers, _ in citations()
        if not text.startswith("docs/") or not numbers or any(number not in sections() for number in numbers)
    ]
    assert not wrong, "cite as docs/algorithms.md 4.5, a section of that page:\n" + "\n".join(wrong)


def test_every_cited_point_is_in_its_section():
    wrong = [
        f"{file}: {text!r}"
        for file, text, numbers, point in citations()
        if point is not None and f"**{point}" not in sections().get(numbers[-1], "")
    ]
    assert not wrong, "points are marked **P1 in their section:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "numbers", "point"),
    [
        ("(docs/algorithms.md 4.5 P2)", "4.5", "P2"),
        ("docs/algorithms.md\n    5.2, 5.3).", "5.2, 5.3", None),
        ("# docs/algorithms.md\n# 1", "1", None),
        ("docs/algorithms.md 2.3-2.5). Here", "2.3-2.5", None),
        ("docs/algorithms.md and more", None, None),
    ],
)
def test_how_a_citation_is_read(text: str, numbers: str | None, point: str | None):
    match = CITED.search(text)
    assert match is not None
    assert (match[1], match[2]) == (numbers, point)
