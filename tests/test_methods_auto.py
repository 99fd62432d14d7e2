"""auto: dense until sparse pays, by lines through measured times, and a report that says what it chose and why."""

from __future__ import annotations

import math

import pytest
import torch
from engine_helpers import GREEDY, make, tokens
from tiny_models import random_ids

from saccade.errors import PolicyError
from saccade.methods import auto
from saccade.methods.auto import LENGTHS, Auto, line, measured_lines


def test_a_line_goes_through_both_times_and_never_falls():
    start, slope = line(1.0, 4.0)
    for length, seconds in zip(LENGTHS, (1.0, 4.0)):
        assert start + slope * length == pytest.approx(seconds)
    assert line(2.0, 1.5) == (2.0, 0.0)


@pytest.mark.parametrize(
    ("options", "times", "chosen"),
    [
        ({}, {"dense": 1.0, "psa": 2.0, "lfps": 3.0}, "dense"),
        ({}, {"dense": 1.0, "psa": 0.95, "lfps": 3.0}, "dense"),  # not by the gain asked for
        ({"gain": 1.0}, {"dense": 1.0, "psa": 0.95, "lfps": 3.0}, "psa"),
        ({}, {"dense": 9.0, "psa": 3.0, "lfps": 2.0}, "lfps"),
        ({"method": "psa"}, {"dense": 9.0, "psa": 3.0, "lfps": 2.0}, "psa"),
        ({"method": "psa"}, {"dense": 2.0, "psa": 3.0, "lfps": 1.0}, "dense"),
        ({"least": 10}, {"dense": 1.0, "psa": 3.0, "lfps": 2.0}, "lfps"),
    ],
)
def test_the_fastest_that_pays(options, times, chosen):
    assert Auto(**options).fastest(times) == chosen


LINES = {"dense": (0.0, 1e-5), "psa": (1e-3, 2e-6), "lfps": (2e-3, 1e-6)}  # dense to 141, psa to 1000, then lfps


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(auto, "measured_lines", lambda *shape: LINES)


@pytest.mark.parametrize(
    ("length", "chosen"), [(60, "dense"), (137, "dense"), (142, "psa"), (900, "psa"), (1100, "lfps")]
)
def test_the_length_of_the_context_decides_and_the_report_says_why(llm, known, length, chosen):
    report = llm.generate(random_ids(length, seed=1), GREEDY, policy="auto")[0].report
    notes = [note for note in report["notes"] if "auto chose" in note]
    assert len(notes) == 1  # one for all layers
    assert f"auto chose '{chosen}" in notes[0]
    assert f"at {length} tokens: measured here" in notes[0]
    assert f"dense {length / 100:.3g}" in notes[0]
    assert f"lfps {2 + length / 1000:.3g}" in notes[0]
    if chosen == "dense":
        assert report["decode"]["density"] == 1.0
    if chosen == "lfps":
        assert report["decode"]["density"] < 0.3


@pytest.mark.parametrize(("length", "chosen"), [(40, "dense"), (1000, "dense"), (2000, "psa")])
def test_lines_below_zero_do_not_make_choosing_free(llm, monkeypatch, length, chosen):
    """Dense 1 ms a 1000 keys; psa 0.5 ms a 1000 less a constant, 1.5 ms at 4096: less than dense / 1.1 from 1650 on."""
    psa = (1.5e-3 - 0.5e-6 * LENGTHS[0], 0.5e-6)
    lines = {"dense": (0.0, 1e-6), "psa": psa, "lfps": (9e-3, 0.0)}
    monkeypatch.setattr(auto, "measured_lines", lambda *shape: lines)
    assert psa[0] < 0
    report = llm.generate(random_ids(length, seed=1), GREEDY, policy="auto")[0].report
    assert any(f"auto chose '{chosen}' at {length} tokens" in note for note in report["notes"])


def test_what_it_chose_runs_as_it_would_alone(llm, known):
    """Tail rows, weights and state reach the method chosen."""
    ids = random_ids(1100, seed=2)
    ours, alone = llm.generate([ids, ids], GREEDY, policy=["auto", "lfps(unit=kv_head)"])
    assert tokens(ours) == tokens(alone)
    for field in ("density", "keys_attended", "keys_scored", "selections"):
        assert ours.report["decode"][field] == alone.report["decode"][field]


def test_every_turn_chooses_anew(llm, known):
    with llm.session("auto") as session:
        chosen = []
        for length in (60, 200, 900):
            report = session.generate(random_ids(length, seed=length), GREEDY).report
            chosen += [note.split("'")[1] for note in report["notes"] if "auto chose" in note]
    assert chosen == ["dense", "psa", "lfps(unit=kv_head)"]


def test_given_length_and_method_nothing_is_measured(llm, monkeypatch):
    monkeypatch.setattr(auto, "measured_lines", lambda *shape: 1 / 0)
    for length, chosen in ((90, "dense"), (100, "lfps(unit=kv_head)")):
        report = llm.generate(random_ids(length, seed=1), GREEDY, policy="auto(least=100, method=lfps)")[0].report
        assert any(f"auto chose '{chosen}' at {length} tokens" in note for note in report["notes"])


def test_times_are_measured_once_a_shape():
    shape = (2, 1, 16, torch.float32, torch.device("cpu"), 1)
    lines = measured_lines(*shape)
    assert lines is measured_lines(*shape)
    assert set(lines) == {"dense", "psa", "lfps"}
    for start, slope in lines.values():
        assert math.isfinite(start)
        assert slope >= 0
        assert start + slope * LENGTHS[1] > 0


def test_it_runs_on_what_this_machine_measures(tiny_llama):
    report = make(tiny_llama).generate(random_ids(100, seed=1), GREEDY, policy="auto")[0].report
    assert any("auto chose" in note and "measured here" in note for note in report["notes"])


@pytest.mark.parametrize("options", [{"gain": 0.9}, {"least": 0}, {"method": "quest"}, {"method": "dense"}])
def test_bad_options(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        Auto(**options)
