"""Random models of every family whose layers keep a state, or share keys, against transformers; ``make hybrids`` has 30
of each."""

from __future__ import annotations

import pytest
from hybrid_configs import KEEPING, hold
from tiny_models import one_thread  # noqa: F401


@pytest.mark.parametrize("family", KEEPING)
@pytest.mark.parametrize("seed", [100, pytest.param(101, marks=pytest.mark.thorough)])
def test_what_a_random_model_says_is_what_transformers_says(family, seed, tmp_path):
    hold(family, seed, tmp_path)
