"""Quantised weights as a GPU's kernels read them (``ops.triton.tile_products``): tiles of 64 outputs, of which what a
program reads at a time lies together. They are packed once, as they are loaded, and are worth what their format says,
to the bit, but that MXFP4's two least scales, which are subnormal (below 2 ** -126), may count as 0.

A tile is a run of bytes: codes, further bits of codes, scales, what is taken off, factors of scales, factors of what is
taken off, codes of 0; each section begins where the one before it ends. Codes of 4 or 8 bits lie in words of 16: bit
field f of the word of output o and lane c is the code of channel ``part * f + c``, and a word's fields are a span's or
a part of them. So a mask and a shift of two words at once make operands of the tensor cores, which no other order of
4-bit codes allows. Fifth and sixth bits lie alike, in words of their own. Scales lie by groups of channels, 64 outputs
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.ops import triton
from saccade.ops.block_weights import FORMATS as BLOCKS
from saccade.ops.block_weights import BlockMatrix, BlockParts
from saccade.ops.group_weights import FORMATS as GROUPS
from saccade.ops.group_weights import GroupMatrix
from saccade.ops.matrices import DenseMatrix, GroupedMatrix, Matrix

TILE = 64  # outputs
WORD = 16  # bits
PIECE = 1 << 24  # weights that are packed or unpacked at once


@dataclass(frozen=True)
class Layout:
    """What a format's tiles are. ``bits``, ``more``: of a code, 4 or 8 and 0 to 2 above them. ``part``: channels that
    have the same scales. ``group``: channels of a 16-bit scale. ``zero``: what is taken off a code. ``factors``: scales
    are times bytes, of a part each. ``least``: something is taken off a weight, ``minima``: times a byte of a part.
    ``zeros``: each group has a code of 0 of its own. ``kind``: of scales."""

    bits: int
    more: int
    part: int
    group: int
    zero: int
    factors: bool
    signed: bool
    least: bool
    minima: bool
    zeros: bool = False
    kind: torch.dtype = torch.float16

    @property
    def step(self) -> int:
        """Channels of the words of codes that are read at a time."""
        return WORD // self.bits * self.part

    @property
    def span(self) -> int:
        """Channels whose codes fill whole words of both kinds: one step, or several."""
        return max(self.step, WORD // self.more * self.part if self.more else 0)

    def sections(self, channels: int) -> list[int]:
        """Bytes of a tile's sections, in order."""
        padded = -(-channels // self.span) * self.span
        parts, scales = TILE * (padded // self.part), 2 * TILE * -(-padded // self.group)
        codes, more = TILE * padded * self.bits // 8, TILE * padded * self.more // 8
        own = [scales, scales * self.least, parts * self.factors, parts * self.minima, scales // 2 * self.zeros]
        return [codes, more, *own]


class TileMatrix(GroupedMatrix):
    """``weight`` uint8 [ceil(outputs / 64), bytes of a tile]; what fills up the last tile, and the last span, is 0.
    ``bias`` in the activations' dtype. A format is a subclass."""

    together, laid = TILE, "tiles"
    layout: ClassVar[Layout]

    def __init__(self, weight: Tensor, outputs: int, channels: int, bias: Tensor | None = None) -> None:
        self.weight, self.bias, self.channels, self._outputs = weight, bias, channels, outputs
        self.places = [0, *accumulate(self.layout.sections(channels)[:-1])]  # at which a tile's sections begin

    def part(self, weight: Tensor, outputs: int, bias: Tensor | None) -> TileMatrix:
        """See :class:`GroupedMatrix`."""
        return type(self)(weight, outputs, self.channels, bias)

    @staticmethod
    def of_weights(matrix: BlockMatrix | GroupMatrix) -> TileMatrix:
        """``matrix`` in tiles, on its device; a piece of it is taken apart at a time."""
        kind, channels, outputs = FORMATS[str(matrix.format)], matrix.channels, matrix.outputs
        size, device = sum(kind.layout.sections(channels)), matrix.weight.device
        weight = torch.empty(-(-outputs // TILE), size, dtype=torch.uint8, device=device)
        step = max(1, PIECE // channels // TILE)
        for first in range(0, len(weight), step):
            rows = slice(first * TILE, min((first + step) * TILE, outputs))
            weight[first : first + step] = kind._packed(matrix, rows)
        return kind(weight, outputs, channels, matrix.bias)

    @classmethod
    def _packed(cls, matrix: BlockMatrix | GroupMatrix, rows: slice) -> Tensor:
        """uint8 [tiles, bytes] of ``rows`` of ``matrix``."""
        layout, channels, count = cls.layout, matrix.channels, rows.stop - rows.start
        tiles, filled = -(-count // TILE), -(-channels // layout.span) * layout.span
        if isinstance(matrix, BlockMatrix):
            found, zeros = matrix.parts(matrix.weight[rows].reshape(-1, matrix.block_bytes)), None
        else:
            found, zeros = BlockParts(matrix.codes(rows), matrix.scales[rows]), matrix.zeros[rows]

        def laid(values: Tensor | None, each: int) -> Tensor:
            """[tiles, ceil(filled / each) * TILE] of ``values``, a number for ``each`` channels."""
            if values is None:
                return torch.empty(tiles, 0, dtype=torch.uint8, device=matrix.weight.device)
            values = values.reshape(count, -1)
            values = pad(values, (0, -(-filled // each) - values.shape[1], 0, tiles * TILE - count))
            together = max(1, layout.step // each)  # of an output
            return values.view(tiles, TILE, -1, together).transpose(1, 2).contiguous().view(tiles, -1)

        codes = pad(found.codes.reshape(count, -1), (0, filled - channels, 0, tiles * TILE - count))
        codes = codes.view(tiles, TILE, -1, layout.part).transpose(1, 2)  # [tiles, parts, TILE, part]
        sections = [
            _words(codes & ((1 << layout.bits) - 1), layout.bits),
            _words(codes >> layout.bits, layout.more) if layout.more else laid(None, 1),
            laid(found.scale, layout.group),
            laid(found.least, layout.group),
            laid(found.factors, layout.part),
            laid(found.minima, layout.part),
            laid(zeros, layout.group),
        ]
        return torch.cat([one.view(torch.uint8) for one in sections], 1)

    def product(self, x: Tensor) -> Tensor:
        """See :class:`Matrix`: by kernels that read the tiles, or, of many rows, by values of a piece at a time."""
        from saccade.ops.triton import tile_products  # needs Triton

        if tile_products.serves(x):
            return tile_products.product(x, self)
        out, step = x.new_empty(x.shape[0], self.outputs), max(1, PIECE // self.channels // TILE) * TILE
        for first in range(0, self.outputs, step):
            part = slice(first, min(first + step, self.outputs))
            bias = None if self.bias is None else self.bias[part]
            weight = tile_products.values(self, range(part.start, part.stop), x.dtype)
            out[:, part] = DenseMatrix(weight, bias).product(x)
        return out

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`Matrix`."""
        from saccade.ops.triton import tile_products  # needs Triton

        return tile_products.values(self, ids, dtype)


class TileExperts:
    """Matrices of one format and shape, one for each of a layer's experts, in one piece of memory: ``weight`` uint8
    [experts, tiles, bytes of a tile] and ``bias`` [experts, outputs], or None. ``matrices`` are its parts."""

    def __init__(self, matrices: Sequence[TileMatrix]) -> None:
        first = matrices[0]
        self.layout, self.weight = first.layout, torch.stack([one.weight for one in matrices])
        biases = [one.bias for one in matrices if one.bias is not None]
        self.bias = torch.stack(biases) if biases else None
        own: Sequence[Tensor | None] = [None] * len(matrices) if self.bias is None else self.bias.unbind()
        self.matrices = [
            first.part(weight, first.outputs, bias) for weight, bias in zip(self.weight.unbind(), own, strict=True)
        ]

    @property
    def first(self) -> TileMatrix:
        """One of them: all are as this one."""
        return self.matrices[0]

    @staticmethod
    def of(matrices: Sequence[Matrix]) -> TileExperts | None:
        """None for matrices that are in no tiles, or of several formats or shapes."""
        tiles = [one for one in matrices if isinstance(one, TileMatrix)]
        kinds = {(type(one), one.weight.shape, one.outputs, one.channels, one.bias is None) for one in tiles}
        return TileExperts(tiles) if len(tiles) == len(matrices) and len(kinds) == 1 else None

    def product(self, x: Tensor, chosen: Tensor, each: int = 1) -> Tensor:
        """Row ``i // each`` of ``x`` [rows, channels] times the matrix of expert ``chosen[i]`` (int64 [n]): [n,
        outputs], in one launch. The host need not know the experts. For few rows."""
        from saccade.ops.triton import tile_products  # needs Triton

        return tile_products.grouped(x, self, chosen, each)


def _words(codes: Tensor, bits: int) -> Tensor:
    """int16 [tiles, words]: of ``codes`` uint8 [tiles, parts, TILE, part], runs of 16 / bits parts in words."""
    fields = codes.unflatten(1, (-1, WORD // bits)).int()
    shifts = torch.arange(0, WORD, bits, device=codes.device)[:, None, None]
    return (fields << shifts).sum(2, dtype=torch.int32).to(torch.int16).flatten(1)


def _layout(kind: type[BlockMatrix], bits: int) -> Layout:
    blank = kind.parts(torch.zeros(1, kind.block_bytes, dtype=torch.uint8, device="cpu"))
    runs = 1 if blank.factors is None else blank.factors.shape[1]
    return Layout(
        bits=8 if bits == 8 else 4,
        more=max(0, bits - 4) if bits < 8 else 0,
        part=min(32, kind.block // runs),
        group=kind.block,
        zero=kind.zero,
        factors=blank.factors is not None,
        signed=blank.factors is not None and blank.factors.dtype == torch.int8,
        least=blank.least is not None,
        minima=blank.minima is not None,
        kind=blank.scale.dtype,
    )


_BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8}
_BITS |= {"Q2_K": 2, "Q3_K": 3, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6}
_BITS |= {"IQ4_NL": 8, "IQ4_XS": 8, "MXFP4": 8}  # numbers of tables: in tiles, twice the file's bytes
_KINDS = {"": torch.float16, "BF16": torch.bfloat16}  # of scales, by what an integer format's name ends with


def _layouts() -> dict[str, Layout]:
    found = {name: _layout(BLOCKS[name], bits) for name, bits in _BITS.items()}
    for name, kind in GROUPS.items():
        scales = _KINDS.get(name.partition("_")[2].partition("_")[2])
        if scales is not None:
            zero, plain = 1 << kind.bits - 1, {"factors": False, "signed": False, "least": False, "minima": False}
            found[name] = Layout(kind.bits, 0, 32, kind.group, zero, **plain, zeros=True, kind=scales)
    return found


FORMATS: dict[str, type[TileMatrix]] = {
    name: type(
        f"{name}Tiles",
        (TileMatrix,),
        {"format": name, "layout": layout, "__module__": __name__},
    )
    for name, layout in _layouts().items()
}


def tiled(matrix: Matrix) -> Matrix:
    """``matrix`` in tiles where it is in blocks or by groups, on a GPU whose kernels read them; or as it is."""
    served = isinstance(matrix, BlockMatrix | GroupMatrix) and str(matrix.format) in FORMATS
    return TileMatrix.of_weights(matrix) if served and matrix.weight.is_cuda and triton.available() else matrix  # type: ignore[arg-type]
