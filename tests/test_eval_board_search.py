"""The board's search for settings that read alike."""

from __future__ import annotations

from math import exp, log

import pytest

from saccade.eval.board.matching import PROBES, SEARCHED, Point, at_equal, distance, nearest

DENSITIES = {
    "as the option": lambda at: 0.002 * 1.06**at,
    "a little more than the option": lambda at: 0.01 + 0.003 * 1.06**at,
    "slow, then steep": lambda at: 1 / (1 + exp(-(at - 70) / 6)),
    "a floor, then a rise": lambda at: max(0.04, at / 100),
    "steps": lambda at: 0.004 * 1.02 ** (4 * (at // 4)) * (1 + at // 20),
}


@pytest.mark.parametrize("step", [log(1.06), None])
@pytest.mark.parametrize("name", DENSITIES)
def test_the_search_finds_the_setting_that_reads_what_it_should(name, step):
    density = DENSITIES[name]
    for target in (0.05, 0.1, 0.25):
        for first in (0, 50, 99):
            asked: list[int] = []

            def measure(at: int, asked: list[int] = asked) -> float:
                asked.append(at)
                return density(at)

            found = nearest(100, measure, target, first, step)
            assert len(asked) == len(set(asked)) <= PROBES
            best = min(distance(density(at), target) for at in range(100))
            assert distance(density(found.at), target) <= max(SEARCHED, best, 0.12)
            assert found.density[found.at] == density(found.at)


def test_the_search_ends_at_what_cannot_be_had():
    """What reads too much at its sparsest setting is left there, and what reads too little at its densest."""
    assert nearest(50, lambda at: 0.33 + at / 100, 0.05, 25, None).at == 0
    assert nearest(50, lambda at: 0.02 * (at + 1) / 50, 0.25, 0, 0.06).at == 49
    assert nearest(1, lambda at: 0.5, 0.1, 0).at == 0


def test_a_target_that_windows_put_out_of_reach_costs_few_probes():
    """Gemma-3-270M at 16K: most layers read their window at every setting, three of 18 what the dial says."""
    for step, first, target in ((0.06, 60, 0.0156), (None, 50, 0.25)):
        densities = [0.028 + 0.167 * (1 - exp(-at / 12)) ** 2 for at in range(100)]
        found = nearest(100, densities.__getitem__, target, first, step)
        assert found.at == (0 if target < 0.028 else 99)
        assert len(found.density) <= 4


def test_a_plateau_before_the_target_does_not_end_the_search():
    densities = [0.02] * 60 + [0.02 * exp(0.1 * at) for at in range(40)]
    for step in (None, 0.1):
        found = nearest(100, densities.__getitem__, 0.25, 10, step)
        assert found.density[found.at] == pytest.approx(0.25, rel=0.12)


def test_between_two_settings_a_sample_moves_on_a_straight_line():
    points = [Point(0.1, 0.05, {"a": 1.0, "b": 0.0}), Point(0.4, 0.2, {"a": 0.0, "b": 1.0, "c": 1.0})]
    found = at_equal(points, 0.2, logs=True)
    assert found is not None
    assert found.scores == {"a": pytest.approx(0.5), "b": pytest.approx(0.5)}  # of samples that both answered
    assert found.keys == pytest.approx(0.1)
    linear = at_equal(points, 0.175, logs=False)
    assert linear is not None
    assert linear.scores["a"] == pytest.approx(0.75)
    assert at_equal(points, 0.5, logs=True) is at_equal(points, 0.05, logs=True) is at_equal([], 0.1, True) is None
    assert at_equal(points[:1], 0.1, logs=True) == points[0]
