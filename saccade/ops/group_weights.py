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


def group_matrix(weight: Tensor, scales: Tensor, zeros: Tensor, bits: int, bias: Tensor | None = None) -> GroupMatrix:
    """The matrix of ``weight`` uint8 [outputs, channels * bits / 8], which :func:`packed_codes` makes, ``scales``
    [outputs, groups] of float16, bfloat16 or float32 and ``zeros`` uint8 [outputs, groups]. A group is of any multiple
    of 32 channels, or all. SaccadeError for other bits, types or shapes."""
    channels, groups = weight.shape[1] * 8 // bits if bits in (4, 8) else 0, scales.shape[1]
    size = channels // groups if groups and channels % groups == 0 else 0
    group = next((one for one in GROUPS if size and size % one == 0), None)
    shape = (weight.shape[0], groups)
    types = weight.dtype, scales.dtype in _SUFFIXES, zeros.dtype
    if group is None or types != (torch.uint8, True, torch.uint8) or shape != scales.shape or shape != zeros.shape:
        raise SaccadeError(
            f"weights by groups have codes of 4 or 8 bits, groups of multiples of 32 channels and scales of 16 or 32 "
            f"bits; got {bits} bits, {_said(weight)}, scales {_said(scales)} and zeros {_said(zeros)}"
        )
    if size != group:  # a scale and a zero for each part of a group are the same
        scales, zeros = (one.repeat_interleave(size // group, 1) for one in (scales, zeros))
    return FORMATS[f"INT{bits}_{group}{_SUFFIXES[scales.dtype]}"](weight, scales, zeros, bias)


def _said(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
