"""Quantised safetensors checkpoints: each format against transformers' model of what its weights are worth in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packed_files import FOLDERS, quantise
from tiny_models import make_checkpoint, one_thread, oracle_logits, random_ids  # noqa: F401

from saccade import LLM, SamplingParams

IDS = random_ids(40, seed=5)
SCORED = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=0, ignore_eos=True)
SIZES = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("made") / "llama", **SIZES)


def same_as(theirs: Any, folder: Path, **settings: Any) -> LLM:
    """The model, closed, whose tokens are ``theirs``, and log-probabilities within 1e-4."""
    with LLM(folder, dtype="float32", kv_memory="4MiB", **settings) as llm:
        output = llm.generate([IDS], SCORED)[0]
    tokens = list(output.outputs[0].token_ids)
    wanted = torch.log_softmax(oracle_logits(theirs, IDS + tokens), -1)
    assert wanted[len(IDS) - 1 : -1].argmax(-1).tolist() == tokens
    found = torch.tensor([entry[token].logprob for token, entry in zip(IDS[1:], output.prompt_logprobs[1:])])
    expected = wanted[: len(IDS) - 1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    return llm


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "awq"),
        ("mixtral", "gptq"),
        ("gemma2", "w4a16"),
        ("qwen2_moe", "fp8_dynamic"),
        ("phi3", "gptq_act"),
    ],
)
def test_families_that_transformers_modules_run(family, name, tmp_path):
    """Experts, too, each of which has its own tensors."""
    made = make_checkpoint(family, tmp_path / "made", **SIZES)
    same_as(quantise(made, tmp_path / name, FOLDERS[name])[1], tmp_path / name)


def test_mxfp4_of_gpt_oss(tmp_path):
    made = make_checkpoint("gpt_oss", tmp_path / "made", **SIZES)
    folder, theirs = quantise(
        made, tmp_path / "mxfp4", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    )
    assert same_as(theirs, folder).model.identity.quantize == "MXFP4"


@pytest.mark.parametrize("name", FOLDERS)
def test_a_format_is_worth_what_it_says(name, llama, tmp_path):
    folder, theirs = quantise(llama, tmp_path / name, FOLDERS[name])
    llm = same_as(theirs, folder)
    print(llm.model.identity.quantize, llm.model.weight_bytes)
