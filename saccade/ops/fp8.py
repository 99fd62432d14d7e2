"""Matrix products whose operands are 8-bit floats (e4m3; Micikevicius et al., "FP8 Formats for Deep Learning", 2022):
weights with a scale per output channel, made once, and activations with a scale per row, made for each product.

``sum_k x[i, k] w[j, k]`` is taken of ``values[i, k] * weight[j, k]`` and multiplied by ``scale[i] * scale[j]``
afterwards, so that no scale depends on another row: what a row gives hangs on its batch no more than it did before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
LEAST = 1e-20  # that a row's largest value counts as: a row of zeros stays one
MULTIPLE = 16  # of channels, in and out: the tensor cores' tiles
QUANTIZATIONS = "fp8", "fp8_reference"


class QuantizedRows(NamedTuple):
    """``values`` e4m3 [rows, channels] times ``scale`` float32 [rows, 1]."""

    values: Tensor
    scale: Tensor

    def dequantized(self) -> Tensor:
        """float32 [rows, channels]."""
        return self.values.float() * self.scale


def quantize(x: Tensor) -> QuantizedRows:
    """The rows of ``x`` [rows, channels] in e4m3: each scaled so that its largest value becomes 448."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    factor = torch.full_like(largest, LARGEST) / largest  # a number over a tensor would be rounded twice
    values = (wide * factor).clamp(-LARGEST, LARGEST).to(E4M3)
    return QuantizedRows(values, largest * (1 / LARGEST))


def why_no_products(device: torch.device) -> str | None:
    """Why ``device`` multiplies no e4m3 values; None where it does."""
    if device.type != "cuda":
        return f"the device is {device}, which has no FP8 products"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {major}.{minor}; FP8 products need 8.9 (Ada), 9.0 (Hopper) or later"
    return None


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why products do not run for activations of ``dtype`` on ``device``; None where it does."""
    reason = why_no_products(device)
    if reason is not None:
        return reason
    if dtype != torch.bfloat16:
        return f"its activations are bfloat16, not {str(dtype).removeprefix('torch.')}"
    return None
