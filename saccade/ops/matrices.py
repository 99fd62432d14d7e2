"""A weight matrix behind one interface: :class:`Matrix`, and a class for each format that it may be stored in. Plain
numbers are here; ``ops.fp8_weights``, ``ops.block_weights`` and ``ops.planes`` have the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from saccade.errors import SaccadeError
from saccade.ops import cpu
from saccade.ops.cpu_structs import STORAGE, address, native
from saccade.ops.layer_weights import HeadNorms


class RowPasses(Protocol):
    """What happens to rows between matrix products: ``ops.row_passes``, or ``ops.triton.rows`` on a GPU, where each is
    one launch that a graph can record. Rows come out as the matrices behind them take them."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Any: ...

    def rotate(self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None) -> None: ...

    def heads(self, attended: Tensor) -> Any: ...

    def gated(self, gate: Tensor, up: Tensor) -> Any: ...


class Matrix(ABC):
    """A product with ``weight`` [outputs, channels], stored as the class says, plus ``bias`` [outputs]."""

    format: str | None = None  # by which a model of such matrices is told from one of plain numbers
    weight: Tensor  # as it is stored, outputs first
    bias: Tensor | None
    channels: int

    @property
    def outputs(self) -> int:
        """Channels of a product."""
        return self.weight.shape[0]

    @property
    def made(self) -> int:
        """Columns of a product: outputs, those of other processes too where all of them have them."""
        return self.outputs

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads of the matrix."""
        return sum(one.nbytes for one in self.stored) + (0 if self.bias is None else self.bias.nbytes)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """What the matrix is made of, but for its bias: tensors with outputs first."""
        return (self.weight,)

    @abstractmethod
    def like(self, stored: Sequence[Tensor], bias: Tensor | None) -> Matrix:
        """A matrix of this kind that is made of other :attr:`stored` tensors."""

    @abstractmethod
    def product(self, x: Any) -> Tensor:
        """``x`` [rows, channels], as :meth:`passes` make it, times the matrix: [rows, outputs] in the dtype of the
        activations, on the matrix's device."""

    @abstractmethod
    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows ``ids`` int64 [n] of the weight, in ``dtype`` [n, channels]: an embedding's."""

    def split(self, widths: Sequence[int]) -> list[Matrix]:
        """Parts of so many outputs each, which share the memory of this one."""
        sizes = list(widths)
        biases = [None] * len(sizes) if self.bias is None else self.bias.split(sizes)
        parts = zip(*(one.split(sizes) for one in self.stored))
        return [self.like(part, bias) for part, bias in zip(parts, biases)]

    def native(self, dtype: torch.dtype) -> Any | None:
        """The matrix as the C++ kernels take it; None where they do not multiply activations of ``dtype`` by it. It
        holds addresses: the matrix must outlive it."""
        return None

    def passes(self, plain: RowPasses) -> RowPasses:
        """The passes whose rows :meth:`product` takes: ``plain``, unless it takes other rows than plain ones."""
        return plain

    def alike(self, other: Matrix) -> bool:
        """Whether :meth:`join` takes ``other`` behind this one."""
        return type(self) is type(other)

    @staticmethod
    def join(parts: Sequence[Matrix]) -> Matrix:
        """Matrices that are :meth:`alike`, of the same channels, as one, their outputs one after another."""
        return parts[0].like([torch.cat(same) for same in zip(*(part.stored for part in parts))], joined_bias(parts))


class PartMatrix(Matrix):
    """One process's ``part`` of a matrix that several multiply together. It has what the part has."""

    def __init__(self, part: Matrix) -> None:
        self.part = part
        self.format, self.weight, self.bias, self.channels = part.format, part.weight, part.bias, part.channels

    @abstractmethod
    def around(self, part: Matrix) -> Matrix:
        """The same of another ``part``, of the same channels."""

    @abstractmethod
    def through(self, product: Callable[[Any, Matrix], Tensor], x: Any) -> Tensor:
        """:meth:`product`, where ``product`` multiplies by a part."""

    def product(self, x: Any) -> Tensor:
        """See :class:`Matrix`."""
        return self.through(lambda rows, part: part.product(rows), x)

    def passes(self, plain: RowPasses) -> RowPasses:
        """See :class:`Matrix`."""
        return self.part.passes(plain)

    def like(self, stored: Sequence[Tensor], bias: Tensor | None) -> Matrix:
        """See :class:`Matrix`."""
        return self.around(self.part.like(stored, bias))

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """See :class:`Matrix`."""
        return self.part.stored

    @property
    def outputs(self) -> int:
        """Those of this process's part."""
        return self.part.outputs

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`Matrix`."""
        return self.part.rows(ids, dtype)


def joined_bias(parts: Sequence[Matrix]) -> Tensor | None:
    """[outputs] of all ``parts``, zeros of those that have none; None where none has."""
    if all(part.bias is None for part in parts):
        return None
    kept = next(part.bias for part in parts if part.bias is not None)
    return torch.cat([kept.new_zeros(part.outputs) if part.bias is None else part.bias for part in parts])


class GroupedMatrix(Matrix):
    """A matrix whose outputs lie together in groups of ``together``: ``weight`` [ceil(outputs / together), ...]. Parts
    of one begin at whole groups."""

    together: ClassVar[int]
    laid: ClassVar[str]  # what groups are called
    _outputs: int

    @property
    def outputs(self) -> int:
        """See :class:`Matrix`."""
        return self._outputs

    @abstractmethod
    def part(self, weight: Tensor, outputs: int, bias: Tensor | None) -> Matrix:
        """A matrix of this kind, and of the same channels, of other groups."""

    def like(self, stored: Sequence[Tensor], bias: Tensor | None) -> Matrix:
        """See :class:`Matrix`: of whole groups, or of as many outputs as ``bias`` has."""
        return self.part(stored[0], self.together * len(stored[0]) if bias is None else bias.numel(), bias)

    def alike(self, other: Matrix) -> bool:
        """See :class:`Matrix`: behind whole groups."""
        return super().alike(other) and self.outputs % self.together == 0

    def split(self, widths: Sequence[int]) -> list[Matrix]:
        """See :class:`Matrix`. SaccadeError where a part would begin within a group."""
        if any(width % self.together for width in widths[:-1]):
            raise SaccadeError(
                f"{self.format} in {self.laid} splits at multiples of {self.together} outputs; got {list(widths)}"
            )
        biases = [None] * len(widths) if self.bias is None else self.bias.split(list(widths))
        parts = self.weight.split([-(-width // self.together) for width in widths])
        return [self.part(*one) for one in zip(parts, widths, biases)]

    @staticmethod
    def join(parts: Sequence[Matrix]) -> Matrix:
        """See :class:`Matrix`. SaccadeError where one but the last has no whole groups."""
        first = parts[0]
        assert isinstance(first, GroupedMatrix)
        if any(part.outputs % first.together for part in parts[:-1]):
            raise SaccadeError(f"{first.format} in {first.laid} joins multiples of {first.together} outputs")
        weight, outputs = torch.cat([part.weight for part in parts]), sum(part.outputs for part in parts)
        return first.part(weight, outputs, joined_bias(parts))


class DenseMatrix(Matrix):
    """Plain numbers: ``weight`` [outputs, channels] in the dtype of the activations."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.channels = weight.shape[1]

    def like(self, stored: Sequence[Tensor], bias: Tensor | None) -> DenseMatrix:
        """See :class:`Matrix`."""
        return DenseMatrix(stored[0], bias)

    def product(self, x: Tensor) -> Tensor:
        """See :class:`Matrix`.

        For every number of rows it meets, torch keeps code and packed weights of a bfloat16 product on a CPU, some 4 MB
        a prompt length, for good. So rows are padded to one of eight numbers an octave, which costs 6 % on average.
        """
        rows = x.shape[0]
        if x.dtype != torch.bfloat16 or x.device.type != "cpu":
            return linear(x, self.weight, self.bias)
        return linear(pad(x, (0, 0, 0, padded_rows(rows) - rows)), self.weight, self.bias)[:rows]

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`Matrix`."""
        return self.weight[ids].to(dtype)

    def native(self, dtype: torch.dtype) -> Any | None:
        """See :class:`Matrix`."""
        if self.weight.dtype != dtype or not on_host(dtype, self.weight, self.bias):
            return None
        return native.RowMatrix(weight=address(self.weight), bias=address(self.bias), rows=self.outputs)


def on_host(dtype: torch.dtype, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the C++ kernels read these tensors as they lie, for activations of ``dtype``: contiguous, on the CPU, and
    the bias in ``dtype``, which is float32 or bfloat16."""
    if dtype not in STORAGE or not cpu.available() or (bias is not None and bias.dtype != dtype):
        return False
    return all(one.device.type == "cpu" and one.is_contiguous() for one in (weight, bias) if one is not None)


def padded_rows(rows: int) -> int:
    """``rows`` rounded up to four significant bits."""
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step
