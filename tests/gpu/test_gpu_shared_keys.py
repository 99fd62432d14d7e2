"""A model whose last layers read earlier ones' keys gives on a GPU what it gives on a CPU, from recorded steps, too."""

from __future__ import annotations

import pytest
from engine_helpers import GREEDY, tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams

LAYERS = 6


@pytest.fixture(scope="module", params=["windows", "none"])
def engines(request, tmp_path_factory):
    """A CPU and a GPU engine of one checkpoint, some of whose layers have windows, or none."""
    kinds = {} if request.param == "windows" else {"layer_types": ["full_attention"] * LAYERS}
    folder = make_checkpoint(
        "gemma3n_text", tmp_path_factory.mktemp("shared"), head_dim=64, max_position_embeddings=2048, **kinds
    )
    options = {"kv_memory": "64MiB", "prefill_chunk": 128, "dtype": "float32", "exact": False}
    return [LLM(folder, device=device, **options) for device in ("cpu", "cuda")]


@pytest.mark.parametrize("policy", ["dense", "quest(budget=64, dense_layers=0)", "arkvale(budget=96)", "topk(k=48)"])
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
    windows = any(one is not None for one in engines[1].model.spec.windows)
    paths = {one["path"] for one in answers[0].report["decode"]["paths"]}
    assert paths <= {"recorded"} or (windows and policy != "dense")


def test_rows_that_come_and_go(engines):
    prompts = [random_ids(length, seed=length) for length in (61, 1, 24, 200, 128, 90)]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (30, 3, 17, 9, 30, 12)]
    for left, right in zip(*(llm.generate(prompts, params) for llm in engines)):
        assert right.error is None
        assert tokens(left) == tokens(right)


def test_drafts_and_audits(engines):
    ids = random_ids(300, seed=1)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, audit=1.0, audit_steps=1.0)
    policy = "lossless(draft=streaming(window=40), tokens=3)"
    left, right = (llm.generate(ids, params, policy=policy)[0] for llm in engines)
    assert right.error is None
    assert tokens(left) == tokens(right)
    whole = engines[1].generate(ids, params, policy="topk(k=10000)")[0]
    assert whole.report["audit"]["retained_mass"]["mean"] == pytest.approx(1, abs=1e-3)
