"""Samples of one prompt share its blocks: it is computed once, and each answer is the one it would have alone."""

from __future__ import annotations

import pytest
from engine_helpers import LAYERS, finish, make, tokens
from tiny_models import random_ids

from saccade import SamplingParams
from saccade.methods.policy import Policy

POLICIES = (
    "dense",
    "topk(k=24)",
    "lfps(k=16, blocks=2, least=16)",
    "cis(k=16, sinks=2, local=8)",
    "cis(k=16, sinks=2, local=8, tau=0.3, anchors=any)",
    "snapkv(capacity=80)",
    "h2o(budget=48)",
    "flexprefill(gamma=0.5, block_size=64, min_budget=0)+loopserve",
)


def sampled(n: int, count: int = 8) -> SamplingParams:
    return SamplingParams(n=n, temperature=1.0, seed=7, max_tokens=count, ignore_eos=True)


def apart(llm, ids, params, policy) -> list[list[int]]:
    """Each sample as a request of its own, one after the other."""
    answers = []
    for index in range(params.n):
        request = llm.engine.add(ids, params.for_sample(index), Policy.parse(policy))
        finish(llm.engine)
        answers.append(request.final_ids)
    return answers


@pytest.mark.parametrize("policy", POLICIES)
def test_samples_share_their_prompt_and_answer_as_alone(llm, policy):
    ids, params = random_ids(205, seed=3), sampled(4)
    output = llm.generate(ids, params, policy=policy)[0]
    assert [one.token_ids for one in output.outputs] == apart(llm, ids, params, policy)
    assert len({tuple(one.token_ids) for one in output.outputs}) == 4
    assert [report["prefill"]["tokens"] for report in output.reports] == [205, 0, 0, 0]
    assert [report["cached_tokens"] for report in output.reports] == [0, 205, 205, 205]
    assert llm.pool.used_blocks == 0


def test_full_blocks_are_held_once(tiny_llama):
    """205 tokens are 6 full blocks and a part of one, which each sample copies."""
    llm = make(tiny_llama)
    first = llm.engine.add(random_ids(205, seed=3), sampled(1), Policy())
    for index in range(1, 4):
        llm.engine.add(first.prompt, sampled(4).for_sample(index), Policy(), shares=first)
    while not first.output_ids:
        llm.engine.step()
    llm.engine.step()
    assert llm.pool.used_blocks == LAYERS * (6 + 4)
    finish(llm.engine)
    assert llm.pool.used_blocks == 0


def test_without_room_for_copies_samples_compute_the_prompt_themselves(tiny_llama, llm):
    ids, params = random_ids(205, seed=3), sampled(3)
    small = make(tiny_llama, blocks=8 * LAYERS)
    output = small.generate(ids, params)[0]
    assert [one.token_ids for one in output.outputs] == apart(llm, ids, params, "dense")
    assert small.pool.used_blocks == 0


@pytest.mark.parametrize("steps", [0, 2, 6])
def test_cancelling_the_first_sample_leaves_the_others(llm, steps):
    ids, params = random_ids(205, seed=3), sampled(3)
    want = apart(llm, ids, params, "topk(k=24)")
    first = llm.engine.add(ids, params.for_sample(0), Policy.parse("topk(k=24)"))
    others = [
        llm.engine.add(ids, params.for_sample(index), Policy.parse("topk(k=24)"), shares=first) for index in (1, 2)
    ]
    for _ in range(steps):
        llm.engine.step()
    llm.engine.cancel(first)
    finish(llm.engine)
    assert [other.final_ids for other in others] == want[1:]
    assert llm.pool.used_blocks == 0


def test_cancelling_a_sample_that_waits(llm):
    first = llm.engine.add(random_ids(205, seed=3), sampled(1), Policy())
    waiting = llm.engine.add(first.prompt, sampled(2).for_sample(1), Policy(), shares=first)
    llm.engine.step()
    llm.engine.cancel(waiting)
    finish(llm.engine)
    assert (waiting.finish_reason, first.finish_reason) == ("cancelled", "length")
    assert llm.pool.used_blocks == 0


def test_one_token_each(llm):
    """The first sample has ended before the others begin."""
    output = llm.generate(random_ids(64, seed=5), sampled(3, count=1))[0]
    assert [len(one.token_ids) for one in output.outputs] == [1, 1, 1]
    assert tokens(output) == tokens(llm.generate(random_ids(64, seed=5), sampled(1, count=1))[0])
    assert llm.pool.used_blocks == 0
