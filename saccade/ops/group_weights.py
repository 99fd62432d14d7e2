"""Weights of 4 or 8 bits by groups of channels, as AWQ, GPTQ and compressed-tensors have them: scale * (code - zero),
an integer zero and a scale for each output and group. Held packed, two codes of 4 bits a byte.

Here they are dequantised in torch; a CPU's kernels have them in planes (``ops.planes``), under the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.ops.dequantised import DequantisedMatrix
from saccade.ops.matrices import Matrix

GROUPS = 128, 64, 32  # channels of a group
_SUFFIXES = {torch.float16: "", torch.bfloat16: "_BF16", torch.float32: "_F32"}


class GroupMatrix(DequantisedMatrix):
    """``weight`` uint8 [outputs, bytes], channel 2 i in the low half of byte i where codes are of 4 bits. ``scales``
    [outputs, groups] in the type that :attr:`format` says, ``zeros`` uint8 [outputs, groups]. ``bias`` in the
    activations' dtype."""

    bits: ClassVar[int]  # of a code
    group: ClassVar[int]  # channels

    def __init__(self, weight: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.scales, self.zeros, self.bias = weight, scales, zeros, bias
        self.channels = weight.shape[1] * 8 // self.bits

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """See :class:`Matrix`."""
        return self.weight, self.scales, self.zeros

    def like(self, stored: Sequence[Tensor], bias: Tensor | None) -> GroupMatrix:
        """See :class:`Matrix`."""
        weight, scales, zeros = stored
        return type(self)(weight, scales, zeros, bias)

    def codes(self, which: Tensor | slice = slice(None)) -> Tensor:
        """uint8 [n, channels] of the rows ``which``."""
        held = self.weight[which]
        return held if self.bits == 8 else torch.stack([held & 15, held >> 4], -1).flatten(1)

    def dequantised(self, which: Tensor | slice) -> Tensor:
        """See :class:`DequantisedMatrix`. Exact: code, zero and scale of 16 bits together have fewer than 24."""
        apart = self.codes(which).float().unflatten(1, (-1, self.group)) - self.zeros[which].float()[..., None]
        return (apart * self.scales[which].float()[..., None]).flatten(1)


# By name, as ``ops.planes`` names those that kernels read: all but the ones with scales of float32.
FORMATS: dict[str, type[GroupMatrix]] = {
    name: type(name, (GroupMatrix,), {"format": name, "bits": bits, "group": group, "__module__": __name__})
    for suffix in _SUFFIXES.values()
    for bits in (4, 8)
    for group in GROUPS
    for name in [f"INT{bits}_{group}{suffix}"]
}


def packed_codes(codes: Tensor, bits: int) -> Tensor:
    """``codes`` uint8 [outputs, channels] as :class:`GroupMatrix` holds them."""
    return codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4


def group_matrix(
    weight: Tensor, scales: Tensor, zeros: Tensor, bits: int, bias: Tensor | None = None, size: int | None = None
) -> GroupMatrix:
    """The matrix of ``weight`` uint8 [outputs, channels * bits / 8], which :func:`packed_codes` makes, ``scales``
    [outputs, groups] of float16, bfloat16 or float32 and ``zeros`` uint8 [outputs, groups]. A group has ``size``
    channels, the last one what is left: a multiple of 32, or -1 for all; by default all have the same. SaccadeError for
    other bits, types or shapes."""
    channels, count = weight.shape[1] * 8 // bits if bits in (4, 8) else 0, scales.shape[1]
    if size is None:
        size = channels // count if count and channels % count == 0 else 0
    size = channels if size == -1 else size
    group = next((one for one in GROUPS if size and channels and size % one == channels % one == 0), None)
    shape = (weight.shape[0], -(-channels // size) if group else 0)
    types = weight.dtype, scales.dtype in _SUFFIXES, zeros.dtype
    if group is None or types != (torch.uint8, True, torch.uint8) or shape != scales.shape or shape != zeros.shape:
        raise SaccadeError(
            f"weights by groups have codes of 4 or 8 bits, groups of multiples of 32 channels and scales of 16 or 32 "
            f"bits; got {bits} bits, {_said(weight)}, scales {_said(scales)} and zeros {_said(zeros)}"
        )
    if size != group:  # a scale and a zero for each part of a group are the same
        parts = torch.arange(0, channels, group, device=weight.device) // size
        scales, zeros = scales[:, parts], zeros[:, parts]
    return FORMATS[f"INT{bits}_{group}{_SUFFIXES[scales.dtype]}"](weight, scales, zeros, bias)


def by_groups(
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bits: int,
    bias: Tensor | None,
    size: int,
    which: Tensor | None,
) -> Matrix:
    """:func:`group_matrix` where ``which`` [channels], if it is given, numbers each channel's group: those of a group
    are brought together. SaccadeError where another number than ``size`` has one."""
    channels = weight.shape[1] * 8 // bits
    even = torch.arange(channels, device=weight.device) // (channels if size == -1 else size)
    if which is None or torch.equal(which.long(), even) or not bool((which > 0).any()):  # unset: all 0, or all -1
        return group_matrix(weight, scales, zeros, bits, bias, size)
    order = which.long().argsort(stable=True)
    if not torch.equal(which.long()[order], even):
        raise SaccadeError(f"g_idx has other groups than such of {size} channels")
    whole = group_matrix(weight, scales, zeros, bits, None, size)
    codes = packed_codes(whole.codes()[:, order].contiguous(), bits)
    return PermutedMatrix(group_matrix(codes, scales, zeros, bits, bias, size), order)


class PermutedMatrix(Matrix):
    """``inner``, whose channel i is channel ``order[i]`` (int64 [channels]) of this one: weights that were quantised in
    another order than they are multiplied in. No kernel that runs whole layers takes it."""

    def __init__(self, inner: Matrix, order: Tensor) -> None:
        self.inner, self.order = inner, order
        self.weight, self.bias, self.channels = inner.weight, inner.bias, inner.channels
        self.format = inner.format

    @property
    def outputs(self) -> int:
        """See :class:`Matrix`."""
        return self.inner.outputs

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """See :class:`Matrix`."""
        return self.inner.stored

    def like(self, stored: Sequence[Tensor], bias: Tensor | None) -> PermutedMatrix:
        """See :class:`Matrix`."""
        return PermutedMatrix(self.inner.like(stored, bias), self.order)

    def alike(self, other: Matrix) -> bool:
        """See :class:`Matrix`."""
        return (
            isinstance(other, PermutedMatrix) and self.inner.alike(other.inner) and torch.equal(self.order, other.order)
        )

    def split(self, widths: Sequence[int]) -> list[Matrix]:
        """See :class:`Matrix`."""
        return [PermutedMatrix(part, self.order) for part in self.inner.split(widths)]

    @staticmethod
    def join(parts: Sequence[Matrix]) -> Matrix:
        """See :class:`Matrix`."""
        held = [part for part in parts if isinstance(part, PermutedMatrix)]
        return PermutedMatrix(held[0].inner.join([part.inner for part in held]), held[0].order)

    def product(self, x: Tensor) -> Tensor:
        """See :class:`Matrix`."""
        return self.inner.product(x.index_select(1, self.order))

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`Matrix`."""
        return self.inner.rows(ids, dtype).index_select(1, self.order.argsort())


def _said(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
