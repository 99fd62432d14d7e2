"""Keys and values of one model in several formats: layers whose heads are alike share a pool, and a sequence has a part
in each.

Gemma 4's layers with a window have heads of 256 channels, its others heads of 512, and another number of them. A slot
holds one layer's block, so each group of layers has slots of its own size. All groups have room for the same tokens:
slots are shared out once, by what a token takes in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from saccade.errors import CapacityError, SaccadeError
from saccade.kv.block_codes import BlockCodes
from saccade.kv.blocks import BlockManager
from saccade.kv.format import KVFormat
from saccade.kv.sequence import SequenceKV
from saccade.kv.storage import KVStorage
from saccade.kv.tier import Tier
from saccade.kv.tiers import LEAST_SLOTS
from saccade.kv.view import KVView

Place = tuple[int, int]  # a layer's group, and its number there
T = TypeVar("T")


class GroupedPool(BlockManager):
    """The pool of the first group, with those of the ``others`` behind it. Whoever counts blocks and slots counts the
    first group's: the others have room for as many tokens. ``places``: each layer's.

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


class GroupedKV(SequenceKV):
    """A sequence's part in each group of a GroupedPool (``parts``), as one SequenceKV: layers are the model's. Slots
    and blocks that it counts are the first group's."""

    def __init__(self, pool: GroupedPool, parts: Sequence[SequenceKV] | None = None) -> None:
        self.pool: GroupedPool = pool
        self._own = tuple(parts or (SequenceKV(one) for one in pool.groups))
        self.id = self.parts[0].id
        self.stood = self.parts[0].stood

    def _of(self, layer: int) -> tuple[SequenceKV, int]:
        group, own = self.pool.places[layer]
        return self.parts[group], own

    def _by_layer(self, given: Sequence[Sequence[T]]) -> list[T]:
        """Of what each group has of its layers, each layer's."""
        return [given[group][own] for group, own in self.pool.places]

    @property
    def version(self) -> int:
        return sum(one.version for one in self.parts)

    @property
    def layers(self) -> int:
        return sum(one.layers for one in self.parts)

    @property
    def readers(self) -> int:
        return len(self.pool.places)

    @property
    def length(self) -> int:
        return min(one.length for one in self.parts)

    @property
    def token_bytes(self) -> int:
        return sum(one.token_bytes for one in self.parts)

    @property
    def blocks(self) -> int:
        return self.parts[0].blocks

    @property
    def block_table(self) -> Tensor:
        """The first group's: others have blocks of their own numbers."""
        return self.parts[0].block_table

    @property
    def resident(self) -> bool:
        return all(one.resident for one in self.parts)

    @property
    def damaged(self) -> bool:
        return any(one.damaged for one in self.parts)

    @property
    def tables(self) -> Tensor:
        """SaccadeError: no one tensor has the slots of all groups; ``parts`` have theirs."""
        raise SaccadeError("layers of several formats have a block table for each group")

    @property
    def hints(self) -> dict[int, int]:
        return self.parts[0].hints

    def logical_slots(self, start: int, stop: int) -> list[int]:
        """The first group's."""
        return self.parts[0].logical_slots(start, stop)

    def missing_blocks(self, tokens: int) -> int:
        return self.parts[0].missing_blocks(tokens)

    def reserve(self, tokens: int) -> None:
        for one in self.parts:  # all of them, or none
            wanted, free = one.missing_blocks(tokens), one.pool.free_blocks
            if wanted > free:
                raise CapacityError(f"{wanted} KV blocks wanted but {free} of {one.pool.num_blocks} are free")
        self._all(lambda one: one.reserve(tokens), lambda one, before: one.truncate(before))

    def _all(self, do: Callable[[SequenceKV], None], undo: Callable[[SequenceKV, int], None]) -> None:
        """Do something to all parts; where one fails, it is undone in those before it."""
        before = [one.length for one in self.parts]
        for number, one in enumerate(self.parts):
            try:
                do(one)
            except BaseException:
                for done, length in zip(self.parts[:number], before):
                    undo(done, length)
                raise

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        part, own = self._of(layer)
        part.append(own, k, v)

    def written(self, layer: int, start: int, stop: int) -> None:
        part, own = self._of(layer)
        part.written(own, start, stop)

    def place(self, layer: int) -> tuple[int, int]:
        """See SequenceKV: a slot of the layer's group."""
        part, own = self._of(layer)
        return part.place(own)

    def appended(self, count: int) -> None:
        for one in self.parts:
            one.appended(count)

    def stored(self, count: int) -> None:
        for one in self.parts:
            one.stored(count)

    def summaries(self, kind: str, block_size: int) -> list[Tensor]:
        return self._by_layer([one.summaries(kind, block_size) for one in self.parts])

    def hand_over(self, kind: str, block_size: int) -> list[Tensor]:
        return self._by_layer([one.hand_over(kind, block_size) for one in self.parts])

    def summary_codes(self, kind: str, block_size: int) -> list[BlockCodes]:
        codes = [one.summary_codes(kind, block_size) for one in self.parts]
        return self._by_layer(codes) if all(codes) else []

    def summary_buffers(self, kind: str, block_size: int, blocks: int) -> list[Tensor]:
        return self._by_layer([one.summary_buffers(kind, block_size, blocks) for one in self.parts])

    def summarized_blocks(self, kind: str, block_size: int) -> int:
        return min(one.summarized_blocks(kind, block_size) for one in self.parts)

    def summarized(self, kind: str, block_size: int) -> None:
        for one in self.parts:
            one.summarized(kind, block_size)

    def view(self, layer: int) -> KVView:
        part, own = self._of(layer)
        return part.view(own)

    def truncate(self, length: int, holds: bool = False) -> None:
        for one in self.parts:
            one.truncate(length, holds)
        self.stood = self.parts[0].stood

    def free(self) -> None:
        for one in self.parts:
            one.free()
        self.stood = self.parts[0].stood

    def keep(self) -> None:
        """See SequenceKV: the first group's pool is asked what is kept."""
        self.parts[0].keep()

    def fork(self, length: int | None = None) -> GroupedKV:
        made: list[SequenceKV] = []
        try:
            for one in self.parts:
                made.append(one.fork(length))
        except BaseException:
            for part in made:
                part.free()
            raise
        return GroupedKV(self.pool, made)

    def mark(self, number: int) -> None:
        self.between_steps("marked")
        self.parts[0].mark(number)

    def between_steps(self, done: str) -> int:
        lengths = [one.between_steps(done) for one in self.parts]
        if len(set(lengths)) > 1:
            raise SaccadeError(f"KV cannot be {done} within a step: groups of its layers have {lengths} tokens")
        return lengths[0]


def open_kv(pool: BlockManager) -> SequenceKV:
    """An empty sequence of ``pool``."""
    return GroupedKV(pool) if isinstance(pool, GroupedPool) else SequenceKV(pool)


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
        slots = [
            one.num_blocks + (0 if tier is None else max(0, tier.cells - LEAST_SLOTS) - 1)
            for one, tier in zip(storages, tiers)
        ]
        blocks = max(1, min(own // layers for own, layers in zip(slots, self.layers)))
        options = {"logical_blocks": blocks, **(options if tiers[0] is not None else {})}
        others = [
            BlockManager(one, layers, tier=tier, reads=reads, **options)
            for one, tier, layers, reads in zip(storages[1:], tiers[1:], self.layers[1:], self.reads[1:])
        ]
        first = {"tier": tiers[0], "reads": self.reads[0], **options}
        return GroupedPool(storages[0], self.layers[0], others, self.places, **first)
