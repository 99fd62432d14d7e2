"""saccade-contrib: methods that come by the entry point, and what a machine without the package says."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from saccade.bench.recall.ladders import ladders
from saccade.errors import PolicyError
from saccade.eval.board.entries import ENTRIES, entry_named, outside_row
from saccade.methods import outside, state
from saccade.methods.base import Method
from saccade.methods.measured import Measured
from saccade.methods.offline import KINDS, Calibration
from saccade.methods.registry import AROUND, IN_CONTRIB, KNOWN, METHODS, MODIFIERS
from saccade.selection import Dense

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "contrib/pyproject.toml").read_text(encoding="utf-8"))["project"]
OFFERED = PROJECT["entry-points"]["saccade.methods"]


def without_it(code: str) -> str:
    """What ``code`` prints in a process that finds no entry points."""
    begin = "import saccade.methods.outside as outside; outside.entry_points = lambda **of: []\n"
    done = subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_package_offers_what_the_core_sends_there():
    assert sorted(OFFERED) == sorted(IN_CONTRIB)
    assert PROJECT["dependencies"] == [f"saccade-llm=={PROJECT['version']}"]
    core = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert core["version"] == PROJECT["version"]
    for name, value in OFFERED.items():
        assert EntryPoint(name, value, outside.GROUP).load() is METHODS[name]
        assert METHODS[name].__module__.startswith("saccade_contrib.")
    inside = {part.__module__.partition(".")[0] for name, part in KNOWN.items() if name not in OFFERED}
    assert inside == {"saccade"}


def test_without_the_package_its_policies_are_refused_with_the_way_out():
    said = without_it(
        "from saccade.errors import PolicyError\n"
        "from saccade.methods.policy import Policy\n"
        "from saccade.methods.registry import IN_CONTRIB\n"
        "for text in (*IN_CONTRIB, 'flexprefill+h2o(budget=30)', 'h3o'):\n"
        "    try: print(Policy.parse(text))\n"
        "    except PolicyError as error: print(error)\n"
    ).splitlines()
    for name, line in zip((*IN_CONTRIB, "h2o"), said):
        assert line == f"method '{name}' is in saccade-contrib, which is not installed: pip install saccade-contrib"
    assert said[-1].startswith("unknown method 'h3o'; known: ")
    assert "pip install" not in said[-1]


def test_without_the_package_the_rest_is_there():
    said = without_it(
        "import contextlib, io, json, sys\n"
        "from saccade.cli.main import main\n"
        "out = io.StringIO()\n"
        "with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit): main(['methods', '--json'])\n"
        "from saccade.bench.recall.ladders import ladders\n"
        "from saccade.eval.board.entries import ENTRIES\n"
        "from saccade.methods.offline import KINDS\n"
        "rows = len(ladders(None, 'decode'))\n"
        "print(json.dumps([sorted(json.loads(out.getvalue())), [one.name for one in ENTRIES], sorted(KINDS), rows]))\n"
        "assert not [name for name in sys.modules if name.startswith('saccade_contrib')]\n"
    )
    names, rows, kinds, count = json.loads(said)
    assert set(names) == {*METHODS, *MODIFIERS, *AROUND} - set(IN_CONTRIB)
    assert rows == [entry.name for entry in ENTRIES if entry.name not in IN_CONTRIB]
    assert kinds == ["locality", "patterns"]
    assert count == len(ladders(None, "decode")) - 1


def test_what_could_not_be_loaded_is_said_instead(monkeypatch):
    monkeypatch.setitem(outside._broken, "h2o", "ImportError: no such thing")
    monkeypatch.delitem(KNOWN, "h2o")
    from saccade.methods.policy import part_named

    with pytest.raises(PolicyError, match="its package offers it, but loading it failed: ImportError"):
        part_named("h2o")


def test_a_saved_state_of_such_a_method_is_read_by_a_new_process():
    """Whatever was asked for before: a state is known by its class, which an entry point brings."""
    from saccade_contrib.h2o import Heavy

    kept = Heavy([torch.arange(3)], 3, [torch.ones(3)], 3, 1)
    tensors, data = state.save(kept)
    plain = {name: tensor.tolist() for name, tensor in tensors.items()}
    code = (
        "import torch\n"
        "from saccade.methods import state\n"
        f"tensors = {{name: torch.tensor(one) for name, one in {plain!r}.items()}}\n"
        f"print(state.load(tensors, {data!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Heavy(positions=[tensor([0, 1, 2])], length=3")


class Means(Calibration):
    @staticmethod
    def shapes(heads, kv_heads, head_dim):
        return {"mean": (kv_heads, head_dim)}


@dataclass(frozen=True)
class Learnt(Method):
    name: ClassVar[str] = "learnt"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    calibrations: ClassVar[dict] = {"means": Means}
    measured: ClassVar[Measured] = Measured("learnt(k={value})", ("3", "5"), summary=0.5, ladder="learnt(k=3|5)")
    k: int = 3

    def select_decode(self, query, state):
        return Dense(query.shape)


@pytest.fixture
def tidy():
    before = dict(KNOWN), dict(METHODS), dict(KINDS)
    yield
    for known, old in zip((KNOWN, METHODS, KINDS), before):
        for name in set(known) - set(old):
            del known[name]


def test_a_method_brings_its_calibration_its_row_and_its_ladder(tidy):
    outside.register(Learnt)
    assert KINDS["means"] is Means
    entry = entry_named("learnt")
    assert (entry.policy("B", 0.1, "5").decode, entry.dial.values(4096), entry.summary) == (Learnt(5), ["3", "5"], 0.5)
    assert outside_row("learnt").name == "learnt"
    assert [one for own in ladders(["learnt"], "decode") for one, _ in own.steps] == ["learnt", "learnt(k=5)"]


@pytest.mark.parametrize(
    ("kinds", "said"),
    [({"means": dict}, "is no class over"), ({"means": 3}, "is no class over"), ({"patterns": Means}, "is taken by")],
)
def test_a_calibration_that_is_none_or_is_taken_is_refused(kinds, said, tidy):
    part = dataclass(frozen=True)(type("Other", (Learnt,), {"name": "other", "calibrations": kinds}))
    with pytest.raises(PolicyError, match=said):
        outside.register(part)
    assert "other" not in KNOWN
    assert "means" not in KINDS
