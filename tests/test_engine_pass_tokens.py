"""Tokens of a pass are those that each request's own sampler chooses, wherever they are chosen."""

from __future__ import annotations

import math

import pytest
import torch

from saccade import SamplingParams
from saccade.engine.rows.pass_tokens import take_logits
from saccade.engine.sampling.sampler import Sampler
from saccade.engine.steps.step import RequestResult, ScheduledRequest, StepInput, StepResult
from saccade.methods.policy import Policy

VOCAB = 50


def scheduled(number, *, start=0, stop=7, **options):
    phase = "prefill" if start == 0 else "decode"
    return ScheduledRequest(number, number, start, stop, phase, Policy(), start, stop, stop, **options)


def run(step, logits, there):
    result = StepResult({one.request_id: RequestResult.of(one) for one in step})
    result.requests[4].error = "broke before"
    loc = torch.zeros(0, dtype=torch.long)
    take_logits(StepInput(tuple(step), loc, loc, ()), result, logits, there)
    return result.requests


@pytest.mark.parametrize("there", [True, False])
def test_tokens_and_logits_of_a_mixed_pass(there):
    samplers = {
        number: Sampler(SamplingParams(temperature=1.0, seed=5 + number, **more))
        for number, more in ((1, {"logit_bias": {3: 4.0}}), (2, {"logprobs": 2}), (6, {"top_k": 4}))
    }
    ids = [3, 1, 4, 1, 5, 9, 2]
    step = [
        scheduled(0, wants_logits=True, greedy=True),
        *(scheduled(number, wants_logits=True, sampling=samplers[number].row(ids)) for number in (1, 2)),
        scheduled(3),  # a chunk in the middle of a prompt
        scheduled(4, wants_logits=True, greedy=True),
        scheduled(5, start=4, stop=7, all_logits=True, greedy=True, drafts=(1, 2), together=True),
        scheduled(6, wants_logits=True, sampling=samplers[6].row(ids)),
        scheduled(7, wants_logits=True, greedy=True),
        scheduled(8, start=0, all_logits=True),
    ]
    logits = torch.randn(1 + 2 + 1 + 3 + 2 + 7, VOCAB + 3, generator=torch.Generator().manual_seed(1))[:, :VOCAB]
    logits[0, 9] = logits[0, 30] = 40.0
    logits[7, 1], logits[8, 2] = math.inf, math.nan  # of 6 and 7: their samplers say what is wrong
    own = run(step, logits, there)
    assert own[0].tokens == [9]
    assert own[0].logits is None
    for number in (1, 2):
        token = samplers[number].sample(ids, logits[number], len(ids))
        if there:
            assert own[number].tokens == [token]
            assert own[number].logits is None
        else:
            assert own[number].tokens is None
            assert torch.equal(own[number].logits, logits[number : number + 1])
    if there:
        assert own[1].logprobs is None
        assert set(own[2].logprobs[0]) >= {own[2].tokens[0]}
    assert own[3].tokens is own[3].logits is None
    assert own[4].tokens is None
    for at, row in enumerate(own[5].rows):
        assert row.tokens is None
        assert torch.equal(row.logits, logits[4 + at : 5 + at])
    for number, at in ((6, 7), (7, 8)):
        assert own[number].tokens is own[number].logprobs is None
        assert torch.equal(own[number].logits, logits[at : at + 1]) or number == 7
    assert torch.equal(own[8].logits, logits[9:])


@pytest.mark.parametrize("there", [True, False])
def test_a_pass_that_chooses_nothing(there):
    step = [scheduled(4), scheduled(1)]
    own = run(step, torch.zeros(0, VOCAB), there)
    assert own[1].tokens is own[1].logits is None
