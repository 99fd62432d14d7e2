"""The list of small mistakes that ``make mutants`` makes can be tried, and the command tells what survives."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parent.parent / "tools" / "mutants.py"


@pytest.fixture(scope="module")
def mutants():
    spec = importlib.util.spec_from_file_location("mutants", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutants"]


def test_each_of_forty_can_be_tried(mutants):
    every = mutants.listed()
    assert len(every) >= 40
    assert [one.fault() for one in every if one.fault()] == []
    assert len({(one.file, one.old, one.new) for one in every}) == len(every)
    parts = {one.file.split("/")[1] for one in every}
    assert {"selection", "methods", "kv", "engine", "ops", "server", "models"} <= parts


def test_what_cannot_be_tried_or_survives_is_told(mutants, monkeypatch, capsys):
    whole = mutants.Mutant("saccade/errors.py", "class SaccadeError", "class SaccadeError", (), "changes nothing")
    gone = mutants.Mutant("saccade/errors.py", "no such text", "", (), "was here once")
    monkeypatch.setattr(mutants, "listed", lambda: [whole, gone])
    asked = []
    monkeypatch.setattr(mutants, "run", lambda copy, arguments, seconds: (asked.append(copy), (0, ""))[1])
    monkeypatch.setattr(sys, "argv", ["mutants.py", "--jobs", "1"])
    assert mutants.main() == 1
    out = capsys.readouterr().out
    assert "the old text occurs 0 times" in out
    assert "1  survived" in out
    assert all(mutants.ROOT not in copy.parents and not copy.exists() for copy in asked)
    for status in (1, None):
        monkeypatch.setattr(mutants, "run", lambda copy, arguments, seconds, status=status: (status, ""))
        assert mutants.survives(whole) is None
    monkeypatch.setattr(mutants, "run", lambda copy, arguments, seconds: (4, "no tests ran"))
    assert "4" in mutants.survives(whole)
