"""A band whose last rows read everything."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.selection.base import Band, Selection, Shape


@dataclass(frozen=True, eq=False)
class Tri(Selection):
    """A :class:`Band` of ``sinks`` and ``window`` for all rows but the last ``dense_rows`` of the call, which read
    every key up to their own."""

    shape: Shape
    window: int
    sinks: int = 0
    dense_rows: int = 0

    def __post_init__(self) -> None:
        if self.dense_rows < 0:
            raise SaccadeError(f"a tri selection needs dense_rows >= 0, got {self.dense_rows}")
        Band(self.shape, self.window, self.sinks)  # refuses a bad window and bad sinks

    @property
    def band(self) -> Band:
        return Band(self.shape, window=self.window, sinks=self.sinks)

    @property
    def band_rows(self) -> int:
        """Rows of this call that keep to the band."""
        return max(0, self.shape.q_len - self.dense_rows)

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        dense = torch.arange(self.shape.q_len, device=self.shape.device)[start:stop, None] >= self.band_rows
        return (self.band.row_mask(unit, start, stop) | dense) & self.shape.causal_mask(start, stop)

    def unit_pairs(self) -> Tensor:
        visible = self.shape.rows + 1
        banded = visible.clamp(max=self.window) + (visible - self.window).clamp(0, self.sinks)
        rows = torch.arange(self.shape.q_len, device=visible.device)
        return torch.where(rows < self.band_rows, banded, visible).sum()[None]

    def row_pairs(self, starts: Tensor, sinks: int) -> Tensor:
        """As of :class:`Band`."""
        everything = Band(self.shape, window=self.shape.k_len)
        banded = torch.arange(self.shape.q_len, device=starts.device) < self.band_rows
        return torch.where(banded, self.band.row_pairs(starts, sinks), everything.row_pairs(starts, sinks))

    def _merge_same(self, other: Selection) -> Selection | None:
        if not isinstance(other, (Tri, Band)):
            return None
        dense_rows = other.dense_rows if isinstance(other, Tri) else 0
        # One of two bands must contain the other, or the union's corner is no band; the larger dense tail holds both.
        if (self.window - other.window) * (self.sinks - other.sinks) < 0:
            return None
        window, sinks = max(self.window, other.window), max(self.sinks, other.sinks)
        return Tri(self.shape, window, sinks, max(self.dense_rows, dense_rows))
