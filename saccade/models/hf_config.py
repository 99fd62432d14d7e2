"""transformers' config of a checkpoint, refused where it says what its model cannot be run by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from saccade.errors import ModelError
from saccade.models.checkpoint import Checkpoint, first_line
from saccade.models.families import FAMILIES, Family, attending_layers
from saccade.models.headers import refuse_more_layers
from saccade.models.packed_config import KEYS
from saccade.models.refusals import refuse_unsupported
from saccade.models.rotary import rope_type
from saccade.models.text_part import SAME_AS, text_config


def checked_config(checkpoint: Checkpoint) -> Any:
    """transformers' config of a checkpoint, of a multimodal one that of its language model. ModelError for one
    that is none, or of what cannot be run."""
    refuse_unsupported(checkpoint.whole, str(checkpoint.path))
    refuse_more_layers(checkpoint, checkpoint.config.get("num_hidden_layers"))
    try:
        if checkpoint.whole["model_type"] in SAME_AS:  # which transformers has no class for
            config = AutoConfig.for_model(**checkpoint.config)
        else:
            config = text_config(
                AutoConfig.from_pretrained(checkpoint.path, local_files_only=True, trust_remote_code=False)
            )
    except Exception as error:  # the config classes raise many kinds
        raise ModelError(
            f"{checkpoint.path / 'config.json'} is not a valid {checkpoint.config['model_type']} config: "
            f"{first_line(error)}"
        ) from error
    _shorten(config, checkpoint.config.get("num_hidden_layers"))
    for key in KEYS:  # read by us, and no part of what the model computes
        config.__dict__.pop(key, None)
    if config.model_type not in FAMILIES:
        raise ModelError(f"{checkpoint.path}: transformers reads this config as {config.model_type}, not supported")
    if not attending_layers(FAMILIES[config.model_type], config):
        raise ModelError(
            f"{checkpoint.path}: layer_types has no full_attention: a model whose layers all keep a state "
            "holds no keys and values; such are not supported"
        )
    _refuse_lost_window(FAMILIES[config.model_type], config, checkpoint.path)
    _refuse_odd_rope(FAMILIES[config.model_type], config, checkpoint.path)
    return config


def _shorten(config: Any, layers: int | None) -> None:
    """To the first ``layers`` layers, where the checkpoint is taken for so many (``checkpoint.of_first_layers``)."""
    there = config.num_hidden_layers
    if layers is None or layers >= there:
        return
    for name, value in list(vars(config).items()):  # layer_types and others of a value a layer
        if isinstance(value, list) and len(value) == there:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers


def _refuse_lost_window(family: Family, config: Any, path: Path) -> None:
    # transformers would ignore the window in the layers yet cut its cache to it; neither meaning is certain.
    window = getattr(config, "sliding_window", None)
    if family.windows == "none" and window is not None:
        raise ModelError(
            f"{path}: config.json sets sliding_window={window}, which {family.model_type} models do not use; remove it "
            "from config.json if the model attends to its whole context"
        )
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if slides and (family.windows != "layer_types" or not window):
        raise ModelError(
            f"{path}: layer_types has sliding_attention, but {family.model_type} "
            + ("models have no such layers" if family.windows != "layer_types" else "is given no sliding_window")
        )


# The rope types the rotary tests cover; a type transformers adds later may depend on more than a row's position.
_ROPE_TYPES = {"default", "linear", "llama3", "yarn", "longrope", "dynamic"}
_FIXED_ROPE_TYPES = _ROPE_TYPES - {"longrope", "dynamic"} | {"proportional"}


def _refuse_odd_rope(family: Family, config: Any, path: Path) -> None:
    kinds = {rope_type(config)}
    if family.rotary_per_layer_type:
        try:
            kinds = {str(config.rope_parameters[kind]["rope_type"]) for kind in set(config.layer_types)}
        except (KeyError, TypeError) as error:
            raise ModelError(f"{path}: rope_parameters must give each layer type its rope_type") from error
    known = _FIXED_ROPE_TYPES if family.rotary_per_layer_type else _ROPE_TYPES
    odd = sorted(str(kind) for kind in kinds - known)
    if odd:
        raise ModelError(
            f"{path}: rope_type {', '.join(odd)} is not supported for {family.model_type}; "
            f"supported: {', '.join(sorted(known))}"
        )


def max_position(config: Any) -> int:
    """The longest sequence the config allows for, in tokens, with its rope scaling counted in."""
    longest = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    factor, kind = rope.get("factor"), rope.get("rope_type")
    # These scale from the trained length; llama3 and longrope checkpoints already state the extended length.
    if factor and kind in ("linear", "dynamic"):
        return int(longest * factor)
    if factor and kind == "yarn":
        return max(longest, int((rope.get("original_max_position_embeddings") or longest) * factor))
    return int(longest)
