"""RocketKV's recorded steps beside what else an engine does: 8 bits, tiers, preemption, samples, drafts. Answers are
those of rows decoded one by one. CPU tensors, Triton's interpreter, no graphs."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import put_on_device
from engine_helpers import tokens
from tier_helpers import nothing_left
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.kv.format import KVFormat

ROCKET = "rocketkv(capacity=60, window=8, kernel=5, keys=20, channels=0.5)"
BY_BUDGET = "rocketkv(budget=24)"
PROMPTS = [random_ids(length, seed=length) for length in (103, 90, 111)]
FEW = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
COUNTS = ("tokens", "keys_attended", "keys_causal", "keys_estimated", "retrievals", "selections")
SLOT = KVFormat(torch.float32, 2, 32, 16).block_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024, head_dim=32, num_hidden_layers=2
    )


def engine(folder, recorded: bool, **options) -> LLM:
    settings = {"dtype": "float32", "kv_memory": "16MiB", "prefill_chunk": 64, "block_size": 16, "device": "cpu"}
    made = LLM(folder, exact=False, **{"enable_prefix_caching": False, **settings, **options})
    if recorded:
        put_on_device(made)
    return made


def same(own, batched) -> None:
    assert batched.error is None
    assert tokens(own) == tokens(batched)
    assert set(batched.report["decode"]["backends"]) == {"triton"}
    for name in COUNTS:
        assert own.report["decode"][name] == batched.report["decode"][name], name


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_rows_of_one_batch_with_keys_in_few_bits(folder, kv_dtype):
    answers = []
    for recorded in (False, True):
        with engine(folder, recorded, kv_dtype=kv_dtype) as llm:
            answers.append(llm.generate(PROMPTS, FEW, policy=[ROCKET, BY_BUDGET, ROCKET]))
    for left, right in zip(*answers):
        same(left, right)


def test_blocks_in_host_memory_are_all_there_for_its_steps_or_the_row_path_serves(folder):
    with engine(folder, False) as llm:
        expected = [tokens(one) for one in llm.generate(PROMPTS, FEW, policy=ROCKET)]
    with engine(folder, True, kv_memory=22 * SLOT, kv_host="16MiB") as llm:
        done = llm.generate(PROMPTS, FEW, policy=ROCKET)
        assert [one.error for one in done] == [None] * 3
        assert [tokens(one) for one in done] == expected
        assert min(llm.pool.tiers.counts.evicted, llm.pool.tiers.counts.bytes_read) > 0
        nothing_left(llm.pool)


def test_preempted_requests_go_on(folder):
    """Three grow where there is room for little more than two."""
    prompts = [random_ids(length, seed=length) for length in (127, 125, 126)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with engine(folder, False) as llm:
        expected = [tokens(llm.generate(one, params, policy=ROCKET)[0]) for one in prompts]
    with engine(folder, True, kv_memory=2 * 25 * SLOT) as llm:
        done = llm.generate(prompts, params, policy=ROCKET)
        assert [tokens(one) for one in done] == expected
        assert sum(one.report["preemptions"] for one in done) > 0
        assert all("triton" in one.report["decode"]["backends"] for one in done)


def test_samples_and_drafts(folder):
    drawn = SamplingParams(temperature=1.5, max_tokens=5, ignore_eos=True, n=3, seed=7)
    answers = []
    for recorded in (False, True):
        with engine(folder, recorded) as llm:
            (samples,) = llm.generate(PROMPTS[2], drawn, policy=ROCKET)
            (checked,) = llm.generate(PROMPTS[0], FEW, policy=f"lossless(draft={ROCKET}, tokens=3)")
            answers.append(([one.token_ids for one in samples.outputs], tokens(checked)))
    assert answers[0] == answers[1]
    assert len(set(map(tuple, answers[0][0]))) > 1
