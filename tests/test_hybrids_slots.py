"""Layers that keep a state by kernels that find it in its slot: what a model answers is what transformers' does. Under
Triton's interpreter; tests/gpu has the same on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import Once, device_of, put_on_device
from engine_helpers import tokens
from test_hybrids import FAMILIES, GREEDY, Pair, costly
from tiny_models import make_checkpoint, one_thread, random_ids  # noqa: F401

from saccade import SamplingParams
from saccade.kv import sequence_states
from saccade.kv.states import StatePool
from saccade.models import fused_modules
from saccade.ops import slotted
from saccade.ops.triton import causal_conv


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    return Pair(make_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture
def in_slots(monkeypatch):
    for where in (slotted, fused_modules):
        monkeypatch.setattr(where, "serves", lambda device: True)
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


@costly
def test_snapshots_stay_what_they_were(pair, batched, monkeypatch):
    """Steps that are launched ahead write behind the state they go on from; what is kept of it is not theirs."""
    monkeypatch.setattr(sequence_states, "EVERY", 5)
    ids = random_ids(40, seed=1)
    with batched.session() as session:
        said = ids + tokens(session.generate(ids, replace(LONG, max_tokens=14)))
        for cut in (48, 53, 46):
            edited = said[:cut] + random_ids(6, seed=cut)
            output = session.complete(edited, LONG)
            said = edited + pair.check(edited, output)
            assert output.report["cached_tokens"] > 40
    assert batched.pool.states.pinned == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_fails_has_moved_no_state(pair, batched, monkeypatch, ahead):
    """It breaks between two layers; the host serves its rows. Where the step after it breaks, which was launched
    before this one was known to hold, sequences go back to a snapshot."""
    device_of(batched).runs_ahead = ahead
    prompts = [random_ids(length, seed=length) for length in (33, 20)]
    real = causal_conv.convolve
    breaks = Once(lambda given, *more: real(given, *more), RuntimeError("broke"), at=1 << 30)
    monkeypatch.setattr(causal_conv, "convolve", breaks)
    run = device_of(batched).run

    def fails_once(*given, **named):
        if breaks.left > 1 << 29 and given[0].scheduled[0].start == 35:
            breaks.left = 2  # of two layers at least
        return run(*given, **named)

    monkeypatch.setattr(device_of(batched), "run", fails_once)
    outputs = batched.generate(prompts, LONG)
    assert breaks.left <= 0
    for ids, output in zip(prompts, outputs):
        pair.check(ids, output)
    assert any("broke" in note for output in outputs for note in output.report["notes"]) == (not ahead)
    assert (sum(output.report["recomputed_tokens"] for output in outputs) > 0) == ahead


@costly
def test_rows_without_room_for_a_second_state_are_the_hosts(pair, batched, monkeypatch):
    prompts = [random_ids(length, seed=length) for length in (12, 33, 20)]
    real = StatePool.take_spare
    monkeypatch.setattr(StatePool, "take_spare", lambda self, states: real(self, states) if self.pinned < 4 else None)
    outputs = batched.generate(prompts, LONG)
    paths = {one["path"] for output in outputs for one in output.report["decode"]["paths"]}
    assert {"recorded"} < paths
    for ids, output in zip(prompts, outputs):
        pair.check(ids, output)
    assert batched.pool.states.pinned == 0


@costly
def test_samples_of_one_prompt_go_their_own_ways(pair, batched):
    ids = random_ids(37, seed=2)
    (output,) = batched.generate([ids], SamplingParams(temperature=2, seed=1, n=3, max_tokens=6, logprobs=1))
    for number in range(3):
        pair.check(ids, output, number, greedy=False)
    assert len({tuple(one.token_ids) for one in output.outputs}) > 1


@costly
def test_steps_that_are_replayed_and_held_against_the_truth(pair, batched):
    """A dense replay of a step moves a state as the step itself then does, from where it was."""
    ids = random_ids(120, seed=3)
    policy = "quest(budget=32, block_size=16, dense_layers=0)"
    plain, audited = (replace(LONG, audit=share, audit_steps=share) for share in (0.0, 0.6))
    (left,), (right,) = (batched.generate([ids], one, policy=policy) for one in (plain, audited))
    assert tokens(left) == tokens(right)
    assert right.report["audit"]["agreement"]["samples"] > 0


@costly
def test_drafts_by_recorded_steps_are_verified_by_the_host(pair, batched):
    """Draft steps move states from slot to slot; what stood before them is what the verification goes on from."""
    prompts = [random_ids(length, seed=length) for length in (33, 61)]
    params = replace(LONG, max_tokens=14)
    drafted = "lossless(draft=quest(budget=32, block_size=16, dense_layers=0), tokens=4, lookup=2)"
    plain, outputs = (batched.generate(prompts, params, policy=one) for one in ("dense", drafted))
    for ids, output, other in zip(prompts, outputs, plain):
        pair.check(ids, output)
        assert tokens(output) == tokens(other)
        said = output.report["speculation"]
        assert said["drafted"] > 0
        assert output.report["recomputed_tokens"] == 0
        assert output.report["notes"] == []
    assert sum(output.report["accepted_tokens"] < output.report["drafted_tokens"] for output in outputs) > 0
    assert batched.pool.states.pinned == 0
