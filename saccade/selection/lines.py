"""Vertical and slash lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.selection.base import Selection, Shape
from saccade.selection.csr import check_below, check_csr, offsets_of, offsets_of_lists


@dataclass(frozen=True, eq=False)
class Lines(Selection):
    """Vertical lines (key columns) and slash lines (distances ``p - i``), the same for all rows of the call.

    ``v_offsets`` / ``s_offsets`` int64 [units + 1]; ``columns`` / ``distances`` int32, sorted and unique per unit;
    entries behind the last offset mean nothing, as those of :class:`Blocks`.
    """

    shape: Shape
    v_offsets: Tensor
    columns: Tensor
    s_offsets: Tensor
    distances: Tensor

    @property
    def units(self) -> int:
        return self.v_offsets.numel() - 1

    @classmethod
    def from_lists(cls, shape: Shape, columns: Sequence[Tensor], distances: Sequence[Tensor]) -> Lines:
        """From one list of columns and one of distances per unit, sorted and made unique here."""
        if len(columns) != len(distances):
            raise SaccadeError(f"{len(columns)} column lists but {len(distances)} distance lists")
        vertical = [torch.unique(part.to(torch.int32)) for part in columns]
        slash = [torch.unique(part.to(torch.int32)) for part in distances]
        return cls(
            shape,
            offsets_of_lists(vertical, vertical[0].device),
            torch.cat(vertical),
            offsets_of_lists(slash, slash[0].device),
            torch.cat(slash),
        )

    @classmethod
    def from_masks(cls, shape: Shape, columns: Tensor, distances: Tensor) -> Lines:
        """From bool [units, k_len] each: which columns and which distances."""
        vertical, slash = (mask.nonzero()[:, 1].to(torch.int32) for mask in (columns, distances))
        return cls(shape, offsets_of(columns.sum(1)), vertical, offsets_of(distances.sum(1)), slash)

    def unit_lines(self, unit: int) -> tuple[Tensor, Tensor]:
        """(columns, distances) of one unit, int64."""
        columns = self.columns[self.v_offsets[unit] : self.v_offsets[unit + 1]].long()
        distances = self.distances[self.s_offsets[unit] : self.s_offsets[unit + 1]].long()
        return columns, distances

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        # Acausal entries get distance -1, which indexes the spare last slot of is_distance.
        columns, distances = self.unit_lines(unit)
        device, keys = columns.device, self.shape.k_len
        rows = self.shape.to(device).rows[start:stop, None]
        distance = (rows - torch.arange(keys, device=device)[None, :]).clamp(min=-1)
        is_column = torch.zeros(keys, dtype=torch.bool, device=device)
        is_column[columns] = True
        is_distance = torch.zeros(keys + 1, dtype=torch.bool, device=device)
        is_distance[distances] = True
        return (is_column[None, :] & (distance >= 0)) | is_distance[distance]

    def unit_pairs(self) -> Tensor:
        first, end = self.shape.q_start, self.shape.q_start + self.shape.q_len
        column_of, columns = self._placed(self.v_offsets, self.columns)
        distance_of, distances = self._placed(self.s_offsets, self.distances)
        # A column c and a distance o cross at row c + o; count the crossings that fall on a row of this call.
        below = torch.zeros(self.units + 1, end + 1, dtype=torch.int32, device=distances.device)
        below[distance_of, distances + 1] = 1
        below = below.cumsum(1, dtype=torch.int32)  # distances below each number
        crossings = below[column_of, end - columns] - below[column_of, (first - columns).clamp(min=0)]
        own = _summed(end - columns.clamp(min=first) - crossings, self.v_offsets)
        return own + _summed(end - distances.clamp(min=first), self.s_offsets)

    def _placed(self, offsets: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Whose every entry is, and the entry: two int64 [entries]; what means nothing is 0 of one unit more. No number
        is read from the device."""
        unit = torch.searchsorted(offsets[1:], torch.arange(indices.numel(), device=offsets.device), right=True)
        return unit, torch.where(unit < self.units, indices, 0).long()

    def seen_pairs(self, starts: Tensor, sinks: int) -> Tensor:
        """``unit_pairs`` of keys below ``sinks`` and, in each row, from its entry of ``starts`` on (int64 [q_len],
        causal and never falling)."""
        hidden = []
        for unit in range(self.units):
            columns, distances = self.unit_lines(unit)
            starts = starts.to(columns.device)
            by_column, by_distance = self._hidden(columns, distances, starts, sinks)
            # Column c is hidden from the first row that starts behind it; a distance crosses it there as in unit_pairs.
            late = columns[columns >= sinks]
            first = self.shape.q_start + torch.searchsorted(starts, late, right=True)
            low = torch.searchsorted(distances, first - late)
            high = torch.searchsorted(distances, self.shape.q_start + self.shape.q_len - 1 - late, right=True)
            hidden.append(by_column.sum() + by_distance.sum() - (high - low).clamp(min=0).sum())
        return self.unit_pairs() - torch.stack(hidden)

    def emptied(self, unit: int, starts: Tensor, sinks: int) -> Tensor:
        """Rows of one unit that read keys, but none of those :meth:`seen_pairs` counts: int64, rising."""
        columns, distances = self.unit_lines(unit)
        if distances.numel() and int(distances[0]) == 0:  # its own key is none that a window hides
            return distances.new_empty(0)
        rows = self.shape.rows.to(columns.device)
        hidden = self._hidden(columns, distances, starts.to(columns.device), sinks)
        counts = [torch.searchsorted(lines, rows, right=True) for lines in (columns, distances)]
        seen = (counts[0] > hidden[0]) | (counts[1] > hidden[1])
        return ((counts[0] + counts[1] > 0) & ~seen).nonzero()[:, 0]

    def _hidden(self, columns: Tensor, distances: Tensor, starts: Tensor, sinks: int) -> tuple[Tensor, Tensor]:
        """How many columns and how many distances of each row lie at ``sinks`` .. start - 1."""
        rows, starts = self.shape.rows.to(starts.device), starts.clamp(min=sinks)
        by_column = torch.searchsorted(columns, starts) - torch.searchsorted(columns, sinks)
        near, far = (torch.searchsorted(distances, rows - keys, right=True) for keys in (starts, sinks))
        return by_column, (far - near).clamp(min=0)

    def _merge_same(self, other: Selection) -> Selection | None:
        if not isinstance(other, Lines):
            return None
        units = math.lcm(self.units, other.units)
        columns, distances = [], []
        for unit in range(units):
            left = self.unit_lines(unit * self.units // units)
            right = other.unit_lines(unit * other.units // units)
            columns.append(torch.cat([left[0], right[0]]))
            distances.append(torch.cat([left[1], right[1]]))
        return Lines.from_lists(self.shape, columns, distances)

    def check(self) -> None:
        if self.s_offsets.numel() != self.v_offsets.numel():
            raise SaccadeError(
                f"columns for {self.units} units but distances for {self.s_offsets.numel() - 1}; they must be as many"
            )
        last = self.v_offsets.new_full((self.units,), self.shape.q_start + self.shape.q_len)
        for offsets, indices in ((self.v_offsets, self.columns), (self.s_offsets, self.distances)):
            listed = indices[: int(offsets[-1])]
            check_csr(offsets, listed, self.shape.heads, 1)
            check_below(offsets, listed, last, "line")


def _summed(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each list of ``values`` [entries]: [lists]."""
    return torch.nn.functional.pad(values.cumsum(0), (1, 0))[offsets].diff()
