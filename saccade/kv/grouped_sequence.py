"""A sequence over several groups of layers (groups.py): a part in each, as one sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from saccade.errors import CapacityError, SaccadeError
from saccade.kv.block_codes import BlockCodes
from saccade.kv.blocks import BlockManager
from saccade.kv.groups import GroupedPool
from saccade.kv.sequence import SequenceKV
from saccade.kv.view import KVView

T = TypeVar("T")


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
        raise SaccadeError("no one block table has the slots of layers of several formats; use those of .parts")

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
