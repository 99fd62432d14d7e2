"""``lossless`` where recorded steps draft: CPU tensors, Triton's interpreter, no graphs."""

from __future__ import annotations

import pytest
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import put_on_device
from engine_helpers import tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048, head_dim=32, num_hidden_layers=2
    )
    host, device = (LLM(folder, kv_memory="16MiB", prefill_chunk=256, exact=False) for _ in range(2))
    put_on_device(device)
    return host, device


def test_recorded_steps_draft_and_the_host_path_verifies(engines):
    """Greedy, seeded and with log-probabilities; drafts without a state and with one; beside a plain request."""
    host, device = engines
    prompts = [random_ids(length, seed=length) for length in (150, 170, 90, 120)]
    common = {"max_tokens": 6, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0.9, seed=4, **common),
        SamplingParams(temperature=0, logprobs=1, **common),
        SamplingParams(temperature=0, **common),
    ]
    drafts = ("quest(budget=64, dense_layers=0)", "streaming(sinks=2, window=40)", "h2o(budget=48)")
    policies = [*(f"lossless(draft={draft}, tokens=2)" for draft in drafts), "dense"]
    want = host.generate(prompts, params)
    got = device.generate(prompts, params, policy=policies)
    assert [one.error for one in got] == [None] * 4
    assert list(map(tokens, got)) == list(map(tokens, want))
    for output, recorded in zip(got, (True, True, False)):
        said = output.report["speculation"]
        assert said["verifications"] >= 2
        assert said["draft"]["tokens"] == said["drafted"] > 0
        assert any("triton" in name for name in said["draft"]["backends"]) or not recorded
        assert 0 < said["draft"]["density"] < 0.9
        assert output.report["decode"]["density"] == 1.0
    assert device.pool.used_blocks == 0
