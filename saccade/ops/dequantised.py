"""Matrices that are multiplied by torch: what is stored of them is dequantised a piece at a time, for any device."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from saccade.ops.matrices import DenseMatrix, Matrix

PIECE = 1 << 22  # weights that are dequantised at once for a product of many rows


class DequantisedMatrix(Matrix):
    """A format's reference: a subclass says what every weight is worth."""

    @abstractmethod
    def dequantised(self, which: Tensor | slice) -> Tensor:
        """float32 [n, channels] of the rows ``which`` of the weight, rounded as the format's own dequantiser does."""

    @property
    def has_kernel(self) -> bool:
        """Whether products of few rows are made by a kernel that reads the numbers as they are stored."""
        return False

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`Matrix`."""
        return self.dequantised(ids).to(dtype)

    def product(self, x: Tensor) -> Tensor:
        """See :class:`Matrix`."""
        step = max(1, PIECE // self.channels)
        out = x.new_empty(x.shape[0], self.outputs)
        for first in range(0, self.outputs, step):
            part = slice(first, first + step)
            bias = None if self.bias is None else self.bias[part]
            out[:, part] = DenseMatrix(self.dequantised(part).to(x.dtype), bias).product(x)
        return out
