"""A pretrained model, read from its GGUF file: equal to transformers' own run of it, and an answer to a question."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import gguf
import pytest
import torch
from real_models import real_gguf, real_model
from safetensors.torch import load_file
from test_cli import run
from tiny_models import oracle

from saccade import LLM, SamplingParams
from saccade.engine.scheduling.answers import UNASKED
from saccade.models.gguf_names import name_of, undone
from saccade.models.gguf_parts import read_header

pytestmark = pytest.mark.real

QUESTION = "What is the capital of France?"
POLICIES = ("lfps", "quest(budget=256)", "flexprefill(min_budget=128)+psa(epsilon=0.9)")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return real_model("smollm2")


@pytest.fixture(scope="module")
def llm(smollm2) -> Iterator[LLM]:
    with LLM(smollm2, dtype="float32", max_model_len=2048, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def text(llm) -> list[int]:
    """320 tokens of prose."""
    prose = files("saccade").joinpath("eval/logbook.txt").read_text(encoding="utf-8")
    ids: list[int] = llm.encode(prose)[:320]
    assert len(ids) == 320
    return ids


def test_dense_equals_transformers_at_every_position(llm, text, smollm2):
    """In float32: the log-probability of every token of the text, and the likeliest token wherever it is clear."""
    with torch.inference_mode():
        logits = oracle(smollm2)(input_ids=torch.tensor([text]), use_cache=False).logits[0]
        expected = torch.log_softmax(logits.double(), -1)
    output = llm.generate(text, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1), policy="dense")[0]
    assert output.prompt_logprobs is not None
    best = expected.topk(2).values
    clear = 0
    for place in range(1, len(text)):
        found, row = output.prompt_logprobs[place], expected[place - 1]
        assert found is not None
        assert found[text[place]].logprob == pytest.approx(float(row[text[place]]), abs=1e-3)
        if best[place - 1, 0] - best[place - 1, 1] > 1e-3:
            clear += 1
            assert min(found, key=lambda token: found[token].rank) == int(row.argmax())
    assert clear > 300
    assert output.outputs[0].token_ids == [int(expected[-1].argmax())]


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_read_less_and_go_on_with_the_text(llm, text, policy):
    """Selections of a real model's heads: fewer keys than dense in decode, and tokens that dense finds likely, too."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    output = llm.generate(text, params, policy=policy)[0]
    assert output.error is None
    assert output.report["decode"]["density"] < 1
    if "flexprefill" in policy:
        assert output.report["prefill"]["density"] < 1
    ids = output.outputs[0].token_ids
    assert len(ids) == 16
    scored = llm.generate([*text, *ids], SamplingParams(max_tokens=1, prompt_logprobs=0), policy="dense")[0]
    likely = [scored.prompt_logprobs[len(text) + at][token].logprob for at, token in enumerate(ids)]
    assert sum(likely) / len(likely) > -2.5  # nonsense is at -9


def test_keys_and_values_in_8_bits_say_nearly_the_same(llm, text, smollm2):
    """Less than bfloat16 changes; and the answer goes another way only where two tokens are as good as equal."""
    asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    with LLM(smollm2, dtype="float32", max_model_len=1024, kv_dtype="int8", enable_prefix_caching=False) as coded:
        outputs = [one.generate(text, asked, policy="dense")[0] for one in (llm, coded)]
    exact, found = (
        torch.tensor([place[token].logprob for token, place in zip(text[1:], one.prompt_logprobs[1:], strict=True)])
        for one in outputs
    )
    assert 1e-4 < (found - exact).abs().mean() < 0.05
    assert (found - exact).mean().abs() < 0.01
    best, ours = (one.outputs[0] for one in outputs)
    for place, token, other in zip(best.logprobs, best.token_ids, ours.token_ids):
        if token != other:
            top = sorted((one.logprob for one in place.values()), reverse=True)
            assert top[0] - top[1] < 0.2
            break


def test_a_question_is_answered(capsys, smollm2, tmp_path):
    """Through the template; raw, the model takes it for a whole text, and the command says so. In float32: its best two
    words are 0.1 apart, which rounding to bfloat16 makes equal on some CPUs."""
    assert "Paris" in run(capsys, "generate", QUESTION, "-m", str(smollm2), "-n", "24", "-q", "--dtype", "float32")[1]
    code, out, err = run(capsys, "generate", QUESTION, "-m", str(smollm2), "-n", "24", "--raw")
    assert (code, out) == (0, "\n")
    assert UNASKED in err


def test_words_are_cut_as_the_model_was_trained(llm):
    """Digits one by one, the spaces before them together; marks of the template are one token each."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer.tokenize("In  123\n\n 4") == ["In", "ĠĠ", "1", "2", "3", "ĊĊĠ", "4"]
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [1, 2]
    assert llm.model.eos_token_ids == (2,)


@pytest.mark.parametrize("name", ["smollm2", pytest.param("qwen2.5-coder", marks=pytest.mark.thorough)])
def test_every_tensor_is_what_gguf_reads(name):
    """By the gguf package's own reader and arithmetic, tensor by tensor: all types that the file has."""
    file, found = real_gguf(name), load_file(real_model(name) / "model.safetensors")
    header = read_header(file)
    heads = header.metadata[f"{header.architecture}.attention.head_count"]
    kv_heads = header.metadata[f"{header.architecture}.attention.head_count_kv"]
    tensors = gguf.GGUFReader(file).tensors
    assert len(tensors) == len(found)
    for tensor in tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        ours = found[str(name_of(header.architecture, tensor.name))]
        assert torch.equal(ours, undone(header.architecture, tensor.name, values, heads, kv_heads).bfloat16()), (
            tensor.name
        )
