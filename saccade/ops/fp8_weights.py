"""Weight matrices in e4m3 (``ops.fp8``), and the rows that they are multiplied with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.ops import triton
from saccade.ops.dequantised import DequantisedMatrix
from saccade.ops.fp8 import E4M3, MULTIPLE, QuantizedRows, quantize, why_no_products, why_not
from saccade.ops.matrices import Matrix, RowPasses

KERNEL_CHANNELS = 128  # that ops.triton.products reads at a time


class Fp8Matrix(Matrix):
    """``weight`` e4m3 [outputs, channels] times ``scale`` float32 [1, outputs]; activations in ``dtype``. Products run
    on the tensor cores of a GPU that ``fp8.why_not`` has nothing
    against or, as a ``reference``, in float32 of the
    dequantized operands, on any device."""

    format = "fp8"

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype, reference: bool = False
    ) -> None:
        self.weight, self.scale, self.bias = weight, scale, bias
        self.channels, self.dtype, self.reference = weight.shape[1], dtype, reference

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None, reference: bool = False) -> Fp8Matrix:
        """Of a ``weight`` [outputs, channels] of any float type, which the activations have, too."""
        rows = quantize(weight)
        return cls(rows.values, rows.scale.t().contiguous(), bias, weight.dtype, reference)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """See :class:`Matrix`."""
        return self.weight, self.scale.t()

    def like(self, stored: Sequence[Tensor], bias: Tensor | None) -> Fp8Matrix:
        """See :class:`Matrix`."""
        weight, scale = stored
        return Fp8Matrix(weight, scale.t(), bias, self.dtype, self.reference)

    def dequantized(self) -> Tensor:
        """float32 [outputs, channels]."""
        return self.weight.float() * self.scale.t()

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`Matrix`."""
        return (self.weight[ids].float() * self.scale.t()[ids]).to(dtype)

    def product(self, x: QuantizedRows) -> Tensor:
        """See :class:`Matrix`."""
        if not x.values.shape[0]:
            return x.scale.new_empty(0, self.outputs, dtype=self.dtype)
        if self.reference:
            out = x.dequantized() @ self.dequantized().t()
            return (out if self.bias is None else out + self.bias.float()).to(self.dtype)
        return torch._scaled_mm(
            x.values,
            self.weight.t(),
            scale_a=x.scale,
            scale_b=self.scale,
            bias=self.bias,
            out_dtype=self.dtype,
            use_fast_accum=True,
        )

    def passes(self, plain: RowPasses) -> RowPasses:
        """See :class:`Matrix`. They leave rows quantized."""
        if self.reference:
            return ReferencePasses(plain)
        from saccade.ops.triton import fp8  # needs Triton

        return fp8


class ScaledFp8Matrix(DequantisedMatrix):
    """``weight`` e4m3 [outputs, channels] times ``scales`` float32 [outputs, runs], one for ``width`` channels each, as
    checkpoints have them. Rows are multiplied as they are, in ``dtype``."""

    format = "F8_E4M3"

    def __init__(self, weight: Tensor, scales: Tensor, width: int, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.weight, self.scales, self.width, self.bias, self.dtype = weight, scales, width, bias, dtype
        self.channels = weight.shape[1]

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """See :class:`Matrix`: bytes, which all of torch's functions take."""
        return self.weight.view(torch.uint8), self.scales

    def like(self, stored: Sequence[Tensor], bias: Tensor | None) -> ScaledFp8Matrix:
        """See :class:`Matrix`."""
        weight, scales = stored
        return ScaledFp8Matrix(weight.view(E4M3), scales, self.width, bias, self.dtype)

    def alike(self, other: Matrix) -> bool:
        """See :class:`Matrix`."""
        return isinstance(other, ScaledFp8Matrix) and self.width == other.width

    def dequantised(self, which: Tensor | slice) -> Tensor:
        """See :class:`DequantisedMatrix`."""
        weight, scales = self.weight.view(torch.uint8)[which].view(E4M3).float(), self.scales[which]
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self.width, 1)[:, : self.channels]
        return weight * scales

    def product(self, x: Tensor) -> Tensor:
        """See :class:`Matrix`: few rows on a GPU by a kernel that reads the 8 bits, others by pieces in ``dtype``."""
        if not self.has_kernel:
            return super().product(x)
        from saccade.ops.triton import products  # needs Triton

        made = products.scaled(x, self)
        return super().product(x) if made is None else made

    @property
    def has_kernel(self) -> bool:
        """See :class:`DequantisedMatrix`: on a GPU with 8-bit floats, in blocks of whole ``KERNEL_CHANNELS``."""
        whole = self.scales.shape[1] == 1 or self.width % KERNEL_CHANNELS == 0
        return (
            whole
            and self.channels % KERNEL_CHANNELS == 0
            and self.weight.is_cuda
            and triton.available()
            and (why_no_products(self.weight.device) is None)
        )

    def multiplied(self) -> Fp8Matrix | None:
        """The same weights for products with rows in e4m3, too; None where those do not run."""
        odd = self.outputs % MULTIPLE or self.channels % MULTIPLE or self.scales.shape[1] > 1
        if odd or why_not(self.weight.device, self.dtype) is not None:
            return None
        return Fp8Matrix(self.weight, self.scales.t(), self.bias, self.dtype)


class ReferencePasses:
    """``plain`` passes, each rounded to the activations' type before it is quantized."""

    def __init__(self, plain: RowPasses) -> None:
        self._plain = plain
        self.rotate = plain.rotate

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> QuantizedRows:
        return quantize(self._plain.add_norm(hidden, delta, weight, epsilon))

    def gated(self, gate: Tensor, up: Tensor) -> QuantizedRows:
        return quantize(self._plain.gated(gate, up))

    def heads(self, attended: Tensor) -> QuantizedRows:
        return quantize(self._plain.heads(attended))
