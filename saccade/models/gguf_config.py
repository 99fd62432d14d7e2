"""config.json of a GGUF file: from its metadata, and where that says nothing from what llama.cpp knows of a family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saccade.errors import ModelError, shown
from saccade.models.checkpoint import first_line
from saccade.models.families import FAMILIES as SERVED
from saccade.models.gguf_family_config import OWN, Get
from saccade.models.gguf_names import model_type
from saccade.models.gguf_rotary import rope

_PARTIAL = ("phi2", "phi3", "glm4", "chatglm", "glm4moe")  # of which a part of a head may rotate
_HALF = ("glm4", "chatglm", "glm4moe")
_BIASED = {  # a switch of the config, and the tensor that says how it stands
    "llama": {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"},
    "smollm3": {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"},
    "granite": {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"},
    "granitemoe": {"attention_bias": "attn_q.bias"},
    "qwen3": {"attention_bias": "attn_q.bias"},
    "qwen3moe": {"attention_bias": "attn_q.bias"},
    "qwen2moe": {"qkv_bias": "attn_q.bias"},
    "arcee": {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"},
    "seed_oss": {"attention_bias": "attn_q.bias", "attention_out_bias": "attn_output.bias", "mlp_bias": "ffn_up.bias"},
    "ernie4_5": {"use_bias": "attn_q.bias"},
    "starcoder2": {"use_bias": "attn_q.bias"},
    "command-r": {"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
    "cohere2": {"attention_bias": "attn_q.bias"},
    "chatglm": {"attention_bias": "attn_q.bias"},
    "glm4": {"attention_bias": "attn_q.bias"},
    "glm4moe": {"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
    "olmo2": {"attention_bias": "attn_q.bias"},
    "olmo": {"attention_bias": "attn_q.bias"},
    "olmoe": {"attention_bias": "attn_q.bias"},
    "gpt-oss": {"attention_bias": "attn_q.bias"},
}
_EXPERTS = {  # what a family's config calls the number of experts
    "llama": "num_local_experts",
    "granitemoe": "num_local_experts",
    "gpt-oss": "num_local_experts",
    "qwen2moe": "num_experts",
    "qwen3moe": "num_experts",
    "olmoe": "num_experts",
    "glm4moe": "n_routed_experts",
}
# What changes answers, and the families whose config takes it.
_MEANT = {
    "attention.sliding_window": ("llama", "gemma2", "gemma3", "phi3", "cohere2", "olmo2", "exaone4", "gpt-oss"),
    "attention.scale": ("granite", "granitemoe"),
    "attention.temperature_scale": ("mistral3",),
    "attention.clamp_kqv": ("olmo", "olmoe"),
    "attn_logit_softcapping": ("gemma2",),
    "final_logit_softcapping": ("gemma2", "gemma3"),
    "embedding_scale": ("granite", "granitemoe"),
    "residual_scale": ("granite", "granitemoe"),
    "logit_scale": ("granite", "granitemoe", "command-r", "cohere2"),
    "expert_weights_scale": ("glm4moe",),
    "expert_count": tuple(_EXPERTS),
}


def config_of(metadata: dict[str, Any], names: set[str], rotary: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """config.json of a file with this metadata and these tensors. ``rotary``: the tensors of ``gguf_names.ROTARY`` that
    it has. ModelError for what is missing, and for what no config of these families says."""
    try:
        return _config(metadata, names, rotary, where)
    except (TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{where} describes no model: {first_line(error)}; download the file again") from error


def _config(metadata: dict[str, Any], names: set[str], rotary: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    kind = str(metadata["general.architecture"])

    def get(key: str, *default: Any) -> Any:
        if f"{kind}.{key}" in metadata or default:
            return metadata.get(f"{kind}.{key}", *default)
        raise ModelError(f"{where} does not say {kind}.{key}; download the file again")

    def count(key: str, *default: Any) -> int:
        value = get(key, *default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise ModelError(f"{where}: {kind}.{key}={shown(value, 80)} is no number of heads, layers or channels")
        return value

    heads, hidden = count("attention.head_count"), count("embedding_length")
    head_dim = count("attention.key_length", hidden // heads)
    rotated = count("rope.dimension_count", head_dim // 2 if kind in _HALF else head_dim)
    refused = {
        "attention.value_length": get("attention.value_length", head_dim) != head_dim,
        "rope.dimension_count": rotated != head_dim and kind not in _PARTIAL,
        **{key: bool(get(key, 0)) and kind not in taken for key, taken in _MEANT.items()},
    }
    if odd := [key for key, here in refused.items() if here]:
        raise ModelError(
            f"{where}: {kind}.{odd[0]}={shown(get(odd[0]), 40)} is not read from GGUF files; give the model's "
            "safetensors folder, or its hub name"
        )
    family = model_type(metadata)
    context = count("context_length")
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [SERVED[family].causal_lm],
        "num_hidden_layers": count("block_count") - get("nextn_predict_layers", 0),
        "hidden_size": hidden,
        "intermediate_size": count("expert_feed_forward_length" if kind == "gpt-oss" else "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens") or ()) or count("vocab_size"),
        "tie_word_embeddings": "output.weight" not in names,
        "rope_parameters": rope(get, head_dim, rotated, context, rotary, where),
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{ours}_token_id"] = _token(metadata, theirs, config["vocab_size"], where)
    for field, tensor in _BIASED.get(kind, {}).items():
        config[field] = f"blk.0.{tensor}" in names
    if (experts := get("expert_count", 0)) or kind in set(_EXPERTS) - {"llama"}:
        config[_EXPERTS[kind]] = count("expert_count", experts)
        config["num_experts_per_tok"] = count("expert_used_count")
    _norms(config, get)
    if family in OWN:
        OWN[family](config, get)
    return config


def ends_of(metadata: dict[str, Any], config: dict[str, Any], where: str) -> dict[str, Any]:
    """generation_config.json beside that ``config``: all tokens that end an answer are ``eos_token_id``. ModelError for
    one that is none."""
    ends = [config["eos_token_id"], *(_token(metadata, name, config["vocab_size"], where) for name in ("eot", "eom"))]
    eos = list(dict.fromkeys(one for one in ends if one is not None))
    said = {"bos_token_id": config["bos_token_id"], "pad_token_id": config["pad_token_id"], "eos_token_id": eos}
    return {key: value for key, value in said.items() if value not in (None, [])}


def _token(metadata: dict[str, Any], name: str, vocabulary: int, where: str) -> int | None:
    """The id of a token with a meaning; None where a file has none, which some write as -1."""
    found = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if found is None or found in (-1, 0xFFFFFFFF):
        return None
    if type(found) is not int or not 0 <= found < vocabulary:
        raise ModelError(
            f"{where}: tokenizer.ggml.{name}_token_id={shown(found, 40)} is none of its {vocabulary} tokens; download "
            "the file again"
        )
    return found


def _norms(config: dict[str, Any], get: Get) -> None:
    """The epsilon of norms by root mean square, or by mean and variance."""
    if (epsilon := get("attention.layer_norm_rms_epsilon", None)) is not None:
        config["rms_norm_eps"] = epsilon
    elif (epsilon := get("attention.layer_norm_epsilon", None)) is not None:
        config["layer_norm_eps"] = config["norm_epsilon"] = epsilon
    else:
        get("attention.layer_norm_rms_epsilon")  # which says that it is missing
    if not 0 <= epsilon < 1:
        raise ValueError(f"a norm's epsilon={epsilon} is none")
