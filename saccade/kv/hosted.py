"""One sequence's keys and values where host memory keeps them: what decode rows on the CPU read and write in place
(LFPS as its paper runs it: all keys beyond the first few lie beside the tables that find them)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from saccade.kv.block_codes import BlockCodes
from saccade.kv.format import KVFormat
from saccade.kv.host import HostTier
from saccade.kv.paged import Paged
from saccade.kv.sequence import SequenceKV
from saccade.kv.sequence_summaries import SequenceSummaries
from saccade.kv.storage import CellStorage
from saccade.kv.tier import LostKV, TierFull
from saccade.kv.view import KVView
from saccade.machine import show_bytes

GROWN = 256  # blocks that a table has room for more


@dataclass(frozen=True)
class CellPool:
    """Where the blocks of a HostedKV lie: nothing of it is ever absent."""

    storage: CellStorage
    rows: int
    tiers: None = None
    absent: int = 0

    @property
    def format(self) -> KVFormat:
        return self.storage.format


class HostedKV:
    """The KV of ``kv``, over a host tier, while it lives there: what rows on a CPU ask of a SequenceKV. No part of it
    stays in a slot, but those that others bring in for themselves. :meth:`settle` before a step; :meth:`close` once it
    lives there no longer, from when on it is read as any other.

    ``summaries`` [blocks, parts, kv_heads, head_dim] of each layer, on the host: by kind and block size what is known
    already.
    """

    def __init__(self, kv: SequenceKV, summaries: Mapping[tuple[str, int], Sequence[Tensor]] | None = None) -> None:
        tiers = kv.pool.tiers
        assert tiers is not None
        assert isinstance(tiers.tier, HostTier)
        self._kv, self._tiers, tier = kv, tiers, tiers.tier
        self.pool = CellPool(CellStorage(tier.k, tier.v, kv.pool.format), kv.pool.rows)
        self.layers = kv.layers
        self._ids = self._generations = np.zeros(0, dtype=np.int64)
        self._table = np.zeros((self.layers, kv.pool.rows, 0), dtype=np.int32)
        self._known = SequenceSummaries(self.layers)
        for (kind, size), made in (summaries or {}).items():
            self._known.give(kind, size, made)

    @property
    def length(self) -> int:
        """Tokens stored, those of the step at hand among them."""
        return self._kv.length

    @property
    def block_table(self) -> Tensor:
        """See SequenceKV."""
        return self._kv.block_table

    @property
    def tables(self) -> Tensor:
        """int32 [layers, kv_heads or 1, >= blocks]: the cells of every block, counted from 0."""
        return torch.from_numpy(self._table)

    @property
    def part_bytes(self) -> int:
        """Of one part."""
        return self._tiers.tier.cell_bytes

    @property
    def heads(self) -> int:
        """Parts that a block of one layer is: 1 unless KV heads lie apart."""
        return len(self._tiers.each)

    def settle(self) -> None:
        """Have all that room is reserved for in host memory, whole, and in no slot that is written to. TierFull where
        there is no room for it there, LostKV where some of it cannot be had back."""
        ids = self._kv.block_table.numpy()
        known = min(len(ids), len(self._ids))
        other = np.nonzero(ids[:known] != self._ids[:known])[0]
        same = int(other[0]) if len(other) else known
        generation = self._tiers.each[0].generation
        fresh = np.nonzero(generation[ids[:same]] != self._generations[:same])[0]
        same = int(fresh[0]) if len(fresh) else same
        last = max(0, len(ids) - 1)
        if any((one.pool.map_of(one.row)[:, ids[last:]] >= 0).any() for one in self._tiers.each):
            same = min(same, last)  # the block that is written to was brought in
        if same < max(len(ids), len(self._ids)):
            self._lodge(ids, same)
        if self._kv.damaged:
            raise LostKV("KV blocks were lost")
        for one in self._tiers.each:
            assert isinstance(one.tier, HostTier)
            one.tier.finish_writes()

    def stored(self, count: int) -> None:
        """Count ``count`` rows that are stored here, in every layer, in the step at hand."""
        self._kv.stored(count)

    def attended(self, parts: int, down: int, up: int) -> None:
        """So many parts were, for which so many bytes of queries and new rows went down, and of results up."""
        counts = self._tiers.counts
        counts.attended_on_host += parts
        counts.bytes_down += down
        counts.bytes_up += up

    def view(self, layer: int) -> KVView:
        """See SequenceKV: a view on the host."""
        return KVView(self._paged(layer), partial(self._known.of, self._plain_view, layer))

    def summaries(self, kind: str, block_size: int) -> list[Tensor]:
        """See SequenceKV: on the host, of what is stored."""
        return self._known.full(self._plain_view, kind, block_size, self.length)

    def summary_codes(self, kind: str, block_size: int) -> list[BlockCodes]:
        """See SequenceKV."""
        return self._known.codes(kind, block_size)

    def close(self) -> None:
        """It lives there no longer."""
        for one in self._tiers.each:
            one.leave(self._ids, self._generations)
        self._ids = self._generations = self._ids[:0]

    def _lodge(self, ids: np.ndarray, same: int) -> None:
        """The blocks from number ``same`` on are others."""
        gone, generations, fresh = self._ids[same:], self._generations[same:], ids[same:].copy()
        for one in self._tiers.each:
            one.leave(gone, generations)
        self._ids, self._generations = self._ids[:same], self._generations[:same]
        if len(gone):
            self._known.truncate(same * self.pool.format.block_size)
        if not self._tiers.lodge(fresh):
            tier = self._tiers.tier
            assert isinstance(tier, HostTier)
            raise TierFull(
                f"{len(fresh) * self.layers * self.heads} parts of KV are to live in host memory, where the CPU "
                f"attends them, but {tier.free_cells} of {tier.cells} cells are free there; raise kv_host (it is "
                f"{show_bytes(tier.cells * tier.format.block_bytes)})"
            )
        self._ids = np.concatenate([self._ids, fresh])
        self._generations = self._tiers.each[0].generation[self._ids]
        if len(self._ids) > self._table.shape[2]:
            grown = np.zeros((*self._table.shape[:2], len(self._ids) + GROWN), dtype=np.int32)
            grown[:, :, :same] = self._table[:, :, :same]
            self._table = grown
        layers = np.arange(self.layers)[:, None]
        for row, one in enumerate(self._tiers.each):
            self._table[:, row, same : len(ids)] = one.cells_of(layers, fresh[None]) - 1

    def _paged(self, layer: int) -> Paged:
        storage = self.pool.storage
        return Paged(storage.k, storage.v, self.tables[layer], self.length, storage.format)

    def _plain_view(self, layer: int) -> KVView:
        return KVView(self._paged(layer))
