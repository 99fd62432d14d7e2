"""Slots that a device may take by itself, so that a recorded step can bring in parts of KV blocks, and the record of
what it took.

The host lists slots that may be taken, in the order in which the replacement of ``Tiers`` would free them; each is
free, or holds a part that the host tier has too. Kernels (ops/triton/slots_taken.py) take slots in this order, pass
over those that were used since they were listed, and note which part took which slot. The host copies this into its own
map while the next step runs, or before it reads the map. A change on the host in between withdraws the slot from the
list.
KV heads that have slots of their own have a list each (kv/listed.py).

Where ``READS_HOST`` says so and addresses allow it, a layer's lists of blocks wait for nothing: kernels read absent
parts where they lie in host memory, each KV head its own part, and the parts take their slots afterwards, on a stream
beside the layers that follow. Such a step fails only for blocks that have no cell.

Two steps may be in flight: one may be launched behind the one that runs, as long as its lists and what it keeps
suffice. Its moves are real even if its result is discarded. Code that reads or changes the map meanwhile waits for that
step first, and takes over the moves of both (``SlotMap.behind``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from saccade.copied import Copied
from saccade.kv.listed import NEXT, SHORT, STEP, WORDS, Listed
from saccade.kv.storage import KVStorage
from saccade.kv.tier import TierCounts

if TYPE_CHECKING:
    from saccade.kv.tiers import Tiers

FIRST_RANKED = 64  # blocks of a ranking that are brought in at first
READS_HOST = True  # whether what is absent is read where it lies
MOST_LATE = 32  # parts of a layer that then take slots in one step, at least
LATE_SHARE = 32  # and one in so many of a layer's slots, where parts are single heads'
Array = np.ndarray[Any, Any]


def most_late(rows: int, slots: int, layers: int) -> int:
    """Parts of a layer and row that take slots in one step, after they were read in host memory. With fewer than a long
    sequence newly chooses, its layers stay absent. A part of one head costs the link what reading it once does; a part
    of all heads costs more than those that chose it have read, so the fewest come. A power of two where slots decide:
    it is compiled in."""
    own = 0 if rows == 1 else slots // layers // LATE_SHARE
    return max(MOST_LATE, 1 << own.bit_length() - 1 if own else 0)


class Flight:
    """A step over Offers that is launched. Once it is settled, ``came`` says whether all that it asked for did, and
    ``moved`` what it counted."""

    def __init__(self) -> None:
        self.came: bool | None = None
        self.moved = TierCounts()
        self.head: Copied | None = None  # as it left it, where another step was launched behind it


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
    slot is recent; hits and misses so far; misses of this layer, how many of them come, and programs that have looked;
    parts of single KV heads that were read in host memory so far.
    ``reach`` int32 [layers]: blocks of a ranking that are brought in before its rule is followed.
    ``host``: the tier's keys and values, where kernels read them; None where blocks come before they are read.
    ``late`` int32 [2, layers, rows, n] and ``late_count`` [layers, rows] are then each layer's ``which``, ``where``.
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
        self.late = torch.zeros(
            2, pool.layers, rows, most_late(rows, slots, pool.layers), dtype=torch.int32, device=device
        )
        self.late_count = torch.zeros(pool.layers, rows, dtype=torch.int32, device=device)
        self.host = host_rows(tiers[0].tier, pool.storage) if READS_HOST else None
        self._forked = False  # whether something runs beside the step that is being launched
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.at = np.full((rows, slots), -1, dtype=np.int64)  # where a slot is in its row's list
        self._staging = torch.empty(0, dtype=torch.int32, device="cpu")
        self._pool, self._each = pool, np.arange(rows)[:, None]
        self.cell_bytes = tiers[0].tier.cell_bytes  # of a part
        self._rows = [Listed(one, self, row) for row, one in enumerate(tiers)]
        self._owed: list[tuple[Listed, int, Array]] = []  # where a list was taken from, and for which parts
        self._kept: tuple[bytes, int] | None = None  # blocks that no list has a slot of, and the map that says so
        self._flights: list[Flight] = []  # not settled yet, the oldest first
        self._ahead = False  # whether the last of them has not been asked for yet
        # What a step before the last has left is read beside the last one, which writes elsewhere.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def prepare(self, kept: Array, open_blocks: Array) -> Flight:
        """Before a step is launched: have enough slots listed, none of them a slot of the blocks ``kept``, which the
        step needs throughout, and which are resident. ``open_blocks`` are written to."""
        self.land()
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
        return self._fly()

    def begin(self) -> None:
        """A step begins, on the device: it has a number, and nothing has run short."""
        self.head[:, STEP].add_(1)
        self.head[:, SHORT].zero_()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched within follows all that was launched so far, and is waited for by :meth:`join` alone."""
        if self._beside is None:
            yield
            return
        self._beside.wait_stream(torch.cuda.current_stream(self.head.device))
        self._forked = True
        with torch.cuda.stream(self._beside):
            yield

    def join(self) -> None:
        """A step ends, on the device: blocks that took slots beside it are there."""
        if self._beside is not None and self._forked:
            self._forked = False
            torch.cuda.current_stream(self.head.device).wait_stream(self._beside)

    def keeps(self, kept: Array) -> bool:
        """Whether the last step kept the same blocks, and the host has moved nothing since: they are resident."""
        return self._kept == (kept.tobytes(), self._pool.changes)

    @property
    def lasts(self) -> bool:
        """Whether a step that keeps the same blocks may be launched behind the one that runs: the device knows all that
        has changed, and the lists have room for both, by what steps took of late."""
        return self._pool.mirrored and len(self._flights) == 1 and all(row.lasts for row in self._rows)

    def go_ahead(self) -> Flight:
        """Right before that step is launched, ahead of its turn: what the one that runs leaves is on its way to the
        host."""
        self._flights[-1].head = Copied(self.head)
        self._ahead = True
        return self._fly()

    def asked(self) -> None:
        """The step that was launched ahead is the one that runs."""
        self._ahead = False
        self._tell()

    def settle(self, flight: Flight) -> bool:
        """After a step, which this waits for: count what it did, and those before it. Whether all that it asked for
        came."""
        while flight.came is None:
            self._settle(self._flights.pop(0))
        return flight.came

    def land(self) -> None:
        """Settle all steps, the one not asked for yet among them."""
        self._ahead = False
        for flight in list(self._flights):
            self.settle(flight)
        self._tell()

    def catch_up(self) -> None:
        """Take over into the host's map what settled steps have moved."""
        owed, self._owed = self._owed, []
        self._tell()
        if not owed:
            return
        took = [row.took(start, parts) for row, start, parts in owed]
        numbers = np.repeat([row.number for row, *_ in owed], [len(came) for *_, came in took])
        slots, left, came = map(np.concatenate, zip(*took))
        self._pool.moved(slots, left, came, numbers)

    def _look(self) -> None:
        """The map is looked into, or changed, while a step ahead of its turn runs."""
        self.land()
        self.catch_up()

    def _tell(self) -> None:
        """Say in the map what it lacks."""
        self._pool.behind = self._look if self._ahead else self.catch_up if self._owed else None

    def _fly(self) -> Flight:
        flight = Flight()
        self._flights.append(flight)
        self._tell()
        return flight

    def _settle(self, flight: Flight) -> None:
        left = Copied(self.head) if flight.head is None else flight.head
        head = np.array(left.wait(), dtype=np.int64)
        counts = self._rows[0].tiers.counts
        short, before = bool(head[:, SHORT].any()), counts.copy()
        flight.came = not short
        moved = [(row, own, row.next, int(own[NEXT])) for row, own in zip(self._rows, head) if own[NEXT] > row.next]
        if moved:
            self._owe(moved)
        for row, own in zip(self._rows, head):
            row.settle(own, short)
        flight.moved = counts.since(before)

    def _owe(self, moved: list[tuple[Listed, Array, int, int]]) -> None:
        """Rows whose lists were taken from one place to another. The map waits until the next step runs, or until
        the map is looked into; but not where slots were free, or the device's map is the host's."""
        self.catch_up()
        taken = self._here([self.taken[row.number, start:stop] for row, _, start, stop in moved])
        self._owed = [(row, start, own.astype(np.int64)) for (row, _, start, _), own in zip(moved, taken)]
        waits = [row.count(start, parts) for row, start, parts in self._owed]
        if all(waits) and self._pool.mirrored:
            self._tell()
        else:
            self.catch_up()

    def _here(self, parts: list[Tensor]) -> list[Array]:
        """What a settled step has left, int32 [n] each, on the host, good until the next call: all are waited for
        once, while another step may run."""
        if self._stream is None:
            return [part.numpy() for part in parts]
        stops = np.cumsum([len(part) for part in parts]).tolist()
        if len(self._staging) < stops[-1]:
            self._staging = torch.empty(2 * stops[-1], dtype=torch.int32, device="cpu", pin_memory=True)
        found = [self._staging[stop - len(part) : stop] for part, stop in zip(parts, stops)]
        with torch.cuda.stream(self._stream):
            for own, part in zip(found, parts):
                own.copy_(part, non_blocking=True)
        self._stream.synchronize()
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


def host_rows(tier: Any, storage: KVStorage) -> tuple[Tensor, Tensor] | None:
    """The keys and values of a HostTier, where they lie whole rows away from those of ``storage``, so that kernels find
    both from one address; else None, and where some lie on a disk."""
    if not tier.addressed:
        return None
    halves = (tier.k, storage.k), (tier.v, storage.v)
    if any((here.data_ptr() - pool.data_ptr()) % (pool.shape[-1] * pool.element_size()) for here, pool in halves):
        return None
    return tier.k, tier.v
