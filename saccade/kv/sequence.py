"""The KV of one sequence: a block table per layer over the shared pool, and its block summaries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.pool import BlockPool
from saccade.kv.summaries import summarize_view
from saccade.kv.view import KVView

ALIGNED = 4  # table entries: kernels are compiled anew for a table that does not begin at 16 bytes


class SequenceKV:
    """Owns slots of ``pool`` for ``layers`` layers. Rows are appended layer by layer; nothing stored ever moves."""

    def __init__(self, pool: BlockPool, layers: int) -> None:
        self.pool = pool
        self._slots: list[list[int]] = [[] for _ in range(layers)]
        self._tables = torch.zeros(layers, 16, dtype=torch.int32, device="cpu")
        self._stored_tables = self._tables.to(pool.k.device)  # the same tensor on a CPU
        self._lengths = [0] * layers
        self._everywhere = 0  # blocks that every layer has
        self._summaries: dict[tuple[int, str, int], _Summary] = {}
        self.version = 0  # grows when tables, or rows that no kernel stored, or buffers of summaries change

    @property
    def layers(self) -> int:
        return len(self._slots)

    @property
    def length(self) -> int:
        """Tokens stored in every layer."""
        return min(self._lengths)

    @property
    def blocks(self) -> int:
        """Slots held, all layers together."""
        return sum(len(slots) for slots in self._slots)

    @staticmethod
    def blocks_for(tokens: int, layers: int, block_size: int) -> int:
        """Slots that ``tokens`` tokens need over all layers."""
        return layers * -(-tokens // block_size)

    def missing_blocks(self, tokens: int) -> int:
        """Slots that must still be allocated before ``tokens`` tokens fit."""
        wanted = -(-tokens // self.pool.block_size)
        if wanted <= self._everywhere:  # asked for every sequence at every step
            return 0
        return sum(max(0, wanted - len(slots)) for slots in self._slots)

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens in every layer. Raises CapacityError, taking nothing, when the pool is
        short."""
        wanted = -(-tokens // self.pool.block_size)
        if wanted <= self._everywhere:
            return
        missing = self.missing_blocks(tokens)
        fresh = self.pool.allocate(missing)
        if wanted > self._tables.shape[1]:
            width = max(-(-wanted // ALIGNED) * ALIGNED, 2 * self._tables.shape[1])
            grown = torch.zeros(self.layers, width, dtype=torch.int32, device="cpu")
            grown[:, : self._tables.shape[1]] = self._tables
            self._tables = grown
        for layer, slots in enumerate(self._slots):
            count = wanted - len(slots)
            if count > 0:
                self._tables[layer, len(slots) : wanted] = torch.tensor(fresh[:count], dtype=torch.int32)
                slots.extend(fresh[:count])
                del fresh[:count]
        self._everywhere = wanted
        if missing:
            self._stored_tables = self._tables.to(self.pool.k.device)
            self.version += 1

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store new rows ``k``, ``v`` [kv_heads, t, head_dim] of one layer after those it has."""
        start, count = self._lengths[layer], k.shape[1]
        if start + count > len(self._slots[layer]) * self.pool.block_size:
            raise SaccadeError(f"layer {layer} has no room for {count} tokens after {start}: reserve() first")
        if count == 1:  # a decode step: the host knows its slot, so a device is given two copies and no index
            slot, offset = self.place(layer)
            for pool, row in ((self.pool.k, k), (self.pool.v, v)):
                pool.select(0, slot).select(1, offset).copy_(row.select(1, 0))
            return
        KVView(self.pool.k, self.pool.v, self._stored_tables[layer], start).write(start, k, v)
        self._lengths[layer] = start + count
        self.version += 1

    def place(self, layer: int) -> tuple[int, int]:
        """Where the next row of one layer goes, slot and offset in it. It counts as stored: the caller writes it."""
        start, slots = self._lengths[layer], self._slots[layer]
        block, offset = divmod(start, self.pool.block_size)
        if block >= len(slots):
            raise SaccadeError(f"layer {layer} has no room for 1 tokens after {start}: reserve() first")
        self._lengths[layer] = start + 1
        self.version += 1
        return slots[block], offset

    def appended(self, count: int) -> None:
        """Count ``count`` rows that a kernel has stored in every layer, and the blocks that it summarized."""
        self._lengths = [length + count for length in self._lengths]

    @property
    def tables(self) -> Tensor:
        """int32 [layers, >= blocks of a layer] on the pool's device: the slots of every layer."""
        return self._stored_tables

    def summary_buffers(self, kind: str, block_size: int, blocks: int) -> list[Tensor]:
        """Each layer's summaries of its full blocks, brought up to date, with room for ``blocks``: [>= blocks,
        parts, kv_heads, head_dim]. What lies beyond the full blocks is not filled."""
        self.version += 1
        return [
            self._summary(layer, kind, block_size).room(blocks, self._plain_view(layer)) for layer in range(self.layers)
        ]

    def summarized(self, kind: str, block_size: int) -> None:
        """Take the summaries of all full blocks for written: a kernel did so in ``summary_buffers``."""
        for layer in range(self.layers):
            self._summary(layer, kind, block_size).filled = self._lengths[layer] // block_size

    def view(self, layer: int) -> KVView:
        """What ops and methods see of one layer."""
        return self._plain_view(layer, partial(self._summaries_of, layer))

    def _summaries_of(self, layer: int, kind: str, block_size: int) -> Tensor:
        summary = self._summary(layer, kind, block_size)
        before, kept = summary.buffer, summary.upto(self._plain_view(layer))
        self.version += summary.buffer is not before
        return kept

    def truncate(self, length: int) -> None:
        """Forget tokens from ``length`` on and give their blocks back."""
        keep = -(-length // self.pool.block_size)
        self._everywhere = min(self._everywhere, keep)
        self.version += 1
        for layer, slots in enumerate(self._slots):
            self._lengths[layer] = min(self._lengths[layer], length)
            self.pool.release(slots[keep:])
            del slots[keep:]
        for summary in self._summaries.values():
            summary.truncate(length)

    def free(self) -> None:
        """Give every block back."""
        self.truncate(0)

    def _summary(self, layer: int, kind: str, block_size: int) -> _Summary:
        key = (layer, kind, block_size)
        if key not in self._summaries:
            self._summaries[key] = _Summary(kind, block_size)
        return self._summaries[key]

    def _plain_view(self, layer: int, summaries: Callable[[str, int], Tensor] | None = None) -> KVView:
        return KVView(self.pool.k, self.pool.v, self._stored_tables[layer], self._lengths[layer], summaries)


class _Summary:
    """Summaries of one layer's full blocks, extended as blocks fill and kept contiguous for scoring."""

    def __init__(self, kind: str, block_size: int) -> None:
        self.kind, self.block_size = kind, block_size
        self.filled = 0
        self.buffer = torch.empty(0)

    def upto(self, view: KVView) -> Tensor:
        """[full blocks, parts, kv_heads, head_dim], as ``summarize_view`` makes them."""
        full = view.length // self.block_size
        if full > self.filled or self.buffer.dim() == 1:
            fresh = summarize_view(view, self.kind, self.block_size, self.filled, full)
            if full > self.buffer.shape[0] or self.buffer.dim() == 1:  # the first buffer, even for no block, has parts
                self._grow(max(full, 2 * self.filled, 16), fresh)
            self.buffer[self.filled : full] = fresh
            self.filled = full
        return self.buffer[:full]

    def room(self, blocks: int, view: KVView) -> Tensor:
        """The whole buffer, summaries up to date, with room for ``blocks``."""
        self.upto(view)
        if blocks > self.buffer.shape[0]:
            self._grow(max(blocks, self.buffer.shape[0] + self.buffer.shape[0] // 8), self.buffer)
        return self.buffer

    def _grow(self, blocks: int, like: Tensor) -> None:
        grown = like.new_empty(blocks, *like.shape[1:])
        if self.filled:
            grown[: self.filled] = self.buffer[: self.filled]
        self.buffer = grown

    def truncate(self, length: int) -> None:
        self.filled = min(self.filled, length // self.block_size)
