"""docs/methods.md names every method once, with options and defaults that are the code's; all options stand in
docs/results/method-options.md, as ``tools/method_options.py`` writes it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from saccade.methods.outside import load_outside
from saccade.methods.policy import part_named
from saccade.methods.registry import KNOWN

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("method_options", ROOT / "tools" / "method_options.py")
assert SPEC is not None
assert SPEC.loader is not None
method_options = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(method_options)

# Name in backticks (perhaps a link), and of the cells the one that is nothing but options: `a=1, b=x`.
ROW = re.compile(r"^\| \[?`(\w+)`", re.MULTILINE)
OPTIONS = re.compile(r"`(\w+=[^`]+)`")
OPTION = re.compile(r"(\w+)=((?:[^,()]|\([^)]*\))+)")  # a value may be a policy with options of its own


def rows() -> list[tuple[str, str]]:
    """(method, options) of every row of the page's tables that have a column of options."""
    found = []
    for table in re.split(r"\n\n+", (ROOT / "docs/methods.md").read_text(encoding="utf-8")):
        lines = table.splitlines()
        if not lines[0].startswith("|") or "options (defaults)" not in lines[0]:
            continue
        at = next(i for i, cell in enumerate(lines[0].split("|")) if "options (defaults)" in cell)
        for line in lines[2:]:
            name = ROW.match(line)
            assert name, line
            cell = line.split("|")[at].strip()
            given = OPTIONS.fullmatch(cell)
            assert given or not cell, f"options are `a=1, b=x`, or nothing: {line}"
            found.append((name[1], given[1] if given else ""))
    return found


def test_every_method_has_one_row():
    load_outside()
    own = {name for name, part in KNOWN.items() if part.__module__.partition(".")[0] in ("saccade", "saccade_contrib")}
    assert sorted(name for name, _ in rows()) == sorted(own)


@pytest.mark.parametrize(("name", "options"), rows(), ids=[name for name, _ in rows()])
def test_defaults_of_a_row_are_the_codes(name: str, options: str):
    said = dict(OPTION.findall(options))
    known = method_options.describe(part_named(name))["options"]
    assert {one: method_options.shown(known.get(one, "no such option")) for one in said} == said


def test_the_page_of_options_is_the_codes():
    written = method_options.PAGE.read_text(encoding="utf-8")
    assert written == method_options.page(), "python tools/method_options.py"
