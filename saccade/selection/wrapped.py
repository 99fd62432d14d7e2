"""Selections that change what another one says."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.selection.base import Selection, Shape


@dataclass(frozen=True, eq=False)
class Wrapped(Selection):
    """Says what ``inner`` says; subclasses change some of it. Pairs are counted from the rows' own masks."""

    inner: Selection

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        return self.inner.shape

    @property
    def units(self) -> int:
        return self.inner.units

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        return self.inner.row_mask(unit, start, stop)

    def row_bias(self, unit: int, start: int, stop: int) -> Tensor | None:
        return self.inner.row_bias(unit, start, stop)

    def unit_pairs(self) -> Tensor:
        rows, tile = self.shape.q_len, 256  # the whole mask may not fit in memory
        tiles = [(start, min(start + tile, rows)) for start in range(0, rows, tile)]
        return torch.stack([sum(self.row_mask(unit, *tile).sum() for tile in tiles) for unit in range(self.units)])  # type: ignore[misc]

    def check(self) -> None:
        self.inner.check()
