"""Slots that a device may take by itself: what it needs to bring parts in within a recorded step, and what it tells
afterwards.

The host lists slots that may be taken, those that leave next first, by the replacement of Tiers; all of them are free,
or hold parts that the host tier has too. Kernels (ops/triton/residency.py) take them in this order, passing over those
that were used since they were listed, and note who took what. The host takes this over into its own map while the next
step runs, or before it looks there. What changes on the host in between withdraws a slot from the list. KV heads that
have slots of their own have a list each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from saccade.errors import SaccadeError

if TYPE_CHECKING:
    from saccade.kv.tiers import Tiers

SHARE = 4  # one in so many slots is listed at once
FIRST_RANKED = 64  # blocks of a ranking that are brought in at first
MOST_FRESH = 1024  # parts that are written so that their slots may be taken, at once
REFILL = 2, 8  # a new list is made where one in the first is left of it, unless steps take little: one in the second
STEPS = 4  # that a list is to last for, at least
STEP, SHORT, NEXT, END, LISTED, HITS, MISSED, WANTED, COUNT, ARRIVED = range(10)  # words of ``head``
WORDS = 16  # of them, with those that are to come
Array = np.ndarray[Any, Any]


class Offers:
    """Over ``tiers``, whose tier is a HostTier: one for all KV heads, or one for each. Each of them is a row below. All
    tensors lie on the device of the slots, and stay where they are. Parts are numbered as in the pool's map.

    ``cells`` int32 [layers * rows * logical blocks]: the cell of each part, from 1, 0 for none. ``listed`` and
    ``holding`` int32 [rows, slots]: slots to be taken, -1 for one withdrawn, and the parts that they hold, -1 for none.
    ``taken`` int32 [rows, slots]: the part for which each of them was taken. ``stamp`` int32 [rows, slots]: when a slot
    was used last, in steps * layers + layer; ``mark`` int32 [rows, logical blocks]: when a block was missed last.
    ``missing``, ``which``, ``where`` int32 [rows, logical blocks]: a layer's misses, the cells they come from (from 0)
    and the slots they go to. ``head`` int32 [rows, 16]: the step's number; whether slots ran short (1), or what is
    brought in of a ranking (2, in the first row); how far the list is taken, and its end; the stamp from which on a
    slot is recent; hits and misses so far; misses of this layer, how many of them come, and programs that have looked.
    ``reach`` int32 [layers]: blocks of a ranking that are brought in before its rule is followed.
    """

    def __init__(self, tiers: Sequence[Tiers]) -> None:
        pool, rows = tiers[0].pool, len(tiers)
        device, slots, blocks = pool.storage.device, pool.storage.num_blocks, pool.logical_blocks

        def words(count: int, value: int = 0) -> Tensor:
            return torch.full((rows, count), value, dtype=torch.int32, device=device)

        cells = np.stack([one.gatherable(one._cell) for one in tiers], 1)
        self.cells = torch.from_numpy(cells.reshape(-1)).to(device)
        self.listed, self.holding, self.taken = words(slots, -1), words(slots, -1), words(slots, -1)
        self.stamp, self.mark = words(slots, -1), words(blocks, -1)
        self.missing, self.which, self.where = words(blocks), words(blocks), words(blocks)
        self.head = words(WORDS)
        self.reach = torch.full((pool.layers,), FIRST_RANKED, dtype=torch.int32, device=device)
        self.at = np.full((rows, slots), -1, dtype=np.int64)  # where a slot is in its row's list
        self._staging = torch.empty(0, dtype=torch.int32, device="cpu")
        self._pool, self._each = pool, np.arange(rows)[:, None]
        self.cell_bytes = tiers[0].tier.cell_bytes  # of a part
        self._rows = [Listed(one, self, row) for row, one in enumerate(tiers)]
        self._owed: list[tuple[Listed, int, Array]] = []  # where a list was taken from, and for which parts
        self._kept: tuple[bytes, int] | None = None  # blocks that no list has a slot of, and the map that says so

    def prepare(self, kept: Array, open_blocks: Array) -> None:
        """Before a step: have enough slots listed, none of them a slot of the blocks ``kept``, which the step needs
        throughout, and which are resident. ``open_blocks`` are written to."""
        listed_anew = [row.refill(open_blocks) for row in self._rows]
        if any(listed_anew) or not self.keeps(kept):
            slots = self._pool.lookup(kept.tolist())
            listed = self.at[self._each, slots] >= 0  # as they were once before: most steps withdraw none
            for number in np.nonzero(listed.any((0, 2)))[0].tolist():
                self._rows[number].withdraw(slots[:, number].reshape(-1))
            self._kept = kept.tobytes(), self._pool.changes
        self._upload()
        for row in self._rows:
            row.tiers.tier.settle()

    def keeps(self, kept: Array) -> bool:
        """Whether the last step kept the same blocks, and the host has moved nothing since: they are resident."""
        return self._kept == (kept.tobytes(), self._pool.changes)

    def settle(self) -> bool:
        """After a step, which this waits for: count what it did. Whether all that it asked for came."""
        head = self._here([self.head.view(-1)])[0].reshape(self.head.shape).astype(np.int64)
        short = bool(head[:, SHORT].any())
        if short:
            self.head[:, SHORT] = 0
        moved = [(row, own, row.next, int(own[NEXT])) for row, own in zip(self._rows, head) if own[NEXT] > row.next]
        if moved:
            self._owe(moved)
        for row, own in zip(self._rows, head):
            row.settle(own, short)
        return not short

    def catch_up(self) -> None:
        """Take over into the host's map what the last step has moved."""
        self._pool.behind = None
        owed, self._owed = self._owed, []
        if not owed:
            return
        took = [row.took(start, parts) for row, start, parts in owed]
        numbers = np.repeat([row.number for row, *_ in owed], [len(came) for *_, came in took])
        slots, left, came = map(np.concatenate, zip(*took))
        self._pool.moved(slots, left, came, numbers)

    def _owe(self, moved: list[tuple[Listed, Array, int, int]]) -> None:
        """Rows whose lists were taken from one place to another. The map waits until the next step runs, or until
        somebody looks there; but not where slots were free, or the device's map is the host's."""
        self.catch_up()
        taken = self._here([self.taken[row.number, start:stop] for row, _, start, stop in moved])
        self._owed = [(row, start, own.astype(np.int64)) for (row, _, start, _), own in zip(moved, taken)]
        waits = [row.count(start, parts) for row, start, parts in self._owed]
        if all(waits) and self._pool.mirrored:
            self._pool.behind = self.catch_up
        else:
            self.catch_up()

    def _here(self, parts: list[Tensor]) -> list[Array]:
        """int32 [n] each, on the host, good until the next call: all are waited for once."""
        if self.head.device.type == "cpu":
            return [part.numpy() for part in parts]
        stops = np.cumsum([len(part) for part in parts]).tolist()
        if len(self._staging) < stops[-1]:
            self._staging = torch.empty(2 * stops[-1], dtype=torch.int32, device="cpu", pin_memory=True)
        found = [self._staging[stop - len(part) : stop] for part, stop in zip(parts, stops)]
        for own, part in zip(found, parts):
            own.copy_(part, non_blocking=True)
        torch.cuda.current_stream(self.head.device).synchronize()
        return [own.numpy() for own in found]

    def _upload(self) -> None:
        """Tell the device what has changed since."""
        device, withdrawn, changed = self.head.device, list[Array](), list[Array]()
        for row in self._rows:
            own = row.changes()
            withdrawn += [one + row.number * self.listed.shape[1] for one in own[0]]
            changed += own[1]
        if withdrawn:
            self.listed.view(-1)[torch.from_numpy(np.concatenate(withdrawn)).to(device)] = -1
        if changed:
            both = torch.from_numpy(np.concatenate(changed, 1)).to(device)
            self.cells[both[0]] = both[1].int()


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
        tiers.offers = self

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

    def refill(self, open_blocks: Array) -> bool:
        """Have enough slots listed. Whether the list is a new one."""
        few, least = (len(self._slots) // share for share in REFILL)
        if self._left - self._owed > min(few, max(least, STEPS * self._spent)):
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
        first, self.next = self.next, int(head[NEXT])
        self._spent = max(self.next - first, self._spent * 7 // 8)
        self._told = head
        if short:
            self._left = 0

    def _list(self) -> None:
        """Make a new list."""
        tiers = self.tiers
        tiers.pool.catch_up()
        stamp = self._stamp.cpu().numpy()
        used = np.nonzero(stamp >= self._seen)[0]
        if tiers.policy == "lru":
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
