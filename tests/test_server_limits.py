"""Prompts that fill the context: scored alone to their last token, refused where an answer was asked for."""

from __future__ import annotations

import pytest
from engine_helpers import make
from server_helpers import error, serving
from tiny_models import random_ids

LIMIT = 48
ALONE = {"max_tokens": 0, "echo": True, "logprobs": 2, "temperature": 0}


@pytest.fixture(scope="module")
def servers(tiny_llama):
    with (
        serving(make(tiny_llama, max_model_len=LIMIT)) as small,
        serving(make(tiny_llama, max_model_len=2 * LIMIT)) as large,
    ):
        yield small, large
        small.idle()


def test_a_prompt_that_fills_the_context_is_scored_alone(servers):
    """By itself, among others, and with ``prompt_logprobs``: as where there is more room."""
    prompts = [random_ids(LIMIT, seed=1), random_ids(20, seed=2), random_ids(LIMIT, seed=3)]
    for prompt in (prompts[0], prompts):
        one, other = (server.ask("/v1/completions", {**ALONE, "prompt": prompt}).json() for server in servers)
        for mine, theirs in zip(one["choices"], other["choices"], strict=True):
            for name in ("tokens", "text_offset", "top_logprobs"):
                assert len(mine["logprobs"][name]) == len(theirs["logprobs"][name])
            assert mine["text"] == theirs["text"]
            assert mine["logprobs"]["tokens"] == theirs["logprobs"]["tokens"]
            assert mine["logprobs"]["text_offset"] == theirs["logprobs"]["text_offset"]
            scores = [part["logprobs"]["token_logprobs"] for part in (mine, theirs)]
            assert scores[0][0] is scores[1][0] is None
            assert scores[0][1:] == pytest.approx(scores[1][1:], abs=1e-4)
            assert mine["finish_reason"] == "length"
        used = [answer["usage"] for answer in (one, other)]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert used[0][name] == used[1][name]
    asked = {"prompt": prompts[0], "max_tokens": 0, "echo": True, "prompt_logprobs": 1}
    found = [server.ask("/v1/completions", asked).json()["choices"][0]["prompt_logprobs"] for server in servers]
    assert [len(one) for one in found] == [LIMIT, LIMIT]
    assert [set(one or ()) for one in found[0]] == [set(one or ()) for one in found[1]]
    last = [one[-1][str(prompts[0][-1])] for one in found]
    assert last[0]["logprob"] == pytest.approx(last[1]["logprob"], abs=1e-4)
    assert last[0]["rank"] == last[1]["rank"]


def test_more_than_fits_is_refused(servers):
    small, _ = servers
    full, longer = random_ids(LIMIT, seed=1), random_ids(LIMIT + 1, seed=1)
    for prompt, fields in ((longer, ALONE), (full, {"max_tokens": 1}), (full, {"max_tokens": 0}), (full, {})):
        answer = small.ask("/v1/completions", {"prompt": prompt, **fields})
        assert error(answer)[:2] in ((400, "context_length_exceeded"), (400, None)), fields
    assert small.ask("/v1/completions", {"prompt": full[:-1], "max_tokens": 1}).status_code == 200


def test_tokens_and_text_have_no_limit(servers):
    """/tokenize and /detokenize run no model."""
    small, _ = servers
    said = "a longer text than the context has room for " * 4
    told = small.ask("/tokenize", {"prompt": said}).json()
    assert told["count"] == len(told["tokens"]) > told["max_model_len"] == LIMIT
    assert small.ask("/detokenize", {"tokens": told["tokens"]}).json()["prompt"].endswith(said)
