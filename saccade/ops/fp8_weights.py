"""Weight matrices in e4m3 (``ops.fp8``), and the rows that they are multiplied with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.ops.fp8 import QuantizedRows, quantize
from saccade.ops.matrices import Matrix, RowPasses


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
