"""Memory for weights in the order in which a step reads them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

import torch
from torch import Tensor

from saccade.machine import ask_for_huge_pages, trim_memory

ARENA_BYTES = 1 << 28
COPIED = 1 << 26  # bytes at once: what a file's mapping takes of memory meanwhile
LINE = 64  # bytes: weights begin at a cache line


class Arena:
    """Memory of pages of 2 MiB on the host, where the system has them: reading of it is faster by a quarter or more. It
    is had ``ARENA_BYTES`` at a time; what nothing was written to takes none."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._lock = Lock()  # models may be loaded side by side

    def room(self, size: int) -> Tensor:
        """uint8 [size], with anything in it."""
        count = -(-size // LINE) * LINE
        with self._lock:
            if count > self._room.numel():
                trim_memory()
                self._room = torch.empty(max(count, ARENA_BYTES), dtype=torch.uint8, device="cpu")
                ask_for_huge_pages(self._room)
            taken, self._room = self._room[:size], self._room[count:]
        return taken

    def take(self, weight: Tensor, dtype: torch.dtype, read: Callable[[Tensor], None]) -> Tensor:
        """A copy of ``weight`` in ``dtype``. ``read`` is given each part that is copied."""
        made = self.room(weight.numel() * dtype.itemsize).view(dtype).view(weight.shape)
        rows = max(1, COPIED // max(1, weight[0].nbytes))
        for to, part in zip(made.split(rows), weight.split(rows)):
            to.copy_(part)
            read(part)
        return made
