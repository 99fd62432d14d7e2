"""Layers that keep a state by kernels that find it in its slot: what a model answers is what transformers' does. Under
Triton's interpreter; tests/gpu has the same on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import device_of, put_on_device
from engine_helpers import tokens
from test_hybrids import FAMILIES, GREEDY, Pair
from tiny_models import make_checkpoint, one_thread, random_ids  # noqa: F401

from saccade import SamplingParams
from saccade.ops import slotted


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    return Pair(make_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture
def in_slots(monkeypatch):
    monkeypatch.setattr(slotted, "serves", lambda device: True)


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


@pytest.fixture
def batched(pair, in_slots):
    """Steps of a device backend, on CPU tensors and without graphs, which launches the next one before it is asked
    for."""
    llm = pair.llm(exact=False, prefill_chunk=128, enable_prefix_caching=True)
    put_on_device(llm)
    device_of(llm).runs_ahead = True
    return llm


LONG = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


def test_recorded_steps_of_rows_that_come_and_go(pair, batched):
    prompts = [random_ids(length, seed=length) for length in (33, 1, 50)]
    params = [replace(LONG, max_tokens=count) for count in (8, 3, 6)]
    for ids, output in zip(prompts, batched.generate(prompts, params)):
        pair.check(ids, output)
        assert {one["path"] for one in output.report["decode"]["paths"]} == {"recorded"}, output.report["decode"]
    assert batched.pool.states.pinned == 0
