"""8-bit floats (e4m3) with scales: one for a matrix, one for each output, or one for each block of outputs and channels
(DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3). Scales of activations that a file may hold are left
out: activations are multiplied as they are, or in e4m3 with a scale for each row (``ops.fp8_weights``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.errors import shown
from saccade.models.packed_format import FLOATS, PackedError, PackedFormat, Stored, demand, sizes
from saccade.ops.fp8_weights import ScaledFp8Matrix

KIND = "F8_E4M3"
SCALES = "weight_scale", "weight_scale_inv"
OF_ACTIVATIONS = "input_scale", "activation_scale", "input_scale_ub"


def formats(config: Mapping[str, Any]) -> Callable[[str], PackedFormat]:
    """See ``packed_config.READERS``: of ``fp8`` (DeepSeek's and Qwen's) and ``fbgemm_fp8``."""
    if config.get("fmt", "e4m3") != "e4m3":
        raise PackedError(f"fmt={shown(config['fmt'], 40)} is not read, e4m3 is: give the unquantised checkpoint")
    read = ScaledFp8(block_of(config.get("weight_block_size")))
    return lambda module: read


def block_of(given: Any) -> tuple[int, int] | None:
    """Outputs and channels of a block, of a config. PackedError for what is none."""
    if given is None:
        return None
    whole = isinstance(given, (list, tuple)) and len(given) == 2
    if not whole or not all(isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in given):
        raise PackedError(f"blocks of {shown(given, 40)} are not read; two positive whole numbers are, as [128, 128]")
    return given[0], given[1]


@dataclass(frozen=True)
class ScaledFp8(PackedFormat):
    """``weight`` e4m3 [outputs, channels], and ``weight_scale`` or ``weight_scale_inv`` of any float type, a factor
    under either name: one number, [outputs] or [outputs, 1], or one for each of ``block``."""

    block: tuple[int, int] | None
    name = "FP8"
    parts = ("weight",)
    more = (*SCALES, *OF_ACTIVATIONS)
    meaning = "fp8"

    @property
    def laid(self) -> dict[str, tuple[int, int]]:
        """See :class:`PackedFormat`."""
        each = 1 if self.block is None else self.block[0]
        return {"weight": (0, 1), **dict.fromkeys(SCALES, (0, each))}

    def shape(self, stored: Mapping[str, Stored]) -> torch.Size:
        """See :class:`PackedFormat`."""
        outputs, channels = sizes(stored, "weight", KIND)
        name = next((one for one in SCALES if one in stored), None)
        if name is None:
            raise PackedError("weight_scale is missing of a matrix in FP8; download the checkpoint again")
        allowed: list[tuple[int, ...]] = [(), (1,), (1, 1), (outputs,), (outputs, 1)]
        if self.block is not None:
            allowed = [(-(-outputs // self.block[0]), -(-channels // self.block[1]))]
        found = stored[name]
        demand(stored, name, FLOATS, found.shape if found.shape in allowed else allowed[-1])
        return torch.Size((outputs, channels))

    def matrix(self, tensors: Mapping[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> ScaledFp8Matrix:
        """See :class:`PackedFormat`."""
        weight, scales = tensors["weight"].contiguous(), next(tensors[one] for one in SCALES if one in tensors).float()
        outputs, channels = weight.shape
        if self.block is None:
            return ScaledFp8Matrix(weight, scales.reshape(-1, 1).expand(outputs, 1).contiguous(), channels, bias, dtype)
        scales = scales.repeat_interleave(self.block[0], 0)[:outputs].contiguous()
        return ScaledFp8Matrix(weight, scales, self.block[1], bias, dtype)
