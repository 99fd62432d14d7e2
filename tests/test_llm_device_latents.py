"""Models that store latents, served by the device backend and by the kernels of single calls: what they get is what the
row path gives. CPU tensors, Triton's interpreter, no graphs."""

from __future__ import annotations

import pytest
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import put_on_device
from engine_helpers import tokens
from model_pairs import GREEDY, Pair
from tiny_models import make_checkpoint, random_ids

from saccade.ops.triton import serves_heads

RECORDED = ["dense", "quest(budget=48, block_size=16, dense_layers=0)", "arkvale(budget=48, block_size=16)"]
RECORDED += ["streaming(sinks=4, window=40)"]
HOSTED = ["psa(epsilon=0.5, block_size=16)", "topk(k=24)"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair(make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("v3"), max_position_embeddings=512))


@pytest.fixture(scope="module")
def engines(pair):
    own, recorded = (pair.llm(exact=False) for _ in range(2))
    put_on_device(recorded)
    return own, recorded


@pytest.mark.parametrize("policy", RECORDED)
def test_recorded_steps(engines, pair, policy):
    prompts = [random_ids(length, seed=length) for length in (130, 61)]
    own, recorded = (one.generate(prompts, GREEDY, policy=policy) for one in engines)
    for ids, left, right in zip(prompts, own, recorded):
        assert right.error is None
        assert tokens(left) == tokens(right)
        assert set(right.report["decode"]["backends"]) == {"triton"}
        assert left.report["decode"]["keys_attended"] == right.report["decode"]["keys_attended"]
        if policy == "dense":
            pair.check(ids, right)


@pytest.mark.parametrize("policy", HOSTED)
def test_methods_whose_kernels_read_keys_and_values_run_by_the_host(engines, policy):
    ids = random_ids(90, seed=3)
    own, passed = (one.generate([ids], GREEDY, policy=policy)[0] for one in engines)
    assert passed.error is None
    assert tokens(own) == tokens(passed)
    assert "triton" not in passed.report["decode"]["backends"]


def test_a_short_question_after_a_long_prefix_is_recorded(engines):
    answers = []
    for one in engines:
        with one.session(policy="dense") as session:
            answers.append([session.generate(random_ids(length, seed=length), GREEDY) for length in (90, 15)])
    for left, right in zip(*answers):
        assert tokens(left) == tokens(right)
    assert set(answers[1][1].report["prefill"]["backends"]) == {"triton"}


@pytest.mark.parametrize("policy", ["dense", RECORDED[1], "topk(k=24)"])
def test_single_calls(engines, pair, policy):
    """By the kernels that the dispatcher names, rows of prefills meeting latents or not."""
    own, called = engines[0], pair.llm(exact=False, backend="triton")
    ids = random_ids(77, seed=5)
    left, right = (one.generate([ids], GREEDY, policy=policy)[0] for one in (own, called))
    assert right.error is None
    assert tokens(left) == tokens(right)
    for phase in ("prefill", "decode"):
        assert set(right.report[phase]["backends"]) == {"triton"}


@pytest.mark.parametrize("policy", RECORDED[:2])
def test_latents_of_a_tier_in_host_memory(engines, pair, policy):
    """Slots for a part of the latents; what recorded steps read of the others they bring in."""
    slot = 16 * 48 * 4
    tiered = pair.llm(exact=False, kv_memory=34 * slot, kv_host="4MiB")
    put_on_device(tiered)
    prompts = [random_ids(length, seed=length) for length in (150, 90)]
    own, moved = (one.generate(prompts, GREEDY, policy=policy) for one in (engines[0], tiered))
    for left, right in zip(own, moved):
        assert right.error is None
        assert tokens(left) == tokens(right)
    assert tiered.pool.tiers is not None


def test_audited_rows_run_by_the_host(pair):
    audited = pair.llm(exact=False, audit=1.0)
    put_on_device(audited)
    ids = random_ids(60, seed=9)
    output = audited.generate([ids], GREEDY, policy="dense")[0]
    pair.check(ids, output)
    assert "triton" not in output.report["decode"]["backends"]
    assert output.report["audit"]["retained_mass"]["mean"] == pytest.approx(1.0, abs=1e-5)


def test_widths_that_kernels_read():
    assert serves_heads(576, 512) is None
    assert serves_heads(256, None) is None
    assert "up to 256; got 576" in serves_heads(576, None)
    assert "512 + 128 channels; got 1088" in serves_heads(1088, 1024)
    assert "multiple of 16; got 568" in serves_heads(568, 512)
