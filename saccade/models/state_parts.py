"""Which part of a layer that keeps a state a rank has: states by heads, or by channels of a short convolution. One
declaration a kind of module, by the sizes that the module itself has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BLOCKS = tuple[int, ...]  # sizes of what a tensor's outputs are, one block after another; each is cut evenly


@dataclass(frozen=True)
class StateParts:
    """``count``: what the state is by, heads or channels, which ranks share out evenly; ``outputs``: of tensors by
    their names within the module; ``channels``: of what matrices take in; ``sizes``: attributes that count what a rank
    has of."""

    count: int
    outputs: dict[str, BLOCKS]
    channels: frozenset[str]
    sizes: tuple[str, ...] = field(default=())


def state_parts(module: Any) -> StateParts | None:
    """Of a module that keeps a state; None of one that is not known."""
    if hasattr(module, "num_k_heads") and hasattr(module, "key_dim"):
        return _delta(module)
    if hasattr(module, "n_groups") and hasattr(module, "ssm_state_size"):
        return _mamba(module)
    if hasattr(module, "conv") and hasattr(module, "in_proj"):
        return _convolution(module)
    return None


def _delta(module: Any) -> StateParts:
    """A gated delta rule (Qwen3-Next, Qwen3.5, OLMo hybrid): by heads of keys, each with its heads of values."""
    keys, values, heads = module.key_dim, module.value_dim, module.num_v_heads
    outputs: dict[str, BLOCKS] = {
        "in_proj_qkv": (keys, keys, values),
        "in_proj_qkvz": (2 * keys + 2 * values,),  # by heads of keys
        "in_proj_ba": (2 * heads,),
        "conv1d": (keys, keys, values),
        "q_proj": (keys,),
        "k_proj": (keys,),
        **dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), (values,)),
        **dict.fromkeys(("in_proj_b", "in_proj_a", "b_proj", "a_proj", "dt_bias", "A_log"), (heads,)),
    }
    sizes = "num_v_heads", "num_k_heads", "key_dim", "value_dim", "conv_dim"
    return StateParts(module.num_k_heads, outputs, frozenset({"out_proj", "o_proj"}), sizes)


def _mamba(module: Any) -> StateParts:
    """Mamba-2 (Bamba, Granite 4, Nemotron-H): by groups of heads, which share their B and C and are normed together."""
    inner, shared, heads = module.intermediate_size, module.n_groups * module.ssm_state_size, module.num_heads
    outputs: dict[str, BLOCKS] = {
        "in_proj": (inner, inner, shared, shared, heads),
        "conv1d": (inner, shared, shared),
        "norm": (inner,),
        **dict.fromkeys(("dt_bias", "A_log", "D"), (heads,)),
    }
    sizes = "num_heads", "n_groups", "intermediate_size", "conv_dim"
    return StateParts(module.n_groups, outputs, frozenset({"out_proj"}), sizes)


def _convolution(module: Any) -> StateParts:
    """LFM2's short convolution: by channels."""
    channels = module.out_proj.in_features
    outputs: dict[str, BLOCKS] = {"in_proj": (channels,) * 3, "conv": (channels,)}
    return StateParts(channels, outputs, frozenset({"out_proj"}))
