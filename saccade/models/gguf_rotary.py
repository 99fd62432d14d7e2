"""Rotary parameters of a GGUF file, as a config of transformers has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.errors import ModelError, shown
from saccade.models.gguf_names import FREQUENCIES, LONG_FACTORS, SHORT_FACTORS


def rope(
    get: Callable[..., Any], head_dim: int, rotated: int, context: int, tensors: Mapping[str, Tensor], where: str
) -> dict[str, Any]:
    """rope_parameters of a model of which ``rotated`` of the channels of a head rotate and whose longest sequence is
    ``context``. ``get(key[, default])``: the metadata of its architecture; ``tensors``: those of
    ``gguf_names.ROTARY``."""
    theta = float(get("rope.freq_base", 10000.0))
    if not 0 < theta < math.inf:
        raise ModelError(f"{where}: rope.freq_base={theta} is no base of rotary frequencies; download the file again")
    made = _scaled(get, theta, rotated, context, tensors, where)
    if rotated != head_dim:
        made["partial_rotary_factor"] = rotated / head_dim
    return made


def _scaled(
    get: Callable[..., Any], theta: float, rotated: int, context: int, tensors: Mapping[str, Tensor], where: str
) -> dict[str, Any]:
    for name, tensor in tensors.items():
        if tensor.shape != (rotated // 2,) or not bool((tensor > 0).all()):
            raise ModelError(f"{where}: {name} holds no {rotated // 2} divisors of frequencies; download it again")
    plain = {"rope_type": "default", "rope_theta": theta}
    kind, factor = get("rope.scaling.type", "none"), get("rope.scaling.factor", None)
    original = get("rope.scaling.original_context_length", None)
    if {LONG_FACTORS, SHORT_FACTORS} <= tensors.keys():
        return _longrope(theta, tensors[SHORT_FACTORS], tensors[LONG_FACTORS], int(original or context), get)
    if FREQUENCIES in tensors:
        return _divided(theta, rotated, context, tensors[FREQUENCIES])
    if kind in ("none", "") or (kind == "linear" and factor in (None, 0, 1)):
        return plain
    if kind == "linear":
        return {**plain, "rope_type": "linear", "factor": float(factor)}
    if kind == "yarn" and factor and original and get("rope.scaling.yarn_ext_factor", 1.0) == 1.0:
        return {
            **plain,
            "rope_type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": int(original),
            **_yarn_options(get),
        }
    raise ModelError(
        f"{where}: rope.scaling.type={shown(kind, 40)} (factor {shown(factor, 40)}, original_context_length "
        f"{shown(original, 40)}) is not read from GGUF files; give the model's safetensors folder, or its hub name"
    )


def _yarn_options(get: Callable[..., Any]) -> dict[str, float]:
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
    found = {theirs: get(f"rope.scaling.{ours}", None) for ours, theirs in names.items()}
    found["mscale"] = found["mscale_all_dim"] = get("rope.scaling.yarn_log_multiplier", None)
    return {name: float(value) for name, value in found.items() if value}


def _longrope(theta: float, short: Tensor, long: Tensor, original: int, get: Callable[..., Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "original_max_position_embeddings": original,
    }
    if attention := get("rope.scaling.attn_factor", None):
        made["attention_factor"] = float(attention)
    return made


def _divided(theta: float, rotated: int, context: int, divisors: Tensor) -> dict[str, Any]:
    """The numbers of Llama 3.1 and its like that give these divisors, of which a file holds what they come to; else the
    divisors themselves, for any length."""
    for factor in dict.fromkeys((float(divisors.max()), 8.0, 32.0)):
        if torch.allclose(divisors.float(), llama3_divisors(theta, rotated, factor), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
    if bool((divisors == 1).all()):
        return {"rope_type": "default", "rope_theta": theta}
    said = divisors.tolist()
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": said,
        "long_factor": said,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def llama3_divisors(theta: float, rotated: int, factor: float) -> Tensor:
    """fp32 [rotated // 2]: by what Llama 3 divides rotary frequencies, of an original context of 8192: nothing where a
    wave is shorter than a quarter of it, ``factor`` where it is longer than all of it."""
    waves = 2 * math.pi * theta ** (torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    smooth = (8192 / waves - 1.0) / 3.0
    between = 1 / ((1 - smooth) / factor + smooth)
    long = torch.where(waves > 8192, torch.full_like(waves, factor), between)
    return torch.where(waves < 2048, torch.ones_like(waves), long).float()
