"""Which part of a layer that keeps a state a rank has: states by heads, or by channels of a short convolution. One
declaration a kind of module, by the sizes that the module itself has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from saccade.errors import ModelError
from saccade.kv.states import StateFormat, StatePart
from saccade.models.families import Family, keeping_layers
from saccade.models.part_rules import Cut
from saccade.models.shards import Share

logger = logging.getLogger(__name__)

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


class SharedStates:
    """How ranks share out the states of a model's layers. ``by_module``: by the names of modules that keep one; None
    where their heads do not divide, and each rank has all of one. ``named``: names by the modules' ids. ModelError for
    a module of which nothing says how."""

    def __init__(self, decoder: Any, family: Family, config: Any, named: Mapping[int, str], share: Share) -> None:
        self.share = share
        self.by_module: dict[str, StateParts | None] = {}
        for place in keeping_layers(family, config):
            assert family.keeping is not None
            module = getattr(decoder.layers[place], family.keeping.module)
            found = state_parts(module)
            if found is None:
                raise ModelError(
                    f"tensor_parallel_size={share.ranks}: nothing says how ranks share the states of "
                    f"{type(module).__name__} out; use tensor_parallel_size=1"
                )
            self.by_module[named[id(module)]] = found if found.count % share.ranks == 0 else None
        if None in self.by_module.values() and share.rank == 0:
            logger.warning(
                "%d processes cannot share out heads or groups of layers that keep a state: each has all of these",
                share.ranks,
            )

    def place_of(self, name: str) -> tuple[str, str] | None:
        """The module that keeps a state which a module or tensor is of, and its name there."""
        start = next((one for one in self.by_module if name.startswith(f"{one}.")), None)
        return None if start is None else (start, name[len(start) + 1 :])

    def cut(self, start: str, own: str, shape: tuple[int, ...], grouped: Callable[[str], bool]) -> Cut | None:
        """What this rank has of the tensor ``own``, of ``shape``, of the module ``start``; None for all of it.
        ``grouped``: whether the matrix of a name is stored in groups of channels."""
        parts = self.by_module[start]
        module, _, kind = own.rpartition(".")
        if parts is None:
            return None
        if module in parts.channels:
            if grouped(f"{start}.{module}"):
                return Cut(0, (self.share.run(shape[0]),))
            return Cut(1, (self.share.run(shape[1]),)) if kind == "weight" else None
        blocks = parts.outputs.get(module or kind)
        if blocks is None or sum(blocks) != shape[0]:  # a norm of each head
            return None
        spans, first = [], 0
        for size in blocks:
            begin, end = self.share.run(size)
            spans.append((first + begin, first + end))
            first += size
        return Cut(0, tuple(spans))

    def format(self, own: StateFormat) -> StateFormat:
        """The format of this rank's states, which says what they are parts of."""
        shared = next(iter(self.by_module.values()))
        if shared is None:
            return own
        convolved = shared.outputs.get("conv1d") or shared.outputs["conv"]

        def blocks(part: StatePart) -> tuple[int, ...]:
            return convolved if part.name.startswith("conv") else (part.shape[0] * self.share.ranks,)

        return replace(own, parts=tuple(replace(one, blocks=blocks(one)) for one in own.parts))
