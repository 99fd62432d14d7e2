"""Keys and values of one model in several formats: layers whose heads are alike share a pool, and a sequence has a part
in each.

Gemma 4's layers with a window have heads of 256 channels, its others heads of 512, and another number of them. A slot
holds one layer's block, so each group of layers has slots of its own size. All groups have room for the same tokens:
slots are shared out once, by what a token takes in each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from saccade.errors import SaccadeError
from saccade.kv.blocks import BlockManager
from saccade.kv.format import KVFormat
from saccade.kv.storage import KVStorage
from saccade.kv.tier import Tier, parts_of

Place = tuple[int, int]  # a layer's group, and its number there


class GroupedPool(BlockManager):
    """The pool of the first group, with those of the ``others`` behind it. Counts of blocks and slots are of the
    first group: the others have room for as many tokens. ``places``: each layer's.

    ``format``, ``layers``, ``storage`` and ``tiers`` are the first group's alone; :attr:`groups` has all.
    """

    def __init__(
        self,
        storage: KVStorage,
        layers: int,
        others: Sequence[BlockManager],
        places: Sequence[Place],
        *,
        logical_blocks: int,
        tier: Tier | None = None,
        replacement: str = "clock",
        debug: bool = False,
        layers_apart: bool = False,
        reads: Sequence[int] = (),
    ) -> None:
        super().__init__(
            storage,
            layers,
            logical_blocks=logical_blocks,
            tier=tier,
            replacement=replacement,
            debug=debug,
            layers_apart=layers_apart,
            reads=reads,
        )
        self.others, self.places = tuple(others), tuple(places)
        if any(one.logical_blocks != logical_blocks for one in self.others):
            raise SaccadeError("groups of layers must have room for the same number of blocks")

    @property
    def groups(self) -> tuple[BlockManager, ...]:
        return self, *self.others

    @property
    def free_blocks(self) -> int:
        """Of the first group's slots, as many as the group with the least room allows."""
        own = super().free_blocks
        left = [one.free_blocks // one.layers for one in self.others]
        return min(own, min(left, default=own) * self.layers)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - super().free_blocks

    @property
    def token_bytes(self) -> int:
        return sum(one.layers * one.format.block_bytes // one.format.block_size for one in self.groups)

    def bytes_by_tier(self) -> dict[str, list[int]]:
        """See BlockManager: of all groups."""
        found = super().bytes_by_tier()
        for one in self.others:
            for place, (taken, there) in one.bytes_by_tier().items():
                before = found.get(place, [0, 0])
                found[place] = [before[0] + taken, before[1] + there]
        return found

    def advance(self) -> None:
        super().advance()
        for one in self.others:
            one.advance()

    @contextmanager
    def publishing_once(self) -> Iterator[None]:
        """See SlotMap."""
        with ExitStack() as stack:
            stack.enter_context(super().publishing_once())
            for one in self.others:
                stack.enter_context(one.publishing_once())
            yield


@dataclass(frozen=True)
class Groups:
    """Layers of a model by how their keys and values lie: of each group its layout, which of its layers each of them
    reads, by their numbers there, and how many ``layers`` store; and each layer's place."""

    layouts: tuple[KVFormat, ...]
    layers: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    places: tuple[Place, ...]

    @classmethod
    def of(cls, layout: KVFormat, reads: Sequence[int], shapes: Sequence[tuple[int, int]] = ()) -> Groups:
        """Of a model whose layer i reads what layer ``reads[i]`` stores, of the same shape. All have ``layout``, but
        for KV heads and head_dim where ``shapes`` has them, by layer."""
        own = tuple(shapes) or ((layout.kv_heads, layout.head_dim),) * len(reads)
        kinds = list(dict.fromkeys(own))
        inner, places = [list[int]() for _ in kinds], list[Place]()
        for layer, shape in enumerate(own):
            group = inner[kinds.index(shape)]
            places.append((kinds.index(shape), len(group)))
            group.append(places[reads[layer]][1])
        layouts = tuple(replace(layout, kv_heads=heads, head_dim=width) for heads, width in kinds)
        return cls(layouts, tuple(max(one) + 1 for one in inner), tuple(map(tuple, inner)), tuple(places))

    def __len__(self) -> int:
        return len(self.layouts)

    @property
    def block_bytes(self) -> int:
        """Of a block of one sequence, in all layers."""
        return sum(layout.block_bytes * layers for layout, layers in zip(self.layouts, self.layers))

    @property
    def shares(self) -> list[float]:
        """What share of a token's bytes each group has."""
        return [one.block_bytes * layers / self.block_bytes for one, layers in zip(self.layouts, self.layers)]

    def slots(self, memory: int) -> list[int]:
        """How many each group has in so many bytes: of one group all that there is room for, of several as many blocks
        of a sequence in each."""
        if len(self) == 1:
            return [memory // self.layouts[0].block_bytes]
        return [memory // self.block_bytes * layers for layers in self.layers]

    def pool(self, storages: Sequence[KVStorage], tiers: Sequence[Tier | None], **options: Any) -> BlockManager:
        """The pool over a storage of each group, with the tier behind each. CapacityError for too small ones."""
        slots = [parts_of(one, tier) for one, tier in zip(storages, tiers)]
        blocks = max(1, min(own // layers for own, layers in zip(slots, self.layers)))
        options = {"logical_blocks": blocks, **(options if tiers[0] is not None else {})}
        others = [
            BlockManager(one, layers, tier=tier, reads=reads, **options)
            for one, tier, layers, reads in zip(storages[1:], tiers[1:], self.layers[1:], self.reads[1:])
        ]
        first = {"tier": tiers[0], "reads": self.reads[0], **options}
        return GroupedPool(storages[0], self.layers[0], others, self.places, **first)
