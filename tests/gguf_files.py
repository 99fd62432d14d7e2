"""GGUF files of tiny checkpoints, written as llama.cpp's converter writes them, by the gguf package's own name map."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tiny_models import CHAT_TEMPLATE, CONFIGS, make_checkpoint, oracle
from tokenizers import pre_tokenizers

# Rows are whole blocks of 32 weights, as quantised types want them.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 272}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}  # for blocks of 256
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
TOKENS += ["ĠĠ", "<bos>", "<eos>", "<user>", "<assistant>", *(f"[PAD{at}]" for at in range(11))]
BOS, EOS = 257, 258
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

# transformers' families by GGUF's architectures; what a file cannot say is as llama.cpp takes it to be.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": False, **PLAIN}),
    "mistral": ("llama", {"sliding_window": None, **PLAIN}),
    "mixtral": ("llama", {"sliding_window": None, **PLAIN}),
    "qwen2": ("qwen2", {"use_sliding_window": False, "sliding_window": None, **PLAIN}),
    "qwen3": ("qwen3", {"use_sliding_window": False, "sliding_window": None, **PLAIN}),
    "qwen2_moe": ("qwen2moe", {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, **PLAIN}),
    "qwen3_moe": ("qwen3moe", {"moe_intermediate_size": 64, **PLAIN}),
    "gemma": ("gemma", {"tie_word_embeddings": True, **PLAIN}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, **PLAIN}),
    "gemma3_text": (
        "gemma3",
        {
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
            },
        },
    ),
    "phi": ("phi2", {"num_key_value_heads": 4}),
    "phi3": ("phi3", {"original_max_position_embeddings": 256, "sliding_window": 7, "rope_parameters": None}),
    "smollm3": (
        "smollm3",
        {"no_rope_layers": [1, 1, 1, 0], "attention_bias": False, "use_sliding_window": False, **PLAIN},
    ),
    "granite": ("granite", PLAIN),
    "granitemoe": ("granitemoe", PLAIN),
    "arcee": ("arcee", PLAIN),
    "olmo": ("olmo", PLAIN),
    "olmo2": ("olmo2", PLAIN),
    "olmo3": ("olmo2", {}),
    "olmoe": ("olmoe", PLAIN),
    "exaone4": ("exaone4", PLAIN),
    "seed_oss": ("seed_oss", PLAIN),
    "ernie4_5": ("ernie4_5", PLAIN),
    "starcoder2": ("starcoder2", {"sliding_window": None, **PLAIN}),
    "cohere": ("command-r", {"tie_word_embeddings": True, **PLAIN}),
    "cohere2": ("cohere2", {"tie_word_embeddings": True, **PLAIN}),
    "glm": ("chatglm", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4moe", {"moe_intermediate_size": 64}),
    "gpt_oss": ("gpt-oss", PLAIN),
    "ministral3": (
        "mistral3",
        {"rope_parameters": {**CONFIGS["ministral3"]["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
}
PATTERNS = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6}  # every so many layers is global; else 4
_CALLED = {  # by the checkpoints that the gguf package knows
    "block_sparse_moe.router": "block_sparse_moe.router.layer",
    "e_score_correction_bias": "e_score_correction",
}
_INTERLEAVED = ("llama", "mistral3", "smollm3", "granite", "granitemoe", "arcee", "olmo")


def tiny(family: str, folder: Path, **overrides: Any) -> Path:
    """A float32 checkpoint of ``family`` (transformers' name) that a GGUF file can hold."""
    settings = {**SIZES, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": None, **FAMILIES[family][1]}
    if "layer_types" in CONFIGS[family]:
        layers, every = (6 if family == "gemma3_text" else 4), PATTERNS.get(family, 4)
        settings["layer_types"] = [
            "full_attention" if at % every == every - 1 else "sliding_attention" for at in range(layers)
        ]
        settings["num_hidden_layers"] = layers
    if family == "smollm3":
        settings["num_hidden_layers"] = 4
    return make_checkpoint(family, folder, tokenizer=False, **{**settings, **overrides})


def metadata_of(config: dict[str, Any]) -> dict[str, Any]:
    """What the converter says of a model, without the architecture's name in front."""
    kind, family = FAMILIES[config["model_type"]][0], config["model_type"]
    rope = config.get("rope_parameters") or {}
    whole = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    said: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(whole.get("rope_theta", 10000.0)),
        "rope.dimension_count": int(
            head_dim * whole.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        ),
    }
    if family in ("phi", "starcoder2", "cohere", "cohere2", "olmo"):
        epsilon = config.get("layer_norm_eps", config.get("norm_epsilon", 1e-5))
        said["attention.layer_norm_epsilon"] = epsilon
    else:
        said["attention.layer_norm_rms_epsilon"] = config["rms_norm_eps"]
    if whole.get("rope_type", "default") in ("linear", "yarn"):
        said |= {"rope.scaling.type": whole["rope_type"], "rope.scaling.factor": float(whole["factor"])}
    if whole.get("rope_type") == "yarn":
        said["rope.scaling.original_context_length"] = whole["original_max_position_embeddings"]
    if config.get("sliding_window") and family != "starcoder2":
        said["attention.sliding_window"] = config["sliding_window"]
        if family in ("olmo3", "exaone4"):
            said["attention.sliding_window_pattern"] = [one == "sliding_attention" for one in config["layer_types"]]
    experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if experts:
        said |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
        said["expert_feed_forward_length"] = config.get("moe_intermediate_size") or config["intermediate_size"]
    names = {
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count", "routed_scaling_factor": "expert_weights_scale",
        "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale", "logit_scale": "logit_scale",
        "clip_qkv": "attention.clamp_kqv", "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }  # fmt: skip
    said |= {theirs: config[ours] for ours, theirs in names.items() if config.get(ours) is not None}
    if kind == "mistral3":
        said["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        said["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
    return said


def parts(config: dict[str, Any], state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names as GGUF has them and views into a model's ``state``, experts apart."""
    kind = FAMILIES[config["model_type"]][0]
    arch = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, value in state.items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        stem, _, own = name.rpartition(".")
        if not stem.endswith("experts") or value.dim() == 1:
            own_stem = f"{stem}.{own}" if own not in ("weight", "bias") else stem
            for ours, theirs in _CALLED.items():
                own_stem = own_stem.replace(ours, theirs)
            found = names.get_name(own_stem)
            assert found is not None, name
            yield f"{found}.{'weight' if own == 'sinks' else 'bias' if own.endswith('bias') else 'weight'}", value
            continue
        layer = name.split(".")[2]
        suffix = "bias" if own.endswith("_bias") else "weight"
        turns = config["model_type"] == "gpt_oss"
        if turns and suffix == "weight":
            value = value.transpose(1, 2)
        if own.startswith("gate_up"):
            half = value.shape[1] // 2
            yield f"blk.{layer}.ffn_gate_exps.{suffix}", value[:, ::2] if turns else value[:, :half]
            yield f"blk.{layer}.ffn_up_exps.{suffix}", value[:, 1::2] if turns else value[:, half:]
        else:
            yield f"blk.{layer}.ffn_down_exps.{suffix}", value


def random_bytes(shape: tuple[int, ...], kind: Kind, seed: int) -> np.ndarray:
    """Blocks of any codes, with scales that a model may have."""
    from test_block_formats import random_blocks

    rows = int(np.prod(shape[:-1]))
    block = gguf.GGML_QUANT_SIZES[kind][0]
    return random_blocks(kind.name, rows, shape[-1] // block, seed, even=True).reshape(*shape[:-1], -1)


def write(
    checkpoint: Path,
    file: Path,
    stored: Kind = Kind.F32,
    pre: str = "default",
    without: tuple[str, ...] = (),
    extra: Mapping[str, np.ndarray] | None = None,
    others: Mapping[str, Kind] | None = None,
    model: Any = None,
    split: int = 0,
    pieces: list[str] | None = None,
    raw: Mapping[str, int] | None = None,
    **metadata: Any,
) -> Path:
    """``checkpoint`` as a GGUF file, matrices as ``stored``. ``without``: keys and tensors that are left out;
    ``extra``: more tensors, in float32; ``others``: types of matrices by parts of their names; ``model``:
    transformers' model of the checkpoint, which is given the weights that the file holds, as the gguf package reads
    them; ``pieces``: a vocabulary of SentencePiece, bytes among them, later ones the better; ``split``: tensors of a
    part, for a file in parts beside ``file``; ``raw``: more keys, whole; ``metadata``: more keys of the architecture,
    ``__`` for a dot."""
    config = json.loads((checkpoint / "config.json").read_text())
    kind = FAMILIES[config["model_type"]][0]
    out = gguf.GGUFWriter(file, kind, split_max_tensors=split)
    said = metadata_of(config) | {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in said.items():
        if key in without:
            continue
        add = {float: out.add_float32, int: out.add_uint32, str: out.add_string, list: out.add_array}[type(value)]
        add(f"{kind}.{key}", value)
    for key, value in (raw or {}).items():
        out.add_uint32(key, value)
    if pieces is not None:
        pieces = [*pieces, *(f"[PAD{at}]" for at in range(len(pieces), config["vocab_size"]))]
        out.add_tokenizer_model("llama")
        out.add_tokenizer_pre("default")
        out.add_token_list(pieces)
        out.add_token_scores([float(at - 1000) for at in range(len(pieces))])
        kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
        out.add_token_types([6 if one.startswith("<0x") else kinds.get(one, 1) for one in pieces])
        out.add_bos_token_id(1)
        out.add_eos_token_id(2)
        out.add_unk_token_id(0)
    elif "tokenizer" not in without:
        out.add_tokenizer_model("gpt2")
        out.add_tokenizer_pre(pre)
        out.add_token_list(TOKENS)
        out.add_token_types([3 if token in TOKENS[257:261] else 5 if "PAD" in token else 1 for token in TOKENS])
        out.add_token_merges(["Ġ Ġ", "Ġ Ġ"])  # of one alone some versions of transformers make a text
        out.add_bos_token_id(BOS)
        out.add_eos_token_id(EOS)
        out.add_chat_template(CHAT_TEMPLATE)
    else:
        out.add_uint32(f"{kind}.vocab_size", config["vocab_size"])
    heads = {".attn_q.": config["num_attention_heads"], ".attn_k.": config["num_key_value_heads"]}
    state = (oracle(checkpoint) if model is None else model).state_dict()
    for number, (named, view) in enumerate(parts(config, state)):
        if named in without:
            continue
        turned = next((count for part, count in heads.items() if part in named and kind in _INTERLEAVED), None)
        offset = 1.0 if kind.startswith("gemma") and named.endswith("norm.weight") else 0.0
        weight = (view if turned is None else interleaved(view, turned)) + offset
        own = next((kind for part, kind in (others or {}).items() if part in named.split(".")), stored)
        plain = view.dim() == 1 or named.endswith(
            (".bias", "norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
        )
        as_stored = Kind.F32 if plain or weight.shape[-1] % gguf.GGML_QUANT_SIZES[own][0] else own
        data = _quantised(weight.numpy(), as_stored, number)
        out.add_tensor(named, data, raw_dtype=as_stored)
        if model is not None:
            values = torch.from_numpy(gguf.dequantize(data, as_stored).copy()) - offset
            view.copy_(values if turned is None else apart(values, turned))
    for name, values in (extra or {}).items():
        out.add_tensor(name, values.astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file


def _quantised(weight: np.ndarray, kind: Kind, seed: int) -> np.ndarray:
    try:
        return gguf.quantize(np.ascontiguousarray(weight), kind)
    except NotImplementedError:  # K-quants
        return random_bytes(weight.shape, kind, seed)


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head in the order that ggml rotates: first of the lower half, first of the upper half, and so on."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def apart(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """:func:`interleaved` the other way."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()
