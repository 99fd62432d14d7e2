"""The host tier: parts of KV blocks in host memory behind a device's, moved by the device itself.

On a GPU the memory is pinned, and a kernel that reads it by address copies scattered parts at the link's speed. All
copies run in order on a stream of their own. The host never waits for one: attention waits on the device for the loads
of its parts, and parts are written back while it computes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch

from saccade.errors import SaccadeError
from saccade.kv.compute import Compute
from saccade.kv.pinned import PinnedMemory
from saccade.kv.rows import Blocks
from saccade.kv.storage import KVStorage
from saccade.kv.tier import Loading, Parts, TierCounts
from saccade.machine import show_bytes

WORD = 16  # bytes that copies take at once
Array = np.ndarray[Any, Any]


class HostTier:
    """Keeps parts of ``storage`` in ``max_bytes`` of host memory. With ``heads_apart`` a part is one KV head's, a cell
    has room for one of each head, and each head's have an owner of their own (:meth:`of_head`). ``compute``: one of
    compute.MODES. Raises SaccadeError where one block is too much, CapacityError where there is no such memory."""

    name = "host"
    in_background = True
    addressed = True  # whether kernels find all cells in ``k`` and ``v``
    _written: Any  # event: the last write, until the device follows it
    _last: Any  # the same, until the host does

    def __init__(self, max_bytes: int, storage: KVStorage, heads_apart: bool = False, compute: str = "device") -> None:
        self.storage, self.format, self.compute = storage, storage.format, Compute(compute)
        block_bytes = storage.format.block_bytes
        self.heads, self._head = storage.format.kv_heads if heads_apart else 1, 0
        self.cell_bytes = block_bytes // self.heads
        self.cells = max_bytes // block_bytes
        if self.cells < 1:
            raise SaccadeError(f"kv_host={show_bytes(max_bytes)} holds no KV block; give at least {block_bytes} bytes")
        self.device = storage.device
        steps = [math.lcm(pool.shape[-1] * pool.element_size(), WORD) for pool in storage.parts]
        self.memory = PinnedMemory(self.cells * block_bytes + sum(steps), self.device)
        rest, halves = self.memory.data, []
        for pool, step, rows in zip(storage.parts, steps, self.format.parts):
            # Whole rows away from the pool's, so that kernels find both from one address.
            rest = rest[(pool.data_ptr() - rest.data_ptr()) % step :]
            halves.append(rest[: self.cells * self.format.half_bytes(rows)])
            rest = rest[len(halves[-1]) :]
        self._parts = tuple(
            half.view(rows.dtype(self.format.dtype)).view(self.format.shape(self.cells, rows))
            for half, rows in zip(halves, self.format.parts)
        )
        self.k, self.v = self._parts[0], self._parts[-1]
        self._begin()
        self.counts = TierCounts()
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._waits: deque[tuple[Any, Any]] = deque()  # events around what the device waited for

    def of_head(self, head: int) -> HostTier:
        """The cells of one KV head's parts, in the same memory, with the same counts; this one closes them."""
        own = copy(self)
        own._head = head
        own._begin()
        return own

    @property
    def free_cells(self) -> int:
        return len(self._free) + self.cells + 1 - self._next

    def write(self, parts: Parts, slots: Sequence[int]) -> list[int]:
        """See Tier."""
        cells = self._take(min(len(parts), self.free_cells))
        count = len(cells)
        if count:
            index = np.array(cells) - 1
            self._owner[index] = np.array(parts[:count])
            with self._copying():
                self._move(self.storage.parts, np.array(slots[:count]), self._parts, index)
                self._written = self._last = self._event()
            self.counts.bytes_written += count * self.cell_bytes
        return cells + [0] * (len(parts) - count)

    def claim(self, parts: Parts) -> list[int]:
        """A cell for each of ``parts``, for which there is room; the caller writes what they hold."""
        cells = self._take(len(parts))
        self._owner[np.array(cells) - 1] = np.array(parts)
        return cells

    def settle(self) -> None:
        """See Tier."""
        if self._written is not None:
            torch.cuda.current_stream(self.device).wait_event(self._written)
            self._written = None

    def finish_writes(self) -> None:
        """The host waits for the writes so far: what it reads in cells is whole."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None

    def read(self, parts: Parts, cells: Sequence[int], slots: Sequence[int]) -> Loading:
        """See Tier."""
        index, wrong = np.array(cells) - 1, self.strangers(parts, cells)
        with self._copying():
            self._move(self._parts, index, self.storage.parts, np.array(slots))
            loaded = self._event()
        self.counts.bytes_read += len(cells) * self.cell_bytes
        return HostLoading(self, wrong, loaded)

    def strangers(self, parts: Parts, cells: Sequence[int]) -> list[int]:
        """Which of ``cells`` (numbers in this order) do not hold ``parts``."""
        return np.nonzero((self._owner[np.array(cells) - 1] != np.array(parts)).any(1))[0].tolist()

    def release(self, cells: Sequence[int]) -> None:
        """See Tier."""
        self._owner[np.array(cells, dtype=np.int64) - 1] = -1
        self._free.extend(cells)

    def used(self, cells: Array) -> None:
        """Parts of these cells were wanted now."""

    def gatherable(self, cells: Array) -> Array:
        """``cells`` as a device may know them: 0 for those that it cannot take parts from."""
        return cells

    def close(self) -> None:
        """See Tier."""
        if self._stream is not None:
            torch.cuda.synchronize(self.device)
        self.k = self.v = self.storage.k.new_empty(0, device="cpu")
        self._parts = ()
        self.memory.close()

    def wait_for(self, loaded: Any) -> None:
        """Have the device attend nothing before ``loaded``."""
        if loaded is None:
            return
        while self._waits and self._waits[0][1].query():  # told once they are over: no caller waits for that
            began, ended = self._waits.popleft()
            self.counts.wait_seconds += began.elapsed_time(ended) / 1e3
        stream = torch.cuda.current_stream(self.device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(stream)
        stream.wait_event(loaded)
        ended.record(stream)
        self._waits.append((began, ended))

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """What is launched within runs after all that was launched so far, and beside what follows."""
        began = time.perf_counter()
        if self._stream is None:
            yield
            self.counts.wait_seconds += time.perf_counter() - began
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def _move(self, source: Blocks, which: Array, target: Blocks, where: Array) -> None:
        """Copy parts: blocks, or what lies there of one KV head."""
        if self.heads > 1:
            source, target = (tuple(part.flatten(0, 1)[:, None] for part in parts) for parts in (source, target))
            which, where = which * self.heads + self._head, where * self.heads + self._head
        listed = [torch.from_numpy(one.astype(np.int64)) for one in (which, where)]
        self.storage.mover.copy_blocks(source, listed[0], target, listed[1])

    def _begin(self) -> None:
        """Own cells in which nothing lies."""
        # Whose part a cell holds: layer, block, generation. What comes back must be what was asked for.
        self._owner = np.full((self.cells, 3), -1, dtype=np.int64)
        self._next = 1  # cells from here on were never used
        self._free: list[int] = []
        self._written = self._last = None

    def _event(self) -> Any:
        return None if self._stream is None else self._stream.record_event()

    def _take(self, count: int) -> list[int]:
        reused = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = list(range(self._next, self._next + count - len(reused)))
        self._next += len(fresh)
        return reused + fresh


class HostLoading:
    """Loads under way (see tier.Loading)."""

    def __init__(self, tier: HostTier, wrong: list[int], loaded: Any) -> None:
        self._tier, self._wrong, self._loaded = tier, wrong, loaded

    def wait(self) -> list[int]:
        loaded, self._loaded = self._loaded, None
        self._tier.wait_for(loaded)
        return self._wrong
