"""AWQ (Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2024) as AutoAWQ's
GEMM kernels take it: codes of 4 bits, 8 outputs a word."""

from __future__ import annotations

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
from saccade.ops.group_weights import GroupMatrix, group_matrix


def formats(config: Mapping[str, Any]) -> Callable[[str], PackedFormat]:
    """See ``packed_config.READERS``."""
    kind = str(config.get("version") or config.get("format") or "gemm").lower()
    if kind != "gemm":
        raise PackedError(f"version={shown(kind, 40)} is not read, gemm is: convert it with AutoAWQ")
    number(config, "bits", 4, (4,))
    read = Awq(group_size(config))
    return lambda module: read


@dataclass(frozen=True)
class Awq(PackedFormat):
    """``qweight`` int32 [channels, outputs / 8], ``qzeros`` int32 [groups, outputs / 8], ``scales`` [groups,
    outputs]."""

    group: int
    name = "AWQ"
    parts = "qweight", "qzeros", "scales"
    meaning = "awq"

    @property
    def laid(self) -> dict[str, tuple[int, int]]:
        """See :class:`PackedFormat`."""
        return {"qweight": (1, 8), "qzeros": (1, 8), "scales": (1, 1)}

    def shape(self, stored: Mapping[str, Stored]) -> torch.Size:
        """See :class:`PackedFormat`."""
        channels, words = sizes(stored, "qweight", "I32")
        count = groups(channels, self.group)
        demand(stored, "qzeros", ("I32",), (count, words))
        demand(stored, "scales", FLOATS, (count, 8 * words))
        return torch.Size((8 * words, channels))

    def matrix(self, tensors: Mapping[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> GroupMatrix:
        """See :class:`PackedFormat`."""
        fields = unpacked(tensors["qweight"], 4)
        weight = _outputs_first(fields[::2] | fields[1::2] << 4)  # two channels a byte
        zeros = _outputs_first(unpacked(tensors["qzeros"], 4))
        return group_matrix(weight, tensors["scales"].t().contiguous(), zeros, 4, bias, self.group)


def _outputs_first(fields: Tensor) -> Tensor:
    """[outputs, n] of ``fields`` [n, outputs], where a word's 8 are its outputs 0, 2, 4, 6, 1, 3, 5, 7."""
    return fields.t().contiguous().unflatten(0, (-1, 2, 4)).transpose(1, 2).reshape(fields.shape[1], -1)
