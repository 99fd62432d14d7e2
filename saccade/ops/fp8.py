"""Matrix products whose operands are 8-bit floats (e4m3; Micikevicius et al., "FP8 Formats for Deep Learning", 2022):
weights with a scale per output channel, made once, and activations with a scale per row, made for each product.

``sum_k x[i, k] w[j, k]`` is taken of ``values[i, k] * weight[j, k]`` and multiplied by ``scale[i] * scale[j]``
afterwards, so that no scale depends on another row: what a row gives hangs on its batch no more than it did before.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, eq=False)
class Fp8Matrix:
    """A product with ``weight`` e4m3 [out, in] times ``scale`` float32 [1, out], plus ``bias`` [out]."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Fp8Matrix:
        """Of a ``weight`` [out, in] of any float type."""
        rows = quantize(weight)
        return cls(rows.values, rows.scale.t().contiguous(), bias)

    def dequantized(self) -> Tensor:
        """float32 [out, in]."""
        return self.weight.float() * self.scale.t()


def quantize(x: Tensor) -> QuantizedRows:
    """The rows of ``x`` [rows, channels] in e4m3: each scaled so that its largest value becomes 448."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    factor = torch.full_like(largest, LARGEST) / largest  # a number over a tensor would be rounded twice
    values = (wide * factor).clamp(-LARGEST, LARGEST).to(E4M3)
    return QuantizedRows(values, largest * (1 / LARGEST))


def product(x: QuantizedRows, matrix: Fp8Matrix, dtype: torch.dtype) -> Tensor:
    """[rows, out] in ``dtype`` (bfloat16), on the tensor cores of a GPU that :func:`why_not` has nothing against."""
    if not x.values.shape[0]:
        return x.scale.new_empty(0, matrix.weight.shape[0], dtype=dtype)
    return torch._scaled_mm(
        x.values,
        matrix.weight.t(),
        scale_a=x.scale,
        scale_b=matrix.scale,
        bias=matrix.bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def reference_product(x: QuantizedRows, matrix: Fp8Matrix, dtype: torch.dtype) -> Tensor:
    """What :func:`product` computes, of dequantized operands in float32, on any device."""
    out = x.dequantized() @ matrix.dequantized().t()
    return (out if matrix.bias is None else out + matrix.bias.float()).to(dtype)


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
    """Why :func:`product` does not run for activations of ``dtype`` on ``device``; None where it does."""
    reason = why_no_products(device)
    if reason is not None:
        return reason
    if dtype != torch.bfloat16:
        return f"its activations are bfloat16, not {str(dtype).removeprefix('torch.')}"
    return None
