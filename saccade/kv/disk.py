"""The disk tier: parts of KV blocks in a private file, written in records of about a MiB, checked when they are read.

The file has no name: it is unlinked as soon as it is open, so that the system takes it back however this process ends.
A page at its head names the version and the KV format; behind it lie *cells* of equal size, each a frame and a part's
keys and values, or keys alone where values are channels of them. A frame says whose part it is (this file, layer,
block, generation) and which write of the file it was, and holds checksums of both halves (of nothing for one that is
not stored), so that a torn, flipped, stale or misplaced part is known before anything reads it. An older version of the
same part in the same cell is sound in all else: its write alone tells that a later one was lost.
"""

from __future__ import annotations

import heapq
import json
import os
import struct
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.disk_loading import DiskLoading, DiskTurns, Run
from saccade.kv.format import VERSION as LAYOUT
from saccade.kv.format import KVFormat
from saccade.kv.tier import Part, Parts, TierCounts
from saccade.machine import show_bytes
from saccade.records import checksum

VERSION = 2
PAGE = 4096
RECORD = 1 << 20  # bytes that one call writes, or reads, at most (one cell at least)
ATTEMPTS = 3
THREADS = 4  # that read
TURNS = 8  # in so many parts come that are read in turn: more cost more than they hide,
LEAST_TURN = 4  # and so do fewer parts than that
_VECTORS = 900  # buffers of one call: systems take 1024
# Magic, version, layer, block, write, generation, file, checksums of keys and of values.
_FRAME = struct.Struct("<4sHHIIq8s16s16s")
_MAGIC = b"SKVp"


class System(Protocol):
    """The calls that move bytes: the ``os`` module, or what a test puts in its place."""

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int, /) -> int: ...
    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int, /) -> int: ...


class Slots(Protocol):
    """Where parts come from and go to: keys and values [slots, kv_heads, block_size, head_dim] in host memory."""

    @property
    def format(self) -> KVFormat: ...
    @property
    def k(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...
    @property
    def parts(self) -> tuple[Tensor, ...]: ...


class DiskTier:
    """Keeps parts of ``storage`` in a file in ``folder``, ``max_bytes`` at most. Raises SaccadeError where there is no
    such folder, or nothing can be written there, or one part is too much."""

    name = "disk"
    in_background = False

    def __init__(self, folder: Path, max_bytes: int, storage: Slots, system: System = os) -> None:
        self.format, self._system = storage.format, system
        self.cell_bytes = _FRAME.size + storage.format.block_bytes
        self.cells = (max_bytes - PAGE) // self.cell_bytes
        if self.cells < 1:
            raise SaccadeError(
                f"kv_disk={show_bytes(max_bytes)} holds no KV block; give at least {PAGE + self.cell_bytes} bytes"
            )
        self._parts = [part.view(torch.uint8).flatten(1).numpy() for part in storage.parts]
        self._tag = os.urandom(8)
        self._fd = _private_file(folder, _header(storage.format, self.cell_bytes, self._tag))
        free = os.fstatvfs(self._fd)
        if free.f_bavail * free.f_frsize < max_bytes:
            warnings.warn(
                f"kv_disk: {folder} has {show_bytes(free.f_bavail * free.f_frsize)} left, less than the "
                f"{show_bytes(max_bytes)} that were given; requests end with an error once it is full",
                stacklevel=2,
            )
        self._writes = 0
        self._write_of = np.zeros(self.cells + 1, dtype=np.uint32)  # each cell's last; 2**32 of them tell all apart
        self._next = 1  # cells from here on were never used
        self._free: list[int] = []  # a heap: neighbours are written in one go
        self.counts = TierCounts()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="saccade-kv")
        self._end = weakref.finalize(self, _close, self._fd, self._pool)

    @property
    def free_cells(self) -> int:
        return len(self._free) + self.cells + 1 - self._next

    def write(self, parts: Parts, slots: Sequence[int]) -> list[int]:
        """See Tier. A record that cannot be written is tried again elsewhere."""
        parts = _named(parts)
        began, cells = time.perf_counter(), self._take(min(len(parts), self.free_cells))
        done = [0] * len(parts)
        for first, last in self._runs(cells):
            for attempt in range(ATTEMPTS):
                if self._write_record(parts[first:last], cells[first:last], slots[first:last]):
                    done[first:last] = cells[first:last]
                    self.counts.bytes_written += (last - first) * self.cell_bytes
                    break
                self.counts.retries += attempt + 1 < ATTEMPTS
            else:
                self.release(cells[first:last])
        self.counts.wait_seconds += time.perf_counter() - began
        return done

    def settle(self) -> None:
        """See Tier: a write is over when it returns."""

    def read(self, parts: Parts, cells: Sequence[int], slots: Sequence[int]) -> DiskLoading:
        """See Tier."""
        parts = _named(parts)
        order = sorted(range(len(cells)), key=cells.__getitem__)
        ordered = [cells[i] for i in order]
        jobs: list[tuple[list[int], Callable[[], list[int]]]] = []
        for first, last in self._runs(ordered, most=max(1, -(-len(cells) // THREADS))):
            which = order[first:last]
            own = [(parts[i], cells[i], slots[i]) for i in which]
            if last == len(cells) <= THREADS:  # of a few the caller reads the last itself: waking a thread takes longer
                jobs.insert(0, (which, partial(self._read_record, own)))
            else:
                jobs.append((which, self._pool.submit(self._read_record, own).result))
        self.counts.bytes_read += len(cells) * self.cell_bytes
        return DiskLoading(self.counts, jobs)

    def read_in_turn(
        self, parts: Parts, cells: Sequence[int], slots: Sequence[int], arrived: Callable[[list[int]], None]
    ) -> DiskTurns:
        """As :meth:`read`, a few after a few in the order asked for, each few by one thread. ``arrived`` is told in
        whatever thread which of them are in their slots, or never will be."""
        parts, loading = _named(parts), DiskTurns(self.counts, self._read_record, arrived)
        turn = max(LEAST_TURN, -(-len(cells) // TURNS))
        for start in range(0, len(cells), turn):
            order = sorted(range(start, min(len(cells), start + turn)), key=cells.__getitem__)
            runs = [order[first:last] for first, last in self._runs([cells[i] for i in order])]
            loading.add(self._pool, [(which, [(parts[i], cells[i], slots[i]) for i in which]) for which in runs])
        self.counts.bytes_read += len(cells) * self.cell_bytes
        return loading

    def release(self, cells: Sequence[int]) -> None:
        """See Tier."""
        for cell in cells:
            heapq.heappush(self._free, cell)

    def close(self) -> None:
        """See Tier."""
        self._pool.shutdown(wait=True)
        self._end()

    def _take(self, count: int) -> list[int]:
        reused = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        fresh = list(range(self._next, self._next + count - len(reused)))
        self._next += len(fresh)
        return reused + fresh

    def _runs(self, cells: Sequence[int], most: int = _VECTORS) -> list[tuple[int, int]]:
        """Stretches of neighbours, each of one record at most."""
        most = max(1, min(most, RECORD // self.cell_bytes, _VECTORS // 3))
        runs, first = [], 0
        for at in range(1, len(cells) + 1):
            if at == len(cells) or cells[at] != cells[at - 1] + 1 or at - first == most:
                runs.append((first, at))
                first = at
        return runs if cells else []

    def _halves(self, slot: int) -> list[Any]:
        return [part[slot] for part in self._parts]

    def _frame(self, part: Part, cell: int, halves: Sequence[Any]) -> bytes:
        sums = [bytes.fromhex(checksum(half)) for half in (*halves, b"")[:2]]
        write = int(self._write_of[cell])
        return _FRAME.pack(_MAGIC, VERSION, part.layer, part.block, write, part.generation, self._tag, *sums)

    def _write_record(self, parts: Sequence[Part], cells: Sequence[int], slots: Sequence[int]) -> bool:
        buffers: list[Any] = []
        for part, cell, slot in zip(parts, cells, slots):
            halves = self._halves(slot)
            self._writes = (self._writes + 1) % (1 << 32)
            self._write_of[cell] = self._writes
            buffers += (self._frame(part, cell, halves), *halves)
        try:
            written = self._system.pwritev(self._fd, buffers, self._offset(cells[0]))
        except OSError:
            return False
        return written == len(cells) * self.cell_bytes

    def _read_record(self, own: Run) -> list[int]:
        """Read neighbours into their slots; which of them are not what was written, tried again one by one."""
        failed = self._read_once(own)
        for _ in range(ATTEMPTS - 1):
            if not failed:
                break
            self.counts.retries += len(failed)
            failed = [i for i in failed if self._read_once([own[i]])]
        return failed

    def _read_once(self, own: Run) -> list[int]:
        frames = [bytearray(_FRAME.size) for _ in own]
        buffers: list[Any] = []
        for frame, (_, _, slot) in zip(frames, own):
            buffers += (frame, *self._halves(slot))
        try:
            got = self._system.preadv(self._fd, buffers, self._offset(own[0][1])) // self.cell_bytes
        except OSError:
            got = 0
        return [
            i
            for i, (frame, (part, cell, slot)) in enumerate(zip(frames, own))
            if i >= got or bytes(frame) != self._frame(part, cell, self._halves(slot))
        ]

    def _offset(self, cell: int) -> int:
        return PAGE + (cell - 1) * self.cell_bytes


def _named(parts: Parts) -> list[Part]:
    return [Part(*one) for one in (parts.tolist() if isinstance(parts, np.ndarray) else parts)]


def _header(format: KVFormat, cell_bytes: int, tag: bytes) -> bytes:
    own = {
        "kind": "saccade KV parts",
        "version": VERSION,
        "layout": LAYOUT,
        "dtype": str(format.dtype).removeprefix("torch."),
        "rows": [rows.name for rows in format.parts],
        "kv_heads": format.kv_heads,
        "head_dim": format.head_dim,
        "block_size": format.block_size,
        "cell_bytes": cell_bytes,
        "generation": tag.hex(),
    }
    text = json.dumps(own)
    return json.dumps({**own, "checksum": checksum(text.encode())}).encode().ljust(PAGE)


def _private_file(folder: Path, header: bytes) -> int:
    """A new file that no other process can open, ``header`` written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix="saccade-kv-", dir=folder)
    except OSError as error:
        raise SaccadeError(f"kv_disk: nothing can be written to {folder}: {error.strerror or error}") from error
    try:
        os.unlink(name)
        os.write(fd, header)
    except OSError as error:
        os.close(fd)
        raise SaccadeError(f"kv_disk: nothing can be written to {folder}: {error.strerror or error}") from error
    return fd


def _close(fd: int, pool: ThreadPoolExecutor) -> None:
    # Garbage may be collected in a thread that is just starting, under a lock that waiting for threads takes too. Jobs
    # keep the disk alive, so none runs any more.
    pool.shutdown(wait=False)
    os.close(fd)
