"""Blocks of which nothing is read, represented by their means."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from saccade.selection.wrapped import Wrapped


@dataclass(frozen=True, eq=False)
class Corrected(Wrapped):
    """What ``inner`` selects is read. Every full block of ``block_size`` keys (on a grid from position 0) that a row
    may see whole, and of which it reads nothing, counts as ``block_size`` keys like their mean key, with their mean
    value: a tail of order zero.

    Blocks with a key of ``gone`` (bool [units, m], keys that were evicted for any head of a unit) are not represented.
    As a selection it stands for what is read.
    """

    block_size: int
    gone: Tensor | None = None

    def unit_pairs(self) -> Tensor:
        return self.inner.unit_pairs()

    def even_pairs(self) -> int | None:
        return self.inner.even_pairs()
