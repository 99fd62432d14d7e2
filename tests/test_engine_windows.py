"""Sparse methods on models with sliding windows, on a CPU: rows that are planned for all layers get what rows get whose
method chooses layer by layer."""

from __future__ import annotations

import pytest
from device_helpers import choose_one_by_one
from engine_helpers import tokens
from tiny_models import random_ids
from window_helpers import BY_KEYS, LENGTHS, METHOD, SIZES, checkpoint, of_two_sizes

from saccade import LLM, SamplingParams
from saccade.engine.watch.phase_stats import SLIDES

FEW = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, logprobs=1)
STAYS = {"loopserve", "rocketkv", "locks", "double_sparsity", "hshare"}  # who chooses in Python, a layer at a time


def engine(folder, planned: bool, **options) -> LLM:
    made = LLM(folder, kv_memory="16MiB", prefill_chunk=256, enable_prefix_caching=False, **options)
    if not planned:
        choose_one_by_one(made)
    return made


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    made = {}

    def of(family: str) -> tuple[LLM, LLM]:
        if family not in made:
            folder = checkpoint(family, tmp_path_factory.mktemp(family))
            made[family] = engine(folder, False), engine(folder, True)
        return made[family]

    return of


def plans(policy: str) -> bool:
    """Whether rows under it are planned."""
    return policy.split("(")[0] not in STAYS and "psaw" not in policy


def same(left, right, planned: bool = True) -> None:
    assert left.error is right.error is None
    assert tokens(left) == tokens(right)
    entries = [one.outputs[0].logprobs for one in (left, right)]
    for token, own, other in zip(tokens(left), *entries):
        assert own[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)
    own, other = left.report["decode"], right.report["decode"]
    assert own["keys_scored"] == pytest.approx(other["keys_scored"], abs=14, rel=0.12)
    for name in ("keys_attended", "keys_causal", "density_per_head", "searches", "searchable", "selections"):
        assert own[name] == other[name], name
    for name in ("coverage_estimated", "coverage_estimated_least"):
        assert own[name] == pytest.approx(other[name], abs=1e-5)
    assert left.report["notes"] == right.report["notes"]
    if planned:
        assert "row" not in {one["path"] for one in other["paths"]}, other["paths"]


@pytest.mark.parametrize("policy", [*METHOD.values(), BY_KEYS])
def test_rows_that_outgrow_a_window(engines, policy):
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    own, planned = (one.generate(prompts, FEW, policy=policy) for one in engines("gemma3_text"))
    for left, right in zip(own, planned):
        same(left, right, plans(policy))
        assert SLIDES in right.report["notes"]


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("gemma2", METHOD["lfps"]),  # logits are capped
        ("gemma2", METHOD["psa"]),
        ("mistral", METHOD["h2o"]),  # all layers slide
        ("mistral", BY_KEYS),
        ("cohere2", METHOD["cis"]),
        ("gpt_oss", METHOD["topk"]),  # layers with logits without values are attended one by one
        ("gemma3_text", f"{METHOD['cis']}+psaw(start_layer=1, block_size=1, sinks=3, local=8)"),
        ("gemma3_text", "streaming(sinks=2, window=40)+psaw(start_layer=1, block_size=1, sinks=3, local=8)"),
    ],
)
def test_families(engines, family, policy):
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    own, planned = (one.generate(prompts, FEW, policy=policy) for one in engines(family))
    for left, right in zip(own, planned):
        same(left, right, family != "gpt_oss" and plans(policy))


@pytest.mark.parametrize("policy", [METHOD["lfps"], METHOD["quest"], METHOD["h2o"], METHOD["locks"]])
def test_windows_of_two_sizes(tmp_path, monkeypatch, policy):
    folder = of_two_sizes(tmp_path / "llama", monkeypatch)
    own, planned = (engine(folder, chosen) for chosen in (False, True))
    assert own.model.runner.spec.windows == SIZES
    prompts = [random_ids(length, seed=length) for length in (69, 99)]
    for left, right in zip(*(one.generate(prompts, FEW, policy=policy) for one in (own, planned))):
        same(left, right, plans(policy))


@pytest.mark.parametrize("policy", [METHOD["lfps"], METHOD["h2o"], METHOD["cis"], METHOD["locks"], BY_KEYS])
def test_turns_across_a_window(engines, policy):
    """The second turn outgrows the window, and the third takes its place, from before the window's size on."""
    first, second, third = (random_ids(length, seed=length) for length in (50, 25, 8))
    answers = []
    for one in engines("gemma3_text"):
        with one.session(policy=policy) as session:
            turns = [session.generate(ids, FEW) for ids in (first, second)]
            answers.append([*turns, session.complete([*first, *third], FEW)])
    for left, right in zip(*answers):
        same(left, right, policy != METHOD["h2o"] and plans(policy))  # its first turn evicts


@pytest.mark.parametrize("policy", [METHOD["lfps"], METHOD["quest"]])
def test_rows_that_the_cpu_attends_in_host_memory(engines, policy):
    own, planned = engines("gemma3_text")
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    expected = [tokens(one) for one in own.generate(prompts, FEW, policy=policy)]
    with engine(planned.config.model, True, kv_host="16MiB", kv_compute="host") as hosted:
        done = hosted.generate(prompts, FEW, policy=policy)
        assert [one.error for one in done] == [None, None]
        assert [tokens(one) for one in done] == expected


def test_requests_under_several_methods(engines):
    policies = [METHOD["lfps"], METHOD["quest"], METHOD["snapkv"], "dense", METHOD["topk"], METHOD["cis"]]
    prompts = [random_ids(length, seed=length) for length in (68, 70, 66, 71, 90, 30)]
    own, planned = (one.generate(prompts, FEW, policy=policies) for one in engines("gemma3_text"))
    for left, right in zip(own, planned):
        same(left, right)


def test_a_method_without_a_plan_is_not_asked_where_all_layers_slide(engines):
    own, planned = (
        one.generate(random_ids(100, seed=1), FEW, policy="topp(dense_upto=0)") for one in engines("mistral")
    )
    same(own[0], planned[0])
