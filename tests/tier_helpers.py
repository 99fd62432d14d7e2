"""A disk that fails as disks do, and what must be left of a pool with a tier in the end: nothing."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from saccade.kv import BlockManager


class FaultySystem:
    """The system's calls, of which some fail. ``plan``: the faults of the next reads, None for none; ``always``: of all
    further reads; ``writes``: of all writes, an errno or a kind. With ``rate`` any call fails so often, by chance.
    ``met``: how often each kind came up."""

    READS = ("flip", "short read", "read error", "slow")
    WRITES = ("torn", "rotten", "stale", "short", 5, 28, "slow")

    def __init__(self, rate: float = 0.0, seed: int = 0) -> None:
        self.plan: list[str | None] = []
        self.always: str | None = None
        self.writes: str | int | None = None
        self.rate, self.rng = rate, random.Random(seed)
        self.met: Counter[str | int] = Counter()
        self.lock = threading.Lock()

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        fault = self._fault(self.plan.pop(0) if self.plan else self.always, self.READS)
        if fault == "read error":
            raise OSError(5, "Input/output error")
        got = os.preadv(fd, buffers, offset)
        if fault == "flip":
            _flip(buffers[-1])
        return got - 7 if fault == "short read" else got

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        fault = self._fault(self.writes, self.WRITES)
        if isinstance(fault, int):
            raise OSError(fault, os.strerror(fault))
        content = bytearray(b"".join(bytes(part) for part in buffers))
        if fault == "short":
            return os.pwritev(fd, [content[: len(content) // 2]], offset)
        if fault == "torn":  # said to be whole
            os.pwritev(fd, [content[: len(content) // 2]], offset)
        elif fault == "stale":  # never came there: what was there before still is
            os.ftruncate(fd, max(os.fstat(fd).st_size, offset + len(content)))
        else:
            if fault == "rotten":
                content[len(content) // 3] ^= 16
            os.pwritev(fd, [content], offset)
        return len(content)

    def _fault(self, wanted: str | int | None, kinds: tuple[str | int, ...]) -> str | int | None:
        with self.lock:
            if wanted is None and self.rate and self.rng.random() < self.rate:
                wanted = self.rng.choice(kinds)
            if wanted is not None:
                self.met[wanted] += 1
        if wanted == "slow":
            time.sleep(0.01)
        return wanted


def _flip(buffer: Any) -> None:
    view = memoryview(buffer).cast("B")
    view[len(view) // 2] ^= 4


def nothing_left(pool: BlockManager) -> None:
    """Nobody holds a block, a slot, a cell or a pin any more."""
    assert pool.used_blocks == pool.absent == 0
    for row, tiers in enumerate(pool.tiers.each if pool.rows > 1 else [pool.tiers]):
        assert tiers.withheld == tiers._charged == tiers.pins.held == tiers._stored == tiers._losses == 0
        assert pool.free_in(row) == pool.storage.num_blocks - 1
        assert tiers.tier.free_cells == tiers.tier.cells
        assert not tiers._cell.any()
        assert not tiers.pins.counts.any()
        assert not tiers._lost.any()
