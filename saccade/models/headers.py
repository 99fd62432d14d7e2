"""What config.json demands against what the safetensors headers hold, before any weight is allocated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from saccade.errors import ModelError, shown
from saccade.models import attention
from saccade.models.checkpoint import Checkpoint, first_line

# Tensors old checkpoints carry that hold nothing but what the config already says, and the layers of some that draft
# tokens ahead, which transformers leaves out, too.
_HARMLESS_EXTRA = re.compile(r"rotary_emb\.inv_freq$|^mtp\.")


MOST_LAYERS = 1024  # of a config without weights: no model has as many


def refuse_more_layers(checkpoint: Checkpoint, layers: Any) -> None:
    """ModelError where ``layers``, as config.json has it, are more than there are tensors: every layer has some."""
    if not checkpoint.shapes and isinstance(layers, int) and layers > MOST_LAYERS:
        raise ModelError(f"{checkpoint.path}: num_hidden_layers={shown(layers)} is more than any model has")
    if checkpoint.shapes and isinstance(layers, int) and layers > len(checkpoint.shapes):
        raise ModelError(
            f"{checkpoint.path}: config.json asks for num_hidden_layers={shown(layers)}, but the checkpoint holds "
            f"{len(checkpoint.shapes)} tensors; give the config.json that belongs to these weights"
        )


def described_model(checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> Any:
    """The model of ``config``, whose modules hold no memory (torch's "meta" device). ModelError where a stored tensor
    has another shape than there, or where that model has more than twice as many weights as are stored; of a config
    alone (``checkpoint.open_config``) nothing is stored. Tensors that
    transformers puts together (experts) count only in sum."""
    attention.register()
    refuse_more_layers(checkpoint, config.num_hidden_layers)
    try:
        with torch.device("meta"):  # shapes without memory
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.ATTENTION_NAME)
        demanded = {name: weight.shape for name, weight in model.named_parameters()}
    except Exception as error:  # sizes of which no tensor can be made, and whatever the modules raise
        raise ModelError(f"{checkpoint.path}: no model can be made of config.json: {first_line(error)}") from error
    refuse_other_shapes(checkpoint, demanded)
    wanted, stored = (sum(shape.numel() for shape in some.values()) for some in (demanded, checkpoint.shapes))
    if checkpoint.shapes and wanted > 2 * stored:
        raise ModelError(
            f"{checkpoint.path}: config.json describes a model of {wanted} weights, but the checkpoint holds {stored}; "
            "give the config.json that belongs to these weights, or download the checkpoint again"
        )
    return model


def refuse_other_shapes(checkpoint: Checkpoint, demanded: Mapping[str, torch.Size]) -> None:
    """ModelError where a stored tensor has another shape than ``demanded``."""
    shapes = checkpoint.shapes
    other = sorted(name for name, shape in demanded.items() if name in shapes and shapes[name] != shape)
    if other:
        raise ModelError(
            f"{checkpoint.path}: {_count(other)} a shape that config.json does not describe: "
            f"{tuple(shapes[other[0]])}, not {tuple(demanded[other[0]])}"
        )


def refuse_absent_or_other(checkpoint: Checkpoint, demanded: Mapping[str, torch.Size], tied: bool) -> None:
    """ModelError unless the stored tensors are those ``demanded``; a head that is ``tied`` may be missing."""
    names, stored = demanded.keys() - ({"lm_head.weight"} if tied else set()), checkpoint.shapes.keys()
    extra = stored - demanded.keys()
    if checkpoint.packed is not None:  # AutoGPTQ stores a bias for each, zeros where a model has none
        extra -= {f"{module}.bias" for module in checkpoint.packed.formats}
    refuse_absent(checkpoint, names - stored, extra)
    refuse_other_shapes(checkpoint, demanded)


def refuse_absent(checkpoint: Checkpoint, missing: Iterable[str], extra: Iterable[str]) -> None:
    """ModelError where tensors of the model are ``missing``, or the stored ones have ``extra`` ones among them."""
    absent = sorted(missing)
    if absent:
        raise ModelError(
            f"{checkpoint.path}: {_count(absent)} no weights in the checkpoint; it is incomplete, download it again"
        )
    odd = sorted(key for key in extra if not _HARMLESS_EXTRA.search(key))
    if odd:
        raise ModelError(
            f"{checkpoint.path}: {_count(odd)} no place in the model config.json describes (wrong config, or weights "
            "of an unsupported kind such as a quantised or extended model)"
        )


def _count(names: list[str]) -> str:
    return f"tensor {names[0]} has" if len(names) == 1 else f"{len(names)} tensors ({names[0]}, ...) have"
