"""GGUF's names of a model's tensors beside transformers', for every family that both know: a tensor without a place is
an error, since what a reader drops (scales of embeddings, sinks) may be what the model cannot do without.

llama.cpp's converter (its ``conversion/``) writes these names, puts rows of queries and keys in another order where it
rotates neighbours against each other, and adds 1 to Gemma's norms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from saccade.errors import ModelError, shown

FREQUENCIES = "rope_freqs.weight"  # divisors of rotary frequencies (Llama 3)
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # the same, by length (longrope)
ROTARY = (FREQUENCIES, LONG_FACTORS, SHORT_FACTORS)  # what a config says

_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_JOINED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}


def _experts(block: str, router: str) -> dict[str, str]:
    parts = {f"ffn_{part}_exps": f"{block}.experts.{part}" for part in ("gate", "up", "down")}
    return {"ffn_gate_inp": f"{block}.{router}", **parts}


LLAMA = {**_ENDS, **_ATTENTION, **_MLP}
_GEMMA2 = {**LLAMA, **_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_GPT_OSS = {
    **{**LLAMA, **_experts("mlp", "router")},
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
}
_WITHOUT_SUFFIX = ("attn_sinks", "exp_probs_b")  # what transformers calls by no .weight or .bias


@dataclass(frozen=True)
class GgufFamily:
    """``model_type``: transformers' name. ``names``: of parts of a layer and of the ends, without ``.weight`` and
    ``.bias``. ``interleaved``: whether rows of queries and keys are in the order of a rotation of neighbours.
    ``norm_offset``: what is added to its norms."""

    model_type: str
    names: dict[str, str]
    interleaved: bool = False
    norm_offset: float = 0.0


FAMILIES = {
    "llama": GgufFamily("llama", {**LLAMA, **_experts("mlp", "gate")}, interleaved=True),  # Mistral's, Mixtral's too
    "mistral3": GgufFamily("ministral3", LLAMA, interleaved=True),
    "qwen2": GgufFamily("qwen2", LLAMA),
    "qwen3": GgufFamily("qwen3", {**LLAMA, **_QK_NORM}),
    "qwen2moe": GgufFamily(
        "qwen2_moe",
        {
            **LLAMA,
            **_experts("mlp", "gate"),
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        },
    ),
    "qwen3moe": GgufFamily("qwen3_moe", {**LLAMA, **_QK_NORM, **_experts("mlp", "gate")}),
    "gemma": GgufFamily("gemma", LLAMA, norm_offset=1.0),
    "gemma2": GgufFamily("gemma2", _GEMMA2, norm_offset=1.0),
    "gemma3": GgufFamily("gemma3_text", {**_GEMMA2, **_QK_NORM}, norm_offset=1.0),
    "phi2": GgufFamily(
        "phi",
        {
            **{**_ENDS, "output_norm": "model.final_layernorm"},
            **{**_ATTENTION, "attn_output": "self_attn.dense"},
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
    ),
    "phi3": GgufFamily("phi3", {**_ENDS, **_ATTENTION, "attn_qkv": "self_attn.qkv_proj", **_JOINED_MLP}),
    "smollm3": GgufFamily("smollm3", LLAMA, interleaved=True),
    "granite": GgufFamily("granite", LLAMA, interleaved=True),
    "granitemoe": GgufFamily(
        "granitemoe", {**_ENDS, **_ATTENTION, **_experts("block_sparse_moe", "router")}, interleaved=True
    ),
    "arcee": GgufFamily("arcee", LLAMA, interleaved=True),
    "olmo": GgufFamily("olmo", LLAMA, interleaved=True),
    "olmo2": GgufFamily("olmo2", {**LLAMA, **_QK_NORM, **_AFTER}),  # OLMo 3's too
    "olmoe": GgufFamily("olmoe", {**LLAMA, **_QK_NORM, **_experts("mlp", "gate")}),
    "exaone4": GgufFamily("exaone4", {**LLAMA, **_QK_NORM, **_AFTER}),
    "seed_oss": GgufFamily("seed_oss", {**LLAMA, "post_attention_norm": "post_attention_layernorm"}),
    "ernie4_5": GgufFamily("ernie4_5", LLAMA),
    "starcoder2": GgufFamily("starcoder2", {**LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "command-r": GgufFamily("cohere", {**LLAMA, **_QK_NORM}),
    "cohere2": GgufFamily("cohere2", LLAMA),
    "chatglm": GgufFamily("glm", {**_ENDS, **_ATTENTION, **_JOINED_MLP}),
    "glm4": GgufFamily(
        "glm4",
        {
            **{**_ENDS, **_ATTENTION, **_JOINED_MLP},
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm4moe": GgufFamily(
        "glm4_moe",
        {
            **{**LLAMA, **_QK_NORM, **_experts("mlp", "gate")},
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
            **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
        },
    ),
    "gpt-oss": GgufFamily("gpt_oss", _GPT_OSS),
}
_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)\.(weight|bias)")
_OTHER = re.compile(r"(token_embd|output_norm|output)\.(weight|bias)")


def check_family(architecture: str, where: str) -> None:
    """ModelError for a family that is not read from GGUF files."""
    if architecture not in FAMILIES:
        raise ModelError(
            f"{where}: GGUF files of the architecture {shown(architecture, 80)} are not read, only those of "
            f"{', '.join(FAMILIES)}; give the model's safetensors folder, or its hub name"
        )


def model_type(metadata: dict[str, Any]) -> str:
    """transformers' name of the family: one architecture of GGUF may be several."""
    kind = str(metadata["general.architecture"])
    window = bool(metadata.get(f"{kind}.attention.sliding_window", 0))
    if kind == "llama" and metadata.get("llama.expert_count", 0):
        return "mixtral"
    if kind == "llama" and window:
        return "mistral"
    return "olmo3" if kind == "olmo2" and window else FAMILIES[kind].model_type


def name_of(architecture: str, name: str) -> str | None:
    """transformers' name of a tensor; None for one that has no place. Experts are ``experts.gate``, ``up``, ``down``,
    which transformers has in other shapes."""
    names = FAMILIES[architecture].names
    if layer := _LAYER.fullmatch(name):
        part = names.get(layer[2]) if layer[2] not in _ENDS else None
        suffix = "" if layer[2] in _WITHOUT_SUFFIX else f".{layer[3]}"
        return part and f"model.layers.{int(layer[1])}.{part}{suffix}"
    other = _OTHER.fullmatch(name)
    return f"{names[other[1]]}.{other[2]}" if other else None


def undone(architecture: str, name: str, values: Tensor, heads: int, kv_heads: int) -> Tensor:
    """``values`` [out, ...], plain or in blocks, as transformers has them."""
    family = FAMILIES[architecture]
    if family.interleaved and (part := re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)):
        count = heads if part[1] == "q" else kv_heads
        rows = values.shape[0] // count
        return values.view(count, rows // 2, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    if family.norm_offset and name.endswith("norm.weight"):
        return values - family.norm_offset
    return values
