"""The vocabulary between methods and ops: which keys each query row may read.

A selection holds indices only. Positions and block ids are absolute; lists are sorted, unique and causal. Query rows
are contiguous: row ``r`` of a call stands at position ``q_start + r``, and keys are positions ``0 .. k_len - 1``.

Lists are kept per *unit*. ``units`` divides the number of query heads: ``heads`` units mean one list per query head,
``kv_heads`` one per KV head, 1 one per layer. Query head ``h`` reads unit ``h // (heads // units)``.

Ragged lists are stored flat (CSR): list ``j`` is ``indices[offsets[j] : offsets[j + 1]]`` with ``offsets`` int64 and
``indices`` int32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import SaccadeError


@dataclass(frozen=True)
class Shape:
    """One attention call of one sequence: ``q_len`` rows at ``q_start ..`` over ``k_len`` keys, for one layer."""

    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    q_start: int

    def __post_init__(self) -> None:
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise SaccadeError(f"heads={self.heads} must be a positive multiple of kv_heads={self.kv_heads}")
        if self.q_len < 1 or self.q_start < 0 or self.q_start + self.q_len > self.k_len:
            raise SaccadeError(
                f"rows {self.q_start}..{self.q_start + self.q_len - 1} do not lie within k_len={self.k_len} keys"
            )

    @classmethod
    def suffix(cls, heads: int, kv_heads: int, q_len: int, k_len: int) -> Shape:
        """The usual case: the rows are the last ``q_len`` of the ``k_len`` positions."""
        return cls(heads, kv_heads, q_len, k_len, k_len - q_len)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def rows(self) -> Tensor:
        """Absolute position of every query row, int64 [q_len]."""
        return torch.arange(self.q_start, self.q_start + self.q_len)

    @property
    def causal_pairs(self) -> int:
        """Number of (row, key) pairs of one head under the causal mask."""
        first, last = self.q_start + 1, self.q_start + self.q_len
        return (first + last) * self.q_len // 2

    def causal_mask(self, start: int = 0, stop: int | None = None) -> Tensor:
        """bool [stop - start, k_len]: the causal mask of rows ``start .. stop - 1``, by default of all rows."""
        return torch.arange(self.k_len)[None, :] <= self.rows[start:stop, None]


class Selection:
    """Base of all selections. ``units`` lists serve ``shape.heads`` query heads."""

    shape: Shape

    @property
    def units(self) -> int:
        return 1

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        """bool [stop - start, k_len], causal: what rows ``start .. stop - 1`` of one unit may read."""
        raise NotImplementedError

    def unit_mask(self) -> Tensor:
        """bool [units, q_len, k_len]. For tests and pictures: it is as large as it looks."""
        return torch.stack([self.row_mask(unit, 0, self.shape.q_len) for unit in range(self.units)])

    def unit_pairs(self) -> Tensor:
        """int64 [units]: number of (row, key) pairs each unit attends to."""
        return self.unit_mask().flatten(1).sum(1)

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


@dataclass(frozen=True, eq=False)
class Dense(Selection):
    """Every key the causal mask allows."""

    shape: Shape

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        return self.shape.causal_mask(start, stop)

    def unit_pairs(self) -> Tensor:
        return torch.tensor([self.shape.causal_pairs])


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
        keys, rows = torch.arange(self.shape.k_len)[None, :], self.shape.rows[start:stop, None]
        return ((keys < self.sinks) | (rows - keys < self.window)) & (keys <= rows)

    def unit_pairs(self) -> Tensor:
        visible = self.shape.rows + 1
        return (visible.clamp(max=self.window) + (visible - self.window).clamp(0, self.sinks)).sum()[None]

    def _merge_same(self, other: Selection) -> Selection | None:
        if isinstance(other, Band) and (self.sinks == other.sinks or self.window == other.window):
            return Band(self.shape, max(self.window, other.window), max(self.sinks, other.sinks))
        return None


@dataclass(frozen=True, eq=False)
class Blocks(Selection):
    """Key blocks per query block, both on one grid of ``block_size`` positions anchored at position 0.

    ``offsets`` int64 [units * q_blocks + 1], ``indices`` int32 [nnz]: key-block ids of list ``u * q_blocks + j``, where
    ``j`` counts query blocks from ``first_q_block``. The causal mask cuts the diagonal block.
    """

    shape: Shape
    block_size: int
    offsets: Tensor
    indices: Tensor

    @property
    def first_q_block(self) -> int:
        return self.shape.q_start // self.block_size

    @property
    def q_blocks(self) -> int:
        last = (self.shape.q_start + self.shape.q_len - 1) // self.block_size
        return last - self.first_q_block + 1

    @property
    def units(self) -> int:
        return (self.offsets.numel() - 1) // self.q_blocks

    @classmethod
    def from_block_mask(cls, shape: Shape, block_size: int, block_mask: Tensor) -> Blocks:
        """From bool [units, q_blocks, k_blocks]; blocks after the query block are dropped."""
        q_blocks, k_blocks = block_mask.shape[1:]
        first = shape.q_start // block_size
        causal = torch.arange(k_blocks)[None, :] <= first + torch.arange(q_blocks)[:, None]
        lists = (block_mask & causal).flatten(0, 1)
        return cls(shape, block_size, _offsets(lists.sum(1)), lists.nonzero()[:, 1].to(torch.int32))

    @classmethod
    def from_lists(cls, shape: Shape, block_size: int, lists: Sequence[Tensor]) -> Blocks:
        """From ``units * q_blocks`` lists of key-block ids, sorted and made unique here."""
        parts = [torch.unique(part.to(torch.int32)) for part in lists]
        counts = torch.tensor([part.numel() for part in parts])
        return cls(
            shape, block_size, _offsets(counts), torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)
        )

    def block_mask(self) -> Tensor:
        """bool [units, q_blocks, k_blocks]."""
        k_blocks = -(-self.shape.k_len // self.block_size)
        mask = torch.zeros(self.offsets.numel() - 1, k_blocks, dtype=torch.bool)
        mask[_list_ids(self.offsets), self.indices.long()] = True
        return mask.view(self.units, self.q_blocks, k_blocks)

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        k_blocks = -(-self.shape.k_len // self.block_size)
        q_block = self.shape.rows[start:stop] // self.block_size - self.first_q_block
        chosen = torch.zeros(self.q_blocks, k_blocks, dtype=torch.bool)
        for j in range(int(q_block[0]), int(q_block[-1]) + 1):
            at = unit * self.q_blocks + j
            chosen[j, self.indices[self.offsets[at] : self.offsets[at + 1]].long()] = True
        tokens = chosen[q_block].repeat_interleave(self.block_size, 1)[:, : self.shape.k_len]
        return tokens & self.shape.causal_mask(start, stop)

    def unit_pairs(self) -> Tensor:
        size, shape = self.block_size, self.shape
        q_block = self.first_q_block + torch.arange(self.q_blocks)
        start = (q_block * size).clamp(min=shape.q_start)
        stop = ((q_block + 1) * size).clamp(max=shape.q_start + shape.q_len)
        below = (stop - start) * size  # pairs in a block left of the diagonal
        head = start - q_block * size  # rows before `start` in the diagonal block
        tail = stop - q_block * size
        diagonal = (tail * (tail + 1) - head * (head + 1)) // 2
        which = _list_ids(self.offsets)
        row_block = which % self.q_blocks
        on_diagonal = self.indices.long() == q_block[row_block]
        weight = torch.where(on_diagonal, diagonal[row_block], below[row_block])
        return torch.zeros(self.units, dtype=torch.int64).index_add_(0, which // self.q_blocks, weight)

    def _merge_same(self, other: Selection) -> Selection | None:
        if not isinstance(other, Blocks) or other.block_size != self.block_size:
            return None
        units = max(self.units, other.units)
        left = self.block_mask().repeat_interleave(units // self.units, 0)
        right = other.block_mask().repeat_interleave(units // other.units, 0)
        return Blocks.from_block_mask(self.shape, self.block_size, left | right)

    def check(self) -> None:
        _check_csr(self.offsets, self.indices, self.shape.heads * self.q_blocks, self.q_blocks)
        limit = (self.first_q_block + torch.arange(self.q_blocks)).repeat(self.units)
        _check_below(self.offsets, self.indices, limit + 1, "block")


@dataclass(frozen=True, eq=False)
class Lines(Selection):
    """Vertical lines (key columns) and slash lines (distances ``p - i``), the same for all rows of the call.

    ``v_offsets`` / ``s_offsets`` int64 [units + 1]; ``columns`` / ``distances`` int32, sorted and unique per unit.
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
            _offsets(torch.tensor([part.numel() for part in vertical])),
            torch.cat(vertical),
            _offsets(torch.tensor([part.numel() for part in slash])),
            torch.cat(slash),
        )

    def unit_lines(self, unit: int) -> tuple[Tensor, Tensor]:
        """(columns, distances) of one unit, int64."""
        columns = self.columns[self.v_offsets[unit] : self.v_offsets[unit + 1]].long()
        distances = self.distances[self.s_offsets[unit] : self.s_offsets[unit + 1]].long()
        return columns, distances

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        # Acausal entries get distance -1, which indexes the spare last slot of is_distance.
        rows = self.shape.rows[start:stop, None]
        distance = (rows - torch.arange(self.shape.k_len)[None, :]).clamp(min=-1)
        columns, distances = self.unit_lines(unit)
        is_column = torch.zeros(self.shape.k_len, dtype=torch.bool)
        is_column[columns] = True
        is_distance = torch.zeros(self.shape.k_len + 1, dtype=torch.bool)
        is_distance[distances] = True
        return (is_column[None, :] & (distance >= 0)) | is_distance[distance]

    def unit_pairs(self) -> Tensor:
        first, last = self.shape.q_start, self.shape.q_start + self.shape.q_len - 1
        counts = []
        for unit in range(self.units):
            columns, distances = self.unit_lines(unit)
            lines = torch.cat([columns, distances])
            total = (last + 1 - lines.clamp(min=first)).clamp(min=0).sum()
            # A column c and a distance o cross at row c + o; count the crossings that fall on a row of this call.
            low = torch.searchsorted(distances, first - columns)
            high = torch.searchsorted(distances, last - columns, right=True)
            counts.append(total - (high - low).sum())
        return torch.stack(counts)

    def _merge_same(self, other: Selection) -> Selection | None:
        if not isinstance(other, Lines):
            return None
        units = max(self.units, other.units)
        columns, distances = [], []
        for unit in range(units):
            left = self.unit_lines(unit * self.units // units)
            right = other.unit_lines(unit * other.units // units)
            columns.append(torch.cat([left[0], right[0]]))
            distances.append(torch.cat([left[1], right[1]]))
        return Lines.from_lists(self.shape, columns, distances)

    def check(self) -> None:
        last = torch.full((self.units,), self.shape.q_start + self.shape.q_len)
        for offsets, indices in ((self.v_offsets, self.columns), (self.s_offsets, self.distances)):
            _check_csr(offsets, indices, self.shape.heads, 1)
            _check_below(offsets, indices, last, "line")


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
        lists = (mask & shape.causal_mask()).flatten(0, 1)
        return cls(shape, _offsets(lists.sum(1)), lists.nonzero()[:, 1].to(torch.int32))

    @classmethod
    def from_lists(cls, shape: Shape, lists: Sequence[Tensor]) -> Tokens:
        """From ``units * q_len`` lists of positions, sorted and made unique here."""
        parts = [torch.unique(part.to(torch.int32)) for part in lists]
        return cls(shape, _offsets(torch.tensor([part.numel() for part in parts])), torch.cat(parts))

    def lists(self) -> list[Tensor]:
        """``units * q_len`` int32 tensors of positions."""
        return [self.indices[a:b] for a, b in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist())]

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        first = unit * self.shape.q_len + start
        offsets = self.offsets[first : first + stop - start + 1]
        mask = torch.zeros(stop - start, self.shape.k_len, dtype=torch.bool)
        mask[_list_ids(offsets), self.indices[offsets[0] : offsets[-1]].long()] = True
        return mask

    def unit_pairs(self) -> Tensor:
        return self.offsets.diff().view(self.units, self.shape.q_len).sum(1)

    def check(self) -> None:
        _check_csr(self.offsets, self.indices, self.shape.heads * self.shape.q_len, self.shape.q_len)
        _check_below(self.offsets, self.indices, (self.shape.rows + 1).repeat(self.units), "token")


@dataclass(frozen=True, eq=False)
class Ranking(Selection):
    """Blocks in order of criticality with a stopping rule; the op decides how many it reads (PSA, Alg. 1). Decode only.

    ``always`` int32 [units, a] and ``order`` int32 [units, m] are disjoint block ids; ``order`` is descending in
    criticality. The op attends to ``always``, then to ``order`` in microbatches of ``microbatch`` blocks, and stops
    once ``1 / (1 + left * exp(rest - acc)) > epsilon`` (strict) for the query heads of a unit, where ``acc`` is the
    log-sum-exp so far and ``rest`` the least block log-sum-exp met (``rest="min"``, the paper) or the greatest of the
    last microbatch (``"last_max"``). ``stop`` says whether ``"all"`` heads of a unit must agree or their ``"mean"``
    suffices. ``always`` blocks never enter ``rest``. As a selection it stands for everything it may read.
    """

    shape: Shape
    block_size: int
    always: Tensor
    order: Tensor
    epsilon: float
    microbatch: int = 4
    rest: str = "min"
    stop: str = "all"

    @property
    def units(self) -> int:
        return self.order.shape[0]

    def as_blocks(self) -> Blocks:
        """Everything the ranking may read."""
        return self.prefix([self.order.shape[1]] * self.units)

    def prefix(self, used: Sequence[int]) -> Blocks:
        """``always`` and the first ``used[u]`` blocks of each unit's order: what the op has read once it stopped."""
        lists = [torch.cat([self.always[u], self.order[u, : used[u]]]) for u in range(self.units)]
        return Blocks.from_lists(self.shape, self.block_size, lists)

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        return self.as_blocks().row_mask(unit, start, stop)

    def unit_pairs(self) -> Tensor:
        return self.as_blocks().unit_pairs()

    def check(self) -> None:
        if self.shape.q_len != 1:
            raise SaccadeError(f"a ranking serves one query row, got q_len={self.shape.q_len}")
        both = torch.cat([self.always, self.order], 1)
        for row in both:
            if torch.unique(row).numel() != row.numel():
                raise SaccadeError("a ranking's always and order blocks must be disjoint and unique")
        self.as_blocks().check()


def _offsets(counts: Tensor) -> Tensor:
    offsets = torch.zeros(counts.numel() + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=offsets[1:])
    return offsets


def _list_ids(offsets: Tensor) -> Tensor:
    """For every entry of a CSR structure the number of the list it belongs to."""
    return torch.repeat_interleave(torch.arange(offsets.numel() - 1), offsets.diff())


def _same_shape(left: Selection, right: Selection) -> None:
    if left.shape != right.shape:
        raise SaccadeError(f"cannot merge selections of different shapes: {left.shape} and {right.shape}")


def _check_csr(offsets: Tensor, indices: Tensor, most_lists: int, lists_per_unit: int) -> None:
    lists = offsets.numel() - 1
    if lists < 1 or lists % lists_per_unit or most_lists % lists:
        raise SaccadeError(f"{lists} index lists do not divide the {most_lists} lists of all query heads")
    if int(offsets[0]) != 0 or int(offsets[-1]) != indices.numel() or bool((offsets.diff() < 0).any()):
        raise SaccadeError("offsets must rise from 0 to the number of indices")
    same_list = _list_ids(offsets)[1:] == _list_ids(offsets)[:-1]
    if bool((indices.diff()[same_list] <= 0).any()):
        raise SaccadeError("indices must be sorted and unique within each list")


def _check_below(offsets: Tensor, indices: Tensor, limit: Tensor, what: str) -> None:
    """Every index of list ``j`` must lie in ``[0, limit[j])``."""
    bad = (indices < 0) | (indices.long() >= limit[_list_ids(offsets)])
    if bool(bad.any()):
        raise SaccadeError(f"{what} index {int(indices[bad][0])} lies outside the causal range of its rows")
