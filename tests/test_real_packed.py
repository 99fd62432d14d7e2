"""Pretrained models in formats of safetensors checkpoints: tokens and log-probabilities of transformers' model of what
their weights are worth in numpy. Slow: each is quantised here first."""

from __future__ import annotations

import shutil
from importlib.resources import files

import pytest
import torch
from packed_files import FOLDERS, quantise
from real_models import first_layers, real_model
from tiny_models import oracle_logits

from saccade import LLM, SamplingParams

pytestmark = pytest.mark.real

SCORED = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0, ignore_eos=True)
CASES = [("smollm2", name) for name in FOLDERS]
CASES += [("qwen2.5-coder", name) for name in ("awq", "gptq", "gptq_sym", "gptq_act", "w4a16_asym", "w8a8")]
QUICK = [("smollm2", "awq", 5), ("smollm2", "gptq_act", 5)]  # first layers alone; None: all


@pytest.mark.parametrize(
    ("model", "name", "layers"), [*QUICK, *(pytest.param(*one, None, marks=pytest.mark.thorough) for one in CASES)]
)
def test_a_real_model_is_what_its_weights_are_worth(model, name, layers, tmp_path):
    made = real_model(model) if layers is None else first_layers(real_model(model), tmp_path / "first", layers)
    folder, theirs = quantise(made, tmp_path / name, FOLDERS[name])
    prose = files("saccade").joinpath("eval/logbook.txt").read_text(encoding="utf-8")
    with LLM(folder, dtype="float32", kv_memory="64MiB", max_model_len=256, enable_prefix_caching=False) as llm:
        ids: list[int] = llm.encode(prose)[:100]
        output = llm.generate([ids], SCORED)[0]
    tokens = list(output.outputs[0].token_ids)
    wanted = torch.log_softmax(oracle_logits(theirs, ids + tokens), -1)
    assert wanted[len(ids) - 1 : -1].argmax(-1).tolist() == tokens
    assert output.prompt_logprobs is not None
    found = torch.tensor([entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:])])
    expected = wanted[: len(ids) - 1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    print(model, name, float((found - expected).abs().max()), llm.model.identity.quantize, llm.model.weight_bytes)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    shutil.rmtree(tmp_path)  # pytest keeps what it finds, hundreds of MB
