"""Quantised weights as the C++ kernels read them: rows in groups of 16, a lane of a vector each, scales before codes in
one stream (csrc/plane_formats.h). They are packed once, as they are loaded, and are worth what their format says, to
the bit.

A product of a few rows of bfloat16 takes these in 8 bits, a scale for 32 channels; rows of float32 as they are. Many
rows are multiplied by the weights in their own type, unpacked a piece at a time: by tiles (csrc/plane_tiles.h) on CPUs
with AMX, elsewhere by torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.ops import cpu
from saccade.ops.arena import Arena
from saccade.ops.block_weights import BlockMatrix
from saccade.ops.cpu_structs import STORAGE, address, native
from saccade.ops.dequantised import PIECE
from saccade.ops.group_weights import GroupMatrix, PermutedMatrix
from saccade.ops.matrices import DenseMatrix, GroupedMatrix, Matrix, on_host
from saccade.ops.tile_weights import tiled

GROUP = 16  # rows that lie together
PACKED = 1 << 23  # bytes that are packed at once: what a file's mapping takes of memory meanwhile
FEW_ROWS = 16  # up to which a product reads the planes; from more on it unpacks them


class PlaneMatrix(GroupedMatrix):
    """``weight`` uint8 [ceil(outputs / 16), bytes]; what fills up the last group is 0. ``bias`` in the activations'
    dtype. A format is a subclass."""

    together, laid = GROUP, "planes"
    number: ClassVar[int]  # of the format in csrc/plane_formats.h
    bits: ClassVar[int]  # of a code
    step: ClassVar[int]  # channels are a multiple of it
    _arena: Arena | None = None  # that the weight lies in

    def __init__(self, weight: Tensor, outputs: int, bias: Tensor | None = None) -> None:
        self.weight, self.bias, self._outputs = weight, bias, outputs
        self.channels = weight.shape[1] // native.plane_group_bytes(self.number, self.step) * self.step

    def part(self, weight: Tensor, outputs: int, bias: Tensor | None) -> PlaneMatrix:
        """See :class:`GroupedMatrix`."""
        return type(self)(weight, outputs, bias)

    @classmethod
    def of_codes(cls, codes: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None = None) -> PlaneMatrix:
        """A matrix scale * (code - zero), of INT formats: ``codes`` uint8 [outputs, channels], ``scales`` in the
        format's type and ``zeros`` uint8 [outputs, channels / step]. SaccadeError for tensors of other types or shapes,
        and for codes of more bits than the format's."""
        outputs, channels = codes.shape
        return cls.of_pieces(outputs, channels, [(codes, scales, zeros)], bias)

    @classmethod
    def of_pieces(
        cls, outputs: int, channels: int, pieces: Iterable[Sequence[Tensor]], bias: Tensor | None = None
    ) -> PlaneMatrix:
        """Of all rows in order, a piece at a time, whose memory may go when the next one is asked for: uint8 [n, bytes]
        of blocks, or codes, scales and zeros as :meth:`of_codes` takes them. All pieces but the last have whole groups
        of 16 rows."""
        groups, each, first, arena = -(-outputs // GROUP), native.plane_group_bytes(cls.number, channels), 0, _arena()
        weight = arena.room(groups * each).view(groups, each)
        for stored, *more in pieces:
            if more:
                cls._check(stored, *more)
            call = native.PackPlanes(
                format=cls.number,
                threads=torch.get_num_threads(),
                rows=stored.shape[0],
                channels=channels,
                stored=address(stored),
                planes=address(weight[first // GROUP :]),
                **dict(zip(("scales", "zeros"), map(address, more))),
            )
            native.pack_planes(call)
            first += stored.shape[0]
        made = cls(weight, outputs, bias)
        made._arena = arena
        return made

    @classmethod
    def _check(cls, codes: Tensor, scales: Tensor, zeros: Tensor) -> None:
        outputs, channels = codes.shape
        groups, kind = (outputs, channels // cls.step), torch.bfloat16 if "BF16" in str(cls.format) else torch.float16
        wanted = {"codes": (codes, torch.uint8, (outputs, groups[1] * cls.step))}
        wanted |= {"scales": (scales, kind, groups), "zeros": (zeros, torch.uint8, groups)}
        for name, (given, dtype, shape) in wanted.items():
            if given.dtype != dtype or tuple(given.shape) != shape:
                raise SaccadeError(
                    f"{cls.format} takes {name} of {dtype} {list(shape)}; got {given.dtype} {list(given.shape)}"
                )
        if int(codes.max()) >> cls.bits:
            raise SaccadeError(f"{cls.format} takes codes below {1 << cls.bits}; got {int(codes.max())}")

    @staticmethod
    def of_blocks(matrix: BlockMatrix, read: Callable[[Tensor], None] = lambda part: None) -> PlaneMatrix:
        """``matrix`` in planes. ``read`` is given each part of its weight when it is packed."""
        weight = matrix.weight.contiguous()

        def pieces() -> Iterator[Sequence[Tensor]]:
            for part in weight.split(whole_groups(weight.shape[1])):
                yield (part,)
                read(part)

        return FORMATS[str(matrix.format)].of_pieces(matrix.outputs, matrix.channels, pieces(), matrix.bias)

    def product(self, x: Tensor) -> Tensor:
        """See :class:`Matrix`."""
        few, own = x.shape[0] <= FEW_ROWS, self.native(x.dtype)
        if own is not None and (few or (x.dtype == torch.bfloat16 and cpu.kernels().has_many_rows)):
            x, out = x.contiguous(), x.new_empty(x.shape[0], self.outputs)
            call = native.ProductRows(
                threads=torch.get_num_threads(),
                storage=STORAGE[x.dtype],
                rows=x.shape[0],
                channels=self.channels,
                x=address(x),
                matrix=own,
                out=address(out),
            )
            (cpu.kernels().product_rows if few else cpu.kernels().many_rows)(call)
            return out
        pieces = -(-self.outputs * self.channels // PIECE)
        step = -(-self.outputs // pieces // GROUP) * GROUP
        if step >= self.outputs:
            return DenseMatrix(self._values(x.dtype, self.outputs, first=0), self.bias).product(x)
        out = x.new_empty(x.shape[0], self.outputs)
        for first in range(0, self.outputs, step):
            part = slice(first, min(first + step, self.outputs))
            bias = None if self.bias is None else self.bias[part]
            out[:, part] = DenseMatrix(self._values(x.dtype, part.stop - first, first=first), bias).product(x)
        return out

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`Matrix`."""
        ids = ids.long().contiguous()
        return self._values(dtype, ids.numel(), ids=address(ids))

    def _values(self, dtype: torch.dtype, count: int, **which: int) -> Tensor:
        kind = dtype if dtype in STORAGE else torch.float32
        out = torch.empty(count, self.channels, dtype=kind, device="cpu")
        call = native.PlaneRows(
            threads=torch.get_num_threads(),
            storage=STORAGE[kind],
            matrix=self._native(None),
            channels=self.channels,
            count=count,
            out=address(out),
            **which,
        )
        cpu.kernels().plane_rows(call)
        return out.to(dtype)

    def native(self, dtype: torch.dtype) -> Any | None:
        """See :class:`Matrix`."""
        return self._native(address(self.bias)) if on_host(dtype, self.weight, self.bias) else None

    def _native(self, bias: int | None) -> Any:
        weight, number = address(self.weight), self.number
        return native.RowMatrix(weight=weight, bias=bias or 0, rows=self.outputs, format=number)


# By name. INT: int4 and int8 of AWQ, GPTQ and compressed-tensors, by the channels of a group, with scales of float16 or
# bfloat16. None without the kernels.
FORMATS: dict[str, type[PlaneMatrix]] = {
    name: type(
        f"{name}Planes",
        (PlaneMatrix,),
        {"format": name, "number": number, "bits": bits, "step": step, "__module__": __name__},
    )
    for number, (name, bits, step) in enumerate([] if native is None else native.plane_formats(), 1)
}


_last_arena: list[weakref.ref[Arena]] = []


def _arena() -> Arena:
    """Where the next matrix lies: behind the one before, as long as a matrix there is still in use."""
    found = _last_arena[0]() if _last_arena else None
    if found is None:
        found = Arena()
        _last_arena[:] = [weakref.ref(found)]
    return found


def packed(matrix: Matrix, read: Callable[[Tensor], None] = lambda part: None) -> Matrix:
    """``matrix``, in blocks or by groups, as the kernels of its device read it: in planes on a CPU, in tiles on a GPU.
    Others as they are. ``read`` is given each part of its weight when it is packed."""
    if isinstance(matrix, PermutedMatrix):
        return PermutedMatrix(packed(matrix.inner, read), matrix.order)
    if matrix.weight.device.type == "cpu" and cpu.available():
        if isinstance(matrix, BlockMatrix):
            return PlaneMatrix.of_blocks(matrix, read)
        if isinstance(matrix, GroupMatrix) and matrix.format in FORMATS:
            pieces = _pieces(matrix, read)
            return FORMATS[matrix.format].of_pieces(matrix.outputs, matrix.channels, pieces, matrix.bias)
    return tiled(matrix)


def whole_groups(row: int) -> int:
    """Rows of ``row`` bytes that are packed at once: whole groups of 16."""
    return max(GROUP, PACKED // row // GROUP * GROUP)


def _pieces(matrix: GroupMatrix, read: Callable[[Tensor], None]) -> Iterator[Sequence[Tensor]]:
    step = whole_groups(matrix.channels)
    for first in range(0, matrix.outputs, step):
        part = slice(first, first + step)
        yield matrix.codes(part).contiguous(), matrix.scales[part].contiguous(), matrix.zeros[part].contiguous()
        read(matrix.weight[part])


def give_back(mapped: Tensor) -> None:
    """Let go of the pages of ``mapped``, part of a private mapping of a file to which nothing was written. Who reads
    them again reads the file, or the system's cache of it."""
    if cpu.available():
        native.drop_pages(address(mapped), mapped.nbytes)
