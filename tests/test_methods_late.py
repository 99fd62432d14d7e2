"""Counts that a device keeps: the report says the same as where the host counts."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import GREEDY, tokens
from tiny_models import random_ids

from saccade.engine.layer_stats import LayerStats
from saccade.engine.step import CallCount
from saccade.methods.base import Cost
from saccade.methods.cis import method as cis
from saccade.selection import Dense, Shape


@pytest.mark.parametrize("policy", ["cis(k=20, sinks=4, local=8, s=4)", "cis(k=20, sinks=4, local=8, unit=kv_head)"])
def test_a_step_whose_searches_are_counted_late(llm, policy, monkeypatch):
    prompt = random_ids(150, seed=3)
    plain = llm.generate(prompt, GREEDY, policy=policy)[0]
    monkeypatch.setattr(cis, "_late", lambda query: True)
    late = llm.generate(prompt, GREEDY, policy=policy)[0]
    assert tokens(late) == tokens(plain)
    counted, expected = late.report["decode"], plain.report["decode"]
    for name in ("searches", "searchable", "keys_attended"):
        assert counted[name] == expected[name] > 0
    assert abs(counted["keys_scored"] - expected["keys_scored"]) <= expected["retrievals"]  # rounded once, not each


def test_late_counts_add_up_and_are_taken_over_once():
    stats, cost = LayerStats(), Cost(scored=3, searches=0)
    for _ in range(2):
        cost.add_late(scored=torch.tensor(2.5), searches=torch.tensor(4))
    for _ in range(3):
        stats.add(CallCount(0, Dense(Shape.suffix(8, 2, 1, 9)), cost, "reference"))
    for _ in range(2):
        stats.settle()
        assert (stats.scored, stats.searches, stats.searchable) == (9 + 15, 24, 24)
