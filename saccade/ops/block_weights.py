"""Weights in blocks along their rows, as GGUF files hold them (ggml's docs/gguf.md): few bits a weight, and a scale for
every block. They are multiplied as they lie; what is dequantised on the way is a piece of one matrix.

A format is a subclass here, a struct of csrc/block_weights.h and a branch of ``ops.triton.block_products``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.ops import triton
from saccade.ops.cpu_structs import address, native
from saccade.ops.matrices import DenseMatrix, Matrix, on_host

PIECE = 1 << 22  # weights that are dequantised at once for a product of many rows


class BlockMatrix(Matrix):
    """``weight`` uint8 [outputs, bytes]: every row a whole number of blocks. ``bias`` in the activations' dtype."""

    number: ClassVar[int]  # of the format in csrc/block_weights.h
    block: ClassVar[int]  # weights
    block_bytes: ClassVar[int]

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.channels = weight.shape[1] // self.block_bytes * self.block

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> BlockMatrix:
        """See :class:`Matrix`."""
        return cls(weight, bias)

    @staticmethod
    def values(blocks: Tensor) -> Tensor:
        """float32 [n, block] of ``blocks`` uint8 [n, block_bytes]."""
        raise NotImplementedError

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`Matrix`."""
        return self._dequantised(self.weight[ids]).to(dtype)

    def product(self, x: Tensor) -> Tensor:
        """See :class:`Matrix`."""
        if x.is_cuda and triton.available():
            from saccade.ops.triton import block_products  # needs Triton

            if block_products.serves(x):
                return block_products.product(x, self)
        step = max(1, PIECE // self.channels)
        out = x.new_empty(x.shape[0], self.outputs)
        for first in range(0, self.outputs, step):
            part = slice(first, first + step)
            bias = None if self.bias is None else self.bias[part]
            out[:, part] = DenseMatrix(self._dequantised(self.weight[part]).to(x.dtype), bias).product(x)
        return out

    def split(self, widths: Sequence[int]) -> list[Matrix]:
        """See :class:`Matrix`."""
        biases = [None] * len(widths) if self.bias is None else self.bias.split(list(widths))
        return [self.of(*part) for part in zip(self.weight.split(list(widths)), biases)]

    def native(self, dtype: torch.dtype) -> Any | None:
        """See :class:`Matrix`."""
        if not on_host(dtype, self.weight, self.bias):
            return None
        bias, number = address(self.bias), self.number
        return native.RowMatrix(weight=address(self.weight), bias=bias, rows=self.outputs, format=number)

    def _dequantised(self, rows: Tensor) -> Tensor:
        return self.values(rows.reshape(-1, self.block_bytes)).view(rows.shape[0], self.channels)


class Q8_0(BlockMatrix):
    """32 signed bytes behind a float16 by which they are multiplied."""

    format = "Q8_0"
    number = 1
    block = 32
    block_bytes = 34

    @staticmethod
    def values(blocks: Tensor) -> Tensor:
        """See :class:`BlockMatrix`."""
        scale = blocks[:, :2].contiguous().view(torch.float16).float()
        return blocks[:, 2:].contiguous().view(torch.int8).float() * scale


FORMATS: dict[str, type[BlockMatrix]] = {"Q8_0": Q8_0}  # by ggml's names
