"""The checked model families: one line of data each, saying what the layer loop must know beyond the common shape.

The common shape is Llama's: embed, rotary, decoder layers, final norm, head. A family enters this table only with a
row in the test matrix that holds its logits against ``model.forward``; whatever is not here is refused at load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

# Where a family's sliding windows come from: nowhere, one window for every layer, or config.layer_types.
Windows = Literal["none", "every_layer", "layer_types"]


def _plain(logits: Tensor, config: Any) -> Tensor:
    return logits


def _softcapped(logits: Tensor, config: Any) -> Tensor:
    cap = config.final_logit_softcapping
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _divided(logits: Tensor, config: Any) -> Tensor:
    return logits / config.logits_scaling


def _multiplied(logits: Tensor, config: Any) -> Tensor:
    return logits * config.logit_scale


def _multiplied_head(logits: Tensor, config: Any) -> Tensor:
    return logits * config.lm_head_multiplier


@dataclass(frozen=True)
class LlamaShape:
    """That a family's layers are Llama's, so that ``models.llama`` can run them: RMS norm, products for query, key and
    value, rotation of halves against each other, attention, product; RMS norm, MLP with a gate. What the modules show
    themselves (biases, sizes, a layer that does not rotate) is read from them.
    """

    head_norms: bool = False  # an RMS norm of every query and key head before it is rotated


@dataclass(frozen=True)
class Keeping:
    """That some layers keep a state beside, or in place of, keys and values. ``module``: the part of a layer that does,
    ``kinds``: what ``config.layer_types`` calls such layers; ``attend``: whether they attend, too; ``attention``: the
    part of a layer that attends; ``neither``: what layers are called that are an MLP, or experts, alone."""

    module: str
    kinds: tuple[str, ...]
    attend: bool = False
    attention: str = "self_attn"
    neither: tuple[str, ...] = ()

    @property
    def known(self) -> tuple[str, ...]:
        """What the config may call a layer, beside one that attends."""
        return (*self.kinds, *self.neither)


@dataclass(frozen=True)
class Family:
    """How one family departs from Llama's layer loop.

    ``scale_embedding`` names the config field the embeddings are multiplied by (Gemma's square-root factor sits
    inside its embedding module and needs nothing here). ``finish_logits`` runs on the head's output, in its dtype.
    ``latent``: what layers keep of a token is a latent (models.latent). ``shares_keys``: the last
    ``num_kv_shared_layers`` of the config store no keys and values, but each reads those that the last layer of its
    type before them has stored. ``heads_by_layer``: layers have heads of sizes of their own
    (``config.per_layer_config``). ``embeds_by_layer``, ``streams``: see models.streams. ``rotates_neighbours``: RoPE
    mixes channels 2 i and 2 i + 1, not the two halves of what it rotates.
    """

    model_type: str
    causal_lm: str  # the class in config.architectures
    windows: Windows = "none"
    rotary_per_layer_type: bool = False
    some_layers_unrotated: bool = False
    rotates_neighbours: bool = False
    final_norm: str = "norm"
    rotary: str | None = "rotary_emb"  # None: it does not rotate
    scale_embedding: str | None = None
    # generate() computes the whole past again when a sequence grows into longrope's long factors.
    restarts_at_long_rope: bool = False
    finish_logits: Callable[[Tensor, Any], Tensor] = _plain
    llama_shape: LlamaShape | None = None
    keeping: Keeping | None = None
    latent: bool = False
    shares_keys: bool = False
    heads_by_layer: bool = False
    embeds_by_layer: bool = False
    streams: bool = False


_DELTA = Keeping("linear_attn", ("linear_attention",))
_MAMBA = Keeping("mamba", ("linear_attention", "mamba"))
_CONVOLUTION = Keeping("conv", ("conv",))

_CHECKED = (
    Family("llama", "LlamaForCausalLM", llama_shape=LlamaShape()),
    Family("mistral", "MistralForCausalLM", windows="every_layer", llama_shape=LlamaShape()),
    Family("qwen2", "Qwen2ForCausalLM", windows="layer_types", llama_shape=LlamaShape()),
    Family("qwen3", "Qwen3ForCausalLM", windows="layer_types", llama_shape=LlamaShape(head_norms=True)),
    Family("phi3", "Phi3ForCausalLM", windows="every_layer", restarts_at_long_rope=True),
    Family("mixtral", "MixtralForCausalLM", windows="every_layer"),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", windows="every_layer"),
    Family("glm4", "Glm4ForCausalLM", rotates_neighbours=True),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        windows="layer_types",
        some_layers_unrotated=True,
        llama_shape=LlamaShape(),
    ),
    Family("granite", "GraniteForCausalLM", scale_embedding="embedding_multiplier", finish_logits=_divided),
    Family("gemma", "GemmaForCausalLM"),
    Family("gemma2", "Gemma2ForCausalLM", windows="layer_types", finish_logits=_softcapped),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        windows="layer_types",
        rotary_per_layer_type=True,
        finish_logits=_softcapped,
    ),
    Family(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        windows="layer_types",
        rotary_per_layer_type=True,
        finish_logits=_softcapped,
        shares_keys=True,
        embeds_by_layer=True,
        streams=True,
    ),
    Family(
        "gemma4_text",
        "Gemma4ForCausalLM",
        windows="layer_types",
        rotary_per_layer_type=True,
        finish_logits=_softcapped,
        shares_keys=True,
        heads_by_layer=True,
        embeds_by_layer=True,
    ),
    Family("phi", "PhiForCausalLM", final_norm="final_layernorm"),
    Family("gpt_oss", "GptOssForCausalLM", windows="layer_types"),
    Family("cohere", "CohereForCausalLM", rotates_neighbours=True, finish_logits=_multiplied),
    Family(
        "cohere2",
        "Cohere2ForCausalLM",
        windows="layer_types",
        some_layers_unrotated=True,
        rotates_neighbours=True,
        finish_logits=_multiplied,
    ),
    Family("olmo2", "Olmo2ForCausalLM"),
    Family("olmo3", "Olmo3ForCausalLM", windows="layer_types", rotary_per_layer_type=True),
    Family("glm4_moe", "Glm4MoeForCausalLM"),
    Family("granitemoe", "GraniteMoeForCausalLM", scale_embedding="embedding_multiplier", finish_logits=_divided),
    Family("ministral", "MinistralForCausalLM", windows="layer_types"),
    Family("ministral3", "Ministral3ForCausalLM", windows="every_layer"),
    Family("arcee", "ArceeForCausalLM"),
    Family("cwm", "CwmForCausalLM", windows="layer_types", llama_shape=LlamaShape()),
    Family("ernie4_5", "Ernie4_5ForCausalLM", rotates_neighbours=True),
    Family("exaone4", "Exaone4ForCausalLM", windows="layer_types", some_layers_unrotated=True),
    Family("glm", "GlmForCausalLM", rotates_neighbours=True),
    Family("olmo", "OlmoForCausalLM"),
    Family("olmoe", "OlmoeForCausalLM"),
    Family("qwen2_moe", "Qwen2MoeForCausalLM", windows="layer_types"),
    Family("seed_oss", "SeedOssForCausalLM"),
    Family("starcoder2", "Starcoder2ForCausalLM", windows="every_layer"),
    Family("lfm2", "Lfm2ForCausalLM", final_norm="embedding_norm", keeping=_CONVOLUTION),
    Family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        final_norm="embedding_norm",
        rotary="pos_emb",
        keeping=_CONVOLUTION,
    ),
    Family("olmo_hybrid", "OlmoHybridForCausalLM", keeping=_DELTA),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        scale_embedding="embedding_multiplier",
        finish_logits=_divided,
        keeping=_MAMBA,
    ),
    Family(
        "falcon_h1",
        "FalconH1ForCausalLM",
        final_norm="final_layernorm",
        scale_embedding="embedding_multiplier",
        finish_logits=_multiplied_head,
        keeping=Keeping("mamba", ("hybrid",), attend=True),
    ),
    Family("bamba", "BambaForCausalLM", final_norm="final_layernorm", keeping=_MAMBA),
    Family(
        "nemotron_h",
        "NemotronHForCausalLM",
        final_norm="norm_f",
        rotary=None,
        keeping=Keeping("mixer", ("linear_attention",), attention="mixer", neither=("mlp", "moe")),
    ),
    Family("qwen3_next", "Qwen3NextForCausalLM", keeping=_DELTA),
    Family("qwen3_5_text", "Qwen3_5ForCausalLM", keeping=_DELTA),
    Family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", keeping=_DELTA),
    Family("deepseek_v2", "DeepseekV2ForCausalLM", latent=True),
    Family("deepseek_v3", "DeepseekV3ForCausalLM", latent=True),
    Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", latent=True),
    Family("youtu", "YoutuForCausalLM", latent=True),
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in _CHECKED}


def keeping_layers(family: Family, config: Any) -> tuple[int, ...]:
    """Which layers keep a state."""
    if family.keeping is None:
        return ()
    return tuple(at for at, kind in enumerate(config.layer_types or ()) if kind in family.keeping.kinds)


def attending_layers(family: Family, config: Any) -> tuple[int, ...]:
    """Which layers attend over keys and values."""
    keeping = family.keeping
    if keeping is None or keeping.attend:
        return tuple(range(config.num_hidden_layers))
    kinds = config.layer_types or ()
    return tuple(at for at in range(config.num_hidden_layers) if at >= len(kinds) or kinds[at] not in keeping.known)


def read_layers(family: Family, config: Any) -> tuple[int, ...]:
    """By layer, whose keys and values it reads (interface.ModelSpec.reads); empty where each reads its own."""
    shared = getattr(config, "num_kv_shared_layers", 0) if family.shares_keys else 0
    if not shared:
        return ()
    kinds = config.layer_types
    stored = config.num_hidden_layers - shared
    last = {kind: at for at, kind in enumerate(kinds[:stored])}
    return (*range(stored), *(last[kind] for kind in kinds[stored:]))


def configured_windows(family: Family, config: Any) -> tuple[int | None, ...]:
    """Each attending layer's sliding window in tokens as the config states it, or None: what HF's masks would have
    encoded."""
    layers = len(attending_layers(family, config))
    window = getattr(config, "sliding_window", None)
    if family.windows == "none" or window is None:
        return (None,) * layers
    if family.windows == "every_layer":
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def configured_shapes(family: Family, config: Any) -> tuple[tuple[int, int], ...]:
    """Each layer's KV heads and head_dim, where a family's may differ; else nothing."""
    if not family.heads_by_layer:
        return ()
    own = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    return tuple((one.num_key_value_heads, one.head_dim) for one in own)
