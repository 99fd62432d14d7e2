"""What crosses the border between the engine and its callers pickles, so that the engine may run in a process of its
own."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from engine_helpers import EVERY, GREEDY, tokens
from method_matrix import MATRIX

from saccade import SamplingParams
from saccade.engine.request import TokenLogprob
from saccade.engine.watch.report import Report
from saccade.errors import CapacityError, ModelError, PolicyError, RequestError, SaccadeError
from saccade.methods.base import PolicyPart
from saccade.methods.policy import Policy
from saccade.methods.registry import KNOWN, PRESETS

PARTS: list[PolicyPart] = [
    *(part() for part in KNOWN.values()),
    *(method for case in MATRIX for method in case.methods()),
]


def again(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.text)
def test_methods_windows_and_freezes_pickle(part):
    """Also what their options make of them: the phases they serve, the rows they want to see."""
    copy = again(part)
    assert copy == part
    assert type(copy) is type(part)
    assert vars(copy) == vars(part)
    assert hash(copy) == hash(part)
    assert copy.text == part.text


@pytest.mark.parametrize(
    "text", [*PRESETS, "flexprefill+lfps+psaw+etf(reuse=hidden)", *(policy.text for policy in EVERY)]
)
def test_policies_pickle(text):
    policy = Policy.parse(text)
    copy = again(policy)
    assert copy == policy
    assert hash(copy) == hash(policy)
    assert copy.text == policy.text
    assert Policy.parse(again(policy.text)) == policy


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(n=3, seed=2**63 - 1, sample=4, stop=["a", "b"], stop_token_ids={3, 5}, logprobs=2),
        SamplingParams(n=2, seed=1, prompt_logprobs=0).for_sample(1),
    ],
)
def test_sampling_parameters_pickle(params):
    assert again(params) == params


@pytest.mark.parametrize("kind", [SaccadeError, ModelError, PolicyError, RequestError, CapacityError])
def test_errors_pickle(kind):
    copy = again(kind("budget=-1 is out of range"))
    assert type(copy) is kind
    assert str(copy) == "budget=-1 is out of range"


def test_results_pickle(llm, prompts):
    """A whole answer with its log-probabilities and its report, as a caller gets it."""
    params = SamplingParams(n=2, seed=3, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    output = llm.generate(prompts[0], params, policy="flexprefill(gamma=0.5, block_size=64, min_budget=0)+topk(k=24)")[
        0
    ]
    copy = again(output)
    assert copy == output
    assert copy.report == output.report
    entry = next(iter(copy.outputs[0].logprobs[0].values()))
    assert type(entry) is TokenLogprob


def test_a_request_that_was_pickled_gives_the_same_answer(llm, prompts):
    policies = [Policy.parse(text) for text in ("psa(epsilon=0.4, block_size=16)", "cis(k=20, sinks=2, local=8)")]
    for policy in policies:
        sampled = SamplingParams(seed=9, temperature=2.0, max_tokens=6, ignore_eos=True)
        for params in (GREEDY, sampled):
            plain = llm.generate(prompts[1], params, policy=policy)[0]
            assert tokens(llm.generate(prompts[1], again(params), policy=again(policy))[0]) == tokens(plain)


def test_an_empty_report_pickles():
    report = Report(Policy.parse("dense"), 2).as_dict()
    assert again(report) == report
