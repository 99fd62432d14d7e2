"""Models that store latents give on a GPU what they give on a CPU: prompts in chunks by keys and values of every head,
recorded steps over latents, and what methods choose among both."""

from __future__ import annotations

import pytest
from engine_helpers import GREEDY, tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams

FAMILIES = ("deepseek_v3", "glm4_moe_lite")
POLICIES = ("dense", "quest(budget=64, dense_layers=0)", "arkvale(budget=64)", "streaming(sinks=4, window=60)")
POLICIES += ("psa(epsilon=0.5)", "xattention(threshold=0.6, block_size=64)")


@pytest.fixture(scope="module", params=FAMILIES)
def engines(request, tmp_path_factory):
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), max_position_embeddings=2048)
    options = {"kv_memory": "64MiB", "prefill_chunk": 256, "dtype": "float32", "exact": False}
    return [LLM(folder, device=device, **options) for device in ("cpu", "cuda")]


@pytest.mark.parametrize("policy", POLICIES)
def test_turns_equal_those_of_the_cpu(engines, policy):
    first, second = (random_ids(length, seed=length) for length in (700, 33))
    said = []
    for llm in engines:
        with llm.session(policy=policy) as session:
            answers = [session.generate(first, GREEDY), session.generate(second, GREEDY)]
        answers += llm.generate([first[:300], first + second], GREEDY, policy=policy)
        assert [one.error for one in answers] == [None] * 4
        said.append([tokens(one) for one in answers])
    assert said[0] == said[1]
    assert set(answers[0].report["prefill"]["backends"]) == {"triton"}


def test_steps_are_recorded(engines):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for policy in POLICIES[:4]:
        answer = engines[1].generate([random_ids(400, seed=1)], params, policy=policy)[0]
        assert {one["path"] for one in answer.report["decode"]["paths"]} <= {"recorded"}
