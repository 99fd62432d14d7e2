"""compressed-tensors, which llm-compressor writes: integers of 4 or 8 bits in words, integers of 8 bits as they are,
and 8-bit floats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.errors import shown
from saccade.models.packed_format import (
    FLOATS,
    PackedError,
    PackedFormat,
    Stored,
    demand,
    group_size,
    groups,
    number,
    sizes,
    unpacked,
)
from saccade.models.scaled_fp8 import OF_ACTIVATIONS, ScaledFp8, block_of
from saccade.ops.group_weights import by_groups, group_matrix
from saccade.ops.matrices import Matrix

FORMATS = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"


def formats(config: Mapping[str, Any]) -> Callable[[str], PackedFormat]:
    """See ``packed_config.READERS``. Each group of the config is for modules by their names (``re:`` before a pattern)
    or, as ``Linear``, for all others."""
    if config.get("transform_config"):
        raise PackedError("transform_config (rotated weights) is not read; give a checkpoint without it")
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") not in ("dense", None):
        raise PackedError("sparsity_config (weights without their zeros) is not read; give a checkpoint without it")
    given = config.get("config_groups")
    if not isinstance(given, Mapping) or not given or not all(isinstance(one, Mapping) for one in given.values()):
        raise PackedError("config_groups says of no weights how they are stored; give one that does")
    read = [(_targets(one), _format(one, config.get("format"))) for one in given.values()]

    def of(module: str) -> PackedFormat:
        for fits in (_named, _patterned, _of_class):  # what is said more closely counts more
            for targets, made in read:
                if any(fits(module, target) for target in targets):
                    return made
        raise PackedError("is stored quantised, but no target of config_groups names it")

    return of


def _targets(group: Mapping[str, Any]) -> list[str]:
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
        raise PackedError(f"targets={shown(targets, 40)} is no list of names")
    for one in targets:
        try:
            re.compile(one.removeprefix("re:"))
        except re.error as error:
            raise PackedError(f"targets: {shown(one, 40)} is no pattern of names") from error
    return targets


def _named(module: str, target: str) -> bool:
    return target == module


def _patterned(module: str, target: str) -> bool:
    return target.startswith("re:") and re.match(target[3:], module) is not None


def _of_class(module: str, target: str) -> bool:
    return target == "Linear"


def _format(group: Mapping[str, Any], whole: Any) -> PackedFormat:
    kind, weights = group.get("format") or whole, group.get("weights")
    if kind not in FORMATS:
        raise PackedError(
            f"format={shown(kind, 40)} is not read; read are {', '.join(FORMATS)}: compress it with llm-compressor"
        )
    if not isinstance(weights, Mapping):
        raise PackedError("a group of config_groups has no weights")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if weights.get("type", "int") == "float":
        number(weights, "num_bits", 8, (8,))
        if strategy not in ("tensor", "channel", "block"):
            raise PackedError(f"strategy={shown(strategy, 40)} of floats is not read; read are tensor, channel, block")
        if strategy == "block":
            return ScaledFp8(block_of(weights.get("block_structure") or (128, 128)))
        return ScaledFp8(None)
    if strategy not in ("tensor", "channel", "group"):
        raise PackedError(f"strategy={shown(strategy, 40)} of integers is not read; read are tensor, channel, group")
    bits = number(weights, "num_bits", 8, (4, 8))
    group_of = group_size(weights, default=None) if strategy == "group" else -1
    symmetric = bool(weights.get("symmetric", True))
    if kind == "pack-quantized":
        return PackedInts(bits, group_of, symmetric)
    number(weights, "num_bits", 8, (8,))
    return Int8(group_of, symmetric)


@dataclass(frozen=True)
class PackedInts(PackedFormat):
    """``weight_packed`` int32 [outputs, channels * bits / 32], ``weight_scale`` [outputs, groups], ``weight_shape``,
    and ``weight_zero_point`` int32 [outputs * bits / 32, groups]; codes and zeros plus half their range."""

    bits: int
    group: int
    symmetric: bool
    name = "compressed-tensors"
    more = "weight_shape", "weight_g_idx", "input_zero_point", *OF_ACTIVATIONS

    @property
    def laid(self) -> dict[str, tuple[int, int]]:
        """See :class:`PackedFormat`."""
        return {"weight_packed": (0, 1), "weight_scale": (0, 1), "weight_zero_point": (0, 32 // self.bits)}

    @property
    def parts(self) -> tuple[str, ...]:  # type: ignore[override]
        """See :class:`PackedFormat`."""
        return (
            ("weight_packed", "weight_scale")
            if self.symmetric
            else ("weight_packed", "weight_scale", "weight_zero_point")
        )

    @property
    def meaning(self) -> str:
        """See :class:`PackedFormat`."""
        return f"packed {self.bits}"

    def shape(self, stored: Mapping[str, Stored]) -> torch.Size:
        """See :class:`PackedFormat`."""
        outputs, words = sizes(stored, "weight_packed", "I32")
        channels = words * 32 // self.bits
        count = groups(channels, self.group)
        _demand_scales(stored, outputs, count)
        if not self.symmetric:
            demand(stored, "weight_zero_point", ("I32",), (-(-outputs * self.bits // 32), count))
        if "weight_g_idx" in stored:
            demand(stored, "weight_g_idx", ("I32",), (channels,))
        return torch.Size((outputs, channels))

    def matrix(self, tensors: Mapping[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> Matrix:
        """See :class:`PackedFormat`."""
        weight = tensors["weight_packed"].contiguous().view(torch.uint8)
        said = tensors["weight_shape"].tolist() if "weight_shape" in tensors else None
        if said not in (None, [len(weight), weight.shape[1] * 8 // self.bits]):
            raise PackedError(f"weight_shape says {shown(said, 40)}, which weight_packed is not")
        scales = _spread(tensors["weight_scale"], len(weight))
        if self.symmetric:
            zeros = torch.full_like(scales, 1 << self.bits - 1, dtype=torch.uint8)
        else:
            zeros = unpacked(tensors["weight_zero_point"].t(), self.bits).t()[: weight.shape[0]].contiguous()
        return by_groups(weight, scales, zeros, self.bits, bias, self.group, tensors.get("weight_g_idx"))


@dataclass(frozen=True)
class Int8(PackedFormat):
    """``weight`` int8 [outputs, channels], ``weight_scale`` [outputs, groups], and ``weight_zero_point`` int8 of the
    same shape."""

    group: int
    symmetric: bool
    name = "compressed-tensors"
    more = "weight_zero_point", "input_zero_point", *OF_ACTIVATIONS
    parts = "weight", "weight_scale"

    @property
    def meaning(self) -> str:
        """See :class:`PackedFormat`."""
        return f"int8 {'symmetric' if self.symmetric else ''}"

    @property
    def laid(self) -> dict[str, tuple[int, int]]:
        """See :class:`PackedFormat`."""
        return {"weight": (0, 1), "weight_scale": (0, 1), "weight_zero_point": (0, 1)}

    def shape(self, stored: Mapping[str, Stored]) -> torch.Size:
        """See :class:`PackedFormat`."""
        outputs, channels = sizes(stored, "weight", "I8")
        _demand_scales(stored, outputs, groups(channels, self.group))
        if not self.symmetric:
            if "weight_zero_point" not in stored:
                raise PackedError("weight_zero_point is missing, which symmetric=false asks for")
            demand(stored, "weight_zero_point", ("I8",), stored["weight_scale"].shape)
        return torch.Size((outputs, channels))

    def matrix(self, tensors: Mapping[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> Matrix:
        """See :class:`PackedFormat`."""

        def shifted(given: Tensor) -> Tensor:
            return given.contiguous().view(torch.uint8) ^ 0x80

        weight = shifted(tensors["weight"])
        scales = _spread(tensors["weight_scale"], len(weight))
        zero = torch.zeros_like(scales, dtype=torch.int8)
        if not self.symmetric:
            zero = _spread(tensors["weight_zero_point"], len(weight))
        return group_matrix(weight, scales, shifted(zero), 8, bias, self.group)


def _demand_scales(stored: Mapping[str, Stored], outputs: int, count: int) -> None:
    """Of groups; of all channels, one for each output or for all."""
    found, alone = stored["weight_scale"], [(outputs,), (1,), (1, 1), ()] if count == 1 else []
    demand(stored, "weight_scale", FLOATS, found.shape if found.shape in alone else (outputs, count))


def _spread(given: Tensor, outputs: int) -> Tensor:
    """A scale or zero for all outputs or for each, as [outputs, groups]."""
    return given.reshape(-1, given.shape[-1] if given.dim() == 2 else 1).expand(outputs, -1).contiguous()
