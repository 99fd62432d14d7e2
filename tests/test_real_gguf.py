"""Pretrained models as they lie in their GGUF files (Q4_1, Q5_0, Q8_0, Q4_K, Q6_K among them): the tokens and
log-probabilities of transformers' model with the weights that the gguf package reads, and the tokenizer's texts."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_files import apart, parts
from real_models import first_layers_gguf, real_gguf
from tiny_models import oracle_logits
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights

from saccade import LLM, SamplingParams
from saccade.models.folders import checkpoint_folder
from saccade.models.gguf_parts import read_header
from saccade.models.tokenizer import load_tokenizer

pytestmark = pytest.mark.real

FORMATS = {"smollm2": {"Q4_1", "Q8_0"}, "qwen2.5-coder": {"Q4_K", "Q5_0", "Q6_K", "Q8_0"}}
FORMATS["gemma3-270m"] = FORMATS["qwen2.5-coder"]
SCORED = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0, ignore_eos=True)


@torch.inference_mode()
def dequantised(file: Path, bare: Path) -> Any:
    """transformers' model in float32, of the numbers that the gguf package makes of ``bare``, its tensors."""
    config = AutoConfig.from_pretrained(checkpoint_folder(file))
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.tie_weights()  # as part of the first weights, which all are replaced
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(bare).tensors}
    heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    for name, view in parts(config.to_dict(), model.state_dict()):
        values = torch.from_numpy(gguf.dequantize(stored[name].data, stored[name].tensor_type).copy())
        turned = next((count for part, count in heads.items() if part in name and config.model_type == "llama"), None)
        offset = 1.0 if config.model_type.startswith("gemma") and name.endswith("norm.weight") else 0.0
        view.copy_((values if turned is None else apart(values, turned)) - offset)
        del stored[name]
    assert not stored
    return model


QUICK = [("smollm2", 6), ("qwen2.5-coder", 4)]  # first layers alone, in which all types of the file occur; None: all


@pytest.mark.parametrize(
    ("name", "layers"), [*QUICK, *(pytest.param(one, None, marks=pytest.mark.thorough) for one in FORMATS)]
)
def test_a_real_file_is_its_dequantised_modules(name, layers, tmp_path):
    file = real_gguf(name)
    bare = first_layers_gguf(file, tmp_path / "bare.gguf", layers, words=False)
    if layers is not None:
        file = first_layers_gguf(file, tmp_path / file.name, layers)
    prose = files("saccade").joinpath("eval/logbook.txt").read_text(encoding="utf-8")
    with LLM(file, dtype="float32", kv_memory="64MiB", max_model_len=256, enable_prefix_caching=False) as llm:
        assert {one.kind for one in read_header(file).tensors} - {"F32"} == FORMATS[name]
        ids: list[int] = llm.encode(prose)[:100]
        assert llm.tokenizer.decode(llm.tokenizer.encode("Zwölf  Boxer\n\n12 x 345!", add_special_tokens=False)) == (
            "Zwölf  Boxer\n\n12 x 345!"
        )
        output = llm.generate([ids], SCORED)[0]
    tokens = list(output.outputs[0].token_ids)
    wanted = torch.log_softmax(oracle_logits(dequantised(file, bare), ids + tokens), -1)
    assert wanted[len(ids) - 1 : -1].argmax(-1).tolist() == tokens
    assert output.prompt_logprobs is not None
    found = torch.tensor([entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:])])
    expected = wanted[: len(ids) - 1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    shutil.rmtree(tmp_path)  # pytest keeps what it finds, hundreds of MB


@pytest.mark.parametrize("name", ["qwen2.5-coder", "gemma3-270m"])
def test_tokens_are_those_of_transformers_reader(name):
    """Which is not public, and cuts SmolLM's digits otherwise."""
    pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    file = real_gguf(name)
    theirs = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    ours = load_tokenizer(checkpoint_folder(file))
    prose = files("saccade").joinpath("eval/logbook.txt").read_text(encoding="utf-8")
    texts = [prose[at : at + 2000] for at in range(0, 20000, 2000)]
    texts += ["", " leading", "I'll say 'twas   na\u00efve\n\n\nx\t\ty", "\u5317\u4eac \U0001f389 <think>ok</think>"]
    texts += [
        "<start_of_turn>user\nhi<end_of_turn>\n",
        "<|im_start|>user\nhi<|im_end|>\n",
        "def f(x):\n    return x+1\n",
    ]
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
