"""Logical blocks and who holds them.

A logical block is ``block_size`` tokens of one sequence over all layers and KV heads. Where its parts lie is one map
(slot_map.py), so that a part can leave its slot and come back to another one while the sequence keeps its block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

from saccade.errors import CapacityError, SaccadeError
from saccade.kv.format import KVFormat
from saccade.kv.head_tiers import HeadTiers
from saccade.kv.holders import Holders
from saccade.kv.host_disk import HostAndDisk
from saccade.kv.slot_map import SlotMap, taken_from
from saccade.kv.states import StatePool
from saccade.kv.storage import KVStorage
from saccade.kv.tier import Tier, check_slots, parts_of
from saccade.kv.tiers import Tiers

T = TypeVar("T")

ROOMY = 16  # blocks of a sequence that are left over where memory is not short


class BlockManager(SlotMap):
    """Hands out logical blocks over ``storage`` for ``layers`` layers.

    Slots are counted by num_blocks, free_blocks and used_blocks; with ``heads_apart`` a slot is free where all its
    heads are. ``logical_blocks`` defaults to what the storage holds when every block is resident in every layer.
    Not safe for use by several threads at once.

    With a ``tier`` behind it (see tiers.py) memory and tier together count as slots: a new block has slots at once
    while some are free, else once rows are written to it. ``replacement``: who leaves, one of replacement.POLICIES.
    With ``layers_apart`` no layer takes more than an equal share of the slots, and its parts make room for each other
    alone: a pool a layer, as engines without PSA's unified one have it (PSA, section 3.4).

    ``states``: of layers that keep one in place of keys and values.

    ``reads``: by layer that attends, the layer whose keys and values it reads. The first ``layers`` store and read
    their own; those after them store nothing and read one of these. By default there are none.
    """

    def __init__(
        self,
        storage: KVStorage,
        layers: int,
        *,
        heads_apart: bool = False,
        logical_blocks: int | None = None,
        tier: Tier | None = None,
        replacement: str = "clock",
        debug: bool = False,
        layers_apart: bool = False,
        states: StatePool | None = None,
        reads: Sequence[int] = (),
    ) -> None:
        self.states = states
        self.places: tuple[tuple[int, int], ...] = tuple(
            (0, layer) for layer in range(len(reads) or layers)
        )  # group, number there
        self.reads = tuple(reads) or tuple(range(layers))
        if self.reads[:layers] != tuple(range(layers)) or not all(0 <= one < layers for one in self.reads):
            raise SaccadeError(
                f"reads={self.reads}: the first {layers} layers read their own keys, others one of these"
            )
        if layers_apart and tier is None:
            raise SaccadeError("layers_apart=True needs a tier: it shares out slots between layers whose parts move")
        self._parts = parts_of(storage, tier)
        if tier is not None:
            check_slots(storage, layers, layers_apart)
        count = max(1, self._parts // max(1, layers)) if logical_blocks is None else logical_blocks
        if layers < 1 or count < 1:
            raise SaccadeError(f"layers={layers} and logical_blocks={count} must both be at least 1")
        super().__init__(storage, layers, count, heads_apart)
        self.layers_apart = layers_apart
        self.tiers: Tiers | HeadTiers | None = None
        if tier is not None:
            self.tiers = (Tiers if self.rows == 1 else HeadTiers)(self, tier, replacement, debug)
            for free in self._free_slots:
                free.remove(self.tiers.guard)
        self._free = list(range(count - 1, -1, -1))
        self._holders = Holders(count)
        self.keepers = self._holders.keepers
        self._ids = 0

    @property
    def format(self) -> KVFormat:
        return self.storage.format

    @property
    def groups(self) -> tuple[BlockManager, ...]:
        """Pools of layers whose keys and values lie alike: this one, unless formats differ (see groups.py)."""
        return (self,)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return self.layers * self.format.block_bytes // self.format.block_size

    def close(self) -> None:
        """Tiers give everything back."""
        for one in self.groups:
            if one.tiers is not None:
                one.tiers.close()

    def tier_numbers(self) -> dict[str, float] | None:
        """What has moved between memory and tiers, and how they stand; None without any. Any thread may ask."""
        if self.tiers is None:
            return None
        numbers: dict[str, float] = {}
        for one in self.groups:
            assert one.tiers is not None
            for name, value in one.tiers.numbers().items():
                numbers[name] = numbers.get(name, 0) + value
        return numbers

    @property
    def shares_layers(self) -> bool:
        """Whether some layers read what others store."""
        return len(self.reads) > self.layers

    def of_readers(self, stored: Sequence[T]) -> list[T]:
        """What each layer that attends finds, of what there is once for each layer that stores."""
        return [stored[one] for one in self.reads]

    @property
    def num_blocks(self) -> int:
        return self._parts

    @property
    def free_blocks(self) -> int:
        if self.tiers is not None:
            return self._parts - self.tiers.withheld - (self.logical_blocks - self.free_logical) * self.layers
        return min(map(len, self._free_slots))

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self.free_blocks

    def bytes_by_tier(self) -> dict[str, list[int]]:
        """Bytes that are taken and that there are, in memory (``device`` or ``host``) and in the tier behind it.
        Parts that lie in both count in both."""
        size, tiers = self.format.block_bytes, self.tiers
        slots = self.storage.num_blocks if tiers is None else tiers.slots
        on_device = self.storage.device.type == "cuda" or (tiers is not None and tiers.tier.name == "host")
        memory = "device" if on_device else "host"
        found = {memory: [(slots - self.free_slots) * size, slots * size]}
        if tiers is not None:
            tier = tiers.tier
            if isinstance(tier, HostAndDisk):
                found |= {place: [taken * size, cells * size] for place, (taken, cells) in tier.places().items()}
            else:
                found[tier.name] = [tiers.stored * size, tier.cells * size]
        return found

    @property
    def free_logical(self) -> int:
        return len(self._free)

    def new_owner(self) -> int:
        """A number that no other sequence has."""
        self._ids += 1
        return self._ids

    def advance(self) -> None:
        """A step begins."""
        for one in self.tier_rows:
            one.settle_charges()

    @property
    def tier_rows(self) -> Sequence[Tiers]:
        """Its tiers, one for each KV head that has slots of its own; none where it has none."""
        return () if self.tiers is None else self.tiers.each

    @property
    def roomy(self) -> bool:
        """Whether so much is free that a block more or less takes no other sequence's place."""
        return self.spare_blocks >= 0

    @property
    def spare_blocks(self) -> int:
        """Slots that may be taken while it stays ``roomy``; less than 0 where it is not."""
        return self.free_blocks - ROOMY * self.layers

    def slots_for(self, tokens: int) -> int:
        """Slots that ``tokens`` tokens of one sequence need over all layers."""
        return self.layers * self.format.blocks(tokens)

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of ``tokens`` tokens fits when nothing else is stored."""
        return self.slots_for(tokens) <= self.num_blocks and self.format.blocks(tokens) <= self.logical_blocks

    def references(self, block: int) -> int:
        """How many sequences hold a block; 0 if it is free."""
        return self._holders.count(block)

    def owner(self, block: int) -> int | None:
        """The sequence that has held a block longest; None if it is free."""
        return self._holders.owner(block)

    @property
    def kept_slots(self) -> int:
        """Slots of blocks that only ``keepers`` hold. May be asked by any thread."""
        if not self.absent:
            return len(self.keepers.alone) * self.layers
        return int((self._places[:, :, list(self.keepers.alone)] >= 0).sum()) // self.rows

    def allocate(self, count: int, owner: int) -> list[int]:
        """``count`` logical blocks for sequence ``owner``, resident in every layer unless there is a tier. Raises
        CapacityError, taking nothing, when slots or logical blocks are short."""
        if count <= 0:
            return []
        self.catch_up()
        wanted = count * self.layers
        if wanted > self.free_blocks:
            raise CapacityError(f"{wanted} KV blocks wanted but {self.free_blocks} of {self.num_blocks} are free")
        if count > len(self._free):
            raise CapacityError(
                f"{count} logical KV blocks wanted but {len(self._free)} of {self.logical_blocks} are free"
            )
        blocks = taken_from(self._free, count)
        self.changes += 1
        if wanted <= self.free_slots and self._shares_leave(count):
            places = [np.array(taken_from(free, wanted)).reshape(self.layers, count) for free in self._free_slots]
            self._map[:, :, blocks] = np.stack(places, 1)
            self._taken += count
            self._publish(blocks)
            for one, own in zip(self.tier_rows, places):
                for layer, slots in enumerate(own):
                    one.placed(layer, blocks, slots)
        else:
            self.absent += wanted * self.rows
        for one in self.tier_rows:
            one.born(blocks)
        self._holders.begin(blocks, owner)
        return blocks

    def share(self, blocks: Sequence[int], holder: int) -> None:
        """Let sequence ``holder`` hold ``blocks`` too. Raises SaccadeError, changing nothing, for a block that is free
        or that it holds already."""
        self._holders.share(blocks, holder)

    def release(self, blocks: Sequence[int], holder: int) -> None:
        """Sequence ``holder`` lets go of ``blocks``; those without a holder are free again. Raises SaccadeError,
        changing nothing, for a block that it does not hold."""
        freed = self._holders.release(blocks, holder)
        if freed:
            self.catch_up()
            self.changes += 1
            for one in self.tier_rows:
                one.forget(freed)
            self.absent -= int((self._map[:, :, freed] < 0).sum())
            for layer in range(self.layers - 1, -1, -1):  # so that the next to allocate gets them in the same order
                self._vacate(layer, range(self.rows), freed)
            self._publish(freed)
            self._free.extend(reversed(freed))

    def copy(self, source: int, target: int) -> None:
        """Copy a block's content in every layer. Without a tier, SaccadeError where a part of either is not
        resident."""
        if self.tiers is not None and self.absent:
            both = np.array([source, target])
            for layer in range(self.layers):
                with self.tiers.fetch(layer, both):
                    self.tiers.opened(slice(layer, layer + 1), both[1:])
                    slots = torch.from_numpy(self._map[layer][:, both].T.copy())
                    self.storage.copy(slots[:1], slots[1:])
            return
        self.require_resident(source)
        self.require_resident(target)
        self.storage.copy(*(torch.from_numpy(self.lookup([block])[..., 0]) for block in (source, target)))

    def require_resident(self, block: int) -> None:
        """Raise SaccadeError unless every part of a block has a slot, or can have one."""
        if self.tiers is not None:
            return
        for layer, head in np.argwhere(self._map[:, :, block] < 0)[:1].tolist():
            raise SaccadeError(f"KV block {block} is not resident in layer {layer}, KV head {head}: admit it first")

    def free_for(self, layer: int, row: int = 0) -> int:
        """Slots that parts of a layer may take as they are: those that are free, within its share."""
        free = len(self._free_slots[row])
        if not self.layers_apart or self.tiers is None:
            return free
        return max(0, min(free, self.tiers.each[row].share - self.taken(layer, row)))

    def admit(self, layer: int, blocks: Sequence[int], kv_head: int | None = None) -> None:
        """Give ``blocks`` slots in one layer again, whose rows the caller fills. Raises CapacityError, taking nothing,
        when slots are short; SaccadeError for a part that is resident or a block that is free."""
        rows, blocks = self._rows(kv_head), list(blocks)
        present = np.atleast_1d((self._map[layer, rows.start : rows.stop][:, blocks] >= 0).any(0))
        for at, block in enumerate(blocks):
            if present[at] or not self._holders.count(block):
                raise SaccadeError(f"KV block {block} is free, or resident in layer {layer}: it cannot be admitted")
        free = min(len(self._free_slots[row]) for row in rows)
        if len(blocks) > free:
            raise CapacityError(f"{len(blocks)} KV blocks wanted but {free} of {self.num_blocks} are free")
        for row in rows:
            self._map[layer, row, blocks] = taken_from(self._free_slots[row], len(blocks))
            self._taken[row, layer] += len(blocks)
        if self.tiers is not None:
            for row in rows:
                self.tiers.each[row].placed(layer, blocks, self._map[layer, row, blocks])
        self._publish(blocks)
        self._changed()
        self.absent -= len(blocks) * len(rows)

    def _shares_leave(self, count: int) -> bool:
        """Whether each layer may take ``count`` slots more."""
        if not self.layers_apart or self.tiers is None:
            return True
        return all(int(own.max()) + count <= one.share for own, one in zip(self._taken, self.tiers.each))
