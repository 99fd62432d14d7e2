"""What this engine cannot run correctly, found in config.json before any weight is read; each refusal names it.

The order matters only for the message: a model with several of these is refused for the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from saccade.errors import ModelError, shown
from saccade.models.families import FAMILIES
from saccade.models.native_sparsity import native_sparsity
from saccade.models.text_part import WRAPPERS, text_of

Config = dict[str, Any]

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "attention", "global"}
_ENCODER_DECODER = ("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "led", "marian", "m2m_100", "whisper", "t5gemma")
_ENCODERS = (
    "bert", "roberta", "distilbert", "electra", "deberta", "modernbert", "albert", "xlm-roberta", "camembert", "xlm",
    "bert-generation", "big_bird", "data2vec-text", "ernie", "megatron-bert", "rembert", "roberta-prelayernorm",
    "roc_bert", "roformer", "xlm-roberta-xl", "xmod",
)  # fmt: skip
_RECURRENT = (
    "mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "jamba", "zamba", "zamba2",
    "minimax", "xlstm", "kimi_linear", "bitnet_mamba",
)  # fmt: skip
_LATENT = ("minicpm3", "longcat_flash")
_UNIFIED = ("gemma4_unified", "gemma4_unified_text")
_SCALED_LOGITS = ("cohere", "cohere2", "granite", "granitemoe")
_ALIBI = ("bloom", "mpt")
_COUNTS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "num_global_key_value_heads", "global_head_dim",
    "num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings",
)  # fmt: skip
_OTHER_MODALITIES = ("vision_config", "audio_config", "speech_config", "text_config", "thinker_config")


def _type_in(*names: str) -> Callable[[Config], bool]:
    return lambda config: config["model_type"] in names


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _shares_keys(config: Config) -> bool:
    """Whether some layers read an earlier one's keys, in a family of which that is not known."""
    family = FAMILIES.get(config["model_type"])
    return _positive(config.get("num_kv_shared_layers")) and not (family is not None and family.shares_keys)


def _is_not_causal(config: Config) -> bool:
    """Gemma 4's may be so among the tokens of an image alone."""
    both = config.get("use_bidirectional_attention")
    if both == "vision" and _type_in("gemma4_text")(config):
        both = None
    return bool(both) or config.get("is_causal") is False or bool(config.get("prefix_lm"))


def _stores_latents(config: Config) -> bool:
    family = FAMILIES.get(config["model_type"])
    return family is not None and family.latent


def _odd_layer_types(config: Config) -> list[str]:
    kinds, family = config.get("layer_types"), FAMILIES.get(config["model_type"])
    known = _KNOWN_LAYER_TYPES | set(family.keeping.known if family is not None and family.keeping is not None else ())
    return sorted({str(kind) for kind in kinds} - known) if isinstance(kinds, list) else []


def _slides_beside_states(config: Config) -> bool:
    """Whether layers are to have windows in a family of which none has, and others keep a state."""
    family = FAMILIES.get(config["model_type"])
    kinds = config.get("layer_types")
    alone = family is not None and family.keeping is not None and family.windows == "none"
    return alone and isinstance(kinds, list) and "sliding_attention" in kinds


def _says_recurrent(config: Config) -> bool:
    marks = ("linear", "mamba", "recurrent", "conv", "ssm", "rwkv", "hybrid")
    return _type_in(*_RECURRENT)(config) or any(mark in kind for kind in _odd_layer_types(config) for mark in marks)


def _natively_sparse(config: Config) -> str:
    return (
        f"an attention that is sparse by itself ({native_sparsity(config)}): dense attention, or a method's choice, "
        "would be another model, and its indexer is not run here; give a checkpoint of a family in docs/models.md"
    )


_Feature = str | Callable[[Config], str]
_FEATURES: tuple[tuple[Callable[[Config], bool], _Feature], ...] = (
    (lambda c: native_sparsity(c) is not None, _natively_sparse),
    (
        lambda c: any(isinstance(c.get(key), dict) for key in _OTHER_MODALITIES),
        "a multimodal or nested config (vision, audio or text_config) of a type whose text is not held against "
        "transformers here (docs/models.md lists those that are); give a text-only causal language model",
    ),
    (
        lambda c: bool(c.get("is_encoder_decoder")) or _type_in(*_ENCODER_DECODER)(c) or bool(c.get("is_cross_attn")),
        "encoder-decoder; give a decoder-only causal language model",
    ),
    (lambda c: bool(c.get("add_cross_attention")), "cross-attention; give a decoder-only causal language model"),
    (_type_in(*_ENCODERS), "an encoder; give a decoder-only causal language model"),
    (
        lambda c: _type_in(*_LATENT)(c) or (_positive(c.get("kv_lora_rank")) and not _stores_latents(c)),
        "multi-head latent attention (MLA) of a kind that is not held against transformers here (docs/models.md lists "
        "the families that are)",
    ),
    (_shares_keys, "keys and values shared between layers"),
    (_type_in(*_UNIFIED), "a unified multimodal model, whose text is not held against transformers here"),
    (
        _slides_beside_states,
        "sliding windows in a family whose other layers keep a state, for which transformers has no code",
    ),
    (
        _says_recurrent,
        "recurrent, convolutional or linear-attention layers, which keep a state instead of keys and values",
    ),
    (
        lambda c: _type_in("llama4", "llama4_text")(c)
        or _positive(c.get("attention_chunk_size"))
        or "chunked_attention" in _odd_layer_types(c),
        "chunked attention",
    ),
    (
        lambda c: _type_in("dory")(c) or _positive(c.get("n_recurrent_loops")),
        "layers that run in loops, with keys and values for each",
    ),
    (lambda c: bool(_odd_layer_types(c)), "layer_types other than full_attention and sliding_attention"),
    (
        _is_not_causal,
        "attention that is not causal (a mask that carries meaning: bidirectional or prefix-LM)",
    ),
    (
        lambda c: bool(c.get("alibi")) or c.get("position_embedding_type") == "alibi" or _type_in(*_ALIBI)(c),
        "ALiBi position biases",
    ),
)  # fmt: skip


def refuse_unsupported(config: Config, where: str) -> None:
    """Raise ModelError if ``config`` (as written in config.json) is of a family or has a feature we cannot run."""
    _refuse_other_wrapper(config, where)
    inner, whole = config.get("text_config"), config["model_type"]
    if whole not in WRAPPERS and isinstance(inner, dict) and isinstance(inner.get("model_type"), str):
        _refuse_features(inner, where)  # which says more than that it is nested
    config = text_of(config)
    _refuse_features(config, where)
    if whole in WRAPPERS and config["model_type"] in _SCALED_LOGITS:
        raise ModelError(
            f"{where} ({whole}) is not supported: {config['model_type']} models scale their logits, which "
            "transformers' multimodal classes leave out; give a text-only causal language model"
        )
    _refuse_other_head(config, where)
    _refuse_odd_sizes(config, where)


def _refuse_features(config: Config, where: str) -> None:
    model_type = config["model_type"]
    for present, feature in _FEATURES:
        if present(config):
            said = feature if isinstance(feature, str) else feature(config)
            raise ModelError(f"{where} ({model_type}) is not supported: it has {_article(said)}")
    if model_type not in FAMILIES:
        raise ModelError(f"model family {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")


def _article(feature: str) -> str:
    return feature if not feature.startswith("encoder-decoder") else f"an {feature}"


def _refuse_other_wrapper(config: Config, where: str) -> None:
    """Of a multimodal model that answers with anything but text."""
    given = config.get("architectures")
    named = given if isinstance(given, list) else [given]
    if config["model_type"] in WRAPPERS and given and not str(named[0]).endswith("ForConditionalGeneration"):
        raise ModelError(
            f"{where} holds {shown(given, 80)}, not a language model with a head; give a ...ForConditionalGeneration "
            "checkpoint"
        )


def _refuse_other_head(config: Config, where: str) -> None:
    expected = FAMILIES[config["model_type"]].causal_lm
    given = config.get("architectures")
    if given and not (isinstance(given, list) and expected in given):
        named = ", ".join(map(str, given)) if isinstance(given, list) else shown(given, 80)
        raise ModelError(f"{where} holds {named}, not a causal language model; give a {expected} checkpoint")


def _refuse_odd_sizes(config: Config, where: str) -> None:
    for key in _COUNTS:
        value = config.get(key)
        if isinstance(value, list) and key in _COUNTS[:3]:
            raise ModelError(f"{where}: {key} differs between layers, which is not supported")
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ModelError(f"{where}: {key} must be a positive whole number, got {value!r}")
    heads = config.get("num_attention_heads")
    for key in ("num_key_value_heads", "num_global_key_value_heads"):
        kv_heads = config.get(key)
        if heads and kv_heads and heads % kv_heads:
            raise ModelError(f"{where}: num_attention_heads ({heads}) must be a multiple of {key} ({kv_heads})")
    hidden = config.get("hidden_size")
    if _stores_latents(config):
        _refuse_odd_latents(config, where)
    elif heads and not config.get("head_dim") and isinstance(hidden, int) and hidden % heads:
        raise ModelError(f"{where}: hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ModelError(f"{where}: sliding_window must be a positive whole number or null, got {window!r}")


_LATENT_SIZES = "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"


def _refuse_odd_latents(config: Config, where: str) -> None:
    for key in _LATENT_SIZES:
        value = config.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ModelError(f"{where}: {key} must be a positive whole number, got {value!r}")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and kv_heads and heads != kv_heads:
        raise ModelError(
            f"{where}: num_key_value_heads ({kv_heads}) must be num_attention_heads ({heads}): a latent holds every "
            "head's key and value"
        )
