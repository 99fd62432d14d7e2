"""Weights in blocks along their rows, as GGUF files hold them (ggml-common.h): few bits a weight, and a scale for every
block. Here they are multiplied as they lie, dequantised a piece of one matrix at a time; a CPU's kernels have them in
planes (``ops.planes``), a GPU's in tiles (``ops.tile_weights``).

A format is a subclass here, which says what every weight is worth. Kernels that read its blocks (csrc/plane_blocks.h,
``ops.tile_weights``) equal it bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from saccade.ops.dequantised import DequantisedMatrix


class BlockParts(NamedTuple):
    """What n blocks hold. A weight is ``scale * factor * (code - zero) - least * minimum``, in float32, where the last
    product but one of these is exact: a product of at most 24 bits."""

    codes: Tensor  # uint8 [n, block]
    scale: Tensor  # float16 or bfloat16 [n, 1]
    factors: Tensor | None = None  # uint8 or int8 [n, groups]: of each run of channels; None: 1
    least: Tensor | None = None  # float16 [n, 1]; None: nothing is taken off
    minima: Tensor | None = None  # uint8 [n, groups]; None: 1


class BlockMatrix(DequantisedMatrix):
    """``weight`` uint8 [outputs, bytes]: every row a whole number of blocks. ``bias`` in the activations' dtype."""

    block: ClassVar[int]  # weights
    block_bytes: ClassVar[int]
    zero: ClassVar[int] = 0  # what is taken off a code

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.channels = weight.shape[1] // self.block_bytes * self.block

    def like(self, stored: Sequence[Tensor], bias: Tensor | None) -> BlockMatrix:
        """See :class:`Matrix`."""
        return type(self)(stored[0], bias)

    @staticmethod
    def parts(blocks: Tensor) -> BlockParts:
        """Of ``blocks`` uint8 [n, block_bytes]. Codes that stand for numbers of a table are those numbers, plus 128."""
        raise NotImplementedError

    @classmethod
    def values(cls, blocks: Tensor) -> Tensor:
        """float32 [n, block] of ``blocks`` uint8 [n, block_bytes]."""
        codes, scale, factors, least, minima = cls.parts(blocks)
        scales = scale.float() if factors is None else scale.float() * factors.float()
        made = _scaled(codes.float() - cls.zero, scales)
        if least is None:
            return made
        off = least.float() if minima is None else least.float() * minima.float()
        return made - off.repeat_interleave(made.shape[1] // off.shape[1], 1)

    def dequantised(self, which: Tensor | slice) -> Tensor:
        """See :class:`DequantisedMatrix`."""
        rows = self.weight[which]
        return self.values(rows.reshape(-1, self.block_bytes)).view(rows.shape[0], self.channels)


def _half(blocks: Tensor, at: int) -> Tensor:
    """float16 [n, 1]: the numbers at byte ``at`` of each block."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _fields(stored: Tensor, bits: int, run: int) -> Tensor:
    """uint8 [n, 8 / bits * bytes] of ``stored`` uint8 [n, bytes], whose bytes hold fields of ``bits`` each: of every
    ``run`` bytes first all lowest fields, then all next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=stored.device)
    apart = stored.unflatten(1, (-1, 1, run)) >> shifts[:, None]
    return (apart & ((1 << bits) - 1)).flatten(1)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    """``values`` [n, block], each run of ``block / groups`` times its one of ``scales`` [n, groups]."""
    return (values.unflatten(1, (scales.shape[1], -1)).float() * scales[..., None]).flatten(1)


class Q4_0(BlockMatrix):
    """32 numbers of 4 bits, less 8, behind a float16 by which they are multiplied."""

    format = "Q4_0"
    block = 32
    block_bytes = 18
    zero = 8

    @staticmethod
    def parts(blocks: Tensor) -> BlockParts:
        """See :class:`BlockMatrix`."""
        return BlockParts(_fields(blocks[:, 2:], 4, 16), _half(blocks, 0))


class Q4_1(BlockMatrix):
    """32 numbers of 4 bits behind a float16 by which they are multiplied, and one that is added."""

    format = "Q4_1"
    block = 32
    block_bytes = 20

    @staticmethod
    def parts(blocks: Tensor) -> BlockParts:
        """See :class:`BlockMatrix`."""
        return BlockParts(_fields(blocks[:, 4:], 4, 16), _half(blocks, 0), least=-_half(blocks, 2))


class Q5_0(BlockMatrix):
    """As :class:`Q4_0`, with a fifth bit of each number, less 16."""

    format = "Q5_0"
    block = 32
    block_bytes = 22
    zero = 16

    @staticmethod
    def parts(blocks: Tensor) -> BlockParts:
        """See :class:`BlockMatrix`."""
        codes = _fields(blocks[:, 6:], 4, 16) | _fields(blocks[:, 2:6], 1, 1) << 4
        return BlockParts(codes, _half(blocks, 0))


class Q5_1(BlockMatrix):
    """As :class:`Q4_1`, with a fifth bit of each number."""

    format = "Q5_1"
    block = 32
    block_bytes = 24

    @staticmethod
    def parts(blocks: Tensor) -> BlockParts:
        """See :class:`BlockMatrix`."""
        codes = _fields(blocks[:, 8:], 4, 16) | _fields(blocks[:, 4:8], 1, 1) << 4
        return BlockParts(codes, _half(blocks, 0), least=-_half(blocks, 2))


class Q8_0(BlockMatrix):
    """32 signed bytes behind a float16 by which they are multiplied."""

    format = "Q8_0"
    block = 32
    block_bytes = 34
    zero = 128

    @staticmethod
    def parts(blocks: Tensor) -> BlockParts:
        """See :class:`BlockMatrix`."""
        return BlockParts(blocks[:, 2:] ^ 128, _half(blocks, 0))  # a signed byte, plus 128


class Q2_K(BlockMatrix):
    """16 groups of 16 numbers of 2 bits: times a scale, less a minimum, each a float16 times 4 bits."""

    format = "Q2_K"
    block = 256
    block_bytes = 84

    @staticmethod
    def parts(blocks: Tensor) -> BlockParts:
        """See :class:`BlockMatrix`."""
        packed, codes = blocks[:, :16], _fields(blocks[:, 16:80], 2, 32)
        return BlockParts(codes, _half(blocks, 80), packed & 15, _half(blocks, 82), packed >> 4)


class Q3_K(BlockMatrix):
    """16 groups of 16 numbers of 3 bits, less 4: times a scale, a float16 times 6 bits less 32."""

    format = "Q3_K"
    block = 256
    block_bytes = 110
    zero = 4

    @staticmethod
    def parts(blocks: Tensor) -> BlockParts:
        """See :class:`BlockMatrix`."""
        scales = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
        codes = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
        return BlockParts(codes, _half(blocks, 108), scales.view(torch.int8) - 32)


def _scales_and_minima(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Two uint8 [n, 8] of uint8 [n, 12]: eight scales and eight minima of 6 bits, the upper two of half of them in
    what the bytes of the others leave free."""
    low, least, rest = stored.split(4, dim=1)
    scales = torch.cat([low & 63, rest & 15 | low >> 2 & 48], 1)
    return scales, torch.cat([least & 63, rest >> 4 | least >> 2 & 48], 1)


class Q4_K(BlockMatrix):
    """8 groups of 32 numbers of 4 bits: times a scale, less a minimum, each a float16 times 6 bits."""

    format = "Q4_K"
    block = 256
    block_bytes = 144

    @staticmethod
    def parts(blocks: Tensor) -> BlockParts:
        """See :class:`BlockMatrix`."""
        scales, minima = _scales_and_minima(blocks[:, 4:16])
        return BlockParts(_fields(blocks[:, 16:], 4, 32), _half(blocks, 0), scales, _half(blocks, 2), minima)


class Q5_K(BlockMatrix):
    """As :class:`Q4_K`, with a fifth bit of each number."""

    format = "Q5_K"
    block = 256
    block_bytes = 176

    @staticmethod
    def parts(blocks: Tensor) -> BlockParts:
        """See :class:`BlockMatrix`."""
        scales, minima = _scales_and_minima(blocks[:, 4:16])
        codes = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
        return BlockParts(codes, _half(blocks, 0), scales, _half(blocks, 2), minima)


class Q6_K(BlockMatrix):
    """16 groups of 16 numbers of 6 bits, less 32: times a scale, a float16 times a signed byte."""

    format = "Q6_K"
    block = 256
    block_bytes = 210
    zero = 32

    @staticmethod
    def parts(blocks: Tensor) -> BlockParts:
        """See :class:`BlockMatrix`."""
        codes = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
        return BlockParts(codes, _half(blocks, 208), blocks[:, 192:208].contiguous().view(torch.int8))


_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the numbers of 4-bit floats


def _looked_up(codes: Tensor, table: tuple[int, ...]) -> Tensor:
    """uint8 of ``codes``, numbers of the entries of ``table``: what these say, plus 128."""
    return _on(table, codes.device)[codes.int()]


@functools.cache
def _on(table: tuple[int, ...], device: torch.device) -> Tensor:
    numbers = [one + 128 for one in table]
    return torch.tensor(numbers, dtype=torch.uint8, device=device)  # once: a GPU's recorded steps copy nothing


class IQ4_NL(BlockMatrix):
    """As :class:`Q4_0`, with numbers that stand for those of a table."""

    format = "IQ4_NL"
    block = 32
    block_bytes = 18
    zero = 128

    @staticmethod
    def parts(blocks: Tensor) -> BlockParts:
        """See :class:`BlockMatrix`."""
        return BlockParts(_looked_up(_fields(blocks[:, 2:], 4, 16), _NONLINEAR), _half(blocks, 0))


class IQ4_XS(BlockMatrix):
    """8 groups of 32 numbers of 4 bits, of :class:`IQ4_NL`'s table: times a scale, a float16 times 6 bits less 32."""

    format = "IQ4_XS"
    block = 256
    block_bytes = 136
    zero = 128

    @staticmethod
    def parts(blocks: Tensor) -> BlockParts:
        """See :class:`BlockMatrix`."""
        factors = _fields(blocks[:, 4:8], 4, 1) | _fields(blocks[:, 2:4], 2, 1) << 4
        codes = _looked_up(_fields(blocks[:, 8:], 4, 16), _NONLINEAR)
        return BlockParts(codes, _half(blocks, 0), factors.to(torch.int8) - 32)


class MXFP4(BlockMatrix):
    """32 floats of 4 bits (E2M1) behind a power of two of 8 bits (E8M0): the Open Compute Project's MX formats, 1.0."""

    format = "MXFP4"
    block = 32
    block_bytes = 17
    zero = 128

    @staticmethod
    def parts(blocks: Tensor) -> BlockParts:
        """See :class:`BlockMatrix`."""
        power = blocks[:, :1].int()  # halved, as the table is doubled: below 2 it is subnormal
        bits = torch.where(power < 2, 0x20 << power.clamp(max=1), (power - 1) << 7).to(torch.int16)
        return BlockParts(_looked_up(_fields(blocks[:, 1:], 4, 16), _E2M1), bits.view(torch.bfloat16))


_KINDS = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4)
FORMATS: dict[str, type[BlockMatrix]] = {kind.__name__: kind for kind in _KINDS}  # by ggml's names
