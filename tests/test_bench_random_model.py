"""``benchmarks/random_model.py`` and ``gpu/random_blocks.py``: random weights are as large as trained ones, so that a
deep model's logits are numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from saccade import LLM, SamplingParams
from saccade.models.reference.tokenizer import build_tokenizer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def random_model(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import random_model  # which finds benchmarks/gpu itself

    yield random_model
    for name in ("random_model", "random_blocks"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_have_a_mean_of_0_and_a_deviation_of_a_fiftieth(random_model, name):
    def values(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return random_model.random_blocks(name, 128, 2048, "cpu", generator).dequantised(slice(None))

    found = values(1)
    assert 0.017 < found.std() < 0.022
    assert found.mean().abs() < 0.0021  # codes that have a sign begin one further below 0 than they end above it
    assert found.abs().max() < 0.07
    assert torch.equal(found, values(1))
    assert not torch.equal(found, values(2))


def test_80_layers_of_4_bits_have_logits(random_model, monkeypatch, tmp_path):
    for name in ("llm.load_model", "llm.checkpoint_folder", "llm.find_heads"):
        monkeypatch.setattr(f"saccade.{name}", None)  # put back behind the test
    for name in ("load_model", "checkpoint_folder", "COMMAND"):
        monkeypatch.setattr(f"saccade.ranks.{name}", None)
    random_model.patch()
    (tmp_path / "shape").write_text("deep")
    build_tokenizer().save_pretrained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)
    with LLM(tmp_path, device="cpu", dtype="float32", kv_memory="64MiB", max_model_len=512, exact=False) as llm:
        assert llm.model.spec.layers == 80
        (output,) = llm.generate([list(range(3, 200))], params, policy="dense")
    assert output.error is None
    spread = [{one.logprob for one in step.values()} for step in output.outputs[0].logprobs]
    # Of 300 tokens each has a chance of some 1/300; weights hundreds of times as large leave one token alone.
    assert all(-6.0 < most < -2.0 for most in map(max, spread))
    assert all(len(one) > 1 for one in spread)
