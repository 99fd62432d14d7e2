"""Host memory with a disk behind it: the parts that were not used for longest move to the disk, and come back when they
are asked for.

A device takes parts from host memory by itself. Parts on the disk come through host memory: a device's step that needs
one is run again by the host, which brings the part in; from then on the device finds it in host memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saccade.errors import SaccadeError
from saccade.kv.disk import DiskTier, System
from saccade.kv.host import HostTier
from saccade.kv.storage import CellStorage, KVStorage
from saccade.kv.tier import Loading, Parts
from saccade.machine import show_bytes

LEAST_CELLS = 8  # of host memory
RECORD = 1 << 20  # bytes that go to the disk together
Array = np.ndarray[Any, Any]


class HostAndDisk(HostTier):
    """Keeps parts of ``storage`` in ``max_bytes`` of host memory, and what that has no room for in a file in
    ``folder``, ``disk_bytes`` at most. Cells from 1 are the host's, those after them the disk's; a few of the host's
    stay free for what comes back. ``disk``: that tier, with counts of its own. Raises SaccadeError where one of both
    holds too little, or nothing can be written to the folder, CapacityError where there is no such memory."""

    addressed = False

    def __init__(
        self,
        max_bytes: int,
        storage: KVStorage,
        folder: Path,
        disk_bytes: int,
        system: System = os,
        compute: str = "device",
    ) -> None:
        super().__init__(max_bytes, storage, compute=compute)
        try:
            if self.cells < LEAST_CELLS:
                raise SaccadeError(
                    f"kv_host={show_bytes(max_bytes)} holds {self.cells} KV blocks, too few with a kv_disk behind it; "
                    f"give at least {LEAST_CELLS * self.cell_bytes} bytes"
                )
            self.disk = DiskTier(folder, disk_bytes, CellStorage(self.k, self.v, self.format), system)
        except BaseException:
            super().close()
            raise
        self.host_cells = self.cells
        self._together = max(1, min(RECORD // self.cell_bytes, self.host_cells // LEAST_CELLS))
        self.cells += self.disk.cells - self._together
        self._used = np.zeros(self.host_cells, dtype=np.int64)  # when a cell was written or read last
        self._clock = 0

    def of_head(self, head: int) -> HostTier:
        raise SaccadeError("a disk behind host memory keeps blocks of all KV heads; leave kv_unit or kv_disk out")

    @property
    def free_cells(self) -> int:
        return max(0, self._free_on_host - self._together) + self.disk.free_cells

    def write(self, parts: Parts, slots: Sequence[int]) -> list[int]:
        """See Tier."""
        named, done = np.array(parts).reshape(-1, 3), list[int]()
        while len(done) < len(named):
            first, count = len(done), min(len(named) - len(done), self.host_cells // 2)
            self._make_room(count)
            count = min(count, self._free_on_host - self._together)
            if count < 1:
                break
            cells = super().write(named[first : first + count], list(slots[first : first + count]))
            self.used(np.array(cells))
            done += cells
        return done + [0] * (len(named) - len(done))

    def read(self, parts: Parts, cells: Sequence[int], slots: Sequence[int]) -> Loading:
        """See Tier. What lies on the disk is in host memory, and known to be whole, when this returns."""
        named, places, where = np.array(parts).reshape(-1, 3), np.array(cells), np.array(slots)
        far = np.nonzero(places > self.host_cells)[0]
        loads = Loads()
        near = np.nonzero(places <= self.host_cells)[0]
        if len(near):
            self.used(places[near])
            loads.add(near, super().read(named[near], places[near].tolist(), where[near].tolist()))
        while len(far):
            count = min(self._together, self._free_on_host)
            if count < 1:  # the disk takes nothing: what lies there has to be computed again
                loads.failed += far.tolist()
                break
            which, far = far[:count], far[count:]
            came, own = self._bring_in(named[which], places[which] - self.host_cells)
            loads.failed += which[~came].tolist()
            which = which[came]
            if len(which):
                loads.add(which, super().read(named[which], own.tolist(), where[which].tolist()))
            self._make_room(0, keep=own)
        return loads

    def strangers(self, parts: Parts, cells: Sequence[int]) -> list[int]:
        """Which of ``cells`` (numbers in this order) are none of the host's, or do not hold ``parts``."""
        places = np.array(cells)
        wrong = (places < 1) | (places > self.host_cells)
        here = np.nonzero(~wrong)[0]
        wrong[here] = (self._owner[places[here] - 1] != np.array(parts).reshape(-1, 3)[here]).any(1)
        return np.nonzero(wrong)[0].tolist()

    def release(self, cells: Sequence[int]) -> None:
        """See Tier."""
        places = np.array(cells, dtype=np.int64)
        far = places > self.host_cells
        super().release(places[~far].tolist())
        self.disk.release((places[far] - self.host_cells).tolist())

    def places(self) -> dict[str, tuple[int, int]]:
        """Cells that are taken and that there are, in host memory and on the disk."""
        return {
            "host": (self.host_cells - self._free_on_host, self.host_cells),
            "disk": (self.disk.cells - self.disk.free_cells, self.disk.cells),
        }

    def used(self, cells: Array) -> None:
        """See HostTier, of cells of the host."""
        self._clock += 1
        self._used[cells - 1] = self._clock

    def gatherable(self, cells: Array) -> Array:
        """See HostTier: 0 for those of the disk."""
        return np.where(cells > self.host_cells, 0, cells)

    def moved(self, parts: Array, cells: Array) -> None:
        """``parts`` [parts, 3] lie in ``cells`` from now on; the tier's own account takes this method's
        place."""

    def close(self) -> None:
        """See Tier."""
        super().close()
        self.disk.close()

    @property
    def _free_on_host(self) -> int:
        return len(self._free) + self.host_cells + 1 - self._next

    def _bring_in(self, parts: Array, cells: Array) -> tuple[Array, Array]:
        """Move cells of the disk into free ones of the host: bool, which of them came, and the cells of these."""
        own = np.array(self._take(len(parts)))
        self._finish()  # what was read from these cells before is read
        bad = self.disk.read(parts, cells.tolist(), (own - 1).tolist()).wait()
        came = np.ones(len(parts), dtype=bool)
        came[bad] = False
        super().release(own[~came].tolist())
        own = own[came]
        self._owner[own - 1] = parts[came]
        self.used(own)
        self.moved(parts[came], own)
        self.disk.release(cells[came].tolist())
        return came, own

    def _make_room(self, count: int, keep: Array | None = None) -> None:
        """Have ``count`` cells of the host free beside those that always are, if the disk takes what lies in others;
        not of ``keep``."""
        short = count + self._together - self._free_on_host
        if short <= 0:
            return
        held = self._owner[:, 0] >= 0
        if keep is not None:
            held[keep - 1] = False
        parts = np.nonzero(held)[0]
        most = min(max(short, self._together), len(parts), self.disk.free_cells)
        if most < 1:
            return
        oldest = np.sort(parts[np.argpartition(self._used[parts], most - 1)[:most]])
        self._finish()  # what was to be written there lies there, and no reader is left
        named = self._owner[oldest]
        cells = np.array(self.disk.write(named, oldest.tolist()))
        done = cells > 0
        self.moved(named[done], cells[done] + self.host_cells)
        super().release((oldest[done] + 1).tolist())

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Loads:
    """Several loads as one (see tier.Loading). ``failed``: parts that did not come, whatever else does."""

    def __init__(self) -> None:
        self.failed: list[int] = []
        self._loads: list[tuple[Array, Loading]] = []

    def add(self, which: Array, loading: Loading) -> None:
        """These parts, by their numbers, come with ``loading``."""
        self._loads.append((which, loading))

    def wait(self) -> list[int]:
        for which, loading in self._loads:
            self.failed += which[loading.wait()].tolist()
        self._loads = []
        return sorted(self.failed)
