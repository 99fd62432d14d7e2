"""What a tier of KV is: a place that keeps parts of blocks outside of the slots that kernels read, and what it counts.

A *part* is one layer's keys and values of one logical block: what one slot holds, all KV heads, or one KV head's of it
where heads have slots of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from saccade.errors import CapacityError, SaccadeError

if TYPE_CHECKING:
    from saccade.kv.storage import KVStorage

LEAST_SLOTS = 8  # that something can run in


class TierError(SaccadeError):
    """A tier could not take or give a part: the disk is full, or fails."""


class TierFull(TierError, CapacityError):
    """Memory and tiers hold all that they can."""


class LostKV(TierError):
    """A part that was stored cannot be had any more: it has to be computed again."""


class Part(NamedTuple):
    """One layer's keys and values of a logical block; ``generation`` counts how often the block was handed out."""

    layer: int
    block: int
    generation: int


Parts = Sequence[Part] | np.ndarray[Any, Any]  # or int64 [parts, 3]


@dataclass
class TierCounts:
    """What moved between memory and a tier. ``hits`` and ``misses``: parts that were asked for and were, or were not,
    resident; ``evicted``: parts that left memory; ``prefetched``: parts whose load began before they were wanted;
    ``retries``: reads and writes that failed and were tried again; ``lost``: parts that could not be had back;
    ``wait_seconds``: time in which attention stood still for loads or writes; ``attended_on_host``: parts that the CPU
    attended where they lie, which are no hits and no misses; ``bytes_down``, ``bytes_up``: of queries and new rows that
    went to the host for that, and of results that came back."""

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    prefetched: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    retries: int = 0
    lost: int = 0
    wait_seconds: float = 0.0
    attended_on_host: int = 0
    bytes_down: int = 0
    bytes_up: int = 0

    def copy(self) -> TierCounts:
        return TierCounts(**vars(self))

    def add(self, other: TierCounts, sign: int = 1) -> None:
        """Add ``other``, or take it away with ``sign`` -1."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + sign * getattr(other, one.name))

    def beside(self, other: TierCounts) -> TierCounts:
        """Both, of processes that move parts of their own at the same time: they wait side by side."""
        made = self.copy()
        made.add(other)
        made.wait_seconds = max(self.wait_seconds, other.wait_seconds)
        return made

    def since(self, before: TierCounts) -> TierCounts:
        """What was counted after ``before``."""
        made = self.copy()
        made.add(before, -1)
        return made

    def share(self, number: int, of: int) -> TierCounts:
        """Part ``number`` of ``of`` equal ones; the first get what is left over."""
        made = TierCounts()
        for name, value in vars(self).items():
            part = value / of if isinstance(value, float) else value // of + (number < value % of)
            setattr(made, name, part)
        return made

    def as_dict(self) -> dict[str, float]:
        """Plain numbers."""
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in vars(self).items()}


class Loading(Protocol):
    """Parts on their way into slots."""

    def wait(self) -> list[int]:
        """Wait for all; which of them (numbers in the order asked for) cannot be had back. Every one is then either
        whole in its slot, or among these."""
        ...


class Tier(Protocol):
    """Keeps parts in *cells*, numbered from 1. One thread drives it; it may use others."""

    name: str
    cells: int  # parts that it holds at most
    cell_bytes: int  # of one
    in_background: bool  # whether writes cost next to nothing, so that full blocks are written before they leave

    @property
    def counts(self) -> TierCounts: ...

    @property
    def free_cells(self) -> int: ...

    def write(self, parts: Parts, slots: Sequence[int]) -> list[int]:
        """Keep the content of ``slots``: the cell of each, 0 where that failed. Slots may be reused after
        :meth:`settle`."""
        ...

    def settle(self) -> None:
        """All that follows, on a device too, follows the writes so far."""
        ...

    def read(self, parts: Parts, cells: Sequence[int], slots: Sequence[int]) -> Loading:
        """Begin to bring cells into slots."""
        ...

    def release(self, cells: Sequence[int]) -> None:
        """These cells are free."""
        ...

    def close(self) -> None:
        """Give everything back. Nothing can be kept or had afterwards."""
        ...


class Openings:
    """Which blocks were opened while all of them were resident, so that a step that opens the same ones again looks at
    no map. All is forgotten once ``state`` (of what the host has moved, and of cells) is another: what a device moves
    by itself are parts with cells, which these have none of."""

    def __init__(self) -> None:
        self._state: tuple[int, ...] = ()
        self._seen: set[tuple[int | None, int | None, bytes]] = set()

    def seen(self, state: tuple[int, ...], layers: slice, blocks: np.ndarray[Any, Any]) -> bool:
        """Whether ``blocks`` of ``layers`` were opened in this state before."""
        if state != self._state:
            self._state, self._seen = state, set()
        return self._key(layers, blocks) in self._seen

    def note(self, layers: slice, blocks: np.ndarray[Any, Any]) -> None:
        """They are now, and all resident."""
        self._seen.add(self._key(layers, blocks))

    @staticmethod
    def _key(layers: slice, blocks: np.ndarray[Any, Any]) -> tuple[int | None, int | None, bytes]:
        return layers.start, layers.stop, blocks.tobytes()


def parts_of(storage: KVStorage, tier: Tier | None) -> int:
    """Parts that slots and cells hold at most: one slot stands for what is absent, and a few parts may be on their
    way."""
    return storage.num_blocks + (0 if tier is None else max(0, tier.cells - LEAST_SLOTS) - 1)


def check_slots(storage: KVStorage, layers: int, layers_apart: bool) -> None:
    """CapacityError for a ``storage`` of too few slots to have a tier behind it. ``layers_apart``: each of ``layers``
    layers has a share of its own."""
    if storage.num_blocks <= LEAST_SLOTS:
        raise CapacityError(
            f"a KV pool of {storage.num_blocks} blocks is too small for tiers: it needs {LEAST_SLOTS + 1}, "
            f"{(LEAST_SLOTS + 1) * storage.format.block_bytes} bytes; raise kv_memory"
        )
    if layers_apart and (least := LEAST_SLOTS * layers + 1) > storage.num_blocks:
        raise CapacityError(
            f"a KV pool of {storage.num_blocks} blocks is too small for {LEAST_SLOTS} of each of {layers} "
            f"layers: it needs {least}, {least * storage.format.block_bytes} bytes; raise kv_memory"
        )
