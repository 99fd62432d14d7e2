"""Matrices that safetensors files hold as several tensors each (codes, scales, zeros): what a format says of them. One
file a format: ``models.awq``, ``models.gptq``, ``models.compressed``, ``models.scaled_fp8``, ``models.mxfp4``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from saccade.errors import SaccadeError, shown
from saccade.ops.matrices import Matrix

FLOATS = "F16", "BF16", "F32"  # safetensors' names of scales' types
LEAST = 32  # channels of a group, and what they are a multiple of


class PackedError(SaccadeError):
    """What a config or tensors say that cannot be, or that is not read; its text follows the name of the module."""


class Stored(NamedTuple):
    """A tensor of a file, as its header has it: safetensors' name of its type, and its shape."""

    kind: str
    shape: tuple[int, ...]


class PackedFormat(ABC):
    """One way to store a matrix. ``parts``: suffixes of the tensors without which it is none; ``more``: of those that
    it may have, too."""

    name: ClassVar[str]  # as people call it
    parts: tuple[str, ...]
    more: tuple[str, ...] = ()

    @property
    @abstractmethod
    def laid(self) -> dict[str, tuple[int, int]]:
        """By part, the axis along which outputs lie, and how many of them an entry holds."""

    @property
    @abstractmethod
    def meaning(self) -> str:
        """What the same tensors could mean otherwise: part of a model's identity."""

    @abstractmethod
    def shape(self, stored: Mapping[str, Stored]) -> torch.Size:
        """Outputs and channels of the matrix of these tensors, by suffixes. PackedError where they are no matrix."""

    @abstractmethod
    def matrix(self, tensors: Mapping[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> Matrix:
        """The matrix of ``tensors``, whose :meth:`shape` is one, for activations of ``dtype``. SaccadeError where their
        numbers are none."""

    def outputs(
        self, tensors: Mapping[str, Tensor], spans: Sequence[tuple[int, int]], all: int
    ) -> dict[str, Tensor] | None:
        """The tensors of some of ``all`` outputs, those of ``spans`` one behind another; None where an entry would have
        to be cut."""
        made = {}
        for part, tensor in tensors.items():
            axis, each = self.laid.get(part, (0, 0))
            if each and tensor.dim() > axis and tensor.shape[axis] == -(-all // each) > 1:
                if any(start % each or (stop % each and stop != all) for start, stop in spans):
                    return None
                runs = [tensor.narrow(axis, start // each, -(-stop // each) - start // each) for start, stop in spans]
                made[part] = runs[0] if len(runs) == 1 else torch.cat(runs, axis)
            elif part not in _OF_ALL:
                made[part] = tensor
        return made


_OF_ALL = ("weight_shape",)  # what is said of a whole matrix


def demand(stored: Mapping[str, Stored], part: str, kinds: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """PackedError where a part has another type or shape."""
    one = stored[part]
    if one.kind not in kinds or one.shape != shape:
        raise PackedError(f"{part} is {one.kind} {list(one.shape)}, not {' or '.join(kinds)} {list(shape)}")


def sizes(stored: Mapping[str, Stored], part: str, kind: str) -> tuple[int, int]:
    """The shape of a part that has two dimensions. PackedError for another type or shape."""
    one = stored[part]
    if one.kind != kind or len(one.shape) != 2 or not all(one.shape):
        raise PackedError(f"{part} is {one.kind} {list(one.shape)}, not {kind} of two dimensions")
    return one.shape[0], one.shape[1]


def groups(channels: int, group: int) -> int:
    """How many groups ``channels`` have, all of them where ``group`` is -1. PackedError for channels or a last group
    that are no multiple of 32, which kernels take."""
    if channels % LEAST:
        raise PackedError(f"{channels} channels are no multiple of {LEAST}; give the unquantised checkpoint")
    return 1 if group == -1 else -(-channels // group)


def number(config: Mapping[str, Any], key: str, default: int | None, allowed: tuple[int, ...]) -> int:
    """A whole number of a quantization_config. PackedError for others than those ``allowed``."""
    value = config.get(key, default)
    if isinstance(value, bool) or value not in allowed:
        listed = ", ".join(map(str, allowed))
        raise PackedError(f"{key}={shown(value, 40)} is not read; read are {listed}: give a checkpoint in one of these")
    return int(value)


def group_size(config: Mapping[str, Any], key: str = "group_size", default: int | None = 128) -> int:
    """Channels of a group, or -1 for all. PackedError for such that are no multiple of 32."""
    value = config.get(key, default)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (value != -1 and (value < LEAST or value % LEAST)):
        raise PackedError(
            f"{key}={shown(value, 40)} is not read; read are multiples of {LEAST}, and -1 for all channels"
        )
    return int(value)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """uint8 [rows, n * 32 / bits] of ``words`` int32 [rows, n], each the numbers of ``bits`` 4 or 8 from its lowest
    bits on."""
    held = words.contiguous().view(torch.uint8)
    return held if bits == 8 else torch.stack([held & 15, held >> 4], -1).flatten(1)
