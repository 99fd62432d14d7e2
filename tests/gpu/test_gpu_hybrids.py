"""Models with layers that keep a state give on a GPU what they give on a CPU: states lie there, no step is recorded."""

from __future__ import annotations

import pytest
from engine_helpers import GREEDY, tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5_text", "qwen3_next"])
def engines(request, tmp_path_factory):
    """A CPU and a GPU engine of one checkpoint, whose heads are wide enough for the kernels."""
    sizes = {"hidden_size": 128} if request.param == "lfm2" else {"head_dim": 32}
    folder = make_checkpoint(
        request.param, tmp_path_factory.mktemp(request.param), **sizes, max_position_embeddings=2048
    )
    options = {"kv_memory": "64MiB", "prefill_chunk": 128, "dtype": "float32", "enable_prefix_caching": True}
    return [LLM(folder, device=device, **{"enable_prefix_caching": False, **options}) for device in ("cpu", "cuda")]


@pytest.mark.parametrize("policy", ["dense", "quest(budget=64, dense_layers=0)"])
def test_turns_and_edits_equal_those_of_the_cpu(engines, policy):
    first, second, other = (random_ids(length, seed=length) for length in (400, 33, 50))
    said = []
    for llm in engines:
        with llm.session(policy=policy) as session:
            answers = [session.generate(first, GREEDY), session.generate(second, GREEDY)]
            answers.append(session.complete(session.token_ids[:425] + other, GREEDY))
        answers += llm.generate([first + other, first + second], GREEDY, policy=policy)
        assert all(one.error is None for one in answers)
        said.append([tokens(one) for one in answers])
    assert said[0] == said[1]
    paths = answers[0].report["decode"]["paths"]
    assert "recorded" not in paths
    assert engines[1].pool.states.pinned == 0
