"""GGUF's names of a model's tensors and sizes, beside transformers': families of which every tensor has a place.

A family that is not here is refused: what a reader has no place for (scales of embeddings, layers without rotation)
would be lost silently.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.errors import ModelError, shown
from saccade.models.checkpoint import first_line
from saccade.models.families import FAMILIES as SERVED

# Of a Llama; the benchmark that writes GGUF files reads this the other way round.
LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA3 = {
    **LLAMA,
    **_QK_NORM,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FAMILIES = {"llama": LLAMA, "qwen2": LLAMA, "qwen3": {**LLAMA, **_QK_NORM}, "gemma3": _GEMMA3}
MODEL_TYPES = {"gemma3": "gemma3_text"}
FREQUENCIES = "rope_freqs.weight"  # divisors of Llama 3's rotary frequencies, which a config says in four numbers
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_OTHER = re.compile(r"(token_embd|output_norm|output)\.(weight|bias)")


def check_family(architecture: str, where: str) -> None:
    """ModelError for a family that is not read from GGUF files."""
    if architecture not in FAMILIES:
        raise ModelError(
            f"{where}: GGUF files of the architecture {shown(architecture, 80)} are not read, only those of "
            f"{', '.join(FAMILIES)}; give the model's safetensors folder, or its hub name"
        )


def name_of(architecture: str, name: str) -> str | None:
    """transformers' name of a tensor; None for one that has no place."""
    family = FAMILIES[architecture]
    if layer := _LAYER.fullmatch(name):
        part = family.get(layer[2]) if layer[2] not in ("token_embd", "output_norm", "output") else None
        return part and f"model.layers.{layer[1]}.{part}.{layer[3]}"
    other = _OTHER.fullmatch(name)
    return f"{family[other[1]]}.{other[2]}" if other else None


def undone(architecture: str, name: str, values: Tensor, heads: int, kv_heads: int) -> Tensor:
    """``values`` [out, in] or [out], as transformers has them: llama.cpp's converter interleaves the rotary halves of
    a Llama's queries and keys, and adds 1 to Gemma's norms."""
    if architecture == "llama" and re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", name):
        count = heads if ".attn_q." in name else kv_heads
        rows = values.shape[0] // count
        return values.view(count, rows // 2, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return values - 1.0
    return values


def config_of(metadata: dict[str, Any], names: set[str], frequencies: Tensor | None, where: str) -> dict[str, Any]:
    """config.json of a file with this metadata and these tensors; ``frequencies``: those of FREQUENCIES, if it has any.
    ModelError for what is missing, and for what no config of these families says."""
    try:
        return _config(metadata, names, frequencies, where)
    except (TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{where} describes no model: {first_line(error)}; download the file again") from error


def _config(metadata: dict[str, Any], names: set[str], frequencies: Tensor | None, where: str) -> dict[str, Any]:
    kind = str(metadata["general.architecture"])

    def get(key: str, *default: Any) -> Any:
        if f"{kind}.{key}" in metadata or default:
            return metadata.get(f"{kind}.{key}", *default)
        raise ModelError(f"{where} does not say {kind}.{key}; download the file again")

    heads, hidden = _whole(get("attention.head_count"), where), _whole(get("embedding_length"), where)
    head_dim = _whole(get("attention.key_length", None) or hidden // heads, where)
    refused = {
        "expert_count": bool(get("expert_count", 0)),
        "attention.value_length": get("attention.value_length", head_dim) != head_dim,
        "rope.dimension_count": get("rope.dimension_count", head_dim) != head_dim,
        "attention.sliding_window": bool(get("attention.sliding_window", 0)) and kind != "gemma3",
    }
    if odd := [key for key, here in refused.items() if here]:
        raise ModelError(
            f"{where}: {kind}.{odd[0]}={shown(get(odd[0]), 40)} is not read from GGUF files; give the model's "
            "safetensors folder, or its hub name"
        )
    config: dict[str, Any] = {
        "model_type": MODEL_TYPES.get(kind, kind),
        "architectures": [SERVED[MODEL_TYPES.get(kind, kind)].causal_lm],
        "num_hidden_layers": _whole(get("block_count"), where),
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(get("attention.head_count_kv", heads), where),
        "head_dim": head_dim,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens") or ()) or get("vocab_size"),
        "tie_word_embeddings": "output.weight" not in names,
        "rope_parameters": _rope(get, float(get("rope.freq_base", 10000.0)), head_dim, frequencies, where),
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (token := metadata.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            config[f"{ours}_token_id"] = token
    if kind == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in names
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in names
    if kind == "gemma3":
        _gemma3(config, get)
    return config


def _gemma3(config: dict[str, Any], get: Callable[..., Any]) -> None:
    """What llama.cpp knows of Gemma 3 beside the file: every sixth layer is global, local ones rotate from 10,000, and
    the largest of the family scales queries by its width."""
    layers = config["num_hidden_layers"]
    config["layer_types"] = ["full_attention" if at % 6 == 5 else "sliding_attention" for at in range(layers)]
    config["sliding_window"] = get("attention.sliding_window")
    local = {"rope_type": "default", "rope_theta": float(get("rope.freq_base_swa", 10000.0))}
    config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
    )
    config["hidden_activation"] = "gelu_pytorch_tanh"


def _rope(
    get: Callable[..., Any], theta: float, head_dim: int, frequencies: Tensor | None, where: str
) -> dict[str, Any]:
    if frequencies is not None:
        return _llama3(theta, head_dim, frequencies, where)
    kind, factor = get("rope.scaling.type", "none"), get("rope.scaling.factor", None)
    if kind in ("none", "") or (kind == "linear" and factor in (None, 0, 1)):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(factor)}
    original = get("rope.scaling.original_context_length", None)
    if kind == "yarn" and factor and original:
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": float(factor),
            "original_max_position_embeddings": int(original),
        }
    raise ModelError(
        f"{where}: rope.scaling.type={shown(kind, 40)} (factor {shown(factor, 40)}, original_context_length "
        f"{shown(original, 40)}) is not read from GGUF files; give the model's safetensors folder, or its hub name"
    )


def _llama3(theta: float, head_dim: int, frequencies: Tensor, where: str) -> dict[str, Any]:
    """The numbers of Llama 3.1 and 3.2 that give these divisors: a file holds what they come to alone."""
    for factor in (8.0, 32.0):
        divisors = llama3_divisors(theta, head_dim, factor)
        if divisors.shape == frequencies.shape and torch.allclose(frequencies.float(), divisors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
    raise ModelError(
        f"{where}: {FREQUENCIES} holds rotary frequencies that are neither Llama 3.1's nor Llama 3.2's; give the "
        "model's safetensors folder, or its hub name"
    )


def llama3_divisors(theta: float, head_dim: int, factor: float) -> Tensor:
    """fp32 [head_dim // 2]: by what Llama 3 divides rotary frequencies, of an original context of 8192: nothing where a
    wave is shorter than a quarter of it, ``factor`` where it is longer than all of it."""
    waves = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = (8192 / waves - 1.0) / 3.0
    between = 1 / ((1 - smooth) / factor + smooth)
    long = torch.where(waves > 8192, torch.full_like(waves, factor), between)
    return torch.where(waves < 2048, torch.ones_like(waves), long).float()


def _whole(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{where}: {shown(value, 80)} is no number of heads, layers or channels")
    return value
