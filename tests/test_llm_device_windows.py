"""Sparse methods on models with sliding windows, in recorded steps: layers whose window hides keys from a row read it,
all others read as the method says, and what requests get is what the row path gives. CPU tensors, Triton's interpreter,
no graphs."""

from __future__ import annotations

import pytest
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import choose_one_by_one, device_of, put_on_device
from engine_helpers import tokens
from tiny_models import random_ids
from window_helpers import BY_KEYS, LENGTHS, METHOD, SIZES, WINDOW, checkpoint, of_two_sizes, thorough

from saccade import LLM, SamplingParams
from saccade.engine.device.ahead import Ahead
from saccade.engine.watch.phase_stats import SLIDES
from saccade.methods.registry import METHODS
from saccade.models.interface import ModelSpec

FEW = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
BLOCK = 16 * 2 * 32 * 4  # bytes of 16 keys and values of a layer
QUICK = "quest", "lfps", "h2o"


def engine(folder, batched: bool, **options) -> LLM:
    settings = {"kv_memory": "16MiB", "prefill_chunk": 256, "enable_prefix_caching": False}
    made = LLM(folder, exact=False, **{**settings, **options})
    (put_on_device if batched else choose_one_by_one)(made)
    return made


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """By family: the row path's, and one whose steps are recorded."""
    made = {}

    def of(family: str) -> tuple[LLM, LLM]:
        if family not in made:
            folder = checkpoint(family, tmp_path_factory.mktemp(family))
            made[family] = engine(folder, False), engine(folder, True)
        return made[family]

    return of


def same(own, batched) -> None:
    """Tokens and what was read are the same, and recorded steps did it."""
    assert own.error is batched.error is None
    assert tokens(own) == tokens(batched)
    left, right = own.report["decode"], batched.report["decode"]
    assert set(right["backends"]) == {"triton"}
    # Rounded step by step on the host, where heads that rest have candidates too.
    assert left["keys_scored"] == pytest.approx(right["keys_scored"], abs=2 * len(tokens(own)), rel=0.12)
    for name in ("keys_attended", "keys_causal", "density_per_head", "searches", "searchable", "selections"):
        assert left[name] == right[name], name
    assert own.report["notes"] == batched.report["notes"]


def logits(answer) -> list[float]:
    """Of each chosen token, its log-probability."""
    return [entry[token].logprob for entry, token in zip(answer.outputs[0].logprobs, answer.outputs[0].token_ids)]


def test_every_method_with_a_plan_is_tried():
    spec = ModelSpec("gemma2", 3, 2, 1, 32, 288, 1024, None, (WINDOW, None, WINDOW))
    planned = {name for name, method in METHODS.items() if "decode" in method.phases and method().device_plan(spec)}
    assert planned - {"dense", "lossless"} == set(METHOD)


@pytest.mark.parametrize("name", [name if name in QUICK else thorough(name) for name in METHOD])
def test_rows_that_outgrow_a_window(engines, name):
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    own, batched = (one.generate(prompts, FEW, policy=METHOD[name]) for one in engines("gemma3_text"))
    for left, right in zip(own, batched):
        same(left, right)
        assert "band" in right.report["decode"]["selections"]
        assert SLIDES in right.report["notes"]


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("gemma2", METHOD["lfps"]),  # logits are capped
        thorough("gemma2", BY_KEYS),
        thorough("gemma2", METHOD["rocketkv"]),
        ("gpt_oss", METHOD["topk"]),  # logits without values
        thorough("gpt_oss", METHOD["psa"]),
        ("mistral", METHOD["snapkv"]),  # all layers slide
        thorough("mistral", METHOD["lfps"]),
        thorough("gemma3_text", BY_KEYS),
        thorough("cohere2", METHOD["cis"]),
    ],
)
def test_families(engines, family, policy):
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    own, batched = (one.generate(prompts, params, policy=policy) for one in engines(family))
    for left, right in zip(own, batched):
        same(left, right)
        assert logits(left) == pytest.approx(logits(right), abs=1e-4)


@pytest.mark.parametrize("policy", ["lfps(k=30, least=1)", thorough(METHOD["quest"]), thorough(METHOD["h2o"])])
def test_windows_of_two_sizes(tmp_path, monkeypatch, policy):
    folder = of_two_sizes(tmp_path / "llama", monkeypatch)
    prompts = [random_ids(length, seed=length) for length in (69, 99)]
    own, batched = (engine(folder, chosen) for chosen in (False, True))
    assert own.model.runner.spec.windows == SIZES
    for left, right in zip(*(one.generate(prompts, FEW, policy=policy) for one in (own, batched))):
        same(left, right)


@pytest.fixture
def small(tmp_path_factory):
    """Two engines over one layer that slides and one that does not."""
    kinds = ["sliding_attention", "full_attention"]
    folder = checkpoint("gemma3_text", tmp_path_factory.mktemp("small"), num_hidden_layers=2, layer_types=kinds)
    return lambda batched, **options: engine(folder, batched, **options)


def greedy(count: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **options)


@pytest.mark.parametrize("policy", [METHOD["topk"], thorough(METHOD["lfps"]), thorough(METHOD["rocketkv"])])
def test_no_step_is_launched_ahead_across_a_window(small, monkeypatch, policy):
    own, batched = small(False), small(True)
    device_of(batched).runs_ahead, seen = True, []
    real = Ahead.serves
    monkeypatch.setattr(Ahead, "serves", lambda *args: seen.append(real(*args)) or seen[-1])
    prompt = random_ids(WINDOW - 4, seed=1)
    ((left,), (right,)) = (one.generate([prompt], greedy(9), policy=policy) for one in (own, batched))
    same(left, right)
    assert seen == [True] * 6  # of eight steps: not the first, and not the first that is longer than the window


@pytest.mark.parametrize("policy", [METHOD["h2o"], thorough(METHOD["snapkv"]), thorough(METHOD["lfps"])])
def test_turns_across_a_window(small, policy):
    """The second turn outgrows the window, and the third takes its place, from before the window's size on."""
    first, *rest = (random_ids(length, seed=length) for length in (50, 25, 8))
    answers = []
    for batched in (False, True):
        with small(batched) as llm, llm.session(policy=policy) as session:
            turns = [session.generate(ids, FEW) for ids in (first, rest[0])]
            answers.append([*turns, session.complete([*first, *rest[1]], FEW)])
    for left, right in zip(*answers):
        assert left.error is right.error is None
        assert tokens(left) == tokens(right)
        for name in ("keys_attended", "selections"):
            assert left.report["decode"][name] == right.report["decode"][name]
        assert left.report["notes"] == right.report["notes"]
        if policy == METHOD["lfps"]:
            same(left, right)


@pytest.mark.parametrize("policy", ["topk(k=24)", thorough(METHOD["cis"]), thorough(METHOD["lfps"])])
def test_preempted_and_forked_requests_go_on(small, policy):
    prompts = [random_ids(length, seed=length) for length in (61, 62, 63)]
    slots = 2 * 14 * BLOCK  # four blocks a layer each, and none is left for the third to grow
    with small(False) as llm:
        expected = [tokens(one) for one in llm.generate(prompts, greedy(14), policy=policy)]
    with small(True, kv_memory=slots, block_size=16) as llm:
        done = llm.generate(prompts, greedy(14), policy=policy)
        assert [tokens(one) for one in done] == expected
        assert sum(one.report["preemptions"] for one in done) > 0
    drawn = SamplingParams(temperature=1.5, max_tokens=6, ignore_eos=True, n=2, seed=7)
    forks = []
    for batched in (False, True):
        with small(batched) as llm:
            (one,) = llm.generate(prompts[:1], drawn, policy=policy)
            forks.append([sample.token_ids for sample in one.outputs])
    assert forks[0] == forks[1]


def test_drafts_across_a_window(small):
    """Steps that the device runs several times by itself are of one level."""
    policy = f"lossless(draft={METHOD['quest']}, tokens=3, lookup=0)"
    prompt = random_ids(WINDOW - 5, seed=3)
    with small(False) as own, small(True) as batched:
        (left,) = own.generate([prompt], greedy(10), policy="dense")
        (right,) = batched.generate([prompt], greedy(10), policy=policy)
    assert right.error is None
    assert tokens(left) == tokens(right)
    assert right.report["speculation"]["verifications"] > 1


def test_audits_and_replays(small):
    """Of rows on both sides of a window: these share no replay."""
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    params = greedy(6, audit=0.7, audit_steps=1.0, seed=3)
    with small(False) as own, small(True) as batched:
        answers = [one.generate(prompts, params, policy=METHOD["quest"]) for one in (own, batched)]
    for left, right in zip(*answers):
        same(left, right)
        host, there = left.report["audit"], right.report["audit"]
        assert host["agreement"] == there["agreement"]
        assert there["divergence"]["mean"] == pytest.approx(host["divergence"]["mean"], abs=1e-5)
        for name in ("retained_mass", "output_error", "output_error_scaled"):
            assert host[name]["samples"] == there[name]["samples"] > 0
            assert there[name]["mean"] == pytest.approx(host[name]["mean"], abs=1e-4), name


@pytest.mark.parametrize("policy", [METHOD["quest"], thorough(METHOD["psa"]), thorough(METHOD["lfps"])])
def test_keys_in_host_memory(small, policy):
    prompts = [random_ids(length, seed=length) for length in (170, 60)]
    with small(False, block_size=16) as llm:
        expected = [tokens(one) for one in llm.generate(prompts, greedy(8), policy=policy)]
    with small(True, block_size=16, kv_memory=22 * BLOCK, kv_host="16MiB", prefill_chunk=64) as llm:
        done = llm.generate(prompts, greedy(8), policy=policy)
        assert [one.error for one in done] == [None, None]
        assert [tokens(one) for one in done] == expected
        assert sum(one.report["decode"]["backends"].get("triton", 0) for one in done) > 0


PSAW = "psaw(start_layer=1, block_size=1, sinks=3, local=8)"


@pytest.mark.parametrize("policy", [f"streaming(sinks=2, window=40)+{PSAW}", thorough(f"{METHOD['cis']}+{PSAW}")])
def test_windows_of_the_policy_beside_the_models_own(engines, policy):
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    own, batched = (one.generate(prompts, FEW, policy=policy) for one in engines("gemma3_text"))
    for left, right in zip(own, batched):
        same(left, right)
