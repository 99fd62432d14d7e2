"""Quantised safetensors checkpoints: each format against transformers' model of what its weights are worth in numpy."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_files import FOLDERS, quantise
from safetensors.torch import load_file, save_file
from test_cli import run
from tiny_models import edit_config, make_checkpoint, one_thread, oracle_logits, random_ids  # noqa: F401

from saccade import LLM, SamplingParams
from saccade.errors import ModelError
from saccade.models import compressed
from saccade.models.baseline import TransformersModel
from saccade.models.checkpoint import open_checkpoint, weight_files
from saccade.models.facts import ModelFacts, RefusedModel, described, facts_of
from saccade.models.headers import described_model
from saccade.models.hf_config import checked_config
from saccade.models.llama_weights import MATRICES, read_weights
from saccade.models.loader import load_model
from saccade.models.packed_weights import PackedWeights
from saccade.ops import cpu
from saccade.ops.fp8_weights import Fp8Matrix, ScaledFp8Matrix
from saccade.ops.matrices import DenseMatrix

pytestmark = pytest.mark.filterwarnings("ignore:no kernel here", "ignore:channels of weights")
IDS = random_ids(40, seed=5)
SCORED = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=0, ignore_eos=True)
X = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
SIZES = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("made") / "llama", **SIZES)


def same_as(theirs: Any, folder: Path, **settings: Any) -> LLM:
    """The model, closed, whose tokens are ``theirs``, and log-probabilities within 1e-4."""
    with LLM(folder, dtype="float32", kv_memory="4MiB", **{"enable_prefix_caching": False, **settings}) as llm:
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


@pytest.mark.parametrize(
    ("family", "sizes", "buffer"),
    [
        ("gemma3n_text", {}, "per_layer_projection_scale"),
        ("gemma4_text", {"enable_moe_block": False, "num_experts": None}, None),
        ("gemma3_text", {}, None),
    ],
)
def test_info_and_the_loader_refuse_the_same_families(family, sizes, buffer, tmp_path):
    """With the files, and by config.json alone: a model with a buffer that neither files hold nor modules make."""
    made = make_checkpoint(family, tmp_path / "made", **SIZES, **sizes)
    folder, theirs = quantise(made, tmp_path / "awq", FOLDERS["awq"])
    (tmp_path / "alone").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "alone")
    told = [described(folder), described(tmp_path / "alone")]
    if buffer is None:
        assert all(isinstance(one, ModelFacts) for one in told)
        same_as(theirs, folder)
        return
    with pytest.raises(ModelError, match=f"{family}: quantised files are not read of a model with a ({buffer})") as no:
        load_model(folder)
    assert all(isinstance(one, RefusedModel) and one.reason == str(no.value) for one in told)
    assert isinstance(described(made), ModelFacts)


def test_mxfp4_of_gpt_oss(tmp_path):
    made = make_checkpoint("gpt_oss", tmp_path / "made", **SIZES)
    folder, theirs = quantise(
        made, tmp_path / "mxfp4", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    )
    assert same_as(theirs, folder).model.identity.quantize == "MXFP4"


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_are_worth_what_a_format_says_bit_for_bit(name, llama, tmp_path):
    folder, theirs = quantise(llama, tmp_path / name, FOLDERS[name])
    left = 0
    for number, layer in enumerate(read_weights(*source_of(folder)).layers):
        for part, held in zip(MATRICES, layer.matrices):
            wanted = theirs.get_submodule(f"model.layers.{number}.{part}")
            assert torch.equal(held.rows(torch.arange(held.outputs), torch.float32), wanted.weight)
            assert held.bias is None or torch.equal(held.bias, wanted.bias)
            left += isinstance(held, DenseMatrix)
    assert left == ("ignore" in FOLDERS[name])  # whose pattern names one


@pytest.mark.parametrize("name", ["awq", "gptq_8", "gptq_act", "w4a16_asym", "w8a8", "fp8_dynamic", "fp8_blocks"])
def test_a_model_is_its_dequantised_modules(name, llama, tmp_path):
    folder, theirs = quantise(llama, tmp_path / name, FOLDERS[name])
    llm = same_as(theirs, folder)
    floats, sorted_channels = name.startswith("fp8"), name == "gptq_act"
    assert (llm.model.identity.quantize == "F8_E4M3") == floats
    whole = llm.model.runner.llama.kernels(1).whole is not None  # all layers in one call
    assert whole == (cpu.available() and not floats and not sorted_channels)
    assert [("no kernel here" in note) for note in llm.model.notes if "desc_act" not in note] == [True] * floats
    assert sum("desc_act" in note for note in llm.model.notes) == sorted_channels
    facts = facts_of(folder)
    assert facts.parameters == sum(one.numel() for one in theirs.parameters())
    assert 0.9 < facts.weight_bytes / ((folder / "model.safetensors").stat().st_size - 8000) < 1.1


@pytest.mark.parametrize("name", ["gptq_act", "w4a16_asym"])
def test_torch_runs_where_kernels_do_not(name, llama, tmp_path, monkeypatch):
    """As on a GPU: the packed codes, dequantised a piece at a time."""
    monkeypatch.setattr("saccade.models.packed_weights.packed", lambda matrix: matrix)
    monkeypatch.setattr("saccade.ops.dequantised.PIECE", 64 * 5)
    folder, theirs = quantise(llama, tmp_path / name, FOLDERS[name])
    llm = same_as(theirs, folder)
    assert any("no kernel here multiplies weights in INT" in note for note in llm.model.notes)
    model, source = source_of(folder)
    apart, joined = read_weights(model, source), read_weights(model, source, join=True)
    for one, other in zip(apart.layers, joined.layers):
        assert (other.joined is None) == (name == "gptq_act")  # whose orders differ
        for ours, theirs in zip(one.matrices, other.matrices):
            assert torch.equal(ours.product(X[:, : ours.channels]), theirs.product(X[:, : ours.channels]))
        if other.joined is not None:
            made = other.joined.product(X[:, :64]).split([part.outputs for part in one.matrices[:3]], 1)
            for ours, theirs in zip(one.matrices[:3], made):
                torch.testing.assert_close(theirs, ours.product(X[:, :64]), rtol=1e-5, atol=1e-5)


def test_a_head_and_an_embedding_that_are_quantised_too(llama, tmp_path):
    config = deepcopy(FOLDERS["w4a16"]) | {"ignore": ["re:.*norm"]}
    folder, theirs = quantise(llama, tmp_path / "head", config)
    weights = same_as(theirs, folder).model.runner.llama.weights
    assert (weights.head.format, weights.embedding.format) == ("INT4_32", "INT4_32")
    tied = make_checkpoint("llama", tmp_path / "made", **SIZES, tie_word_embeddings=True)
    same_as(quantise(tied, tmp_path / "tied", config)[1], tmp_path / "tied")


def source_of(folder: Path) -> tuple[Any, PackedWeights]:
    checkpoint = open_checkpoint(folder)
    model = described_model(checkpoint, checked_config(checkpoint), torch.float32)
    return model, PackedWeights(weight_files(folder), checkpoint.packed, torch.device("cpu"), torch.float32)


def test_fp8_checkpoints_take_rows_in_e4m3_where_those_run(llama, tmp_path, monkeypatch):
    """A layer of which a matrix is left out, or whose scales are by blocks, takes rows as they are."""
    monkeypatch.setattr("saccade.ops.fp8_weights.why_not", lambda device, dtype: None)
    folder, _ = quantise(llama, tmp_path / "fp8", FOLDERS["fp8_dynamic"])
    first, *others = read_weights(*source_of(folder), join=True).layers
    assert {type(one) for one in first.matrices} == {ScaledFp8Matrix, DenseMatrix}
    stored = load_file(folder / "model.safetensors")
    for number, layer in enumerate(others, 1):
        assert {type(one) for one in (*layer.matrices, layer.joined, layer.both)} == {Fp8Matrix}
        for name, part in zip(MATRICES, layer.matrices):
            start = f"model.layers.{number}.{name}."
            worth = stored[f"{start}weight"].float() * stored[f"{start}weight_scale"].float()
            assert torch.equal(part.dequantized(), worth)
            assert (part.bias is None) == (f"{start}bias" not in stored)
    folder, _ = quantise(llama, tmp_path / "blocks", FOLDERS["fp8_blocks"])
    layers = read_weights(*source_of(folder), join=True).layers
    assert {type(one) for layer in layers for one in layer.matrices} == {ScaledFp8Matrix}


def test_who_a_model_is(llama, tmp_path):
    """Its contents and what they mean, whatever it is called and however it is split."""
    folder, _ = quantise(llama, tmp_path / "one", FOLDERS["gptq"])
    first = load_model(folder).identity
    tensors = load_file(folder / "model.safetensors")
    moved = folder.rename(tmp_path / "moved")
    (moved / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {f"model-{at}.safetensors": names[at::3] for at in range(3)}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, moved / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (moved / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_model(moved).identity == first
    edit_config(moved, quantization_config={**FOLDERS["gptq"], "damp_percent": 0.01})  # which means nothing now
    assert load_model(moved).identity == first
    edit_config(moved, quantization_config={**FOLDERS["gptq"], "checkpoint_format": "gptq_v2"})
    assert load_model(moved).identity.differences(first.data) == ["other weights"]


def test_float16_checkpoints_run_in_bfloat16_on_a_cpu(llama, tmp_path, capsys):
    folder = edit_config(quantise(llama, tmp_path / "awq", FOLDERS["awq"])[0], dtype="float16")
    with pytest.warns(UserWarning, match=r"the quantised model runs in bfloat16.*dtype='float32'"):
        assert load_model(folder).spec.dtype == torch.bfloat16
    with pytest.warns(UserWarning, match="the model runs in float32"):
        assert load_model(folder, dtype="float16").spec.dtype == torch.float32
    code, out, err = run(capsys, "info", str(folder))
    assert (code, err) == (0, "")
    assert all(part in " ".join(out.split()) for part in ("AWQ", "activations bfloat16", "in one loop"))


def test_what_takes_no_packed_weights_says_so(llama, tmp_path):
    folder, _ = quantise(llama, tmp_path / "awq", FOLDERS["awq"])
    with pytest.raises(ModelError, match=r"quantize='fp8_reference' is for weights of 16 or 32 bits; awq has fewer"):
        load_model(folder, quantize="fp8_reference")
    with pytest.raises(ModelError, match=r"is in AWQ, which transformers runs by other packages"):
        TransformersModel(folder, torch.float32)


DYNAMIC = {"+:.*q_proj": {"bits": 8, "group_size": 64}, "-:.*down_proj": {}}


def test_modules_of_numbers_of_their_own(llama, tmp_path):
    """GPTQModel's ``dynamic``, and groups of compressed-tensors, the most special one first."""
    eight = quantise(llama, tmp_path / "eight", {**FOLDERS["gptq_8"], "group_size": 64})[0]
    four = quantise(llama, tmp_path / "four", FOLDERS["gptq"])[0]
    tensors = {name: one for name, one in load_file(four / "model.safetensors").items() if "q_proj" not in name}
    tensors |= {name: one for name, one in load_file(eight / "model.safetensors").items() if "q_proj" in name}
    save_file(tensors, four / "model.safetensors", metadata={"format": "pt"})
    edit_config(four, quantization_config={**FOLDERS["gptq"], "dynamic": DYNAMIC})
    held = read_weights(*source_of(four)).layers[1]
    assert (held.query.format, held.key.format) == ("INT8_64", "INT4_32")
    config = deepcopy(FOLDERS["w4a16"])
    groups = config["config_groups"]
    other = {"targets": ["re:.*q_proj"], "weights": {**groups["group_0"]["weights"], "num_bits": 8}}
    config["config_groups"] = {"group_0": groups["group_0"], "group_1": other}
    of = compressed.formats(config)
    assert [of(f"model.layers.1.self_attn.{name}").bits for name in ("q_proj", "k_proj")] == [8, 4]


def test_mixtrals_experts_are_called_as_in_the_file(tmp_path):
    config = deepcopy(FOLDERS["w4a16"]) | {"ignore": ["re:.*self_attn.*", "re:.*embed_tokens", "lm_head"]}
    config["config_groups"]["group_0"]["targets"] = ["re:.*block_sparse_moe.experts.*w[123]"]
    made = make_checkpoint("mixtral", tmp_path / "made", **SIZES)
    assert (
        same_as(quantise(made, tmp_path / "w4a16", config)[1], tmp_path / "w4a16").model.identity.quantize == "INT4_32"
    )
