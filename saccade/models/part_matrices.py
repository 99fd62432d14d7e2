"""Matrices that several ranks multiply by together, each with a part: what joins the parts of their products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from saccade.ops.fp8 import QuantizedRows
from saccade.ops.matrices import Matrix, PartMatrix
from saccade.selection.head_part import WHOLE, HeadPart


class Ranks(Protocol):
    """What joins the ranks of a model; each calls the same, for tensors of one shape and dtype, in the same order."""

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, in the dtype of ``part``."""

    def gather(self, part: Tensor) -> list[Tensor]:
        """All ranks' parts, in the order of ranks."""


Joined = Callable[[], Ranks]  # asked for at each product: parts are made before ranks have met
Share = tuple[int, int]  # which of how many equal ones of the channels that a part is given are its own


class SummedMatrix(PartMatrix):
    """A rank's part of a matrix along its channels: what the parts of all ranks make is added up. Where rows and
    weights have 8 bits each rank scales its own channels."""

    def __init__(self, part: Matrix, joined: Joined, share: Share = (0, 1)) -> None:
        super().__init__(part)
        self._joined, self._share = joined, share

    def through(self, product: Callable[[Any, Matrix], Tensor], x: Any) -> Tensor:
        """See :class:`PartMatrix`."""
        return self._joined().sum(product(_own_channels(x, self._share), self.part))

    def around(self, part: Matrix) -> SummedMatrix:
        """See :class:`PartMatrix`."""
        return SummedMatrix(part, self._joined, self._share)


class GatheredMatrix(PartMatrix):
    """A rank's outputs of a matrix whose channels the ranks make together: they are gathered before the product, as its
    outputs are behind it, so that a product is that of the whole matrix, bit for bit. ``made``: outputs of all ranks;
    ``share``: as of :class:`SummedMatrix`; ``heads``: which ones the channels are of, where they are heads'."""

    def __init__(self, part: Matrix, made: int, joined: Joined, share: Share = (0, 1), heads: HeadPart = WHOLE) -> None:
        super().__init__(part)
        self._made, self._joined, self._share, self._heads = made, joined, share, heads

    @property
    def made(self) -> int:
        """See :class:`Matrix`."""
        return self._made

    def through(self, product: Callable[[Any, Matrix], Tensor], x: Any) -> Tensor:
        """See :class:`PartMatrix`: ``x`` has this rank's channels, the product the outputs of all ranks."""
        ranks, own = self._joined(), _own_channels(x, self._share)
        return torch.cat(ranks.gather(product(self._heads.join(ranks.gather(own), 1), self.part)), 1)

    def around(self, part: Matrix) -> GatheredMatrix:
        """See :class:`PartMatrix`."""
        return GatheredMatrix(part, self._made, self._joined, self._share, self._heads)


class VocabularyMatrix(PartMatrix):
    """A rank's part of a head, or of an embedding, by its tokens, the last one's filled up to as many. All ranks'
    logits are gathered, and rows that a rank does not have come from the one that does, so that all have the same.
    ``made``: tokens of all parts; ``first``: this one's."""

    def __init__(self, part: Matrix, first: int, made: int, joined: Joined) -> None:
        super().__init__(part)
        self._first, self._made, self._joined = first, made, joined

    @property
    def made(self) -> int:
        """See :class:`Matrix`."""
        return self._made

    def through(self, product: Callable[[Any, Matrix], Tensor], x: Any) -> Tensor:
        """See :class:`PartMatrix`."""
        return torch.cat(self._joined().gather(product(x, self.part)), 1)[:, : self._made]

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`Matrix`."""
        own = ids - self._first
        here = (own >= 0) & (own < self.part.outputs)
        found = self.part.rows(own.clamp(0, self.part.outputs - 1), dtype)
        return self._joined().sum(torch.where(here[:, None], found, 0))

    def around(self, part: Matrix) -> VocabularyMatrix:
        """See :class:`PartMatrix`."""
        return VocabularyMatrix(part, self._first, self._made, self._joined)


def _own_channels(x: Any, share: Share) -> Any:
    number, parts = share
    if parts == 1:
        return x
    if isinstance(x, QuantizedRows):  # whose scales are of all channels
        return x._replace(values=x.values.chunk(parts, 1)[number].contiguous())
    return x.chunk(parts, 1)[number]
