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
from saccade.ops.group_weights import GroupMatrix, group_matrix, packed_codes

PLACES = 0, 4, 1, 5, 2, 6, 3, 7  # of a word's 8 outputs, in fields of 4 bits


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

    def shape(self, stored: Mapping[str, Stored]) -> torch.Size:
        """See :class:`PackedFormat`."""
        channels, words = sizes(stored, "qweight", "I32")
        count = groups(channels, self.group)
        demand(stored, "qzeros", ("I32",), (count, words))
        demand(stored, "scales", FLOATS, (count, 8 * words))
        return torch.Size((8 * words, channels))

    def matrix(self, tensors: Mapping[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> GroupMatrix:
        """See :class:`PackedFormat`."""
        places = torch.tensor(PLACES, device=tensors["qweight"].device)

        def outputs_first(words: Tensor) -> Tensor:
            return unpacked(words, 4).unflatten(1, (-1, 8))[..., places].flatten(1).t().contiguous()

        weight = packed_codes(outputs_first(tensors["qweight"]), 4)
        scales, zeros = tensors["scales"].t().contiguous(), outputs_first(tensors["qzeros"])
        return group_matrix(weight, scales, zeros, 4, bias, self.group)
