"""Requests that share steps: nobody's tokens depend on the company, on chunks or on preemption."""

from __future__ import annotations

import pytest
from engine_helpers import EVERY, FIVE, GREEDY, LAYERS, make, preempted, tokens
from tiny_models import oracle, oracle_greedy, random_ids

from saccade import SamplingParams


def test_solo_runs_differ_between_policies(llm, prompts):
    """Without this, equality below would prove nothing about policies."""
    answers = [tokens(llm.generate(prompts[0], GREEDY, policy=policy)[0]) for policy in FIVE]
    assert len({tuple(answer) for answer in answers}) >= 4


def test_dense_greedy_equals_transformers(llm, prompts, tiny_llama):
    theirs = oracle(tiny_llama)
    for ids in prompts[:2]:
        assert tokens(llm.generate(ids, SamplingParams(temperature=0, max_tokens=10))[0]) == oracle_greedy(
            theirs, ids, 10
        )


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1), (3, 3, 1, 4, 0)])
def test_i3_i4_a_mixed_batch_equals_solo_runs(llm, prompts, solo, order):
    outputs = llm.generate([prompts[i] for i in order], GREEDY, policy=[FIVE[i] for i in order])
    assert [tokens(output) for output in outputs] == [solo[i] for i in order]
    assert [output.prompt_token_ids for output in outputs] == [prompts[i] for i in order]


@pytest.mark.parametrize("model", ["tiny_llama", "odd_llama"])
def test_a_batch_of_every_method_equals_solo_runs(request, model, prompts):
    llm = make(request.getfixturevalue(model))
    ids = [prompts[i % len(prompts)] for i in range(len(EVERY))]
    few = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    alone = [tokens(llm.generate(one, few, policy=policy)[0]) for one, policy in zip(ids, EVERY)]
    assert [tokens(output) for output in llm.generate(ids, few, policy=EVERY)] == alone
    assert [tokens(output) for output in llm.generate(ids[::-1], few, policy=EVERY[::-1])] == alone[::-1]


def test_requests_that_come_and_go_do_not_disturb(llm, prompts, solo):
    """Different lengths of answers and a limit on running requests: the batch changes at every step."""
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 10, 3, 7, 2)]
    llm.engine.scheduler.max_requests = 2
    try:
        outputs = llm.generate(prompts, params, policy=list(FIVE))
    finally:
        llm.engine.scheduler.max_requests = 64
    assert [tokens(output) for output in outputs] == [want[: p.max_tokens] for want, p in zip(solo, params)]


@pytest.mark.parametrize("chunk", [1, 7, 32, 100, 2048])
def test_chunked_prefill_equals_whole_prefill_in_dense(tiny_llama, prompts, solo, chunk):
    ids = prompts[0] if chunk > 1 else prompts[0][:40]
    whole = solo[0] if chunk > 1 else tokens(make(tiny_llama).generate(ids, GREEDY)[0])
    assert tokens(make(tiny_llama, chunk=chunk).generate(ids, GREEDY)[0]) == whole


@pytest.mark.parametrize("policy", [*EVERY, FIVE[4]], ids=str)
def test_preemption_changes_no_token(tiny_llama, llm, policy):
    small, outputs = preempted(tiny_llama, llm, policy)
    assert outputs[0].report["preemptions"] == 0
    assert small.engine.pool.used_blocks == 0


def test_preemption_keeps_the_draws_of_a_sampled_request(tiny_llama, llm):
    ids = [random_ids(length, seed=length) for length in (127, 125, 126)]
    params = [SamplingParams(seed=seed, max_tokens=12, ignore_eos=True, logprobs=1) for seed in range(3)]
    alone = [llm.generate(one, each)[0].outputs[0] for one, each in zip(ids, params)]
    outputs = make(tiny_llama, blocks=3 * LAYERS * 4 + LAYERS).generate(ids, params)
    assert sum(output.report["preemptions"] for output in outputs) > 0
    for output, want in zip(outputs, alone):
        assert tokens(output) == want.token_ids
        assert output.outputs[0].text == want.text
        assert output.outputs[0].cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-4)


def test_a_full_pool_ends_the_last_request_with_what_it_has(tiny_llama, llm):
    small = make(tiny_llama, blocks=4 * LAYERS)
    ids = random_ids(120, seed=1)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    output = small.generate(ids, params)[0]
    assert output.outputs[0].finish_reason == "length"
    assert tokens(output) == tokens(llm.generate(ids, params)[0])[: len(tokens(output))]
    assert 8 <= len(tokens(output)) <= 9
    assert any("KV pool is full" in note for note in output.report["notes"])
    assert small.engine.pool.used_blocks == 0


@pytest.mark.parametrize("policy", FIVE)
def test_exact_mode_gives_the_same_logprobs_to_the_last_bit(tiny_llama, prompts, policy):
    exact = make(tiny_llama, exact=True)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    alone = exact.generate(prompts[0], params, policy=policy)[0].outputs[0]
    beside = exact.generate(prompts[:3], params, policy=[policy, FIVE[1], FIVE[2]])[0].outputs[0]
    assert beside.logprobs == alone.logprobs
