"""Fewer rows, and every pair of settings in one of them."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from covering import covering, quick, spread, thorough

AXES = (range(4), "ab", (1.0, 2.0, 3.0), {"x": 1, "y": 2}, range(7))


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_any_values_of_any_axes_meet(strength):
    rows = covering(AXES, strength)
    for places in combinations(range(len(AXES)), strength):
        wanted = set(product(*(list(AXES[place]) for place in places)))
        assert {tuple(row[place] for place in places) for row in rows} == wanted
    assert len(rows) <= {1: 7, 2: 34, 3: 110}[strength] < 4 * 2 * 3 * 2 * 7
    assert rows == covering(AXES, strength)


def rows_of(cases):
    """(values, whether they wait for ``make test-all``)"""
    return [(case.values, bool(case.marks)) for case in cases]


def test_each_case_meets_one_setting_soon_and_all_of_them_later():
    rows = rows_of(spread("abcde", [1, 2, 3]))
    assert [values for values, _ in rows] == list(product("abcde", [1, 2, 3]))
    soon = [values for values, later in rows if not later]
    assert soon == [("a", 1), ("b", 2), ("c", 3), ("d", 1), ("e", 2)]


def test_what_is_not_quick_waits():
    assert rows_of(quick([1, 2], lambda one: one > 1)) == [((1,), True), ((2,), False)]
    assert rows_of(thorough([(1, "a")])) == [((1, "a"), True)]
