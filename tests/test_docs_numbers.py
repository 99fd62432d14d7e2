"""Numbers of tables in the documents are those of the data that they came from.

A comment before a table names the file and what every row of it has in common:
``<!-- numbers: docs/results/core.csv task=all length=all -->``. Rows are found by the policy (or method) in backticks
and by their protocol; columns by their titles. A number may be rounded to as many digits as it shows, no more.
"""

from __future__ import annotations

import csv
import json
import re
from functools import cache
from pathlib import Path

import pytest

from saccade.errors import PolicyError
from saccade.methods.policy import Policy

ROOT = Path(__file__).parent.parent
MARK = re.compile(r"<!-- numbers: (\S+)((?: \w+=\S+)*) -->")
# Tables whose page has no room for a comment: the beginning of their head, and what they show.
UNMARKED = {
    ("README.md", "| policy | keys read, 4K | facts 4K |"): "docs/results/real-models.csv model=qwen2.5-coder",
}
# Title of a column (a beginning of it) -> (name in the data, what it is multiplied by).
COLUMNS = {
    "score": ("score", 100),
    "minus dense": ("difference", 100),
    "points lost": ("difference", -100),
    "prefill density": ("prefill_density", 100),
    "decode density": ("decode_density", 100),
    "keys read": ("keys", 100),
    "bytes read": ("bytes", 100),
    "recall": ("recall", 100),
}
# Columns that are a family of tasks at a length: differences from dense in points, of dense its score.
FAMILY = re.compile(r"(facts|RULER) (\d+)K")
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


@cache
def records(file: str) -> list[dict[str, str]]:
    path = ROOT / file
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as lines:
            return list(csv.DictReader(lines))
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [{**row, "policy": row["method"]} for row in rows]


def canonical(text: str) -> str:
    try:
        return Policy.parse(text).text
    except PolicyError:
        return text


def found(file: str, wanted: dict[str, str], policy: str, protocol: str | None) -> dict[str, str]:
    """The one record of a row. A protocol that some samples could not keep is written A/B there."""
    fits = [
        one
        for one in records(file)
        if all(str(one[key]) == value for key, value in wanted.items())
        and policy in (one["policy"], canonical(one["policy"]))
        and (protocol is None or protocol in (one["protocol"], one["protocol"].rpartition("/")[2]))
    ]
    if protocol is None:
        fits = fits[:1] if len({one["score"] for one in fits if "score" in one}) == 1 else fits
    assert len(fits) == 1, f"{len(fits)} rows of {file} are {policy} {protocol} {wanted}"
    return fits[0]


def shows(text: str, value: float) -> bool:
    """Whether a number as written is ``value``, rounded to the digits that it shows."""
    digits = len(text.partition(".")[2])
    return abs(float(text) - value) <= 0.5000001 * 10**-digits


def wrong(table: list[list[str]], file: str, wanted: dict[str, str]) -> list[str]:
    """Cells that say something else than the data."""
    head, _, *rows = table
    protocol_at = head.index("protocol") if "protocol" in head else None
    given = wanted.pop("protocol", None) if protocol_at is None else None
    bad, checked = [], 0
    for cells in rows:
        named = re.search(r"`([^`]+)`", cells[0])
        assert named, f"no policy in backticks: {cells[0]}"
        protocol = cells[protocol_at] if protocol_at is not None else given
        for title, cell in zip(head[1:], cells[1:]):
            if not (family := FAMILY.fullmatch(title)) or not NUMBER.search(cell):
                continue
            own = {**wanted, "family": family[1].lower(), "length": str(1024 * int(family[2]))}
            data = found(file, own, canonical(named[1]), protocol)
            first = "score" if named[1] == "dense" else "difference"
            for one, text in zip((first, "difference_low", "difference_high"), NUMBER.findall(cell)):
                checked += 1
                if not shows(text, 100 * float(data[one])):
                    bad.append(f"{named[1]}, {title}: {text} is {100 * float(data[one]):.4g} in {file}")
        if any(map(FAMILY.fullmatch, head)):
            continue
        data = found(file, wanted, canonical(named[1]), protocol)
        for title, cell in zip(head[1:], cells[1:]):
            name, factor = next((COLUMNS[one] for one in COLUMNS if title.startswith(one)), (None, 0))
            numbers = NUMBER.findall(cell.replace("−", "-"))
            if name is None or not numbers:
                continue
            names = [name, *(f"{name}_{end}" for end in (("low", "high") if factor > 0 else ("high", "low")))]
            for one, text in zip(names, numbers):
                checked += 1
                if not shows(text, factor * float(data[one])):
                    bad.append(f"{named[1]}, {title}: {text} is {factor * float(data[one]):.4g} in {file}")
    assert checked, f"no column of {head} is checked"
    return bad


def tables(page: Path) -> list[tuple[list[list[str]], str, dict[str, str]]]:
    """(cells, file, what its rows have in common) of every table that names its data."""
    result = []
    lines = page.read_text(encoding="utf-8").splitlines()
    for at, line in enumerate(lines):
        mark = MARK.fullmatch(line)
        start = at + 1 + (at + 1 < len(lines) and not lines[at + 1]) if mark else at
        said = f"{mark[1]}{mark[2]}" if mark else ""
        for (name, head), what in UNMARKED.items():
            if page == ROOT / name and line.startswith(head):
                said = what
        if said:
            body = []
            while start < len(lines) and lines[start].startswith("|"):
                body.append([cell.strip() for cell in lines[start].strip("|").split("|")])
                start += 1
            assert len(body) > 2, f"{page.name}:{at + 1} names data and no table follows"
            file, *pairs = said.split()
            result.append((body, file, dict(pair.split("=", 1) for pair in pairs)))
    return result


PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if tables(page)]


def test_tables_name_their_data():
    """Without this the test below would prove nothing."""
    assert {"README.md", "ablations.md", "claims-prefill.md", "choosing.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_are_those_of_their_data(page):
    bad = [line for table, file, wanted in tables(page) for line in wrong(table, file, wanted)]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("cells", "bad"),
    [
        (["`flexprefill`", "C", "99.5", "-0.5 [-1.6, 0.0]", "44.9 %", "100 %"], 0),
        (["`flexprefill`", "C", "99.4", "-0.5 [-1.6, 0.0]", "44.9 %", "100 %"], 1),
        (["`flexprefill`", "C", "99.5", "-0.5 [-1.2, 0.0]", "45 %", "99 %"], 2),
        (["`lfps`", "B", "98.8", "-1.2 [-3.0, 0.0]", "100 %", "5.8 %"], 0),
        (["`lfps`", "A", "98.8", "", "100 %", "5.8 %"], 1),  # A's score is another
    ],
)
def test_a_number_that_disagrees_is_found(cells, bad):
    head = ["policy", "protocol", "score", "minus dense [95 %]", "prefill density", "decode density"]
    table = [head, ["---"] * len(head), cells]
    assert len(wrong(table, "docs/results/core.csv", {"task": "all", "length": "all"})) == bad
