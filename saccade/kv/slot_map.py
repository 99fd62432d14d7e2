"""Where the parts of logical blocks lie: one map of slots, on the host and on a device, and which slots are free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from saccade.errors import SaccadeError
from saccade.kv.storage import KVStorage
from saccade.machine import release_rows, sent


class SlotMap:
    """Slots of ``storage`` for the parts of ``count`` logical blocks in ``layers`` layers; who holds a block it does
    not know.

    ``slots``: int32 [layers, kv_heads or 1, count] on the storage's device, -1 where a part is not resident or a block
    is free. It is made once and changed in place, so that a recorded graph sees the changes; ``host_slots`` is the same
    on the host. With ``heads_apart`` every KV head has slots of its own: head g of a slot is then free or taken apart
    from the slot's other heads.

    ``behind``: writes down what a device has moved by itself, waiting for a step that was not asked for yet. Code that
    changes who has slots calls it first (:meth:`catch_up`). ``changes``: of who has slots, by the host; what a device
    moves by itself is not counted. ``absent``: parts of held blocks that are not resident.
    """

    def __init__(self, storage: KVStorage, layers: int, count: int, heads_apart: bool) -> None:
        self.storage, self.layers = storage, layers
        self.rows = storage.format.kv_heads if heads_apart else 1
        self._host_slots = torch.full((layers, self.rows, count), -1, dtype=torch.int32, device="cpu")
        self.slots = self._host_slots.to(storage.device)  # the same tensor on a CPU
        self._places = self._host_slots.numpy()
        self.behind: Callable[[], None] | None = None
        self._free_slots = [list(range(storage.num_blocks - 1, -1, -1)) for _ in range(self.rows)]
        self._taken = np.zeros((self.rows, layers), dtype=np.int64)  # slots, by KV head and layer
        self._late: list[int] | None = None
        self._version = 0
        self.changes = 0
        self.absent = 0

    @property
    def logical_blocks(self) -> int:
        return self._places.shape[2]

    @property
    def host_slots(self) -> torch.Tensor:
        """``slots`` on the host, what a device has moved included."""
        self.catch_up()
        return self._host_slots

    @property
    def version(self) -> int:
        """Grows when a part of a held block changes its slot."""
        self.catch_up()
        return self._version

    @property
    def mirrored(self) -> bool:
        """Whether the device has a map of its own."""
        return self.slots is not self._host_slots

    def catch_up(self) -> None:
        """Write down what a device has moved, if that waits (``behind``)."""
        if self.behind is not None:
            self.behind()

    @property
    def _map(self) -> np.ndarray:
        """``host_slots`` as an array."""
        self.catch_up()
        return self._places

    @property
    def free_slots(self) -> int:
        """Slots in memory that nothing lies in."""
        return min(map(len, self._free_slots))

    def lookup(self, blocks: Sequence[int]) -> np.ndarray:
        """Slots of ``blocks``: int32 [layers, kv_heads or 1, len(blocks)], on the host."""
        return self._map[:, :, list(blocks)]

    def map_flat(self) -> np.ndarray:
        """The slot of every part, by (layer * KV heads or 1 + KV head) * logical_blocks + block; not to be written
        to."""
        return self._map.reshape(-1)

    def map_of(self, row: int) -> np.ndarray:
        """The slots [layers, logical_blocks] of one KV head's parts, or of those that all share; not to be written
        to."""
        return self._map[:, row]

    def free_in(self, row: int) -> int:
        """Slots that nothing of one KV head lies in."""
        return len(self._free_slots[row])

    def taken(self, layer: int, row: int = 0) -> int:
        """Slots that parts of a layer lie in, of one KV head if they lie apart."""
        self.catch_up()
        return int(self._taken[row, layer])

    def resident(self, layer: int, block: int, kv_head: int = 0) -> bool:
        """Whether one KV head's part of a block has a slot in ``layer``; heads that share slots answer alike."""
        return bool(self._map[layer, kv_head if self.rows > 1 else 0, block] >= 0)

    @contextmanager
    def publishing_once(self) -> Iterator[None]:
        """What changes in the map within comes to the device at the end, in one transfer."""
        outer, self._late = self._late, [] if self._late is None else self._late
        try:
            yield
        finally:
            late, self._late = self._late, outer
            if outer is None and late:
                self._publish(list(dict.fromkeys(late)))

    def withhold(self, count: int, row: int = 0) -> list[int]:
        """Take free slots away: as many of ``count`` as there are, of one KV head if they lie apart."""
        self.catch_up()
        taken = taken_from(self._free_slots[row], min(count, len(self._free_slots[row])))
        heads = self.rows
        for part in self.storage.parts:
            release_rows(part if heads == 1 else part.flatten(0, 1), [slot * heads + row for slot in taken])
        return taken

    def give_back(self, slots: list[int], row: int = 0) -> None:
        """Slots that were taken away are free again."""
        self._free_slots[row].extend(slots)

    def free_list(self, row: int = 0) -> np.ndarray:
        """Slots that nothing lies in, those that are handed out last first: int64."""
        return np.array(self._free_slots[row], dtype=np.int64)

    def moved(self, slots: np.ndarray, left: np.ndarray, came: np.ndarray, rows: np.ndarray) -> None:
        """A device has moved parts (numbers as in ``map_flat``, each of one of ``rows``) by itself: those of ``left``
        (-1: none) out of ``slots``, and ``came`` into them. Its own map says so already."""
        flat, free = self._places.reshape(-1), left < 0
        flat[left[~free]] = -1
        flat[came] = slots
        for parts, change in ((left[~free], -1), (came, 1)):
            layer, row = np.divmod(parts // self.logical_blocks, self.rows)
            np.add.at(self._taken, (row, layer), change)
        for row in np.unique(rows[free]).tolist():
            gone = set(slots[free & (rows == row)].tolist())
            self._free_slots[row] = [slot for slot in self._free_slots[row] if slot not in gone]
        self._version += 1
        self.absent += len(left) - int(free.sum()) - len(came)

    def evict(self, layer: int, blocks: Sequence[int], kv_head: int | None = None) -> None:
        """Free the slots of ``blocks`` in one layer, of one KV head if they lie apart. What was in them is gone from
        here: the evicting tier keeps it elsewhere. SaccadeError for a part that is not resident."""
        rows = self._rows(kv_head)
        absent = (self._map[layer, rows.start : rows.stop][:, list(blocks)] < 0).any(0)
        if absent.any():
            block = blocks[int(absent.argmax())]
            raise SaccadeError(f"KV block {block} is not resident in layer {layer}: it cannot be evicted")
        self._vacate(layer, rows, list(blocks))
        self._publish(list(blocks))
        self._changed()
        self.absent += len(blocks) * len(rows)

    def _changed(self) -> None:
        self._version += 1
        self.changes += 1

    def _rows(self, kv_head: int | None) -> range:
        if kv_head is None:
            return range(self.rows)
        if self.rows == 1:
            raise SaccadeError(f"kv_head={kv_head}: KV heads share slots here; leave it out, or use heads_apart=True")
        return range(kv_head, kv_head + 1)

    def _vacate(self, layer: int, rows: range, blocks: list[int]) -> None:
        for row in rows:
            places = self._map[layer, row, blocks]
            leaving = places[places >= 0]
            self._free_slots[row].extend(leaving[::-1].tolist())
            self._taken[row, layer] -= len(leaving)
            self._map[layer, row, blocks] = -1

    def _publish(self, blocks: list[int]) -> None:
        """Bring the device's map up to date for ``blocks``, in one transfer."""
        if not self.mirrored:
            return
        if self._late is not None:
            self._late += blocks
            return
        index = torch.tensor(blocks, device="cpu")
        changed = torch.cat([self._host_slots[:, :, index].flatten(0, 1), index[None].int()])
        changed = sent(changed, self.slots.device)
        self.slots.flatten(0, 1).index_copy_(1, changed[-1].long(), changed[:-1])


def taken_from(free: list[int], count: int) -> list[int]:
    """The last ``count`` of ``free``, the last first."""
    kept = len(free) - count
    taken = free[kept:][::-1]
    del free[kept:]
    return taken
