"""Fewer rows, and every pair of settings in one of them."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from covering import covering

AXES = (range(4), "ab", (1.0, 2.0, 3.0), {"x": 1, "y": 2}, range(7))


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_any_values_of_any_axes_meet(strength):
    rows = covering(AXES, strength)
    for places in combinations(range(len(AXES)), strength):
        wanted = set(product(*(list(AXES[place]) for place in places)))
        assert {tuple(row[place] for place in places) for row in rows} == wanted
    assert len(rows) <= {1: 7, 2: 34, 3: 110}[strength] < 4 * 2 * 3 * 2 * 7
    assert rows == covering(AXES, strength)
