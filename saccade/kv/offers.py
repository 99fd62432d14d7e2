"""Slots that a device may take by itself: what it needs to bring parts in within a recorded step, and what it tells
afterwards.

The host lists slots that may be taken, those that leave next first, by the replacement of Tiers; all of them are free,
or hold parts that the host tier has too. Kernels (ops/triton/residency.py) take them in this order, passing over those
that were used since they were listed, and note who took what. After the step the host takes this over into its own map.
What changes on the host in between withdraws a slot from the list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from saccade.kv.tiers import Tiers

SHARE = 4  # one in so many slots is listed at once
FIRST_RANKED = 64  # blocks of a ranking that are brought in at first
MOST_FRESH = 1024  # parts that are written so that their slots may be taken, at once
REFILL = 2  # a new list is made once no more than one in so many is left of it
STEP, SHORT, NEXT, END, LISTED, HITS, MISSED, WANTED, COUNT = range(9)  # words of ``head``
Array = np.ndarray[Any, Any]


class Offers:
    """Over ``tiers``, whose tier is a HostTier. All tensors lie on the device of the slots, and stay where they are.

    ``cells`` int32 [layers * logical blocks]: the cell of each part, from 1, 0 for none. ``listed`` and ``holding``
    int32 [slots]: slots to be taken, -1 for one withdrawn, and the parts that they hold, -1 for none. ``taken`` int32
    [slots]: the part for which each of them was taken. ``stamp`` int32 [slots]: when a slot was used last, in steps *
    layers + layer; ``mark`` int32 [logical blocks]: when a block was missed last. ``missing``, ``which``, ``where``
    int32 [logical blocks]: a layer's misses, the cells they come from (from 0) and the slots they go to. ``head`` int32
    [16]: the step's number; whether slots ran short; how far the list is taken, and its end; the stamp from which on a
    slot is recent; hits and misses so far; misses of this layer, and how many of them come. ``reach`` int32 [layers]:
    blocks of a ranking that are brought in before its rule is followed.
    """

    def __init__(self, tiers: Tiers) -> None:
        self.tiers, pool = tiers, tiers.pool
        device, slots, blocks = pool.storage.device, pool.storage.num_blocks, pool.logical_blocks

        def words(count: int, value: int = 0) -> Tensor:
            return torch.full((count,), value, dtype=torch.int32, device=device)

        self.cells = torch.from_numpy(tiers._cell.reshape(-1).copy()).to(device)
        self.listed, self.holding, self.taken = words(slots, -1), words(slots, -1), words(slots, -1)
        self.stamp, self.mark = words(slots, -1), words(blocks, -1)
        self.missing, self.which, self.where = words(blocks), words(blocks), words(blocks)
        self.head = words(16)
        self.reach = words(pool.layers, FIRST_RANKED)
        self._slots, self._parts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)  # as listed
        self._at = np.full(slots, -1, dtype=np.int64)  # where a slot is in the list
        self._next = self._seen = 0  # how far it is taken; the stamp of the last listing
        self._told = np.zeros(16, dtype=np.int64)
        self._withdrawn: list[Array] = []
        self._changed: list[Array] = []  # parts whose cell has changed

    def withdraw(self, slots: Array) -> None:
        """``slots`` hold something else now, or what the tier does not have."""
        at = self._at[slots]
        gone = at[at >= 0]
        if len(gone):
            self._at[self._slots[gone]] = -1
            self._withdrawn.append(gone)

    def cells_changed(self, parts: Array) -> None:
        """The tier keeps ``parts`` elsewhere, or no more."""
        self._changed.append(parts)

    def prepare(self, kept: Array, open_blocks: Array) -> None:
        """Before a step: have enough slots listed, none of them a slot of the blocks ``kept``, which the step needs
        throughout, and which are resident. ``open_blocks`` are written to."""
        tiers, layers = self.tiers, self.tiers.pool.layers
        if (self._at >= 0).sum() * REFILL <= self._wanted:
            self._list()
            tiers.opened(slice(None), open_blocks)
        self.withdraw(np.concatenate([tiers.pool.slots_of(layer, kept) for layer in range(layers)]))
        self._upload()
        tiers.tier.settle()

    def settle(self) -> bool:
        """After a step, which this waits for: take over what it did. Whether all that it asked for came."""
        head = self.head.cpu().numpy().astype(np.int64)
        tiers, told = self.tiers, self._told
        tiers.counts.hits += int(head[HITS] - told[HITS])
        tiers.counts.misses += int(head[MISSED] - told[MISSED])
        first, self._next = self._next, int(head[NEXT])
        if self._next > first:
            part = self.taken[first : self._next].cpu().numpy().astype(np.int64)
            used = np.nonzero(part >= 0)[0]
            self._at[self._slots[first : self._next]] = -1
            self._took(self._slots[first + used], self._parts[first + used], part[used])
        self._told = head
        if head[SHORT]:
            self.head[SHORT] = 0
        return not head[SHORT]

    @property
    def _wanted(self) -> int:
        return max(1, self.tiers.slots // SHARE)

    def _list(self) -> None:
        """Make a new list."""
        tiers = self.tiers
        stamp = self.stamp.cpu().numpy()
        used = np.nonzero(stamp >= self._seen)[0]
        tiers._turn.touch(used[np.argsort(stamp[used], kind="stable")], in_turn=True)
        self._seen = (int(self._told[STEP]) + 1) * tiers.pool.layers
        self._at[:] = -1
        self._withdrawn.clear()
        slots, parts = self._offerable(self._wanted)
        self._slots, self._parts, self._next = slots, parts, 0
        self._at[slots] = np.arange(len(slots))
        count = len(slots)
        packed = torch.from_numpy(np.stack([slots, parts]).astype(np.int32)).to(self.head.device)
        self.listed[:count], self.holding[:count] = packed[0], packed[1]
        self.taken[:count] = -1
        limits = torch.tensor([0, count, self._seen], dtype=torch.int32, device="cpu")
        self.head[NEXT : LISTED + 1] = limits.to(self.head.device)

    def _upload(self) -> None:
        """Tell the device what has changed since."""
        device = self.head.device
        if self._withdrawn:
            at = torch.from_numpy(np.concatenate(self._withdrawn)).to(device)
            self.listed[at] = -1
            self._withdrawn.clear()
        if self._changed:
            parts = np.unique(np.concatenate(self._changed))
            values = self.tiers._cell.reshape(-1)[parts].astype(np.int64)
            both = torch.from_numpy(np.stack([parts, values])).to(device)
            self.cells[both[0]] = both[1].int()
            self._changed.clear()

    def _offerable(self, count: int) -> tuple[Array, Array]:
        """Up to ``count`` slots that are free or hold parts that the tier has too, or gets now; and these parts, -1 for
        none."""
        tiers, pool = self.tiers, self.tiers.pool
        free = pool.free_list()[:count]
        spare = min(count - len(free), tiers.slots - pool.free_slots - tiers._pinned)
        layers, blocks = tiers._victims(max(0, spare))
        fresh = np.nonzero(tiers._cell[layers, blocks] == 0)[0][: min(MOST_FRESH, tiers.tier.free_cells)]
        if len(fresh):
            tiers._write(layers[fresh], blocks[fresh], layers[:0], blocks[:0])
        has = tiers._cell[layers, blocks] > 0
        parts = (layers * pool.logical_blocks + blocks)[has]
        nothing = np.full(len(free), -1, dtype=np.int64)
        return np.concatenate([free, pool.map_flat()[parts]]), np.concatenate([nothing, parts])

    def _took(self, slots: Array, left: Array, came: Array) -> None:
        """The device has let the parts ``left`` (-1: none) leave ``slots`` and brought ``came`` there."""
        tiers = self.tiers
        tiers.pool.moved(slots, left, came)
        tiers._turn.place(slots, came)
        tiers.counts.evicted += int((left >= 0).sum())
        tiers.counts.bytes_read += len(came) * tiers.pool.format.block_bytes
