"""The host's record of a list of slots that a device takes by itself (kv/offers.py): the slots listed, those withdrawn
or changed since, and those that the device has taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from saccade.errors import SaccadeError

if TYPE_CHECKING:
    from saccade.kv.offers import Offers
    from saccade.kv.tiers import Tiers

SHARE = 4  # one in so many slots is listed at once
MOST_FRESH = 1024  # parts that are written so that their slots may be taken, at once
REFILL = 2, 8  # a new list is made where one in the first is left of it, unless steps take little: one in the second
STEPS = 4  # that a list is to last for, at least
UNKNOWN = 2  # times the most of late: what a step that still runs is taken to spend
STEP, SHORT, NEXT, END, LISTED, HITS, MISSED, WANTED, COUNT, ARRIVED, READ = range(11)  # words of ``Offers.head``
WORDS = 16  # of them, with those that are to come
Array = np.ndarray[Any, Any]


class Listed:
    """The host's side of row ``row`` of ``offers``, which ``tiers`` knows as its own."""

    def __init__(self, tiers: Tiers, offers: Offers, row: int) -> None:
        self.tiers, self.number = tiers, row
        self._listed, self._holding, self._taken, self._stamp, self._head = (
            one[row] for one in (offers.listed, offers.holding, offers.taken, offers.stamp, offers.head)
        )
        self._slots, self._parts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)  # as listed
        self._at = offers.at[row]
        self.next = self._seen = 0  # how far it is taken; the stamp of the last listing
        self._left = 0  # listed, and neither taken, nor passed over, nor withdrawn
        self._owed = 0  # the same, of which the last step has had some
        self._spent = 0  # of a list, by a step: about the most of late
        self._told = np.zeros(WORDS, dtype=np.int64)
        self._withdrawn: list[Array] = []
        self._changed: list[Array] = []  # parts whose cell has changed
        self._head_bytes = tiers.pool.format.block_bytes // tiers.pool.format.kv_heads
        tiers.offers, tiers._turn.sees_turns = self, False

    def withdraw(self, slots: Array) -> None:
        """``slots`` hold something else now, or what the tier does not have."""
        at = self._at[slots]
        gone = at[at >= 0]
        if len(gone):
            self._at[self._slots[gone]] = -1
            self._left -= len(gone)
            self._withdrawn.append(gone)

    def cells_changed(self, parts: Array) -> None:
        """The tier keeps ``parts`` elsewhere, or no more."""
        self._changed.append(parts)

    @property
    def lasts(self) -> bool:
        """Whether there is nothing to tell the device, and enough will be listed still once the step that runs has
        taken its part."""
        told = not self._withdrawn and not self._changed
        return told and self._left - self._owed - UNKNOWN * self._spent > self._few

    def refill(self, open_blocks: Array) -> bool:
        """Have enough slots listed. Whether the list is a new one."""
        if self._left - self._owed > self._few:
            return False
        self._list()
        self.tiers.opened(slice(None), open_blocks)
        return True

    def changes(self) -> tuple[list[Array], list[Array]]:
        """What has changed since this was last asked: places of the list that are withdrawn, and parts with their
        cells, int64 [2, parts]."""
        withdrawn, self._withdrawn = self._withdrawn, []
        if not self._changed:
            return withdrawn, []
        parts = np.unique(np.concatenate(self._changed))
        self._changed.clear()
        cells = self.tiers.gatherable(self.tiers._cell[self.tiers.of_numbers(parts)])
        return withdrawn, [np.stack([parts, cells.astype(np.int64)])]

    def count(self, start: int, parts: Array) -> bool:
        """Count what :meth:`took` is to take over. Whether that may wait."""
        tiers, used = self.tiers, parts >= 0
        self._owed, gone = len(parts), self._parts[start : start + len(parts)][used] >= 0
        tiers.counts.evicted += int(gone.sum())
        tiers.counts.bytes_read += len(gone) * tiers.tier.cell_bytes
        return bool(gone.all()) and not tiers.debug

    def took(self, start: int, parts: Array) -> tuple[Array, Array, Array]:
        """The device has taken the list from ``start`` on, for ``parts`` (-1: passed over). Of those that were taken:
        the slots, the parts that have left them (-1: none), and those that came. In debug mode SaccadeError where a
        cell that it read is not the part's."""
        tiers, used = self.tiers, np.nonzero(parts >= 0)[0]
        passed = self._slots[start : start + len(parts)]
        self._left -= int((self._at[passed] >= 0).sum())
        self._owed = 0
        self._at[passed] = -1
        slots, left, came = passed[used], self._parts[start + used], parts[used]
        if tiers.debug and not tiers.owns(came):
            raise SaccadeError("a device has brought in KV of other blocks than it was asked for")
        tiers.wanted(came)
        tiers._turn.place(slots, came)
        return slots, left, came

    def settle(self, head: Array, short: bool) -> None:
        """A step has left ``head``. Where it ran ``short`` the list is made anew."""
        tiers, told = self.tiers, self._told
        tiers.counts.hits += int(head[HITS] - told[HITS])
        tiers.counts.misses += int(head[MISSED] - told[MISSED])
        tiers.counts.bytes_read += int(head[READ] - told[READ]) * self._head_bytes
        first, self.next = self.next, int(head[NEXT])
        self._spent = max(self.next - first, self._spent * 7 // 8)
        self._told = head
        if short:
            self._left = 0

    @property
    def _few(self) -> int:
        """With so many slots left a new list is made."""
        few, least = (len(self._slots) // share for share in REFILL)
        return min(few, max(least, STEPS * self._spent))

    def _list(self) -> None:
        """Make a new list."""
        tiers = self.tiers
        tiers.pool.catch_up()
        stamp = self._stamp.cpu().numpy()
        used = np.nonzero(stamp >= self._seen)[0]
        if tiers.policy in ("lru", "cycle"):
            used = used[np.argsort(stamp[used], kind="stable")]
        tiers._turn.touch(used, in_turn=True)
        self._seen = (int(self._told[STEP]) + 1) * tiers.pool.layers
        self._at[:] = -1
        self._withdrawn.clear()
        slots, parts = self._offerable(max(1, tiers.slots // SHARE))
        self._slots, self._parts, self.next = slots, parts, 0
        self._at[slots] = np.arange(len(slots))
        count = self._left = len(slots)
        packed = torch.from_numpy(np.stack([slots, parts]).astype(np.int32)).to(self._head.device)
        self._listed[:count], self._holding[:count] = packed[0], packed[1]
        self._taken[:count] = -1
        limits = torch.tensor([0, count, self._seen], dtype=torch.int32, device="cpu")
        self._head[NEXT : LISTED + 1] = limits.to(self._head.device)

    def _offerable(self, count: int) -> tuple[Array, Array]:
        """Up to ``count`` slots that are free or hold parts that the tier has too, or gets now; and these parts, -1 for
        none."""
        tiers, pool = self.tiers, self.tiers.pool
        free = pool.free_list(tiers.row)[:count]
        spare = min(count - len(free), tiers.slots - pool.free_in(tiers.row) - tiers.pins.held)
        layers, blocks = tiers._victims(max(0, spare))
        fresh = np.nonzero(tiers._cell[layers, blocks] == 0)[0][: min(MOST_FRESH, tiers.tier.free_cells)]
        if len(fresh):
            tiers._write(layers[fresh], blocks[fresh], layers[:0], blocks[:0])
        has = tiers._cell[layers, blocks] > 0
        layers, blocks = layers[has], blocks[has]
        nothing = np.full(len(free), -1, dtype=np.int64)
        slots = np.concatenate([free, tiers.slots_of(layers, blocks)])
        return slots, np.concatenate([nothing, tiers.numbers_of(layers, blocks)])
