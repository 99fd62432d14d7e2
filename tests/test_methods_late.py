"""Counts that a device keeps are in the report once."""

from __future__ import annotations

import torch

from saccade.engine.layer_stats import LayerStats
from saccade.engine.step import CallCount
from saccade.methods.base import Cost
from saccade.selection import Dense, Shape


def test_late_counts_add_up_and_are_taken_over_once():
    stats, cost = LayerStats(), Cost(scored=3, searches=0)
    for _ in range(2):
        cost.add_late(scored=torch.tensor(2.5), searches=torch.tensor(4))
    for _ in range(3):
        stats.add(CallCount(0, Dense(Shape.suffix(8, 2, 1, 9)), cost, "reference"))
    for _ in range(2):
        stats.settle()
        assert (stats.scored, stats.searches, stats.searchable) == (9 + 15, 24, 24)
