"""``saccade info`` by config.json alone: against loaded models, published sizes, and every model of transformers."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from causal_classes import TYPES, Evidence, small_config
from covering import quick
from multimodal import make_multimodal
from test_cli import run
from tiny_models import CONFIGS, make_checkpoint, one_thread, random_ids  # noqa: F401

from saccade import LLM, SamplingParams
from saccade.errors import ModelError
from saccade.models.facts import ModelFacts, RefusedModel, described, facts_of
from saccade.models.families import FAMILIES
from saccade.models.loader import load_model
from saccade.models.text_part import WRAPPERS

QUICK = ("llama", "gemma3_text", "phi3", "qwen3_moe", "gpt_oss", "cwm", "lfm2", "qwen3_5_text", "deepseek_v2")


def config_alone(folder: Path, to: Path) -> Path:
    to.mkdir(parents=True)
    shutil.copy(folder / "config.json", to)
    return to


def written(folder: Path, config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", quick(CONFIGS, lambda one: one in QUICK))
def test_a_config_alone_says_what_the_loaded_model_has(family, tmp_path):
    folder = make_checkpoint(family, tmp_path / "whole")
    model, facts = load_model(folder), described(config_alone(folder, tmp_path / "alone"))
    spec, here = model.spec, facts_of(folder)
    assert isinstance(facts, ModelFacts)
    assert (facts.layers, facts.heads, facts.kv_heads) == (model.runner.depth, spec.heads, spec.kv_heads)
    assert len(facts.layer_windows) == spec.layers
    assert facts.state_bytes == (0 if spec.states is None else spec.states.nbytes)
    assert (facts.head_dim, facts.layer_windows, facts.context) == (spec.head_dim, spec.windows, spec.max_position)
    assert facts.weight_bytes == here.weight_bytes == sum(one.nbytes for one in model.runner.weights.values())
    assert (facts.parameters, facts.weights_here, here.weights_here) == (here.parameters, False, True)
    rows = 2 if spec.value_dim is None else 1
    assert facts.latent == (rows == 1)
    each = [rows * math.prod(spec.shape(layer)) * 4 for layer in range(spec.layers)]
    assert facts.token_bytes == sum(each[: spec.stored])
    experts = any(".experts." in name for name in model.runner.weights)
    assert facts.step_bytes <= model.weight_bytes if experts else facts.step_bytes == model.weight_bytes
    for tokens in (1, 6, 8, 100):
        read = sum(size * min(tokens, window or tokens) for size, window in zip(each, spec.windows))
        assert facts.kv_bytes(tokens) == read


LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_30B = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "sliding_window": None,
    "max_position_embeddings": 262144, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rope_theta": 1e7,
}  # fmt: skip
GEMMA_4B = {  # as it is published: all else is the class's default
    "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27},
}  # fmt: skip


def test_published_models(tmp_path):
    """Sizes as their publishers state them: 8.03B; 30.5B of which 3.3B are active; 3.88B of text, five layers of six
    over a window of 1,024."""
    llama, qwen, gemma = (
        described(written(tmp_path / str(place), one)) for place, one in enumerate((LLAMA_8B, QWEN3_30B, GEMMA_4B))
    )
    assert llama.parameters == 8_030_261_248
    assert llama.weight_bytes == 2 * llama.parameters
    assert llama.token_bytes == 128 << 10
    read = 2 * (llama.parameters - 128256 * 4096)
    assert llama.step_bytes == read
    assert llama.half_at == -(-read // llama.token_bytes) == 114_517
    assert llama.gain(131072, 0.05) == pytest.approx((read + (16 << 30)) / (read + 0.05 * (16 << 30)))
    assert (qwen.parameters, qwen.step_bytes) == (30_532_122_624, pytest.approx(2 * 3.04e9, rel=0.02))
    assert (gemma.family, gemma.multimodal, gemma.context) == ("gemma3_text", "gemma3", 131072)
    assert gemma.parameters == pytest.approx(3.88e9, rel=1e-3)
    assert [gemma.layer_windows.count(one) for one in (None, 1024)] == [5, 29]
    assert gemma.kv_bytes(131072) == 4 * 256 * 2 * 2 * (5 * 131072 + 29 * 1024)


def test_a_published_hybrid(tmp_path):
    """Qwen3.5-27B: a layer of four attends, others keep 48 matrices of 128 x 128 in float32 and four columns of a
    convolution over queries, keys and values."""
    text = {
        "model_type": "qwen3_5_text", "head_dim": 256, "hidden_size": 5120, "intermediate_size": 17408,
        "linear_num_value_heads": 48, "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4,
        "max_position_embeddings": 262144, "vocab_size": 248320,
    }  # fmt: skip
    config = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    facts = described(written(tmp_path, {**config, "dtype": "bfloat16", "tie_word_embeddings": False}))
    assert facts.parameters == pytest.approx(26.9e9, rel=1e-3)
    assert (facts.layers, facts.state_layers, len(facts.layer_windows)) == (64, 48, 16)
    assert facts.token_bytes == 16 * 2 * 4 * 256 * 2
    assert facts.state_bytes == 48 * (48 * 128 * 128 * 4 + (2 * 16 * 128 + 48 * 128) * 4 * 2)
    assert facts.kv_bytes(1000) == 1000 * facts.token_bytes
    read = facts.step_bytes + 2 * facts.state_bytes  # states are written, too
    kept = 131072 * facts.token_bytes
    assert facts.gain(131072, 0.05) == pytest.approx((read + kept) / (read + 0.05 * kept))


def test_quantised_configs(tmp_path):
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
    facts = described(written(tmp_path / "awq", {**LLAMA_8B, "quantization_config": awq}))
    assert 5.6e9 < facts.weight_bytes < 5.8e9  # files of such models have 5.7 GB
    assert list(facts.formats) == ["about 4.156 bits", "bfloat16"]
    other = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    refused = described(written(tmp_path / "nf4", {**LLAMA_8B, "quantization_config": other}))
    assert isinstance(refused, RefusedModel)
    assert "quantised by bitsandbytes" in refused.reason
    assert described(tmp_path / "awq").weights_here is False
    whole = described(written(tmp_path / "plain", LLAMA_8B), "int4")
    assert 4.7 / 8 * whole.parameters < whole.weight_bytes < 5.3 / 8 * whole.parameters


def test_it_is_said_in_lines(tmp_path, capsys):
    folder = written(tmp_path / "8b", LLAMA_8B)
    code, out, err = run(capsys, "info", str(folder))
    told = " ".join(out.split())
    assert (code, err) == (0, "")
    for part in (
        "runs here yes, layers in one loop",
        "8,030.3 million",
        "no weights here: what config.json lets expect",
        "131,072 16.0 GiB 16.0 GiB 53.4% 2.03x",
        "1,048,576 128.0 GiB 128.0 GiB 90.2% 6.97x beyond its context",
        "attention is half of it at 114,517 tokens",
    ):
        assert part in told, told
    code, out, _ = run(capsys, "info", str(folder), "--json")
    said = json.loads(out)
    assert (said["supported"], said["half_of_a_step_at"]) == (True, 114_517)
    assert [one["tokens"] for one in said["contexts"]] == [4096 << n for n in range(9)]
    folder = written(tmp_path / "mamba", {"model_type": "mamba"})
    code, out, err = run(capsys, "info", str(folder))
    assert (code, err) == (0, "")
    assert "runs here no:" in " ".join(out.split())
    assert "recurrent" in out
    code, out, _ = run(capsys, "info", str(folder), "--json")
    assert (json.loads(out)["supported"], json.loads(out)["family"]) == (False, "mamba")


def test_windows_in_every_layer_never_reach_half(tmp_path, capsys):
    config = {**LLAMA_8B, "model_type": "mistral", "architectures": None, "sliding_window": 4096}
    facts = described(written(tmp_path, config))
    assert (facts.half_at, facts.gain(1 << 20, 0.05)) == (None, 1.0)
    assert "attention is never half of it" in run(capsys, "info", str(tmp_path))[1]


def test_hub_names_without_a_network(tmp_path, capsys, monkeypatch):
    """A config in the cache is enough; a name alone says what to do."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--org--eight", "0123456789abcdef0123456789abcdef01234567"
    written(repository / "snapshots" / commit, LLAMA_8B)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "info", "org/eight")
    assert (code, err) == (0, "")
    assert "8,030.3 million" in out
    code, out, err = run(capsys, "info", "org/nine")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    for part in (
        "'org/nine' is no folder here and not in the cache",
        "HF_HUB_OFFLINE is set",
        "no more of it than its config.json",
    ):
        assert part in err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**9}, "more than any model has"),
        ({"num_attention_heads": 7}, "multiple of num_key_value_heads"),
        ({"hidden_size": "wide"}, "hidden_size must be"),
        ({"rope_parameters": {"rope_type": "x", "rope_theta": 1.0}}, "rope"),
        ({"hidden_act": "x"}, "no model can be made"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantised by AQLM"),
        ({"text_config": {"model_type": "mamba"}}, "recurrent"),
        ({"text_config": {"model_type": "llama"}}, "multimodal"),
    ],
    ids=str,
)
def test_configs_of_models_that_cannot_be(tmp_path, changes, words):
    facts = described(written(tmp_path, {**LLAMA_8B, **changes}))
    assert isinstance(facts, RefusedModel)
    assert words in facts.reason
    assert "\n" not in facts.reason


def test_files_that_are_broken_are_errors(tmp_path):
    for content, words in (("{", "cannot be read as JSON"), ("[]", "not a JSON object"), ("{}", "no model_type")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelError, match=words):
            described(tmp_path)
    (tmp_path / "config.json").unlink()
    for folder, words in ((tmp_path, "no config.json"), (tmp_path / "none", "does not exist")):
        with pytest.raises(ModelError, match=words):
            described(folder)


# What a reason says, and what else of transformers' model shows that it is true.
REASONS = {
    "sparse by itself": lambda shown: "Indexer(" in shown.source(),
    "recurrent, convolutional": lambda shown: shown.keeps_state() or "ShortConv(" in shown.source(),
    "has no full_attention": lambda shown: "full_attention" not in shown.text.layer_types,
    "multi-head latent attention": lambda shown: shown.latent(),
    "keys and values shared": lambda shown: shown.shares_keys(),
    "a unified multimodal model": lambda shown: "Unified" in shown.source(),
    "chunked attention": lambda shown: bool(getattr(shown.text, "attention_chunk_size", 0)),
    "ALiBi": lambda shown: "alibi" in shown.source(),
    "layers that run in loops": lambda shown: getattr(shown.text, "n_recurrent_loops", 1) > 1,
    "layer_types other than": lambda shown: bool({*shown.text.layer_types} - {"full_attention", "sliding_attention"}),
    "an encoder;": lambda shown: shown.sees_ahead(),
    "not causal": lambda shown: bool(getattr(shown.text, "use_bidirectional_attention", 0)) or shown.text.prefix_lm,
    "multimodal or nested": lambda shown: bool(shown.parts()),
}
SOME = (
    "bert",
    "deepseek_v3",
    "deepseek_v32",
    "falcon_mamba",
    "longcat_flash",
    "gemma3",
    "gemma3n",
    "gemma4_text",
    "glm_moe_dsa",
    "gpt2",
    "llama",
    "llama4_text",
    "minimax_m3_vl",
    "mpt",
    "qwen4_exp",
)


@pytest.mark.parametrize("model_type", quick(TYPES, lambda one: one in SOME))
def test_every_model_of_transformers_is_told_truly(model_type, tmp_path):
    """What is said to run generates; what is refused has a reason that its own model shows."""
    folder = written(tmp_path / "small", small_config(model_type))
    facts = described(folder)
    if isinstance(facts, ModelFacts):
        assert model_type in FAMILIES or model_type in WRAPPERS
        if model_type in WRAPPERS:
            made = tmp_path / "made"
            make_multimodal(model_type, made)
        else:
            made = make_checkpoint(model_type, tmp_path / "made")
        with LLM(made, kv_memory="4MiB") as llm:
            output = llm.generate(random_ids(9, seed=1), SamplingParams(max_tokens=3, ignore_eos=True))[0]
        assert len(output.outputs[0].token_ids) == 3
        return
    assert "\n" not in facts.reason
    evidence = Evidence.of(folder)
    found = [true for words, true in REASONS.items() if words in facts.reason]
    if found:
        assert (
            evidence is None
            or found[0](evidence)
            or found[0](Evidence.of(written(tmp_path / "own", {"model_type": model_type})))
        )
    elif "an encoder-decoder" in facts.reason:
        assert small_config(model_type)["is_encoder_decoder"]
    elif "no model can be made of" in facts.reason:
        assert evidence is None  # nor by transformers
    else:
        assert "is not supported; supported: " in facts.reason
        assert model_type not in FAMILIES
        assert evidence is None or not (evidence.keeps_state() or evidence.latent())  # which there is a reason for


def test_evidence_tells_models_apart(tmp_path):
    """What must not hold of a plain decoder."""
    shown = Evidence.of(written(tmp_path, small_config("llama")))
    for words, true in REASONS.items():
        if words not in (
            "layer_types other than",
            "has no full_attention",
            "not causal",
        ):  # whose fields a llama has not
            assert not true(shown), words
