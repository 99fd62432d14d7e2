"""Tiers: which parts of KV blocks lie in slots and which in the tier behind them, which are brought in, and which have
to leave.

A part is written to the tier when it first leaves its slot or, where writes cost next to nothing, once its block is
full and slots run short. It is not written again: its cell remains its own until the block is released or written to
(:meth:`Tiers.opened`), and while it has both slot and cell, leaving costs nothing. When cells run short, parts in slots
give their cells up; memory and tier together hold what both have room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.kv.hold import Gate, Hold
from saccade.kv.host_disk import HostAndDisk
from saccade.kv.lodging import RECLAIMED, Lodging
from saccade.kv.offers import Offers
from saccade.kv.pins import Pins
from saccade.kv.replacement import Replacement
from saccade.kv.tier import LEAST_SLOTS, LostKV, Openings, Tier, TierError, TierFull

if TYPE_CHECKING:
    from saccade.kv.blocks import BlockManager

FEW = LEAST_SLOTS // 2  # parts that trade places at once where the tier is nearly full
RECORD = 1 << 20  # bytes of victims that leave together
SHORT = 4  # one in so many slots free: full blocks are written ahead of their leaving
BEHIND = ("bytes_read", "bytes_written", "retries", "wait_seconds")  # of a disk behind host memory
Array = np.ndarray[Any, Any]


class Tiers(Lodging):
    """The slots of ``pool`` over ``tier``, for the one thread that drives the pool. ``policy`` says who leaves:
    ``clock`` (second chance), ``lru``, ``fifo`` or ``random``. ``debug`` fills slots that parts have left, and the one
    that stands for absent parts, with NaN, so that a read of them shows.

    Of a pool whose KV heads lie apart it knows those of KV head ``row`` alone (see head_tiers.py)."""

    heads = 1  # KV heads that have slots, and cells, of their own

    def __init__(
        self, pool: BlockManager, tier: Tier, policy: str = "clock", debug: bool = False, row: int = 0
    ) -> None:
        super().__init__(pool, tier, row, debug)
        self.policy = policy
        self.pins = Pins(*self._cell.shape)
        self._openings = Openings()
        self._charged = 0  # bytes beside the slots that their memory is to hold
        self._withheld: list[int] = []
        self._turn = Replacement(pool.storage.num_blocks, policy)
        self._offers: Offers | None = None
        self.guard = pool.storage.num_blocks - 1  # the slot that stands for what is not resident
        pool.storage.k[self.guard].fill_(float("nan") if debug and pool.storage.k.is_floating_point() else 0.0)
        pool.storage.v[self.guard].fill_(0.0)  # kernels that read whole tiles weigh what is not theirs with 0
        self._batch = max(1, min(RECORD * pool.rows // pool.format.block_bytes, self.slots // 8))

    @property
    def slots(self) -> int:
        """Parts that memory holds at most."""
        return self.pool.storage.num_blocks - 1 - len(self._withheld)

    @property
    def share(self) -> int:
        """Parts of one layer that memory holds at most."""
        return self.slots // self.pool.layers if self.pool.layers_apart else self.slots

    @property
    def withheld(self) -> int:
        """Slots whose memory holds block summaries instead."""
        return len(self._withheld)

    @property
    def parts(self) -> int:
        """The same, over all KV heads that have slots of their own."""
        return self.slots

    @property
    def stored(self) -> int:
        """Parts that the tier holds, those that are resident too among them."""
        return self._stored

    @property
    def room(self) -> int:
        """Parts that one call may hold beside those that are held already, as many of each layer."""
        if self.pool.layers_apart:
            return self.pool.layers * (self.share - max(self.pins.held_in))
        return self.slots - self.pins.held

    def room_in(self, layer: int) -> int:
        """The same, all of one layer."""
        return self.share - self.pins.held_in[layer] if self.pool.layers_apart else self.slots - self.pins.held

    def charge(self, change: int) -> None:
        """Block summaries in memory have grown by ``change`` bytes: from the next step on so many slots less are used.
        On a device they are no part of what slots were given."""
        if self.pool.storage.device.type == "cpu":
            self._charged += change
            self._give_back()

    def settle_charges(self) -> None:
        """Between two steps: have as many slots as memory leaves beside summaries, an eighth of them at least."""
        wanted = self._give_back()
        if self.pool.layers_apart and wanted > len(self._withheld):
            share = (self.pool.storage.num_blocks - 1 - wanted) // self.pool.layers
            try:
                for layer in range(self.pool.layers):
                    while (over := self.pool.taken(layer, self.row) - share) > 0:
                        self._evict(min(over, self._batch), 0, layer)
            except (TierError, TierFull):
                return
        while wanted > len(self._withheld):
            short = wanted - len(self._withheld)
            if not self._free:
                try:
                    self._evict(min(short, self._batch), 0)
                except (TierError, TierFull):  # what is held, or cannot be written, stays
                    return
            taken = self.pool.withhold(short, self.row)
            if self.offers is not None:
                self.offers.withdraw(np.array(taken, dtype=np.int64))
            self._withheld += taken

    def loose(self, layer: int, blocks: Array) -> int:
        """How many of ``blocks`` have no holder."""
        return int(self.pins.loose(layer, blocks).sum()) if self.pins.held else len(blocks)

    def fetch(self, layer: int, blocks: Array, ahead: bool = False, gate: Gate | None = None) -> Hold:
        """Hold ``blocks`` (int ids, no id twice) of one layer and begin to bring in those that are not resident;
        ``ahead``: no step waits for them yet. Behind a ``gate`` they come in this order, a few at a time. LostKV,
        TierFull or TierError, holding nothing, where that cannot be."""
        if self._losses and self._lost[layer, blocks].any():
            raise LostKV(f"KV blocks of layer {layer} were lost")
        slots = self.slots_of(layer, blocks)
        self._turn.turn(layer)
        absent = slots < 0
        missing = blocks[absent]
        self.counts.hits += len(blocks) - len(missing)
        self.counts.misses += len(missing)
        self._turn.touch(slots[~absent] if len(missing) else slots)
        hold = Hold(self, layer, blocks, gate)
        self.pins.add(layer, blocks)
        try:
            self.counts.prefetched += ahead * len(missing)
            first = 0
            with self.pool.publishing_once():
                while first < len(missing):
                    left = len(missing) - first
                    roomy = self.tier.free_cells >= left + self._batch
                    step = left if roomy else FEW  # what comes keeps its cell while others leave for it
                    hold.wait()
                    hold._load(self._admit(layer, missing[first : first + step], left))
                    first += step
        except BaseException:
            self.pins.remove(layer, blocks)
            raise
        return hold

    def passed_over(self, layer: int, blocks: Array) -> None:
        """``blocks`` that were asked for were not wanted in the end, and did not come."""
        self._vacate(layer, blocks)
        self.counts.misses -= len(blocks)
        self.tier.counts.bytes_read -= len(blocks) * self.tier.cell_bytes

    def found(self, layer: int, slots: Array) -> None:
        """Parts of ``layer`` in ``slots`` were looked up and were there."""
        self.counts.hits += len(slots)
        self._turn.turn(layer)
        self._turn.touch(slots)

    def opened(self, layers: slice, blocks: Array) -> None:
        """Rows are about to be written to ``blocks``: what the tier has of their resident parts is the past."""
        if (
            not self._stored
            or not len(blocks)
            or self._openings.seen((self.pool.changes, self.written), layers, blocks)
        ):
            return
        resident = self.pool.map_of(self.row)[layers][:, blocks] >= 0
        if resident.all():
            self._openings.note(layers, blocks)
        stale = (self._cell[layers][:, blocks] > 0) & resident
        for at in np.nonzero(stale.any(1))[0].tolist():
            self._drop_cells(range(self.pool.layers)[layers][at], blocks[stale[at]])

    def sealed(self, layers: range, blocks: Array) -> None:
        """``blocks`` are full: where slots run short, a tier that works in the background gets their parts now, so
        that leaving costs nothing."""
        free = min(self.pool.free_for(layer, self.row) for layer in layers) if self.pool.layers_apart else self._free
        if not self.tier.in_background or free >= self.share // SHORT:
            return
        which, own = np.repeat(np.array(layers), len(blocks)), np.tile(blocks, len(layers))
        fresh = (self.pool.map_of(self.row)[which, own] >= 0) & (self._cell[which, own] == 0)
        kept = self._batch + self.tier.cells // (RECLAIMED // 2)  # for victims, who have nowhere else to go
        if fresh.any() and self.tier.free_cells >= int(fresh.sum()) + kept:
            self._write(which[fresh], own[fresh], which[:0], own[:0])

    def placed(self, layer: int, blocks: Sequence[int] | Array, slots: Array) -> None:
        """``blocks`` have these slots from now on."""
        self._turn.place(slots, self.numbers_of(layer, np.asarray(blocks, dtype=np.int64)))
        if self.offers is not None:
            self.offers.withdraw(slots)

    def forget(self, blocks: Sequence[int]) -> None:
        """``blocks`` have lost their last holder."""
        if self.offers is not None:
            slots = self.pool.map_of(self.row)[:, blocks].reshape(-1)
            self.offers.withdraw(slots[slots >= 0])
        if self._stored:
            for layer in range(self.pool.layers):
                own = np.asarray(blocks)
                self._drop_cells(layer, own[self._cell[layer, own] > 0])
        self._lodgers[blocks] = 0
        if self._losses:
            self._losses -= int(self._lost[:, blocks].sum())
            self._lost[:, blocks] = False

    def lose(self, layer: int, blocks: Array) -> None:
        """``blocks`` cannot be had back: their slots, whatever is in them, are free."""
        self._vacate(layer, blocks)
        self._drop_cells(layer, blocks)
        self._lost[layer, blocks] = True
        self._losses += len(blocks)
        self.counts.lost += len(blocks)

    @property
    def each(self) -> list[Tiers]:
        """This, where KV heads share slots (see HeadTiers)."""
        return [self]

    def copied(self, layer: int, blocks: Array) -> bool:
        """Have host memory keep a copy of each of ``blocks``. Whether it has one of all."""
        bare = blocks[(self._cell[layer, blocks] == 0) & (self.slots_of(layer, blocks) >= 0)]
        if len(bare) and self.tier.free_cells >= len(bare) + self._batch:
            self._write(np.full(len(bare), layer), bare, bare[:0], bare[:0])
        return bool((self.cells_of(layer, blocks) > 0).all())

    def offer(self) -> Offers:
        """What a device needs to bring parts in by itself, made once."""
        if self._offers is None:
            self._offers = Offers([self])
        return self._offers

    def numbers(self) -> dict[str, float]:
        """What has moved, and how the tier stands; any thread may ask."""
        tier = self.tier
        numbers = {**self.counts.as_dict(), "slots": self.slots, "cells": tier.cells, "free_cells": tier.free_cells}
        if isinstance(tier, HostAndDisk):
            numbers |= {f"disk_{name}": value for name, value in tier.disk.counts.as_dict().items() if name in BEHIND}
        return numbers

    def close(self) -> None:
        """The tier gives everything back."""
        self.tier.close()

    @property
    def _free(self) -> int:
        """Slots that nothing lies in."""
        return self.pool.free_in(self.row)

    def _give_back(self) -> int:
        """How many slots are to be withheld; those beyond are free again."""
        every = self.pool.storage.num_blocks - 1
        most = max(0, every - max(LEAST_SLOTS, every // 8))
        wanted = max(0, min(-(-self._charged // self.pool.format.block_bytes), most))
        if wanted < len(self._withheld):
            self.pool.give_back(self._withheld[wanted:], self.row)
            del self._withheld[wanted:]
        return wanted

    def _admit(self, layer: int, missing: Array, arriving: int) -> Array:
        """Slots for ``missing``, of ``arriving`` parts that are held and not resident; those of them whose content must
        be read."""
        short = len(missing) - self.pool.free_for(layer, self.row)
        if short > 0:
            self._evict(short, arriving, layer)
        self.pool.admit(layer, missing.tolist(), self._head)
        return missing[self._cell[layer, missing] > 0]

    def _evict(self, count: int, arriving: int, layer: int = 0) -> None:
        """Free ``count`` slots at least, of ``layer`` where layers lie apart, while ``arriving`` parts are held that
        are not resident. TierFull or TierError where fewer can be had."""
        self.pool.catch_up()
        if self.pool.layers_apart:
            spare = self.pool.taken(layer, self.row) - self.pins.held_in[layer] + arriving
        else:
            spare = self.slots - self._free - self.pins.held + arriving
        wanted = count
        if count > spare:
            raise TierFull(
                f"{count} KV blocks wanted in memory at once but {spare} of {self.share} can be spared; raise kv_memory"
            )
        count = max(count, min(self._batch, spare, self.tier.free_cells))
        layers, blocks = self._victims(count, layer if self.pool.layers_apart else None)
        has = self._cell[layers, blocks] > 0
        kept = has.copy()
        if not has.all():
            kept[~has] = self._write(layers[~has], blocks[~has], layers[has], blocks[has])
        self.tier.settle()
        for layer in np.unique(layers[kept]).tolist():
            self._vacate(layer, blocks[kept & (layers == layer)])
        gone = int(kept.sum())
        self.counts.evicted += gone
        if gone < wanted:
            raise TierError(
                f"KV blocks cannot be written to the {self.tier.name}: it is full, or the device fails "
                f"({len(kept) - gone} of {len(kept)} writes failed)"
            )

    def _victims(self, count: int, layer: int | None = None) -> tuple[Array, Array]:
        """``count`` resident parts without a holder, of ``layer`` if it is given: layers and blocks."""
        held = self.pool.map_flat()

        def allowed(slots: Array, parts: Array) -> Array:
            valid = parts >= 0
            own = np.where(valid, parts, 0)
            may = valid & (held[own] == slots)
            may = may if layer is None else may & of_layer(parts)
            return may & self.pins.loose(*self.of_numbers(own)) if self.pins.held else may

        def of_layer(parts: Array) -> Array:
            return self.of_numbers(parts)[0] == layer

        if layer is None:
            return self.of_numbers(self._turn.victims(count, allowed))
        return self.of_numbers(self._turn.victims(count, allowed, layer, of_layer))
