"""The language model of a multimodal checkpoint: which part of its config and of its tensors that is.

Text runs through the language model alone, so a checkpoint of a type in ``WRAPPERS`` is read as the text family that it
holds; towers and projectors stay in their files. A type enters with a row in ``tests/test_models_text_part.py``, which
holds its text against transformers' own model without images.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# What a multimodal type's text model is where its config does not say. Left out: such as scale logits otherwise than
# their text family (aya_vision, cohere2_vision, granite_speech), or store experts otherwise (qwen3_vl_moe).
WRAPPERS = {
    "deepseek_vl": "llama",
    "exaone4_5": "exaone4",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "glmasr": "llama",
    "got_ocr2": "qwen2",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "kimi_k25": "deepseek_v3",
    "lighton_ocr": "qwen3",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "smolvlm": "llama",
    "video_llama_3": "qwen2",
    "video_llava": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}
# Text models that compute what another family does. M-RoPE rotates each part of a head by one of three positions
# (Wang et al. 2024, Qwen2-VL, section 2.1); those of a text token are equal, which is plain rotation by its position.
SAME_AS = {
    "kimi_k2": "deepseek_v3",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
_MROPE = "mrope_section", "mrope_interleaved"
# How names of the language model's tensors begin: since transformers 4.52, before, Idefics3's, and Qwen2-VL's.
_PREFIXES = "model.language_model.", "language_model.model.", "model.text_model.", "model."
_HEADS = "lm_head.", "language_model.lm_head."
_OF_THE_WHOLE = "dtype", "torch_dtype", "quantization_config", "compression_config", "eos_token_id"


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the language model alone, of that of a multimodal checkpoint; any other as it is, by the name of
    the family that it is the same as."""
    own = WRAPPERS.get(config["model_type"])
    if own is None:
        return {**config, "model_type": SAME_AS.get(config["model_type"], config["model_type"])}
    inner = config.get("text_config")
    # Qwen2-VL's first configs have the text model's fields among the others.
    text = dict(inner) if isinstance(inner, Mapping) else {k: v for k, v in config.items() if k != "vision_config"}
    given = inner.get("model_type") if isinstance(inner, Mapping) else None
    kind = given if isinstance(given, str) else own
    text["model_type"] = SAME_AS.get(kind, kind)
    text.pop("architectures", None)
    whole = {key: config[key] for key in _OF_THE_WHOLE if config.get(key) is not None}
    return {**text, **whole}


def text_config(config: Any) -> Any:
    """transformers' config of the language model alone, of that of a multimodal checkpoint; any other as it is."""
    from transformers import CONFIG_MAPPING

    if config.model_type not in WRAPPERS:
        return config
    text = config.get_text_config()
    family = SAME_AS.get(text.model_type)
    if family is not None:
        kind = CONFIG_MAPPING[family]
        known = kind().to_dict().keys() - {"model_type", "architectures", "transformers_version"}
        fields = {name: value for name, value in text.to_dict().items() if name in known}
        rope = dict(fields["rope_parameters"])
        fields["rope_parameters"] = {name: value for name, value in rope.items() if name not in _MROPE}
        text = kind(**fields)
    if config.model_type == "gemma3":
        text.final_logit_softcapping = None  # Gemma 3's multimodal class has none
    text.tie_word_embeddings = bool(config.tie_word_embeddings)  # the one that transformers goes by
    if getattr(config, "eos_token_id", None) is not None:
        text.eos_token_id = config.eos_token_id
    return text


def text_names(config: Mapping[str, Any], stored: Iterable[str]) -> dict[str, str]:
    """The tensors of the language model by the names that it has alone, with those by which files ``stored`` them;
    all of them, as they are, where ``config`` is of no multimodal checkpoint."""
    names = list(stored)
    if config["model_type"] not in WRAPPERS:
        return dict(zip(names, names))
    return {
        own + name[len(start) :]: name
        for start, own in _starts(names).items()
        for name in names
        if name.startswith(start)
    }


def own_name(name: str) -> str:
    """What the language model alone calls a module of it that is named as in some multimodal model."""
    start = next((one for one in _PREFIXES if name.startswith(one)), None)
    return name.removeprefix("language_model.") if start is None else f"model.{name[len(start) :]}"


def renaming(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, str] | None:
    """What to replace in ``names`` of files for those that the language model has alone, as transformers takes it."""
    if config["model_type"] not in WRAPPERS:
        return None
    return {f"^{re.escape(start)}": own for start, own in _starts(list(names)).items() if start != own}


def _starts(names: list[str]) -> dict[str, str]:
    """How the names of the language model begin in files, and how alone."""
    layers = next((one for one in _PREFIXES if any(name.startswith(f"{one}embed_tokens.") for name in names)), "model.")
    return {layers: "model.", **{head: "lm_head." for head in _HEADS if any(name.startswith(head) for name in names)}}
