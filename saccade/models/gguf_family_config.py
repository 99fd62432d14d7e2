"""What the config of a family says beyond Llama's, of a GGUF file: from its metadata, and where that says nothing as
llama.cpp takes it to be (its ``src/models``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Get = Callable[..., Any]  # (key[, default]) of the metadata, without the architecture's name


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
    config["rope_parameters"]["truncate"] = False
    _layer_types(config, get, 2)


OWN: dict[str, Callable[[dict[str, Any], Get], None]] = {
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
