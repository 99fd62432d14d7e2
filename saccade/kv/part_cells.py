"""Where parts of KV blocks lie: their slots in memory, and their cells in the tier behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.kv.host import HostTier
from saccade.kv.host_disk import HostAndDisk
from saccade.kv.listed import Listed
from saccade.kv.tier import Tier, TierCounts

if TYPE_CHECKING:
    from saccade.kv.blocks import BlockManager

Array = np.ndarray[Any, Any]


class PartCells:
    """Of the parts of ``pool``'s row ``row`` (a KV head where heads lie apart) over ``tier``. Parts are numbered as
    they lie in the pool's map: (layer * KV heads or 1 + row) * logical blocks + block."""

    def __init__(self, pool: BlockManager, tier: Tier, row: int) -> None:
        self.pool, self.tier, self.row = pool, tier, row
        shape = pool.host_slots.shape[0], pool.host_slots.shape[2]
        self.generation = np.zeros(shape[1], dtype=np.int64)
        self._cell = np.zeros(shape, dtype=np.int32)  # 0: none
        self._stored = 0  # parts with a cell
        self._lost = np.zeros(shape, dtype=bool)
        self._losses = 0
        self.written = 0  # times that parts got cells
        self.offers: Listed | None = None  # this row's side of them
        if isinstance(tier, HostAndDisk):
            tier.moved = self._moved  # type: ignore[method-assign]

    @property
    def counts(self) -> TierCounts:
        return self.tier.counts

    def born(self, blocks: Sequence[int]) -> None:
        """``blocks`` have been handed out."""
        self.generation[blocks] += 1

    def damaged(self, blocks: Array) -> bool:
        """Whether parts of ``blocks`` are lost."""
        return bool(self._losses and self._lost[:, blocks].any())

    def slots_of(self, layer: int | Array, blocks: Array) -> Array:
        """Slots of ``blocks`` in a layer, or in one each, -1 where one is not resident."""
        return self.pool.map_of(self.row)[layer, blocks]

    def numbers_of(self, layers: int | Array, blocks: Array) -> Array:
        """The numbers of parts."""
        found: Array = (layers * self.pool.rows + self.row) * len(self.generation) + blocks
        return found

    def of_numbers(self, parts: Array) -> tuple[Array, Array]:
        """Layers and blocks of parts of this row."""
        blocks = len(self.generation)
        return parts // (blocks * self.pool.rows), parts % blocks

    def owns(self, parts: Array) -> bool:
        """Whether each of ``parts`` (numbers) has a cell, with that part in it."""
        layers, blocks = self.of_numbers(parts)
        cells = self._cell[layers, blocks]
        if not isinstance(self.tier, HostTier) or not (cells > 0).all():
            return False
        return not len(parts) or not self.tier.strangers(self._parts(layers, blocks), cells.tolist())

    def cells_of(self, layer: int | Array, blocks: Array) -> Array:
        """The cells of host memory that hold copies of ``blocks``, 0 for none."""
        return self.gatherable(self._cell[layer, blocks])

    def keeps(self, layer: int, blocks: Array, cells: Array) -> bool:
        """Whether the host tier has ``blocks`` in ``cells``."""
        assert isinstance(self.tier, HostTier)
        lost = self._losses and self._lost[layer, blocks].any()
        return not lost and not self.tier.strangers(self._parts(layer, blocks), cells.tolist())

    def gatherable(self, cells: Array) -> Array:
        """See HostTier."""
        assert isinstance(self.tier, HostTier)
        return self.tier.gatherable(cells)

    def wanted(self, parts: Array) -> None:
        """A device has brought ``parts`` (numbers) in by itself."""
        assert isinstance(self.tier, HostTier)
        cells = self.gatherable(self._cell[self.of_numbers(parts)])
        self.tier.used(cells[cells > 0])

    def _drop_cells(self, layer: int, blocks: Array) -> None:
        cells = self._cell[layer, blocks]
        cells = cells[cells > 0]
        if len(cells):
            self.tier.release(cells.tolist())
            self._cell[layer, blocks] = 0
            self._stored -= len(cells)
            if self.offers is not None:
                self.offers.cells_changed(self.numbers_of(layer, np.asarray(blocks)))
                slots = self.slots_of(layer, blocks)
                self.offers.withdraw(slots[slots >= 0])

    def _moved(self, parts: Array, cells: Array) -> None:
        """The tier has put ``parts`` [parts, 3] into other cells."""
        layers, blocks = parts[:, 0], parts[:, 1]
        self._cell[layers, blocks] = cells
        if self.offers is not None:
            self.offers.cells_changed(self.numbers_of(layers, blocks))

    def _parts(self, layers: int | Array, blocks: Array) -> Array:
        """As a tier takes them: layer, block and generation, int64 [blocks, 3]."""
        return np.stack(np.broadcast_arrays(layers, blocks, self.generation[blocks]), 1)
