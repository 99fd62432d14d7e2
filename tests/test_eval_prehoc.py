"""PrHS's certificates: the proved ones hold for any weights, and what is fitted is told apart from what holds."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from engine_helpers import make
from tiny_models import random_ids

from saccade import SamplingParams
from saccade.engine.observing import observing
from saccade.ops.prehoc import divergence, drift, fit_changes, information_loss

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from prehoc_bounds import FreezeBound, RecencyBound, SharingBound, verdict


def entropy(weights: torch.Tensor) -> torch.Tensor:
    return -torch.xlogy(weights, weights).sum(-1)


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 6.0])
def test_what_truncation_does_is_within_the_bounds(sharpness):
    rng = torch.Generator().manual_seed(0)
    weights = torch.softmax(sharpness * torch.randn(50, 200, generator=rng, dtype=torch.float64), -1)
    kept = torch.rand(weights.shape, generator=rng) < torch.rand(50, 1, generator=rng)
    kept[:, 0] = True
    dropped = (weights * ~kept).sum(-1)
    left = weights * kept / (1 - dropped)[:, None]
    torch.testing.assert_close((torch.xlogy(left, left) - torch.xlogy(left, weights)).sum(-1), divergence(dropped))
    assert ((entropy(weights) - entropy(left)).abs() <= information_loss(dropped, 200) / 2 + 1e-12).all()
    assert information_loss(torch.zeros(1), 200) == 0


def test_weights_drift_by_no_more_than_queries_do():
    rng = torch.Generator().manual_seed(1)
    keys = torch.randn(100, 16, generator=rng)
    for near in (1e-3, 0.05, 1.0):
        query = torch.randn(30, 16, generator=rng)
        before = query + near * torch.randn(30, 16, generator=rng)
        change = (torch.softmax(query @ keys.T / 4, -1) - torch.softmax(before @ keys.T / 4, -1)).abs().sum(-1)
        bound = drift(query, before, keys.norm(dim=-1).amax(), 0.25)
        assert (change <= bound + 1e-6).all()
        assert near > 0.01 or (bound < 1).all()


def test_on_a_model_proved_bounds_hold_and_say_where_they_say_nothing(tiny_llama):
    llm = make(tiny_llama)
    sharing, recency, freeze = SharingBound(24), RecencyBound([8, 32, 128], sinks=4), FreezeBound(1)

    def look(call):
        for one in (sharing, recency, freeze):
            one(call)

    with observing(llm.engine, look):
        llm.generate(random_ids(200, 3), SamplingParams(temperature=0, max_tokens=13, ignore_eos=True))
    cis, (fit, etf), psaw = sharing.verdicts(), freeze.verdicts(), recency.verdicts()
    assert [(one.layer, one.head) for one in cis] == [(layer, head) for layer in range(3) for head in range(4)]
    assert all(one.steps == 11 and one.broken == 0 for one in cis)
    assert all(one.steps == 12 and one.broken == 0 for one in etf)
    assert {one.layer for one in etf} == {1, 2}
    assert fit.start == 1
    assert any(one.vacuous > 0 for one in cis)  # random queries are nowhere near each other
    assert all(0 <= one.error < 1 for one in (*cis, *etf))
    assert any(one.error > 0 for one in cis)
    assert len(psaw) == 12
    assert all(decay >= 0 and one.steps == 6 * 3 for decay, one in psaw)
    assert any(one.broken > 0 or one.bound < 1 for _, one in psaw)


def test_a_fit_is_an_envelope_and_finds_what_made_it():
    changes = [5 * math.exp(-0.3 * at) for at in range(6)]
    exact = fit_changes(changes, 4)
    assert (exact.most, exact.mu) == pytest.approx((5.0, 0.3))
    rough = fit_changes([3.0, 4.0, 0.5, 1.0], 2)
    assert all(rough.at(2 + at) >= value - 1e-9 for at, value in enumerate([3.0, 4.0, 0.5, 1.0]))


def test_a_broken_bound_is_seen():
    one = verdict(2, 3, torch.tensor([0.1, 0.5, 2.0, 0.3]), torch.tensor([0.2, 0.4, 0.9, 0.3]))
    assert (one.layer, one.head, one.steps, one.vacuous, one.broken) == (2, 3, 4, 0.25, 0.25)
