"""Layers that keep a state by kernels that find it in its slot: what a model answers is what transformers' does. Under
Triton's interpreter; tests/gpu has the same on a GPU."""

from __future__ import annotations

import pytest
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from engine_helpers import tokens
from test_hybrids import FAMILIES, GREEDY, Pair
from tiny_models import make_checkpoint, one_thread, random_ids  # noqa: F401

from saccade.ops import slotted


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    return Pair(make_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture
def in_slots(monkeypatch):
    monkeypatch.setattr(slotted, "serves", lambda device: True)
    monkeypatch.setattr(slotted, "on_host", lambda device: False)


def test_prompts_turns_and_edits(pair, in_slots, monkeypatch):
    llm = pair.llm(exact=False, prefill_chunk=70, enable_prefix_caching=True)
    assert llm.engine.worker.runner.keeping.in_slots(llm.engine.worker.runner.device)
    prompts = [random_ids(length, seed=length) for length in (33, 1, 80)]
    for ids, output in zip(prompts, llm.generate(prompts, GREEDY)):
        pair.check(ids, output)
    first, second = random_ids(40, seed=1), random_ids(20, seed=2)
    with llm.session() as session:
        said = first + tokens(session.generate(first, GREEDY))
        said += second + tokens(session.generate(second, GREEDY))
        edited = said[:50] + random_ids(9, seed=3)
        pair.check(edited, session.complete(edited, GREEDY))
    assert llm.pool.states.pinned == 0
