"""What config.json demands against what the safetensors headers hold, before any weight is allocated."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from saccade.errors import ModelError, shown
from saccade.models.checkpoint import Checkpoint, first_line


def refuse_more_layers(checkpoint: Checkpoint, layers: Any) -> None:
    """ModelError where ``layers``, as config.json has it, are more than there are tensors: every layer has some."""
    if isinstance(layers, int) and layers > len(checkpoint.shapes):
        raise ModelError(
            f"{checkpoint.path}: config.json asks for num_hidden_layers={shown(layers)}, but the checkpoint holds "
            f"{len(checkpoint.shapes)} tensors; give the config.json that belongs to these weights"
        )


def refuse_other_shapes(checkpoint: Checkpoint, config: Any, attention: str) -> None:
    """ModelError where a stored tensor has another shape than the model of ``config``, or where that model has more
    than twice as many weights as are stored. Tensors that transformers puts together (experts) count only in sum."""
    refuse_more_layers(checkpoint, config.num_hidden_layers)
    try:
        with torch.device("meta"):  # shapes without memory
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        demanded = {name: weight.shape for name, weight in model.named_parameters()}
    except Exception as error:  # sizes of which no tensor can be made, and whatever the modules raise
        raise ModelError(f"{checkpoint.path}: no model can be made of config.json: {first_line(error)}") from error
    shapes = checkpoint.shapes
    other = sorted(name for name, shape in demanded.items() if name in shapes and shapes[name] != shape)
    if other:
        many = f"tensor {other[0]} has" if len(other) == 1 else f"{len(other)} tensors ({other[0]}, ...) have"
        raise ModelError(
            f"{checkpoint.path}: {many} a shape that config.json does not describe: {tuple(shapes[other[0]])}, not "
            f"{tuple(demanded[other[0]])}"
        )
    wanted, stored = (sum(shape.numel() for shape in some.values()) for some in (demanded, shapes))
    if wanted > 2 * stored:
        raise ModelError(
            f"{checkpoint.path}: config.json describes a model of {wanted} weights, but the checkpoint holds {stored}; "
            "give the config.json that belongs to these weights, or download the checkpoint again"
        )
