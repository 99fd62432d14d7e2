"""Pretrained models through transformers' own ``generate`` with our attention: sdpa's tokens, our engine's tokens."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
import torch
from covering import quick
from real_models import real_model
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import saccade.transformers
from saccade import LLM, SamplingParams

pytestmark = pytest.mark.real

MODELS = ("smollm2", "qwen2.5-coder", "gemma3-270m")
LENGTHS = (300, 41, 7, 190)
POLICY = "flexprefill(min_budget=128)+lfps(k=0.05)"


@pytest.fixture(scope="module", params=quick(MODELS, lambda one: one == MODELS[0]))
def folder(request):
    return real_model(request.param)


@pytest.fixture(scope="module")
def ours(folder) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="saccade").eval()
    saccade.transformers.configure(model, kv_memory="256MiB")
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def prompts(folder) -> list[list[int]]:
    prose = files("saccade").joinpath("eval/logbook.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(folder)(prose[:12000])["input_ids"]
    return [ids[100 * at : 100 * at + length] for at, length in enumerate(LENGTHS)]


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]),
    }


def greedy(tokens: int) -> dict[str, Any]:
    return {"do_sample": False, "pad_token_id": 0, "max_new_tokens": tokens, "min_new_tokens": tokens}


def test_dense_gives_sdpas_tokens_alone_and_in_a_padded_batch(folder, ours, prompts):
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    theirs.generation_config.eos_token_id = None
    for some in (prompts[:1], prompts):
        inputs = padded(some)
        expected = theirs.generate(**inputs, **greedy(16))
        assert torch.equal(ours.generate(**inputs, **greedy(16), saccade="dense"), expected)


def test_a_policy_gives_the_engines_tokens(folder, ours, prompts):
    inputs = padded(prompts)
    made = ours.generate(**inputs, **greedy(16), saccade=POLICY)[:, inputs["input_ids"].shape[1] :]
    found = saccade.transformers.report(ours)
    assert found[0]["prefill"]["density"] < 1
    assert found[0]["decode"]["density"] < 1
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(folder, dtype="float32", max_model_len=1024, kv_memory="256MiB", enable_prefix_caching=False) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, policy=POLICY)
    for tokens, mine, output in zip(made.tolist(), found, outputs):
        assert tokens == output.outputs[0].token_ids
        assert mine["decode"]["keys_attended"] == output.report["decode"]["keys_attended"]


def test_a_pipeline_takes_a_policy(folder, ours):
    ask = pipeline("text-generation", model=ours, tokenizer=AutoTokenizer.from_pretrained(folder))
    prompt = "The capital of France is"
    said = ask(prompt, max_new_tokens=6, do_sample=False, saccade="lfps")[0]["generated_text"]
    assert said.startswith(prompt)
    assert len(said) > len(prompt)
    assert saccade.transformers.report(ours)[0]["policy"] == "lfps"
