"""What cannot run correctly is refused at load with one line that names it; nothing is guessed or filled in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import edit_config, make_checkpoint, one_thread, random_ids  # noqa: F401

from saccade.errors import ModelError
from saccade.models import load_model
from saccade.models.refusals import refuse_unsupported

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(llama, tmp_path) -> Path:
    """A private copy of a good checkpoint to spoil."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def refused(path, *words: str, **options) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_the_good_copy_loads(folder):
    load_model(folder)


# --- features and families, by config alone --------------------------------------------------------------------------

_GEMMA4 = {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]}
FEATURES = [
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ({"vision_config": {"hidden_size": 8}}, "multimodal"),
    ({"model_type": "paligemma", "text_config": {"hidden_size": 8}}, "multimodal"),
    ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
    ({"is_encoder_decoder": True}, "encoder-decoder"),
    ({"add_cross_attention": True}, "cross-attention"),
    ({"model_type": "bert"}, "an encoder"),
    ({"model_type": "minicpm3", "kv_lora_rank": 512}, "MLA"),
    ({"kv_lora_rank": 512}, "MLA"),
    ({"model_type": "deepseek_v32", "kv_lora_rank": 512}, "DeepSeek Sparse Attention", "the 2,048 tokens", "indexer"),
    ({"model_type": "glm_moe_dsa", "index_topk": 512}, "DeepSeek Sparse Attention", "the 512 tokens"),
    ({"model_type": "deepseek_v3", "kv_lora_rank": 512, "index_topk": 64}, "the 64 tokens"),
    ({"model_type": "kimi_k2", "kv_lora_rank": 512, "index_topk": 64}, "the 64 tokens"),
    ({"model_type": "deepseek_v4"}, "compressed sparse attention", "the 512 entries"),
    ({"model_type": "deepseek_v4", "layer_types": ["heavily_compressed_attention"]}, "layer_types other than"),
    ({"model_type": "deepseek_v4", "compress_ratios": [0, 128]}, "'deepseek_v4' is not supported; supported: "),
    ({"model_type": "minimax_m3"}, "16 blocks of 128 tokens"),
    ({"model_type": "minimax_m3_vl", "text_config": {"index_topk_blocks": 4}}, "4 blocks of 128 tokens"),
    (
        {
            "model_type": "minimax_m3_vl_text",
            "sparse_attention_config": {
                "sparse_attention_freq": [0, 1],
                "sparse_topk_blocks": 8,
                "sparse_block_size": 64,
            },
        },
        "8 blocks of 64 tokens",
    ),
    (
        {"model_type": "minimax_m3_vl_text", "sparse_attention_config": {"sparse_attention_freq": [0, 0]}},
        "'minimax_m3_vl_text' is not supported; supported: ",
    ),
    (
        {
            "model_type": "qwen4_exp",
            "text_config": {"indexer_n_heads": 4, "indexer_budget": 1024, "indexer_compress_ratio": 16},
        },
        "QSA",
        "the 1,024 tokens in blocks of 16",
    ),
    ({"model_type": "qwen4_exp_text", "layer_types": ["linear_attention"]}, "recurrent"),
    ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "not causal"),
    ({**_GEMMA4, "num_global_key_value_heads": 3}, "multiple of num_global_key_value_heads (3)"),
    ({**_GEMMA4, "global_head_dim": 0}, "global_head_dim must be a positive"),
    ({"model_type": "gemma4_unified_text", "head_dim": 64, "global_head_dim": 64}, "a unified multimodal model"),
    ({"num_kv_shared_layers": 2}, "shared between layers"),
    ({"model_type": "mamba"}, "recurrent"),
    ({"model_type": "jamba"}, "recurrent"),
    ({"layer_types": ["linear_attention", "full_attention"]}, "recurrent"),
    ({"model_type": "lfm2", "layer_types": ["conv", "sliding_attention"]}, "sliding windows in a family", "state"),
    ({"model_type": "llama4_text"}, "chunked attention"),
    ({"attention_chunk_size": 8192}, "chunked attention"),
    ({"layer_types": ["chunked_attention"]}, "chunked attention"),
    ({"layer_types": ["some_new_attention"]}, "layer_types"),
    ({"n_recurrent_loops": 2}, "run in loops"),
    ({"use_bidirectional_attention": True}, "not causal"),
    ({"is_causal": False}, "not causal"),
    ({"alibi": True}, "ALiBi"),
    ({"model_type": "bloom"}, "ALiBi"),
    ({"model_type": "gpt2"}, "'gpt2' is not supported; supported: ", "llama"),
    ({"model_type": "no_such_model"}, "'no_such_model' is not supported"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification", "LlamaForCausalLM"),
    ({"architectures": ["LlamaModel"]}, "LlamaModel"),
    ({"num_attention_heads": 4, "num_key_value_heads": 3}, "multiple of num_key_value_heads (3)"),
    ({"num_key_value_heads": [2, 4, 2]}, "differs between layers"),
    ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive"),
    ({"num_attention_heads": "four"}, "num_attention_heads must be a positive"),
    ({"head_dim": -8}, "head_dim must be a positive"),
    ({"head_dim": None, "hidden_size": 50}, "multiple of num_attention_heads"),
    ({"sliding_window": 0}, "sliding_window must be"),
    ({"sliding_window": 8}, "sliding_window=8", "remove it"),
    ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope_type proportional"),
    ({"hidden_size": "wide"}, "hidden_size must be a positive"),
    ({"rms_norm_eps": "small"}, "not a valid llama config"),
    ({"rope_parameters": {"rope_type": "no_such_rope", "rope_theta": 1e4}}, "no_such_rope"),
    ({"hidden_act": "no_such_activation"}, "no_such_activation"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive"),
    ({"vocab_size": -1}, "vocab_size must be a positive"),
    ({"max_position_embeddings": 0}, "max_position_embeddings must be a positive"),
]


@pytest.mark.parametrize(("changes", "words"), [(case[0], case[1:]) for case in FEATURES], ids=str)
def test_config_is_refused(folder, changes, words):
    refused(edit_config(folder, **changes), *words)


# What configs of well-known checkpoints hold that looks like a refused feature and is not.
HARMLESS = [
    ("qwen2", {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}),
    ("qwen2_moe", {"use_sliding_window": False, "sliding_window": 0}),
    ("phi3", {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "sliding_window": 262144}),
    ("gemma3_text", {"use_bidirectional_attention": False, "cache_implementation": "hybrid", "is_causal": True}),
    ("mistral", {"sliding_window": None, "quantization_config": None, "head_dim": None, "hidden_size": 4096}),
    ("llama", {"pretraining_tp": 1, "architectures": None, "is_encoder_decoder": False, "layer_types": None}),
    ("smollm3", {"layer_types": ["full_attention"] * 36, "sliding_window": None}),
]


@pytest.mark.parametrize(("model_type", "config"), HARMLESS, ids=lambda value: value if isinstance(value, str) else "")
def test_harmless_settings_are_let_pass(model_type, config):
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    refuse_unsupported({"model_type": model_type, **heads, **config}, "folder")


def test_non_causal_gemma(tmp_path):
    folder = make_checkpoint("gemma2", tmp_path / "gemma")
    refused(edit_config(folder, use_bidirectional_attention=True), "not causal")


def test_window_the_layers_would_not_apply(tmp_path):
    """layer_types ask for a window that use_sliding_window=False switches off in the layers but not in the masks."""
    folder = make_checkpoint("smollm3", tmp_path / "smollm3", sliding_window=7, use_sliding_window=True)
    refused(edit_config(folder, use_sliding_window=False), "layer 1 runs with sliding window None", "implies 7")


@pytest.mark.parametrize(("family", "word"), [("phi3", "no such layers"), ("gpt_oss", "no sliding_window")])
def test_sliding_layers_without_a_window_of_their_own(tmp_path, family, word):
    folder = make_checkpoint(family, tmp_path / family)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    refused(edit_config(folder, layer_types=kinds, sliding_window=None), word)


def test_sizes_that_do_not_fit_each_other(tmp_path):
    """An odd head_dim makes tensors that load and rotary factors that cannot be applied."""
    folder = make_checkpoint("qwen3", tmp_path / "odd", head_dim=16)
    save = folder / WEIGHTS
    tensors = load_file(save)
    for name in tensors:
        part = name.rsplit(".", 2)[-2]
        if part in ("q_proj", "k_proj", "v_proj"):
            tensors[name] = tensors[name][: tensors[name].shape[0] // 16 * 15].contiguous()
        if part == "o_proj":
            tensors[name] = tensors[name][:, :60].contiguous()
        if part in ("q_norm", "k_norm"):
            tensors[name] = tensors[name][:15].contiguous()
    save_file(tensors, save, metadata={"format": "pt"})
    refused(edit_config(folder, head_dim=15), "")


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["x" * 5000, "~no_such_user/model", "", "a\0b"], ids=lambda path: path[:9])
def test_paths_that_cannot_be(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(path, "")


def test_missing_folder(tmp_path):
    refused(tmp_path / "nowhere", "does not exist", "hub name")


def test_loading_takes_folders_alone():
    refused("meta-llama/Llama-3.1-8B", "does not exist", "hub name")


def test_file_instead_of_folder(folder):
    refused(folder / "config.json", "is a file; give the folder")


def test_no_config(folder):
    (folder / "config.json").unlink()
    refused(folder, "no config.json")


@pytest.mark.parametrize("text", ['{"model_type": "llama"', "", "\xff\xfe", "[1, 2]", '"llama"', "null"])
def test_broken_config(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    refused(folder, "config.json")


@pytest.mark.parametrize("model_type", [None, "", 3, ["llama"]])
def test_config_without_model_type(folder, model_type):
    refused(edit_config(folder, model_type=model_type), "names no model_type")


def test_only_pickled_weights(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin", "only safetensors")


def test_no_weights(folder):
    (folder / WEIGHTS).unlink()
    refused(folder, "no weights")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_truncated_weights(folder, keep):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    refused(folder, WEIGHTS, "truncated or corrupt")


def test_corrupt_weights(folder):
    (folder / WEIGHTS).write_bytes(b"\x00garbage" * 500)
    refused(folder, WEIGHTS, "truncated or corrupt")


def respoil(folder: Path, change) -> Path:
    """Rewrite the weights with ``change`` applied to the dict of tensors."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


LAYER = "model.layers.1.self_attn.k_proj.weight"


def test_missing_tensor(folder):
    """transformers would fill it with random numbers."""
    refused(respoil(folder, lambda t: t.pop(LAYER)), LAYER, "no weights in the checkpoint")


def test_missing_head_that_is_not_tied(folder):
    refused(respoil(folder, lambda t: t.pop("lm_head.weight")), "lm_head.weight", "no weights")


def test_many_missing_tensors_are_counted(folder):
    def drop(tensors):
        for name in [name for name in tensors if "layers.2" in name]:
            del tensors[name]

    refused(respoil(folder, drop), "tensors (model.layers.2", "have no weights")


def test_wrong_shape(folder):
    refused(respoil(folder, lambda t: t.update({LAYER: torch.zeros(8, 8)})), LAYER, "a shape that config.json")


def test_tensor_the_model_has_no_place_for(folder):
    """transformers would drop it: here a checkpoint with query norms under a config without them."""
    name = "model.layers.0.self_attn.q_norm.weight"
    refused(respoil(folder, lambda t: t.update({name: torch.ones(12)})), name, "no place in the model")


def test_harmless_extra_tensor_is_let_pass(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load_model(respoil(folder, lambda t: t.update({name: torch.ones(6)})))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_storage_without_a_quantization_config(folder, dtype):
    refused(respoil(folder, lambda t: t.update({LAYER: t[LAYER].to(dtype)})), LAYER, "quantised")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [LAYER, "model.layers.2.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_weights_that_are_not_numbers(folder, name, value):
    refused(respoil(folder, lambda t: t[name].view(-1)[:4].fill_(value)), "NaN or infinity")


def shard(folder: Path) -> Path:
    """Split the weights over two files with an index."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (folder / WEIGHTS).unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_load(folder, llama):
    one, two = load_model(llama), load_model(shard(folder))
    for (name, a), (_, b) in zip(one.runner.weights.items(), two.runner.weights.items(), strict=True):
        assert torch.equal(a, b), name


def test_shard_in_the_index_but_absent(folder):
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "model-00002-of-00002.safetensors", "not found")


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_broken_index(folder, text):
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, "index.json")


def test_adapter_folder(folder):
    (folder / "adapter_config.json").write_text("{}")
    refused(folder, "PEFT adapter", "--lora")


def test_broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{ not json")
    refused(folder, "tokenizer")


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "end"}'])
def test_broken_generation_config(folder, text):
    (folder / "generation_config.json").write_text(text)
    refused(folder, "generation_config.json")


def test_code_in_the_folder_is_never_run(folder, tmp_path):
    mark = tmp_path / "ran"
    (folder / "modeling_evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass C: ...\n")
    (folder / "configuration_evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass C: ...\n")
    auto_map = {"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.C"}
    load_model(edit_config(folder, auto_map=auto_map))
    refused(edit_config(folder, auto_map=auto_map, model_type="evil"), "'evil' is not supported")
    assert not mark.exists()


# --- dtype and device -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "half", "", torch.int32, torch.float64])
def test_unknown_dtype(folder, dtype):
    refused(folder, "dtype", "'auto', 'float32', 'bfloat16', 'float16'", dtype=dtype)


def test_unknown_device(folder):
    refused(folder, "device", device="toaster")
    refused(folder, "device", device="meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_where_there_is_none(folder):
    refused(folder, "no GPU", "device='cpu'", device="cuda")


# --- sizes that the weights do not have: refused before anything is allocated -----------------------------------------


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        ("llama", {"model_type": "llama"}, ("a shape that config.json does not describe",)),  # 23 GB by its defaults
        ("llama", {"num_hidden_layers": 10**12}, ("num_hidden_layers=1000000000000", "42 tensors")),
        ("qwen2", {"num_hidden_layers": 10**12}, ("num_hidden_layers=1000000000000",)),  # a list with an entry a layer
        ("llama", {"vocab_size": 10**12}, ("a shape that config.json does not describe",)),
        ("llama", {"intermediate_size": 10**30}, ("no model can be made of config.json",)),
        ("mixtral", {"num_local_experts": 10**9}, ("describes a model of", "but the checkpoint holds")),
        ("olmoe", {"intermediate_size": 10**9}, ("describes a model of", "but the checkpoint holds")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_of_another_size_allocates_nothing(tmp_path, monkeypatch, family, config, words):
    folder = make_checkpoint(family, tmp_path)
    if config == {"model_type": "llama"}:
        (folder / "config.json").write_text(json.dumps(config))
    else:
        edit_config(folder, **config)
    monkeypatch.setattr("saccade.models.filling.AutoModelForCausalLM", None)  # who would allocate
    refused(folder, *words)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/../../b.safetensors", "", "a\0b", "a\nb"])
def test_a_weight_index_that_leads_outside_of_the_folder(folder, name):
    (folder / WEIGHTS).rename(folder.parent / WEIGHTS)
    index = {"metadata": {}, "weight_map": {LAYER: name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "model.safetensors.index.json", "no file name inside the folder")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_that_is_nested_too_deeply(folder, file):
    if "index" in file:
        (folder / WEIGHTS).unlink()
    (folder / file).write_text("[" * 200_000)
    refused(folder, file, "nested too deeply")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("ends", [[1, None], "a", [True], 1.5, [[1]], {"a": 1}, 10**400])
def test_ends_that_are_no_token_ids(folder, file, ends):
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**config, "eos_token_id": ends}))
    refused(folder, file, "eos_token_id must be a token id or a list of them")


@pytest.mark.parametrize("rope", [["llama3"], {"rope_type": ["llama3"]}, {"rope_type": 3}])
def test_rope_settings_of_another_type_are_refused(tmp_path, rope):
    """An unhashable one came out as a TypeError."""
    folder = edit_config(make_checkpoint("llama", tmp_path / "model"), rope_parameters=rope)
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    assert len(str(caught.value).splitlines()) == 1
