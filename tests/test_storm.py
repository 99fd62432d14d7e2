"""A short storm of requests over an engine whose insides fail, and a few hundred mistakes: ``make storm`` and ``make
fuzz`` run thousands."""

from __future__ import annotations

import pytest
from fuzz.run import fuzz
from storm.run import storm
from storm.sessions import FAMILY, rounds

from saccade.kv import sequence_states


@pytest.mark.slow
def test_requests_that_others_failures_do_not_touch():
    done = storm(100, seed=3, rate=2, each=1)
    assert done["outcomes"]["answered"] > 40
    assert done["outcomes"]["failed"] > 5
    assert len(done["planted"]) >= 4, done


@pytest.mark.thorough
@pytest.mark.slow
def test_storms_over_layers_that_keep_a_state(monkeypatch):
    done = storm(100, seed=3, rate=2, each=1, family="qwen3_5_text")
    assert done["outcomes"]["answered"] > 30
    assert done["planted"]["states"] > 0
    monkeypatch.setenv(FAMILY, "qwen3_5_text")
    monkeypatch.setattr(sequence_states, "EVERY", sequence_states.EVERY)  # which the storm sets
    seen = rounds(60, seed=1)
    assert seen["older snapshots"] > 0


@pytest.mark.slow
def test_mistakes_give_an_error_of_one_line_or_a_result():
    outcomes, wrong = fuzz(500, seed=7)
    assert not wrong, "\n".join(f"{place}: {example}" for place, example in wrong.items())
    for kind in ("policies", "parameters", "prompts", "settings", "checkpoints"):
        assert outcomes[f"{kind}: error"] > 5, outcomes
        assert outcomes[f"{kind}: result"] > 0, outcomes
    assert outcomes["commands: result"] > 10
