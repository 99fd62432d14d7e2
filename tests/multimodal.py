"""Tiny multimodal checkpoints of transformers' classes, whose text is held against those."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from tiny_models import _BASE, CONFIGS, byte_tokenizer
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForMultimodalLM

from saccade.models.text_part import SAME_AS, WRAPPERS

# Sizes of whatever sees or hears, by any name that a config of it has.
_SMALL = dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim", "d_model", "hidden_dim", "mlp_dim"), 32)
_SMALL |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32)
_SMALL |= dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "num_layers"), 1)
_SMALL |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "encoder_attention_heads"), 2)
_SMALL |= {"out_hidden_size": 48, "projection_dim": 48, "image_size": 28, "patch_size": 14}
_MROPE = {"rope_type": "default", "rope_theta": 1e4}
_TEXT: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"rope_parameters": {**_MROPE, "mrope_section": [2, 2, 2]}},
    "qwen2_5_vl": {"rope_parameters": {**_MROPE, "mrope_section": [1, 2, 3]}},
    "qwen3_vl": {"head_dim": 16, "rope_parameters": {**_MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
}
_OF_TEXT = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "mistral3": "mistral",
    "exaone4_5": "exaone4",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
LAYOUTS = {
    "qwen2_vl": ("model.", "lm_head.", "visual."),
    "qwen2_5_vl": ("model.", "lm_head.", "visual."),
    "idefics": ("model.text_model.", "lm_head.", "model.vision_model."),
    "first": ("language_model.model.", "language_model.lm_head.", "vision_tower."),
    "now": ("model.language_model.", "lm_head.", "model.visual."),
}


def make_multimodal(wrapper: str, folder: Path, *, seed: int = 0, **whole: Any) -> Any:
    """Write a random float32 checkpoint of the multimodal type ``wrapper`` into ``folder``; returns transformers' model
    of it."""
    kind = CONFIG_MAPPING[wrapper]
    default = kind()
    own = {**_BASE, **CONFIGS.get(_OF_TEXT.get(wrapper, ""), {}), **_TEXT.get(wrapper, {})}
    parts: dict[str, Any] = {"text_config": {**own, "model_type": WRAPPERS[wrapper]}}
    for name, part in vars(default).items():
        if name != "text_config" and hasattr(part, "to_dict"):
            known = type(part)().to_dict()
            parts[name] = {key: size for key, size in _SMALL.items() if key in known} | {"model_type": part.model_type}
    torch.manual_seed(seed)
    config = kind(**parts, **{"tie_word_embeddings": False, **whole})
    with _without_timm():
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * (0.5 if "embed" in name else 0.2))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if wrapper == "kimi_k25":
        _call_layers_so(folder / "model.safetensors")
    byte_tokenizer().save_pretrained(folder)
    return model


@contextmanager
def _without_timm() -> Iterator[None]:
    """Gemma 3n's images are seen by a model of timm's, which need not be installed for text."""
    made = AutoModel.from_config

    def small(config: Any, **asked: Any) -> Any:
        return torch.nn.Linear(4, 4) if config.model_type == "gemma3n_vision" else made(config, **asked)

    with patch.object(AutoModel, "from_config", small):
        yield


def _call_layers_so(file: Path) -> None:
    """transformers 5.23 writes Kimi K2.5's text layers by the name of its tower's, which no published file does."""
    tensors = {name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
               for name, tensor in load_file(file).items()}  # fmt: skip
    save_file(tensors, file, metadata={"format": "pt"})


def wrapped(text: Path, folder: Path, wrapper: str, layout: str) -> Path:
    """The text checkpoint ``text`` as the language model of a multimodal one, its tensors called as in ``layout``,
    beside some of a tower."""
    layers, head, tower = LAYOUTS[layout]
    shutil.copytree(text, folder)
    config = json.loads((text / "config.json").read_text())
    names = {family: own for own, family in SAME_AS.items()}
    config["model_type"] = WRAPPERS[wrapper] if wrapper.startswith("qwen") else config["model_type"]
    assert config["model_type"] in (*names.values(), *CONFIG_MAPPING)
    outer = {key: config.pop(key) for key in ("quantization_config", "dtype", "architectures") if key in config}
    outer["architectures"] = ["SomeForConditionalGeneration"]
    whole = {"model_type": wrapper, "text_config": config, "tie_word_embeddings": False, **outer}
    (folder / "config.json").write_text(json.dumps(whole))
    stored = load_file(folder / "model.safetensors")

    def called(name: str) -> str:
        return head + name[8:] if name.startswith("lm_head.") else layers + name.removeprefix("model.")

    tensors = {called(name): tensor for name, tensor in stored.items()}
    tensors |= {f"{tower}blocks.{at}.weight": torch.full((8, 8), torch.nan) for at in range(3)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
