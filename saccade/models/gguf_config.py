"""config.json of a GGUF file: from its metadata, and where that says nothing from what llama.cpp knows of a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from saccade.errors import ModelError, shown
from saccade.models.checkpoint import first_line
from saccade.models.families import FAMILIES as SERVED
from saccade.models.gguf_names import model_type
from saccade.models.gguf_rotary import rope

Get = Callable[..., Any]

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


def config_of(
    metadata: dict[str, Any], names: set[str], rotary: Mapping[str, Tensor], where: str
) -> dict[str, Any]:
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
        "intermediate_size": count("feed_forward_length", *([0] if kind == "gpt-oss" else [])) if kind != "gpt-oss" else 0,
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens") or ()) or count("vocab_size"),
        "tie_word_embeddings": "output.weight" not in names,
        "rope_parameters": rope(get, head_dim, rotated, context, rotary, where),
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{ours}_token_id"] = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
    for field, tensor in _BIASED.get(kind, {}).items():
        config[field] = f"blk.0.{tensor}" in names
    if (experts := get("expert_count", 0)) or kind in set(_EXPERTS) - {"llama"}:
        config[_EXPERTS[kind]] = count("expert_count", experts)
        config["num_experts_per_tok"] = count("expert_used_count")
    _norms(config, get)
    own = _OWN.get(family)
    if own is not None:
        own(config, get)
    return config


def _norms(config: dict[str, Any], get: Get) -> None:
    """The epsilon of norms by root mean square, or by mean and variance."""
    if (epsilon := get("attention.layer_norm_rms_epsilon", None)) is not None:
        config["rms_norm_eps"] = epsilon
    elif (epsilon := get("attention.layer_norm_epsilon", None)) is not None:
        config["layer_norm_eps"] = config["norm_epsilon"] = epsilon
    else:
        get("attention.layer_norm_rms_epsilon")  # which says that it is missing


def _layer_types(config: dict[str, Any], get: Get, every: int) -> None:
    """The file's list of layers that slide, or all but each ``every``-th."""
    layers = config["num_hidden_layers"]
    said = get("attention.sliding_window_pattern", every)
    if isinstance(said, list):
        slides = [bool(one) for one in said[:layers]]
        if len(slides) != layers:
            raise ValueError(f"attention.sliding_window_pattern has {len(slides)} layers of {layers}")
    else:
        slides = [at % int(said) != int(said) - 1 for at in range(layers)]
    config["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
    config["sliding_window"] = get("attention.sliding_window", 0) or None


def _by_layer_type(config: dict[str, Any], local_theta: float) -> None:
    local = {"rope_type": "default", "rope_theta": local_theta}
    config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}


def _mistral(config: dict[str, Any], get: Get) -> None:
    config["sliding_window"] = get("attention.sliding_window")
    if config.pop("attention_bias") or config.pop("mlp_bias"):
        raise ValueError("sliding windows with biases, which no model of this architecture has")


def _ministral3(config: dict[str, Any], get: Get) -> None:
    config["rope_parameters"]["llama_4_scaling_beta"] = float(get("attention.temperature_scale", 0.0))


def _qwen2_moe(config: dict[str, Any], get: Get) -> None:
    config["moe_intermediate_size"] = get("expert_feed_forward_length")
    config["shared_expert_intermediate_size"] = get("expert_shared_feed_forward_length")
    config["norm_topk_prob"] = False


def _qwen3_moe(config: dict[str, Any], get: Get) -> None:
    config["moe_intermediate_size"] = get("expert_feed_forward_length")
    config["norm_topk_prob"] = True


def _glm4_moe(config: dict[str, Any], get: Get) -> None:
    config["moe_intermediate_size"] = get("expert_feed_forward_length")
    config["n_shared_experts"] = get("expert_shared_count")
    config["first_k_dense_replace"] = get("leading_dense_block_count", 0)
    config["routed_scaling_factor"] = get("expert_weights_scale", 1.0)
    config["norm_topk_prob"] = bool(get("expert_weights_norm", True))
    config["n_group"], config["topk_group"] = get("expert_group_count", 1), get("expert_group_used_count", 1)


def _gemma(config: dict[str, Any], get: Get) -> None:
    config["hidden_activation"] = config["hidden_act"] = "gelu_pytorch_tanh"


def _gemma2(config: dict[str, Any], get: Get) -> None:
    """Every second layer is global, and the largest of the family scales queries by its width."""
    _gemma(config, get)
    _layer_types(config, get, 2)
    wide = config["num_hidden_layers"] == 46
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    )
    config["attn_logit_softcapping"] = get("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = get("final_logit_softcapping", 30.0)


def _gemma3(config: dict[str, Any], get: Get) -> None:
    """Every sixth layer is global, local ones rotate from 10,000, and the largest of the family scales queries by its
    width."""
    _gemma(config, get)
    _layer_types(config, get, 6)
    _by_layer_type(config, float(get("rope.freq_base_swa", 10000.0)))
    wide = config["num_hidden_layers"] == 62
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    )
    config["final_logit_softcapping"] = get("final_logit_softcapping", None)


def _phi(config: dict[str, Any], get: Get) -> None:
    config["hidden_act"] = "gelu_new"
    config["partial_rotary_factor"] = config["rope_parameters"].get("partial_rotary_factor", 1.0)


def _phi3(config: dict[str, Any], get: Get) -> None:
    config["sliding_window"] = get("attention.sliding_window", 0) or None
    original = get("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original


def _granite(config: dict[str, Any], get: Get) -> None:
    config["attention_multiplier"] = get("attention.scale", config["head_dim"] ** -0.5)
    config["embedding_multiplier"] = get("embedding_scale", 1.0)
    config["residual_multiplier"] = get("residual_scale", 1.0)
    config["logits_scaling"] = get("logit_scale", 1.0)


def _smollm3(config: dict[str, Any], get: Get) -> None:
    config["no_rope_layers"] = [int((at + 1) % 4 != 0) for at in range(config["num_hidden_layers"])]
    config["use_sliding_window"] = False


def _olmo(config: dict[str, Any], get: Get) -> None:
    config["clip_qkv"] = get("attention.clamp_kqv", None)


def _olmoe(config: dict[str, Any], get: Get) -> None:
    _olmo(config, get)
    config["norm_topk_prob"] = False


def _olmo3(config: dict[str, Any], get: Get) -> None:
    _layer_types(config, get, 4)
    _by_layer_type(config, config["rope_parameters"]["rope_theta"])


def _cohere(config: dict[str, Any], get: Get) -> None:
    config["logit_scale"] = get("logit_scale")


def _cohere2(config: dict[str, Any], get: Get) -> None:
    _cohere(config, get)
    _layer_types(config, get, 4)


def _exaone4(config: dict[str, Any], get: Get) -> None:
    if get("attention.sliding_window", 0):
        _layer_types(config, get, 4)
    else:
        config["sliding_window"] = None
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]


def _starcoder2(config: dict[str, Any], get: Get) -> None:
    config["hidden_act"], config["sliding_window"] = "gelu_pytorch_tanh", None


def _arcee(config: dict[str, Any], get: Get) -> None:
    config["hidden_act"] = "relu2"


def _gpt_oss(config: dict[str, Any], get: Get) -> None:
    config["intermediate_size"] = get("expert_feed_forward_length")
    config["rope_parameters"]["truncate"] = False
    _layer_types(config, get, 2)


_OWN: dict[str, Callable[[dict[str, Any], Get], None]] = {
    "mistral": _mistral,
    "ministral3": _ministral3,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "glm4_moe": _glm4_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi": _phi,
    "phi3": _phi3,
    "granite": _granite,
    "granitemoe": _granite,
    "smollm3": _smollm3,
    "olmo": _olmo,
    "olmoe": _olmoe,
    "olmo3": _olmo3,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "exaone4": _exaone4,
    "starcoder2": _starcoder2,
    "arcee": _arcee,
    "gpt_oss": _gpt_oss,
}
