"""MXFP4 as gpt-oss has it: 4-bit floats of its experts, 32 behind a power of two (OCP Microscaling Formats 1.0, 2023),
the numbers of all experts in one tensor and their powers in another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.models.packed_format import PackedError, PackedFormat, Stored, demand
from saccade.ops.block_weights import MXFP4
from saccade.ops.group_weights import packed_codes


def formats(config: Mapping[str, Any]) -> Callable[[str], PackedFormat]:
    """See ``packed_config.READERS``."""
    read = Mxfp4()
    return lambda module: read


@dataclass(frozen=True)
class Mxfp4(PackedFormat):
    """``blocks`` uint8 [experts, outputs, blocks, 16], channel 2 i of a block in the low half of byte i, and ``scales``
    uint8 [experts, outputs, blocks]."""

    name = "MXFP4"
    parts = "blocks", "scales"
    meaning = "mxfp4"

    @property
    def laid(self) -> dict[str, tuple[int, int]]:
        """See :class:`PackedFormat`: of experts, which are not cut."""
        return {}

    def shape(self, stored: Mapping[str, Stored]) -> torch.Size:
        """See :class:`PackedFormat`: of all experts, [experts, outputs, channels]."""
        found = stored["blocks"]
        if found.kind != "U8" or len(found.shape) != 4 or found.shape[3] != 16 or not all(found.shape):
            raise PackedError(
                f"blocks are {found.kind} {list(found.shape)}, not U8 of four dimensions, the last one 16"
            )
        demand(stored, "scales", ("U8",), found.shape[:3])
        return torch.Size((*found.shape[:2], 32 * found.shape[2]))

    def matrix(self, tensors: Mapping[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> MXFP4:
        """See :class:`PackedFormat`: the outputs of all experts below one another. Blocks as GGUF files have them, the
        channels of the upper half of a block in the high halves of its bytes."""
        blocks = tensors["blocks"]
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).unflatten(-1, (2, 16)).transpose(-1, -2)
        halves = packed_codes(codes.reshape(-1, 32), 4).view(*blocks.shape)
        made = torch.cat([tensors["scales"][..., None], halves], -1)
        return MXFP4(made.reshape(blocks.shape[0] * blocks.shape[1], -1), bias)
