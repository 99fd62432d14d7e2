"""Requests that the device backend serves get what the row path gives: tokens, stored keys and reports. CPU tensors,
Triton's interpreter, no graphs."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import Once, put_on_device
from drafters import Seldom, drafting
from engine_helpers import finish, start, tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.core import new_request_id
from saccade.engine.device import attention as device_attention
from saccade.engine.device import sampling as device_sampling
from saccade.engine.messages import AddRequest
from saccade.engine.observing import observing_logits
from saccade.eval.drift.measure import run
from saccade.methods.policy import Policy
from saccade.outputs import finished
from saccade.passage import Passage

POLICIES = [
    "dense",
    "streaming(sinks=2, window=40)",
    "arkvale(budget=96)",
    "quest(budget=64, dense_layers=1)",
    pytest.param("psa(epsilon=0.4, microbatch=1)", marks=pytest.mark.thorough),
]
FEW = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048, head_dim=32, num_hidden_layers=2
    )


def engine(folder, batched: bool, **options) -> LLM:
    made = LLM(folder, kv_memory="16MiB", prefill_chunk=256, exact=False, **{"enable_prefix_caching": False, **options})
    if batched:
        put_on_device(made)
    return made


@pytest.fixture(scope="module")
def engines(folder):
    return engine(folder, False), engine(folder, True)


def same(reports) -> None:
    """Everything a report counts, times and names of kernels aside; the coverage that a stopping rule believed in but
    for rounding."""
    aside = dict.fromkeys(("seconds", "tokens_per_second", "paths", "coverage_estimated", "coverage_estimated_least"))
    for name in ("coverage_estimated", "coverage_estimated_least"):
        assert reports[0]["decode"][name] == pytest.approx(reports[1]["decode"][name], abs=1e-5)
    left, right = ({**report["decode"], **aside} for report in reports)
    for one in (left, right):
        one["backends"] = sum(one["backends"].values())
    assert left == right
    assert reports[0]["notes"] == reports[1]["notes"]


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_and_reports_equal_those_of_the_own_path(engines, policy):
    prompts = [random_ids(length, seed=length) for length in (30, 190, 223)]
    own, batched = (one.generate(prompts, FEW, policy=policy) for one in engines)
    for left, right in zip(own, batched):
        assert tokens(left) == tokens(right)
        same([left.report, right.report])
        assert set(right.report["decode"]["backends"]) == {"triton"}


def test_methods_side_by_side_with_one_that_is_not_served(engines):
    prompts = [random_ids(length, seed=length) for length in (150, 190, 223, 130, 170)]
    policies = [*POLICIES[:4], "topk(k=24)"]
    own, batched = (one.generate(prompts, FEW, policy=policies) for one in engines)
    for left, right in zip(own, batched):
        assert tokens(left) == tokens(right)
        same([left.report, right.report])


def test_sampling_and_logprobs(engines, monkeypatch):
    params = [
        SamplingParams(max_tokens=4, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=4, temperature=0, logprobs=2),
        SamplingParams(max_tokens=4, seed=4, top_p=0.8, min_tokens=3, repetition_penalty=1.3, logit_bias={9: 2}),
        SamplingParams(max_tokens=4, temperature=0, presence_penalty=1.5, frequency_penalty=0.5, bad_words=["a"]),
    ]
    prompts = [random_ids(100 + row, seed=row) for row in range(4)]
    chosen: list[int] = []
    real = device_sampling.choose_tokens

    def noted(logits, asked, places):
        chosen.append(len(asked))
        return real(logits, asked, places)

    monkeypatch.setattr(device_sampling, "choose_tokens", noted)
    own, batched = (one.generate(prompts, params, policy="dense") for one in engines)
    for left, right in zip(own, batched):
        assert tokens(left) == tokens(right)
        scores = [one.outputs[0].logprobs or [] for one in (left, right)]
        assert [list(entries) for entries in scores[0]] == [list(entries) for entries in scores[1]]
    assert sum(chosen) == 4 * 3  # every token but the prompts' own
    assert all(len(entries) >= 2 for entries in batched[1].outputs[0].logprobs)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_windows_softcaps_and_sinks(tmp_path, family):
    """Layers that slide, cap their logits, or weigh in logits without values."""
    folder = make_checkpoint(family, tmp_path / family, head_dim=16)
    prompts = [random_ids(length, seed=length) for length in (9, 70)]
    own, batched = (engine(folder, chosen).generate(prompts, FEW, policy="dense") for chosen in (False, True))
    for left, right in zip(own, batched):
        assert tokens(left) == tokens(right)
        same([left.report, right.report])
        assert set(right.report["decode"]["backends"]) == {"triton"}
        assert set(right.report["decode"]["selections"]) == {"dense", "band"}


@pytest.mark.slow
def test_a_second_turn_finds_keys_and_summaries(engines):
    """Pages of 16 fill in decode steps, and in a short prefill between them that summarizes none."""
    answers = []
    for one in engines:
        with one.session(policy="quest(budget=32, dense_layers=0)") as session:
            params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
            turns = [session.generate(random_ids(length, seed=length), params) for length in (60, 15, 3)]
            answers.append([(turn.outputs[0].token_ids, turn.report) for turn in turns])
    for (own, own_report), (batched, batched_report) in zip(*answers):
        assert own == batched
        same([own_report, batched_report])


@pytest.mark.slow
def test_preemption_and_cancelling(folder):
    """A pool too small for two: one is preempted and computed again; a cancelled one leaves its row to others."""
    prompts = [random_ids(length, seed=length) for length in (250, 252)]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    outputs = []
    for batched in (False, True):
        one = LLM(
            folder, kv_memory=17 * 2 * 2 * 2 * 32 * 32 * 4, prefill_chunk=256, exact=False, enable_prefix_caching=False
        )
        if batched:
            put_on_device(one)
        requests = [start(one, ids, params, "arkvale(budget=96)") for ids in prompts]
        for _ in range(3):
            one.engine.step()
        third = start(one, random_ids(20, seed=9), params)
        finish(one.engine)
        outputs.append([request.final_ids for request in [*requests, third]])
        assert sum(request.report.preemptions for request in requests) > 0
        assert one.engine.pool.used_blocks == 0
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("policy", ["dense", "arkvale(budget=96)"])
def test_rows_of_drafts_take_the_own_path(engines, policy):
    """Steps with drafts and recorded ones take turns: blocks and their summaries come and go between them."""
    prompts = [random_ids(length, seed=length) for length in (60, 180, 223)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    own = engines[0].generate(prompts, params, policy=policy)
    knows = [[*ids, *tokens(output)] for ids, output in zip(prompts, own)]
    with drafting(engines[1], Seldom(knows)):
        drafted = engines[1].generate(prompts, params, policy=policy)
    for left, right in zip(own, drafted):
        assert tokens(left) == tokens(right)
        same([left.report, right.report])
        assert right.report["drafted_tokens"] > 0
        assert "triton" in right.report["decode"]["backends"]
        assert len(right.report["decode"]["backends"]) == 2
    assert sum(one.report["accepted_tokens"] for one in drafted) > 0


def test_a_step_that_fails_says_so_and_takes_the_own_path(folder, monkeypatch):
    one = engine(folder, True)
    monkeypatch.setattr(device_attention, "append_rows", lambda *args: 1 / 0)
    prompt = random_ids(60, seed=4)
    output = one.generate(prompt, FEW, policy="dense")[0]
    assert any("the batched step failed" in note and "ZeroDivisionError" in note for note in output.report["notes"])
    assert tokens(output) == tokens(engine(folder, False).generate(prompt, FEW, policy="dense")[0])


@pytest.mark.parametrize("error", [ZeroDivisionError("it broke"), torch.cuda.OutOfMemoryError("no memory")])
def test_one_failure_costs_one_step(folder, monkeypatch, error):
    """The row path serves that step; the device serves the others."""
    one = engine(folder, True)
    monkeypatch.setattr(device_attention, "append_rows", Once(device_attention.append_rows, error, at=2))
    prompt = random_ids(60, seed=4)
    output = one.generate(prompt, FEW, policy="dense")[0]
    assert tokens(output) == tokens(engine(folder, False).generate(prompt, FEW, policy="dense")[0])
    assert any(str(error) in note for note in output.report["notes"])
    backends = output.report["decode"]["backends"]
    assert backends.pop("triton") == 2 * 2  # steps, layers
    assert sum(backends.values()) == 2


@pytest.mark.parametrize("policy", ["dense", "topk(k=24)", "arkvale(budget=96)", "psa(epsilon=0.4, microbatch=1)"])
def test_logits_are_looked_at_in_recorded_steps(engines, policy):
    """Those of forced rows and of answers are the row path's; the steps are the device's, as without an observer."""
    ids, shown, reports = random_ids(200, seed=6), [], []
    for one in engines:
        seen: dict[int, torch.Tensor] = {}
        message = AddRequest(new_request_id(), ids, FEW, Policy.parse(policy), decoded=6)

        def look(request: int, position: int, row: torch.Tensor, seen: dict[int, torch.Tensor] = seen) -> None:
            seen[position] = row.clone()

        with observing_logits(one.engine, look), one.loop.asked([message]) as streams:
            (outcome,) = finished(streams)
        assert outcome.error is None
        shown.append(seen)
        reports.append(outcome.report)
    assert list(shown[0]) == list(shown[1]) == list(range(194, 203))
    for position, row in shown[0].items():
        torch.testing.assert_close(shown[1][position], row, atol=2e-4, rtol=1e-4)
    assert set(reports[1]["decode"]["backends"]) == {"triton"}
    assert [one["path"] for one in reports[1]["decode"]["paths"]] == ["recorded"]
    same(reports)


def test_one_who_looks_at_logits_and_fails_fails_that_request_alone(engines):
    _, batched = engines
    messages = [AddRequest(new_request_id(), random_ids(60, seed=seed), FEW, Policy()) for seed in (3, 4)]

    def look(request: int, position: int, row: torch.Tensor) -> None:
        if request == messages[0].request_id and position == 61:
            raise ValueError("I will not look")

    told = pytest.warns(RuntimeWarning, match="I will not look")
    with told, observing_logits(batched.engine, look), batched.loop.asked(messages) as streams:
        bad, good = finished(streams)
    assert bad.error is not None
    assert "I will not look" in bad.error
    assert good.error is None
    assert [one["path"] for one in good.report["decode"]["paths"]] == ["recorded"]


@pytest.mark.parametrize("policy", ["dense", "topk(k=24)", "arkvale(budget=96)", "streaming(sinks=2, window=40)"])
@pytest.mark.parametrize("weights", [False, True])
def test_drift_is_what_it_is_on_the_own_path(engines, policy, weights):
    """With an observer of calls, whose kernels are launched one by one, and without."""
    ids = random_ids(203, seed=8)
    given = Passage(tuple(ids), 196)
    own, device = (run(one, given, Policy.parse(policy), weights=weights) for one in engines)
    torch.testing.assert_close(device[0], own[0], atol=2e-4, rtol=1e-4)
    assert device[1]["decode"]["density"] == pytest.approx(own[1]["decode"]["density"])
    assert device[1]["decode"]["reads"] == pytest.approx(own[1]["decode"]["reads"])
    kept = [one[1]["decode"]["kept"] for one in (own, device)]
    if weights:
        assert kept[1]["mean"] == pytest.approx(kept[0]["mean"], abs=1e-5)
        assert kept[1]["least"]["weight"] == pytest.approx(kept[0]["least"]["weight"], abs=1e-5)
    else:
        assert kept == [None, None]
