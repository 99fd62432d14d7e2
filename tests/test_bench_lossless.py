"""``benchmarks/lossless.py`` replays the acceptance that it was asked for, in the order of tests, not of places."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "benchmarks" / "lossless_passes.py"


@pytest.fixture(scope="module")
def passes():
    spec = importlib.util.spec_from_file_location("lossless_passes", FILE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("chance", [0.7, 0.8, 0.9, 0.98])
@pytest.mark.parametrize("drafts", [1, 4, 15])
def test_the_asked_share_of_tested_tokens_stays(passes, chance, drafts):
    coins = passes.Coins(chance, seed=3)
    place = stayed = tests = 0
    runs = []
    while tests < 100 * coins.DECK:
        given = [coins.stays(place + at) for at in range(drafts)]
        stay, tested = coins.test(drafts)
        assert given[:tested] == [True] * stay + [False] * (tested - stay)
        stayed, tests, place = stayed + stay, tests + tested, place + stay + 1
        runs.append(stay)
    assert stayed / tests == pytest.approx(chance, abs=1 / tests + 0.001)
    expected = sum(chance**at for at in range(1, drafts + 1))  # of independent tosses
    assert sum(runs) / len(runs) == pytest.approx(expected, rel=0.1)


def test_the_best_length_of_measured_times(passes):
    said = passes.best_of(0.9, 0.1, {1: 1.0, 3: 1.1, 7: 1.2}, 1.0)
    best = sum(0.9**at for at in range(8)) / (0.7 + 1.2)
    assert f"best {best:.2f} x dense with 7 drafts" in said
