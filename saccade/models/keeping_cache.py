"""Caches as transformers' modules that keep a state ask for them, over states that are the engine's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from saccade.kv.states import StatePart
from saccade.ops.slots import NewRows, Slots

Parts = Mapping[str, Tensor | Slots]


class _Held:
    """One layer's states as modules of transformers 5.17 look them up in a cache: by number."""

    record_past = False

    def __init__(self, parts: Parts) -> None:
        self.conv_states = _numbered(parts, "conv")
        self.recurrent_states = _numbered(parts, "recurrent")


def _numbered(parts: Parts, kind: str) -> dict[int, Tensor | Slots]:
    return {int(name.removeprefix(kind)): part for name, part in parts.items() if name.startswith(kind)}


class StateCache:
    """What modules of transformers ask of a cache, over ``parts`` by name, [sequences, ...], changed in place, or in
    slots, which only kernels of ours look into (``ops.slotted``). A state before the first token is zeros, as modules
    pad without one."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    # Up to some version after 5.17 modules ask whether there is a state, and look into a layer for it.
    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    @cached_property
    def layers(self) -> Mapping[int, _Held]:
        held = _Held(self.parts)
        return defaultdict(lambda: held)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | Slots:
        return self.parts[f"conv{state_idx}"]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | Slots:
        return self.parts[f"recurrent{state_idx}"]

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **sizes: Any
    ) -> Tensor | NewRows:
        """``conv_states`` [sequences, channels, rows]: those of new rows; returned behind what was there."""
        held = self.parts[f"conv{state_idx}"]
        if isinstance(held, Slots):
            return NewRows(conv_states, held)
        whole = torch.cat([held, conv_states], -1)
        held.copy_(whole[..., -held.shape[-1] :])
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor | Slots, layer_idx: int, state_idx: int = 0
    ) -> Tensor | Slots:
        held = self.parts[f"recurrent{state_idx}"]
        if isinstance(held, Slots) or isinstance(recurrent_states, Slots):
            return held  # the kernel has written it
        return held.copy_(recurrent_states)


class StateShapes:
    """A cache that has nothing and notes what a module would have it keep."""

    def __init__(self) -> None:
        self.parts: list[StatePart] = []

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        shape = *conv_states.shape[1:-1], conv_kernel_size
        self.parts.append(StatePart(f"conv{state_idx}", shape, conv_states.dtype))
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        shape = tuple(recurrent_states.shape[1:])
        self.parts.append(StatePart(f"recurrent{state_idx}", shape, recurrent_states.dtype))
        return recurrent_states
