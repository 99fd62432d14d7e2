"""The block table of one sequence: its logical blocks, and the slots in which they lie."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.blocks import BlockManager
from saccade.machine import sent

ALIGNED = 4  # table entries: kernels are compiled anew for a table that does not begin at 16 bytes


class BlockTable:
    """Logical blocks of ``pool`` that sequence ``owner`` holds, in the order of its tokens. ``ids`` are their numbers;
    ``numbers`` and ``blocks`` the same as int64 [blocks], an array and a tensor on the host, good until the table
    changes and not to be written to.

    ``version`` grows when the list changes, or slots that were looked up.
    """

    def __init__(self, pool: BlockManager, owner: int) -> None:
        self.pool, self.owner = pool, owner
        self.ids: list[int] = []
        self.version = 0
        self._size = pool.format.block_size
        self._residency = pool.version
        self._slots = torch.zeros(pool.layers, pool.rows, 16, dtype=torch.int32, device="cpu")
        self._layers: tuple[Tensor, ...] = ()
        self._read: Tensor | None = None
        self.numbers = np.zeros(0, dtype=np.int64)
        self.blocks = torch.from_numpy(self.numbers)
        self._changed()

    @property
    def room(self) -> int:
        """Tokens that its blocks hold."""
        return len(self.ids) * self._size

    @property
    def resident(self) -> bool:
        """Whether every part of every block has a slot."""
        return bool((self.pool.lookup(self.ids) >= 0).all())

    @property
    def tables(self) -> Tensor:
        """int32 [layers, kv_heads or 1, >= blocks] on the storage's device: the slots of every block, -1 where one is
        not resident."""
        if self._residency != self.pool.version or not self._layers:
            self.of(0)
        return self._tables

    @property
    def read_tables(self) -> Tensor:
        """:attr:`tables` as layers that attend read them, one of each: those of layers that read others' twice."""
        tables = self.tables
        if not self.pool.shares_layers:
            return tables
        if self._read is None:
            self._read = tables[list(self.pool.reads)]
        return self._read

    def of(self, layer: int) -> Tensor:
        """``tables`` of one layer."""
        if self._residency != self.pool.version:
            self._refresh()
        if not self._layers:  # brought to the device on first use: recorded steps look blocks up themselves
            self._tables = sent(self._slots, self.pool.storage.device)  # the same tensor on a CPU
            self._layers = self._tables.unbind()
        return self._layers[layer]

    def slot(self, layer: int, block: int) -> int:
        """Where the ``block`` th block lies in one layer, as all KV heads share it; -1 if it is not resident."""
        if self._residency != self.pool.version:
            self._refresh()
        return self._host[layer].item(block)

    def logical_slots(self, start: int, stop: int) -> list[int]:
        """See SequenceKV."""
        size, ids = self._size, self.ids
        if stop - start == 1 and 0 <= start < len(ids) * size:  # a decode row
            return [ids[start // size] * size + start % size]
        self._require_room(start, stop)
        positions = np.arange(start, stop)
        return (self.numbers[positions // size] * size + positions % size).tolist()

    def extend(self, blocks: list[int]) -> None:
        """Hold ``blocks`` after those there are."""
        have = len(self.ids)
        self.ids += blocks
        self._derive(have)

    def replace(self, at: int, fresh: list[int]) -> None:
        """Let the last of the blocks ``fresh``, which were just allocated for the owner, stand for a shared one, with
        its content. They all go back if that fails."""
        self.pool.require_resident(self.ids[at])
        self.copy(self.ids[at], fresh)
        self.pool.release([self.ids[at]], self.owner)
        self.ids[at] = fresh[-1]
        self._derive(at)

    def copy(self, source: int, fresh: list[int]) -> None:
        """Copy block ``source`` to the last of ``fresh``, which were just allocated for the owner: all of them go back
        if that fails."""
        try:
            self.pool.copy(source, fresh[-1])
        except BaseException:
            self.pool.release(fresh, self.owner)
            raise

    def cut(self, keep: int) -> None:
        """Let go of all but the first ``keep`` blocks."""
        if keep >= len(self.ids):
            return
        self.pool.release(self.ids[keep:], self.owner)
        del self.ids[keep:]
        self.numbers, self.blocks = self.numbers[:keep], self.blocks[:keep]
        self.version += 1

    def _require_room(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.room:
            raise SaccadeError(f"no slots for tokens {start}..{stop}: room is reserved for {self.room}")

    def _derive(self, first: int) -> None:
        """Look up the slots of the blocks from ``first`` on."""
        blocks = len(self.ids)
        if blocks > self._slots.shape[2]:
            width = max(-(-blocks // ALIGNED) * ALIGNED, 2 * self._slots.shape[2])
            grown = torch.zeros(*self._slots.shape[:2], width, dtype=torch.int32, device="cpu")
            grown[:, :, : self._slots.shape[2]] = self._slots
            self._slots = grown
        self._slots.numpy()[:, :, first:blocks] = self.pool.lookup(self.ids[first:])
        self._changed(first)

    def _changed(self, first: int = 0) -> None:
        """The blocks from ``first`` on are others."""
        self.numbers = np.concatenate([self.numbers[:first], np.array(self.ids[first:], dtype=np.int64)])
        self.blocks = torch.from_numpy(self.numbers)
        self._host = list(self._slots.numpy()[:, 0])
        self._layers, self._read = (), None
        self.version += 1

    def _refresh(self) -> None:
        """Look up all slots anew where some block has moved."""
        self._residency = self.pool.version
        self._derive(0)
