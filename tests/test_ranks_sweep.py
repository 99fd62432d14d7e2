"""The sweep of models, methods and processes: what it finds, and that a fault of one process is found."""

from __future__ import annotations

import pytest
import rank_sweep
from tiny_models import one_thread  # noqa: F401

from saccade.methods.topk import TopK


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_what_differs_is_rounding(seed):
    found = rank_sweep.sweep(1, seed)
    assert found.wrong == []
    assert found.equal > 0


def test_a_process_that_chooses_otherwise_is_found(monkeypatch):
    """By answers that are as far off whatever the weights' last digits are."""
    real = TopK.select_decode

    def select_decode(self, query, state):
        if query.part.number == 1:
            query.q[:] = query.q.flip(-1)
        return real(self, query, state)

    monkeypatch.setattr(TopK, "select_decode", select_decode)
    monkeypatch.setattr(TopK, "device_plan", lambda self, spec: None)
    monkeypatch.setattr(rank_sweep, "COPIES", 2)
    found = rank_sweep.sweep(1, 0, ["llama"], ["topk(k=24)"])
    assert len(found.wrong) == 2  # the requests, and the session
    assert "topk" in found.wrong[0]
    assert not found.rounding
