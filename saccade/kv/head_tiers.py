"""Tiers of a pool whose KV heads have slots of their own, so that a block that one of eight heads wants moves for that
head alone.

Head g of a slot holds a part of head g, and head g of a cell keeps one. Each head has all slots and cells of the pool,
and evictions are decided head by head: there is a ``Tiers`` for each head, and the class here asks them in turn and
joins their answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.errors import SaccadeError
from saccade.kv.hold import Hold, JointHold
from saccade.kv.host import HostTier
from saccade.kv.offers import Offers
from saccade.kv.tier import Openings, Tier, TierCounts
from saccade.kv.tiers import Tiers

if TYPE_CHECKING:
    from saccade.kv.blocks import BlockManager

Array = np.ndarray[Any, Any]


class HeadTiers:
    """As ``Tiers``, over a pool with ``heads_apart`` and a HostTier with ``heads_apart``; SaccadeError for others.
    ``slots``, ``withheld`` and ``room`` are those of each KV head, as the pool's blocks are; ``counts`` counts parts of
    one KV head."""

    def __init__(self, pool: BlockManager, tier: Tier, policy: str = "clock", debug: bool = False) -> None:
        if not isinstance(tier, HostTier) or tier.heads != pool.rows:
            raise SaccadeError("KV heads with slots of their own need a host tier that keeps heads apart, too")
        self.pool, self.tier, self.policy = pool, tier, policy
        self.heads = pool.rows
        self.each = [Tiers(pool, tier.of_head(head), policy, debug, head) for head in range(self.heads)]
        self._openings = Openings()
        self._cells = np.zeros(pool.host_slots.shape, dtype=np.int32)
        for row, one in enumerate(self.each):
            one._cell = self._cells[:, row]
        self.guard = self.each[0].guard
        self._offers: Offers | None = None

    @property
    def slots(self) -> int:
        return self.each[0].slots

    @property
    def parts(self) -> int:
        return sum(one.slots for one in self.each)

    @property
    def withheld(self) -> int:
        return max(one.withheld for one in self.each)

    @property
    def stored(self) -> int:
        return sum(one.stored for one in self.each) // self.heads

    @property
    def room(self) -> int:
        return min(one.room for one in self.each)

    def room_in(self, layer: int) -> int:
        """See Tiers: the least of all heads."""
        return min(one.room_in(layer) for one in self.each)

    @property
    def counts(self) -> TierCounts:
        return self.tier.counts

    def loose(self, layer: int, blocks: Array) -> int:
        """See Tiers: the least of all heads."""
        return min(one.loose(layer, blocks) for one in self.each)

    def fetch(self, layer: int, blocks: Array, ahead: bool = False, heads: Sequence[Array] | None = None) -> Hold:
        """See Tiers. ``heads``: of each KV head the blocks that are wanted, else ``blocks`` of all of them."""
        holds: list[Hold] = []
        try:
            with self.pool.publishing_once():
                for one, own in zip(self.each, [blocks] * self.heads if heads is None else heads):
                    holds.append(one.fetch(layer, own, ahead))
        except BaseException:
            JointHold(holds).release()
            raise
        return JointHold(holds)

    def opened(self, layers: slice, blocks: Array) -> None:
        """See Tiers."""
        state = self.pool.changes, *(one.written for one in self.each)
        if not any(state[1:]) or not len(blocks) or self._openings.seen(state, layers, blocks):
            return
        resident = self.pool.map_flat().reshape(self._cells.shape)[layers][:, :, blocks] >= 0
        if resident.all():
            self._openings.note(layers, blocks)
        stale = (self._cells[layers][:, :, blocks] > 0) & resident
        for row in np.nonzero(stale.any((0, 2)))[0].tolist():  # in most steps none
            self.each[row].opened(layers, blocks)

    def lodge(self, blocks: Array) -> bool:
        """See Lodging: in every KV head, or in none."""
        for at, one in enumerate(self.each):
            if not one.lodge(blocks):
                for done in self.each[:at]:
                    done.leave(blocks, done.generation[blocks])
                return False
        return True

    def offer(self) -> Offers:
        """See Tiers."""
        if self._offers is None:
            self._offers = Offers(self.each)
        return self._offers

    def numbers(self) -> dict[str, float]:
        """See Tiers: slots and cells count parts of one KV head."""
        free, cells = sum(one.tier.free_cells for one in self.each), self.tier.cells * self.heads
        return {**self.counts.as_dict(), "slots": self.parts, "cells": cells, "free_cells": free}

    def close(self) -> None:
        """See Tiers."""
        self.tier.close()
