"""The base of all selections, and the kinds that need no block grid: everything, a band, token lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.selection.csr import check_below, check_csr, list_ids, offsets_of, offsets_of_lists

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """One attention call of one sequence: ``q_len`` rows at ``q_start ..`` over ``k_len`` keys, for one layer.

    ``device``: where what is made of it lies; shapes that differ in it alone are equal.
    """

    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    q_start: int
    device: torch.device = field(default=CPU, compare=False)

    def __post_init__(self) -> None:
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise SaccadeError(f"heads={self.heads} must be a positive multiple of kv_heads={self.kv_heads}")
        if self.q_len < 1 or self.q_start < 0 or self.q_start + self.q_len > self.k_len:
            raise SaccadeError(
                f"rows {self.q_start}..{self.q_start + self.q_len - 1} do not lie within k_len={self.k_len} keys"
            )

    @classmethod
    def suffix(cls, heads: int, kv_heads: int, q_len: int, k_len: int, device: torch.device = CPU) -> Shape:
        """The usual case: the rows are the last ``q_len`` of the ``k_len`` positions."""
        return cls(heads, kv_heads, q_len, k_len, k_len - q_len, device)

    def to(self, device: torch.device) -> Shape:
        """The same shape on ``device``; itself if it is there already."""
        return self if self.device == device else replace(self, device=device)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def rows(self) -> Tensor:
        """Absolute position of every query row, int64 [q_len]."""
        return torch.arange(self.q_start, self.q_start + self.q_len, device=self.device)

    @property
    def causal_pairs(self) -> int:
        """Number of (row, key) pairs of one head under the causal mask."""
        first, last = self.q_start + 1, self.q_start + self.q_len
        return (first + last) * self.q_len // 2

    def causal_mask(self, start: int = 0, stop: int | None = None) -> Tensor:
        """bool [stop - start, k_len]: the causal mask of rows ``start .. stop - 1``, by default of all rows."""
        return torch.arange(self.k_len, device=self.device)[None, :] <= self.rows[start:stop, None]


class Selection:
    """Base of all selections. ``units`` lists serve ``shape.heads`` query heads."""

    shape: Shape

    @property
    def units(self) -> int:
        return 1

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        """bool [stop - start, k_len], causal: what rows ``start .. stop - 1`` of one unit may read."""
        raise NotImplementedError

    def row_bias(self, unit: int, start: int, stop: int) -> Tensor | None:
        """fp32 [stop - start, k_len]: what the logits of these rows gain before the softmax; None is nothing."""
        return None

    def unit_mask(self) -> Tensor:
        """bool [units, q_len, k_len]. For tests and pictures: it is as large as it looks."""
        return torch.stack([self.row_mask(unit, 0, self.shape.q_len) for unit in range(self.units)])

    def unit_pairs(self) -> Tensor:
        """int64 [units]: number of (row, key) pairs each unit attends to."""
        return self.unit_mask().flatten(1).sum(1)

    def even_pairs(self) -> int | None:
        """What every query head attends to, where that is the same for all and known without looking at indices: a
        decode step counts it without a tensor."""
        return None

    def mask(self) -> Tensor:
        """bool [heads, q_len, k_len]: the selection spelt out per query head."""
        return self.unit_mask().repeat_interleave(self.shape.heads // self.units, dim=0)

    def pairs(self) -> Tensor:
        """int64 [heads]: number of (row, key) pairs per query head."""
        return self.unit_pairs().repeat_interleave(self.shape.heads // self.units)

    def density(self) -> float:
        """Attended pairs over causal pairs, averaged over query heads; 1.0 is dense."""
        return float(self.unit_pairs().double().mean()) / self.shape.causal_pairs

    def merge(self, other: Selection) -> Selection:
        """The union of two selections of one shape; falls back to token lists when the kinds differ."""
        _same_shape(self, other)
        if isinstance(self, Dense):
            return self
        if isinstance(other, Dense):
            return other
        merged = self._merge_same(other)
        return merged if merged is not None else Tokens.from_mask(self.shape, self.mask() | other.mask())

    def _merge_same(self, other: Selection) -> Selection | None:
        """Union within one kind, or None when this kind cannot express it."""
        return None

    def check(self) -> None:
        """Raise SaccadeError unless indices are sorted, unique, causal and in range."""

    def to(self, device: torch.device) -> Self:
        """The same selection with its shape and indices on ``device``; itself if they are there already."""
        moved = {f.name: _moved(getattr(self, f.name), device) for f in fields(self)}  # type: ignore[arg-type]
        same = all(value is getattr(self, name) for name, value in moved.items())
        return self if same else replace(self, **moved)  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class Dense(Selection):
    """Every key the causal mask allows."""

    shape: Shape

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        return self.shape.causal_mask(start, stop)

    def unit_pairs(self) -> Tensor:
        return torch.tensor([self.shape.causal_pairs], device=CPU)  # nothing to compute: no device need wait for it

    def even_pairs(self) -> int | None:
        return self.shape.causal_pairs


@dataclass(frozen=True, eq=False)
class Band(Selection):
    """The first ``sinks`` keys and the last ``window`` keys up to and including the row's own: row ``p`` reads key
    ``i`` iff ``i < sinks`` or ``p - i < window``. Sliding-window layers are bands without sinks."""

    shape: Shape
    window: int
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window < 1 or self.sinks < 0:
            raise SaccadeError(f"a band needs window >= 1 and sinks >= 0, got window={self.window}, sinks={self.sinks}")

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        rows = self.shape.rows[start:stop, None]
        keys = torch.arange(self.shape.k_len, device=rows.device)[None, :]
        return ((keys < self.sinks) | (rows - keys < self.window)) & (keys <= rows)

    def unit_pairs(self) -> Tensor:
        visible = self.shape.rows + 1
        return (visible.clamp(max=self.window) + (visible - self.window).clamp(0, self.sinks)).sum()[None]

    def row_pairs(self, starts: Tensor, sinks: int) -> Tensor:
        """How many keys below ``sinks`` or from the row's entry of ``starts`` on each row reads: int64 [q_len]."""
        rows = self.shape.rows.to(starts.device)
        first = (rows - self.window + 1).clamp(min=0)  # of the window; sinks before it are counted apart
        sinks_seen = _length(0, torch.minimum(first, rows.new_tensor(self.sinks)), starts, sinks)
        return sinks_seen + _length(first, rows + 1, starts, sinks)

    def even_pairs(self) -> int | None:
        def upto(row: int, most: int) -> int:  # of rows before it, of which the i-th reads min(i, most)
            full = min(row, most)
            return full * (full + 1) // 2 + (row - full) * most

        first, last, window = self.shape.q_start, self.shape.q_start + self.shape.q_len, self.window
        seen = upto(last, window) - upto(first, window)
        return seen + upto(max(last - window, 0), self.sinks) - upto(max(first - window, 0), self.sinks)

    def _merge_same(self, other: Selection) -> Selection | None:
        if isinstance(other, Band) and (self.sinks == other.sinks or self.window == other.window):
            return Band(self.shape, max(self.window, other.window), max(self.sinks, other.sinks))
        return None


@dataclass(frozen=True, eq=False)
class Tokens(Selection):
    """Key positions per query row. ``offsets`` int64 [units * q_len + 1], ``indices`` int32 [nnz]."""

    shape: Shape
    offsets: Tensor
    indices: Tensor

    @property
    def units(self) -> int:
        return (self.offsets.numel() - 1) // self.shape.q_len

    @classmethod
    def from_mask(cls, shape: Shape, mask: Tensor) -> Tokens:
        """From bool [units, q_len, k_len]; acausal entries are dropped."""
        lists = (mask & shape.to(mask.device).causal_mask()).flatten(0, 1)
        return cls(shape, offsets_of(lists.sum(1)), lists.nonzero()[:, 1].to(torch.int32))

    @classmethod
    def from_lists(cls, shape: Shape, lists: Sequence[Tensor]) -> Tokens:
        """From ``units * q_len`` lists of positions, sorted and made unique here."""
        parts = list(map(torch.unique, lists))
        indices = torch.cat(parts).to(torch.int32)
        return cls(shape, offsets_of_lists(parts, indices.device), indices)

    def lists(self) -> list[Tensor]:
        """``units * q_len`` int32 tensors of positions."""
        return [self.indices[a:b] for a, b in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist())]

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        first = unit * self.shape.q_len + start
        offsets = self.offsets[first : first + stop - start + 1]
        mask = torch.zeros(stop - start, self.shape.k_len, dtype=torch.bool, device=offsets.device)
        mask[list_ids(offsets), self.indices[offsets[0] : offsets[-1]].long()] = True
        return mask

    def unit_pairs(self) -> Tensor:
        return self.offsets.diff().view(self.units, self.shape.q_len).sum(1)

    def check(self) -> None:
        check_csr(self.offsets, self.indices, self.shape.heads * self.shape.q_len, self.shape.q_len)
        ends = self.shape.to(self.offsets.device).rows + 1
        check_below(self.offsets, self.indices, ends.repeat(self.units), "token")


def _length(first: Tensor | int, stop: Tensor, starts: Tensor, sinks: int) -> Tensor:
    """How many of the keys ``first .. stop - 1`` are below ``sinks`` or from ``starts`` on."""
    seen_from = max(first, sinks) if isinstance(first, int) else first.clamp(min=sinks)
    hidden = torch.minimum(stop, starts) - seen_from
    return stop - first - hidden.clamp(min=0)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, (Tensor, Selection, Shape)):
        return value.to(device)
    if isinstance(value, tuple):
        parts = tuple(_moved(part, device) for part in value)
        return value if all(a is b for a, b in zip(parts, value)) else parts
    return value


def _same_shape(left: Selection, right: Selection) -> None:
    if left.shape != right.shape:
        raise SaccadeError(f"cannot merge selections of different shapes: {left.shape} and {right.shape}")
