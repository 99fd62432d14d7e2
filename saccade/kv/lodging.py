"""Blocks that stay in host memory because the CPU attends them there, reading and writing their cells directly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.kv.host import HostTier
from saccade.kv.part_cells import PartCells
from saccade.kv.tier import LostKV, Tier

if TYPE_CHECKING:
    from saccade.kv.blocks import BlockManager

RECLAIMED = 64  # one in so many cells is taken from a resident part at once, where cells run short
Array = np.ndarray[Any, Any]


class Lodging(PartCells):
    """Of parts over a host tier: which blocks are lodged. Their cells are not taken from them, even while they are
    resident, too."""

    def __init__(self, pool: BlockManager, tier: Tier, row: int, debug: bool) -> None:
        super().__init__(pool, tier, row)
        self.debug = debug
        self._head = row if pool.rows > 1 else None
        self._lodgers = np.zeros(len(self.generation), dtype=np.int16)  # sequences whose KV lives there, by block

    def lodge(self, blocks: Array) -> bool:
        """Have host memory alone keep ``blocks`` (int64, no id twice) in every layer, for one lodger more: what lies in
        slots moves there, and what nothing was written to has cells from now on. False, for none of them, where cells
        are short; LostKV where one cannot be had back. Who reads cells first waits for the tier's writes."""
        if self._losses and self._lost[:, blocks].any():
            raise LostKV("KV blocks were lost")
        there, layers = self.pool.map_of(self.row)[:, blocks] >= 0, self.pool.layers
        wanted = int((self._cell[:, blocks] == 0).sum())
        if wanted > self.tier.free_cells:
            every = np.repeat(np.arange(layers), len(blocks)), np.tile(blocks, layers)
            self._reclaim(wanted - self.tier.free_cells, *every)
            if wanted > self.tier.free_cells:
                return False
        bare = self._cell[:, blocks] == 0
        nothing = np.zeros(0, dtype=np.int64)
        if (leaving := bare & there).any():
            own, which = leaving.nonzero()
            if not self._write(own, blocks[which], nothing, nothing).all():
                return False
        if (empty := bare & ~there).any():
            own, which = empty.nonzero()
            self._claim(own, blocks[which])
        self.tier.settle()
        with self.pool.publishing_once():
            for layer in np.nonzero(there.any(1))[0].tolist():
                self._vacate(layer, blocks[there[layer]])
        self.counts.evicted += int(there.sum())
        self._lodgers[blocks] += 1
        return True

    def leave(self, blocks: Array, generations: Array) -> None:
        """A lodger's ``blocks``, of which it saw these generations, have one less; those that were freed have none."""
        same = self.generation[blocks] == generations
        self._lodgers[blocks[same]] -= 1

    def _claim(self, layers: Array, blocks: Array) -> None:
        """Cells for parts that nothing was written to yet."""
        assert isinstance(self.tier, HostTier)
        self._cell[layers, blocks] = self.tier.claim(self._parts(layers, blocks))
        self._stored += len(blocks)
        self.written += 1
        if self.offers is not None:
            self.offers.cells_changed(self.numbers_of(layers, blocks))

    def _write(self, layers: Array, blocks: Array, clean_layers: Array, clean_blocks: Array) -> Array:
        """Write parts that have no cell; bool like them, whether that was done."""
        if self.tier.free_cells < len(blocks):
            self._reclaim(len(blocks) - self.tier.free_cells, clean_layers, clean_blocks)
        slots = self.slots_of(layers, blocks).tolist()
        cells = np.array(self.tier.write(self._parts(layers, blocks), slots), dtype=np.int32)
        self._cell[layers, blocks] = cells
        if self.offers is not None:
            self.offers.cells_changed(self.numbers_of(layers, blocks))
        self._stored += int((cells > 0).sum())
        self.written += 1
        return cells > 0

    def _reclaim(self, count: int, leaving_layers: Array, leaving_blocks: Array) -> None:
        """Take the cells of ``count`` resident parts, or more, which must be written again when they leave; not of
        those that leave now."""
        count = max(count, self.tier.cells // RECLAIMED)  # finding them takes a look at all parts
        resident = (self._cell > 0) & (self.pool.map_of(self.row) >= 0)
        resident &= self._lodgers == 0
        resident[leaving_layers, leaving_blocks] = False
        layers, blocks = (found[:count] for found in np.nonzero(resident))
        for layer in np.unique(layers).tolist():
            self._drop_cells(layer, blocks[layers == layer])

    def _vacate(self, layer: int, blocks: Array) -> None:
        """Let the parts leave their slots; a read before they are filled again is to be noticed."""
        if self.offers is not None:
            self.offers.withdraw(self.slots_of(layer, blocks))
        if self.debug and self.pool.storage.k.is_floating_point():
            slots = self.slots_of(layer, blocks).tolist()
            for part in self.pool.storage.parts:
                (part if self._head is None else part[:, self._head])[slots] = float("nan")
        self.pool.evict(layer, blocks.tolist(), self._head)
