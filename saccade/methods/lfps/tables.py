"""LFPS's score tables: two histories of which keys a head attended to, by position and by distance
(docs/algorithms.md 1.2), and what a step adds to them.

A table's entry is a decayed sum of what the key at that position (``vertical``), or at that distance from the row
(``slash``), received. Stored by distance, a slash line stays where it is while the row moves on. That is the
meaning; kernels do the same, but for the order of their sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.machine import ask_for_huge_pages
from saccade.methods.fitting import Fitting, Sizes
from saccade.methods.options import LARGEST
from saccade.methods.state import MethodState
from saccade.selection import Tokens

BLOCK = 16  # entries that share an upper bound: a cache line
REFRESH = 64  # steps between two exact recomputations of the power sums


@dataclass
class ScoreTables(MethodState):
    """The tables of one sequence and layer, for positions ``first ..``.

    ``vertical``, ``slash`` float32 [units, capacity]: by position - ``first`` and by distance; a true value is the
    stored one times ``scale`` float64 [units], so that decay touches no entry. ``vertical_max``, ``slash_max`` [units,
    capacity / 16] are upper bounds of 16 entries each. ``sums`` float64 [units, 2, 4]: sums of the stored entries'
    first four powers, vertical before slash. ``row`` int64 [units]: the position whose distances ``slash`` holds.
    """

    first: int
    vertical: Tensor
    slash: Tensor
    vertical_max: Tensor
    slash_max: Tensor
    sums: Tensor
    scale: Tensor
    row: Tensor
    steps: int = 0

    @classmethod
    def of(cls, vertical: Tensor, slash: Tensor, first: int, row: int) -> ScoreTables:
        """From true values float32 [units, n] of the positions ``first ..`` and of the distances 0 .. n - 1."""
        units, n = vertical.shape
        capacity = _padded(n + 1024)
        vertical, slash = _widened((vertical, slash), capacity)
        device = vertical.device
        bounds = torch.empty(2, units, capacity // BLOCK, device=device)
        sums = torch.zeros(units, 2, 4, dtype=torch.float64, device=device)
        scale = torch.ones(units, dtype=torch.float64, device=device)
        rows = torch.full((units,), row, device=device)
        tables = cls(first, vertical, slash, bounds[0], bounds[1], sums, scale, rows)
        tables.refresh(slice(None))
        return tables

    def fit(self, sizes: Sizes, fitting: Fitting) -> None:
        """See MethodState."""
        vertical = fitting.tensor("vertical", self.vertical, torch.float32, sizes.units, None)
        units, capacity = vertical.shape
        fitting.tensor("slash", self.slash, torch.float32, units, capacity)
        for name in ("vertical_max", "slash_max"):
            fitting.tensor(name, getattr(self, name), torch.float32, units, capacity // BLOCK)
        fitting.tensor("sums", self.sums, torch.float64, units, 2, 4)
        fitting.tensor("scale", self.scale, torch.float64, units)
        fitting.within("row", fitting.tensor("row", self.row, torch.int64, units), -1, sizes.length)
        fitting.within("first", self.first, 0, sizes.length)
        fitting.within("steps", self.steps, 0, sizes.length)
        fitting.require(capacity % BLOCK == 0, f"has room for {capacity} positions, no whole blocks")

    def cloned(self, name: str, tensor: Tensor) -> Tensor:
        if name not in ("vertical", "slash"):
            return tensor.clone()
        return _roomy(tensor.shape, tensor.device).copy_(tensor)

    def to(self, device: torch.device | str) -> Self:
        """See MethodState."""
        made = super().to(device)
        if made.vertical.device != self.vertical.device and made.vertical.device.type == "cpu":
            made.vertical, made.slash = (self.cloned("vertical", part) for part in (made.vertical, made.slash))
        return made

    def check(self) -> None:
        """SaccadeError unless the parts are contiguous, as kernels take them to be."""
        written = (self.vertical, self.slash, self.vertical_max, self.slash_max, self.sums, self.scale, self.row)
        if not all(map(Tensor.is_contiguous, written)):
            raise SaccadeError("score tables are written in place and must be contiguous: clone a slice of them first")

    @property
    def units(self) -> int:
        return self.vertical.shape[0]

    @property
    def capacity(self) -> int:
        return self.vertical.shape[1]

    def grow(self, length: int) -> None:
        """Make room for ``length`` positions; new entries are 0."""
        if length <= self.capacity:
            return
        capacity = _padded(2 * length)
        self.vertical, self.slash = _widened((self.vertical, self.slash), capacity)
        self.vertical_max, self.slash_max = _widened((self.vertical_max, self.slash_max), capacity // BLOCK)

    def step(self) -> Tensor:
        """Count a step: bool [units], those whose power sums are due to be computed anew after it."""
        due = _due(self.units)[self.steps % REFRESH :]
        self.steps += 1
        return due

    def stay(self, units: Tensor, length: int) -> None:
        """Leave the slash tables of ``units`` (bool [units]) where they are in a context of ``length`` positions while
        the row moves on by one: all their distances grow by one."""
        if not bool(units.any()):
            return
        self.grow(length + 1)
        moved = torch.nn.functional.pad(self.slash[:, :-1], (1, 0))
        self.slash.copy_(torch.where(units[:, None], moved, self.slash))
        self.slash_max.copy_(torch.where(units[:, None], moved.unflatten(1, (-1, BLOCK)).amax(2), self.slash_max))

    def decayed_into(self, vertical: Tensor, slash: Tensor, share: float) -> None:
        """Mix the true values of these tables, at weight ``share``, into other tables float32 [units, n] of the same
        positions and of the row that is now the last: sums stay what they were where both have them alike."""
        for mine, other in ((self.vertical, vertical), (self.slash, slash)):
            n = min(self.capacity, other.shape[1])
            other *= 1.0 - share
            other[:, :n] += (share * self.scale[:, None] * mine[:, :n]).float()

    def refresh(self, unit: int | slice) -> None:
        """Compute the power sums and bounds of a unit, or of several, anew."""
        for which, (table, bounds) in enumerate(((self.vertical, self.vertical_max), (self.slash, self.slash_max))):
            values = table[unit].double()
            self.sums[unit, which] = torch.stack([(values**power).sum(-1) for power in (1, 2, 3, 4)], -1)
            bounds[unit] = table[unit].unflatten(-1, (-1, BLOCK)).amax(-1)


def learn(
    tables: ScoreTables, read: Tokens, weights: Tensor, idle: Tensor | None, decay: float, stop: int = LARGEST
) -> None:
    """What a step adds (LFPS eq. 10): tables decay, and each of the m positions read, from ``first`` on and below
    ``stop``, gains w - 1 / (2 m), w its weight among them, averaged over the unit's query heads; so both tables' sums
    move towards 0.5 / (1 - decay).

    ``read`` and ``weights`` as :func:`saccade.ops.weights.selected_weights` lays them out, ``idle`` bool [heads]: who
    has no say; a unit whose heads are all idle stays as it is. ``tables.row`` must be the step's alignment already.
    """
    refresh = tables.step()
    heads = read.shape.heads // tables.units
    lists, bounds = read.lists(), read.offsets.tolist()
    per_list = read.shape.heads // read.units
    for unit in range(tables.units):
        voters = [h for h in range(unit * heads, (unit + 1) * heads) if idle is None or not bool(idle[h])]
        if not voters:
            continue
        positions = lists[voters[0] // per_list].long()
        known = (positions >= tables.first) & (positions < stop)
        gain = torch.zeros(int(known.sum()), device=weights.device)
        for head in voters:
            own, row = divmod(head, per_list)
            w = weights[row, bounds[own] : bounds[own + 1]][known]
            gain += w / w.sum().clamp(min=1e-38) / len(voters)
        positions, count = positions[known], int(gain.numel())
        learnt(tables, unit, positions, gain - 0.5 / max(1, count), decay)
        if bool(refresh[unit]) or float(tables.scale[unit]) == 1.0:
            tables.refresh(unit)


def learnt(tables: ScoreTables, unit: int, positions: Tensor, gain: Tensor, decay: float) -> None:
    """One unit's tables decay, and ``positions`` int64 [m] gain ``gain`` fp32 [m], true values."""
    _decay(tables, unit, decay)
    gain = gain / float(tables.scale[unit])
    _add(tables.vertical[unit], tables.vertical_max[unit], tables.sums[unit, 0], positions - tables.first, gain)
    distance = int(tables.row[unit]) - positions
    ahead = distance >= 0
    _add(tables.slash[unit], tables.slash_max[unit], tables.sums[unit, 1], distance[ahead], gain[ahead])


@lru_cache(maxsize=64)
def _due(units: int) -> Tensor:
    """From place ``step`` % REFRESH on: bool, which units are refreshed in that step, one after the other."""
    return torch.arange(units + REFRESH, device="cpu") % REFRESH == REFRESH - 1


def _decay(tables: ScoreTables, unit: int, decay: float) -> None:
    tables.scale[unit] *= decay
    if float(tables.scale[unit]) < 1e-8:  # the fourth powers of stored values come near the end of float32
        for table in (tables.vertical, tables.slash):
            table[unit] *= float(tables.scale[unit])
        tables.scale[unit] = 1.0


def _add(table: Tensor, bounds: Tensor, sums: Tensor, places: Tensor, gain: Tensor) -> None:
    before = table[places].double()
    table[places] += gain
    after = table[places]
    bounds.scatter_reduce_(0, places // BLOCK, after, "amax")
    sums += torch.stack([(after.double() ** power - before**power).sum() for power in (1, 2, 3, 4)])


def _widened(tables: tuple[Tensor, Tensor], width: int) -> Tensor:
    """Two tables [units, n] as one tensor fp32 [2, units, width], with zeros behind."""
    units, n = tables[0].shape
    wide = _roomy((2, units, width), tables[0].device)
    for part, values in zip(wide, tables):
        part[:, :n] = values
        part[:, n:] = 0.0
    return wide


def _roomy(shape: Sequence[int], device: torch.device) -> Tensor:
    """An empty table, fp32. Entries are visited here and there, so large ones ask for huge pages, as the keys do."""
    room = torch.empty(*shape, device=device)
    ask_for_huge_pages(room, 2)
    return room


def _padded(n: int) -> int:
    return -(-n // BLOCK**2) * BLOCK**2
