"""Whether a method state that was read from outside can be one of a sequence: what kernels take for granted of shapes,
types and positions is looked at before they see it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import torch
from torch import Tensor

from saccade.errors import SaccadeError, shown, whole_number


@dataclass(frozen=True)
class Sizes:
    """Of a model, and of a sequence whose states saw at most ``length`` tokens. ``dtype``: of its keys."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    dtype: torch.dtype

    @property
    def units(self) -> tuple[int, int]:
        """How many units a method may decide for: KV heads or query heads."""
        return self.kv_heads, self.heads


Axis = int | tuple[int, ...] | None  # a length, some of which it may have one, or any


class Fitting:
    """Checks parts of what is called ``name``. Each method raises SaccadeError for what does not fit."""

    def __init__(self, name: str) -> None:
        self.name = name

    def require(self, right: bool, said: str) -> None:
        """``said``: what is wrong unless it is ``right``."""
        if not right:
            raise SaccadeError(f"a saved {self.name} {said}: it is damaged")

    def tensor(self, part: str, value: Any, dtype: torch.dtype, *shape: Axis) -> Tensor:
        """``value``, a contiguous tensor of ``dtype`` and of ``shape``."""
        self.require(isinstance(value, Tensor), f"has {part}={shown(value, 60)}, which is no tensor")
        right = value.dtype == dtype and value.dim() == len(shape) and all(map(_is_axis, value.shape, shape))
        wanted = [list(axis) if isinstance(axis, tuple) else "any" if axis is None else axis for axis in shape]
        self.require(right, f"has {part} {value.dtype} {list(value.shape)}, not {dtype} {wanted}")
        self.require(value.is_contiguous(), f"has {part} with gaps between its values")
        return value

    def within(self, part: str, values: Tensor | Iterable[int] | int, least: int, most: int) -> None:
        """Integers from ``least`` to ``most``."""
        if isinstance(values, Tensor):
            low, high = (int(end) for end in values.aminmax()) if values.numel() else (least, most)
            right, found = least <= low and high <= most, f"{low} to {high}"
        else:
            listed = [values] if isinstance(values, int) else list(values)
            right, found = all(whole_number(one, least, most) for one in listed), shown(values, 60)
        self.require(right, f"has {part}={found}, not from {least} to {most}")

    def rising(self, part: str, values: Tensor, below: int) -> None:
        """Positions under ``below``, each greater than the one before."""
        self.within(part, values, 0, below - 1)
        self.require(bool((values[1:] > values[:-1]).all()), f"has {part} out of order")


def _is_axis(found: int, wanted: Axis) -> bool:
    return wanted is None or (found in wanted if isinstance(wanted, tuple) else found == wanted)


def is_of(value: Any, hint: Any) -> bool:
    """Whether ``value`` is what a field's annotation says; ``Any`` and what is not known here is everything."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(is_of(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(is_of(one, parts[0]) for one in value)
    if origin is tuple and Ellipsis not in parts:
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(is_of, value, parts))
    if origin is dict:
        return isinstance(value, dict) and all(is_of(one, parts[1]) for one in value.values())
    if hint is int:
        return whole_number(value, -(2**63))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is Any or not isinstance(hint, type):
        return True
    return isinstance(value, NoneType if hint is None else hint)
