"""A layer of a sequence of whose blocks some may lie in a tier; they are brought in when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.head_tiers import HeadTiers
from saccade.kv.hold import Hold
from saccade.kv.host import HostTier
from saccade.kv.paged import Paged
from saccade.kv.tier import TierFull
from saccade.kv.view import KVView

if TYPE_CHECKING:
    from saccade.kv.blocks import BlockManager
    from saccade.kv.kept_summaries import KeptSummaries

Array = np.ndarray[Any, Any]
NOWHERE = torch.zeros(1, 0, dtype=torch.int32, device="cpu")  # a table is made for each reader, of what it reads


class TieredView(KVView):
    """A KVView over blocks ``ids`` (int64) of ``pool``, which has tiers. Keys and values that are asked for by position
    are brought in, a few blocks at a time, and copied; kernels take :meth:`holding`."""

    __slots__ = ("_hints", "_ids", "_layer", "_pool", "tiers")

    def __init__(
        self,
        pool: BlockManager,
        layer: int,
        ids: Array,
        length: int,
        summaries: Callable[[str, int], KeptSummaries] | None = None,
        hints: dict[int, int] | None = None,
    ) -> None:
        assert pool.tiers is not None
        self._pool, self._layer, self._ids, self.tiers = pool, layer, ids, pool.tiers
        self._hints = {} if hints is None else hints
        storage = pool.storage
        nowhere = NOWHERE if storage.device.type == "cpu" else NOWHERE.to(storage.device)
        super().__init__(Paged(storage.k, storage.v, nowhere, length, storage.format), summaries, storage.mover)

    @property
    def in_pieces(self) -> bool:
        """Whether this is too much to be resident at once."""
        return self.blocks > self.piece_blocks

    @property
    def piece_blocks(self) -> int:
        """Blocks that one call may bring in together: all, where memory has room for those that are not held there."""
        room = self.tiers.room_in(self._layer)
        if room < self.blocks and self.tiers.loose(self._layer, self._ids[: self.blocks]) <= room:
            return self.blocks
        return max(1, room)

    @property
    def hints(self) -> dict[int, int]:
        """What the caller notes of a layer from one step to the next."""
        return self._hints

    @property
    def layer(self) -> int:
        return self._layer

    def paged(self, start: int = 0) -> Paged:
        """Where the tokens from ``start`` on lie, for kernels: they are resident until another block is asked for.
        TierFull where they are too many for that."""
        first = start // self.block_size
        wanted = np.arange(first, self.blocks)
        if len(wanted) > self.piece_blocks:
            raise TierFull(
                f"{len(wanted)} KV blocks of layer {self._layer} are to be read at once, but memory holds "
                f"{self.piece_blocks}; raise kv_memory"
            )
        with self.hold(wanted):
            return self._guarded(self.length)

    def layout(self) -> Paged:
        """As of KVView: nothing is brought in, and there is no table."""
        return self._paged

    @property
    def apart(self) -> bool:
        """Whether KV heads have slots of their own."""
        return self.tiers.heads > 1

    def hold(self, blocks: Array, ahead: bool = False, heads: Sequence[Array] | None = None) -> Hold:
        """Have blocks (rising numbers within the sequence) brought in, and keep them while the Hold lasts. Where KV
        heads lie apart, ``heads`` are the blocks that each of them wants, of these."""
        if heads is None or not isinstance(self.tiers, HeadTiers):
            return self.tiers.fetch(self._layer, self._ids[blocks], ahead)
        return self.tiers.fetch(self._layer, self._ids[blocks], ahead, [self._ids[own] for own in heads])

    def held(self, blocks: Array, heads: Sequence[Array] | None = None) -> KVView:
        """What kernels may read of this while ``blocks`` are held, or of each KV head its own of ``heads``: all others,
        of which some may be on their way, are one of zeros."""
        return KVView(self._guarded(self.length, blocks, heads), self._summaries, self._mover)

    def ids_of(self, blocks: Array) -> Array:
        """The pool's ids of blocks (numbers within the sequence)."""
        return self._ids[blocks]

    def places(self) -> tuple[Array, Array]:
        """Of each KV head that has slots of its own, or of all heads, [rows, blocks]: whether a block is resident, and
        the cell in which the tier has a copy of it, 0 for none."""
        ids = self._ids[: self.blocks]
        slots = np.stack([one.slots_of(self._layer, ids) for one in self.tiers.each])
        return slots >= 0, np.stack([one.cells_of(self._layer, ids) for one in self.tiers.each])

    def strangers(self, blocks: Array, want: Array, cells: Array) -> bool:
        """Whether ``cells`` [rows, blocks], where ``want`` like them marks one of ``blocks``, are none, or hold
        anything else."""
        for one, own, kept in zip(self.tiers.each, want, cells):
            some = blocks[own[blocks]]
            if len(some) and not ((kept[some] > 0).all() and one.keeps(self._layer, self._ids[some], kept[some])):
                return True
        return False

    def copied(self, blocks: Array) -> bool:
        """Have a copy of each of ``blocks`` in the tier. Whether there was room for all."""
        return all(one.copied(self._layer, self._ids[blocks]) for one in self.tiers.each)

    def there(self, blocks: Array, cells: Array) -> KVView:
        """``blocks`` where the tier, which is host memory, keeps them in ``cells`` [rows, blocks of the sequence]: a
        view on the host, of which nothing else is to be read. What is still being written is waited for."""
        tier = self.tiers.tier
        assert isinstance(tier, HostTier)
        for one in self.tiers.each:
            assert isinstance(one.tier, HostTier)
            one.tier.finish_writes()
        table = np.zeros(cells.shape, dtype=np.int32)
        table[:, blocks] = np.maximum(cells[:, blocks] - 1, 0)
        paged = self._paged._replace(k=tier.k, v=tier.v, block_table=torch.from_numpy(table))
        return KVView(paged)

    def upto(self, length: int) -> KVView:
        if length == self.length:
            return self
        return TieredView(self._pool, self._layer, self._ids, length, self._summaries, self._hints)

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        size, stop, done = self.block_size, start + k.shape[1], start
        layer = self._layer
        for blocks in self._pieces(start, stop):
            ids, upto = self._ids[blocks], min(stop, (int(blocks[-1]) + 1) * size)
            with self.tiers.fetch(layer, ids):
                self.tiers.opened(slice(layer, layer + 1), ids)
                here, rows = self._guarded(upto, blocks), slice(done - start, upto - start)
                self._mover.store(here, done, k[:, rows], v[:, rows])
            done = upto

    def head_keys(self, kv_head: int, stop: int) -> Tensor:
        own, size = self._paged, self.block_size
        out = own.k.new_empty(stop, own.k.shape[-1])
        for blocks in self._pieces(0, stop):
            first, last = int(blocks[0]) * size, min(stop, (int(blocks[-1]) + 1) * size)
            with self._hold_head(blocks, kv_head):
                out[first:last] = own.k[self._slots(blocks, kv_head), kv_head].flatten(0, 1)[: last - first]
        return self.format.decode(out, self.format.k)

    def take(self, positions: Tensor, kv_head: int) -> tuple[Tensor, Tensor]:
        own, size = self._paged, self.block_size
        index = positions.long()
        block, offset = (index // size).cpu().numpy(), index % size
        wanted = np.unique(block)
        pools = self.format.stored(own.k, own.v)
        parts = [pool.new_empty(index.numel(), pool.shape[-1]) for pool in pools]
        for first in range(0, len(wanted), self.piece_blocks):
            some = wanted[first : first + self.piece_blocks]
            with self._hold_head(some, kv_head):
                if len(some) == len(wanted):
                    slots = self._slots(block, kv_head)
                    return self._rows([pool[slots, kv_head, offset] for pool in pools])
                found = np.nonzero((block >= some[0]) & (block <= some[-1]))[0]
                here, slots = torch.from_numpy(found).to(index.device), self._slots(block[found], kv_head)
                for part, pool in zip(parts, pools):
                    part[here] = pool[slots, kv_head, offset[here]]
        return self._rows(parts)

    def summarized(self, kind: str, block_size: int, first: int, last: int) -> Tensor | None:
        return None  # blocks come in piece by piece

    def keys(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self.format.decode(self._gathered(self._paged.k, start, stop), self.format.k)

    def values(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self.format.decode(self._gathered(self._paged.v, start, stop), self.format.v)

    def stored(self, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        parts = [self._gathered(part, start, stop) for part in self.format.stored(self._paged.k, self._paged.v)]
        return parts[0], parts[-1]

    def _gathered(self, pool: Tensor, start: int, stop: int | None) -> Tensor:
        stop = self.length if stop is None else stop
        if not 0 <= start <= stop <= self.length:
            raise SaccadeError(f"positions {start}..{stop} do not lie within the {self.length} stored tokens")
        size = self.block_size
        out = pool.new_empty(self.kv_heads, stop - start, pool.shape[-1])
        for blocks in self._pieces(start, stop):
            first, last = max(start, int(blocks[0]) * size), min(stop, (int(blocks[-1]) + 1) * size)
            with self.hold(blocks):
                out[:, first - start : last - start] = self._mover.gather(
                    pool, self._guarded(last).block_table, first, last
                )
        return out

    def _pieces(self, start: int, stop: int) -> Iterator[Array]:
        """The blocks of positions ``start .. stop - 1``, as many at a time as there is room for."""
        first, last = start // self.block_size, -(-stop // self.block_size)
        while first < last:
            yield np.arange(first, min(last, first + self.piece_blocks))
            first += self.piece_blocks

    def _hold_head(self, blocks: Array, kv_head: int) -> Hold:
        """Of one KV head alone where they lie apart."""
        return self.hold(blocks, heads=[blocks if one == kv_head else blocks[:0] for one in range(self.kv_heads)])

    def _slots(self, blocks: Array, kv_head: int) -> Tensor:
        places = self._pool.map_of(kv_head if self._pool.rows > 1 else 0)[self._layer, self._ids[blocks]]
        return torch.from_numpy(places.astype(np.int64)).to(self._pool.storage.device)

    def _guarded(self, length: int, blocks: Array | None = None, heads: Sequence[Array] | None = None) -> Paged:
        """As kernels take it, the guard's slot in place of what is not resident, or none of ``blocks``."""
        storage = self._pool.storage
        table = np.full((self._pool.rows, max(1, len(self._ids))), self.tiers.guard, dtype=np.int32)
        whole = np.arange(len(self._ids)) if blocks is None else blocks
        for row, own in enumerate(table):
            which = whole if heads is None or not self.apart else heads[row]
            slots = self._pool.map_of(row)[self._layer, self._ids[which]]
            own[which] = np.where(slots < 0, self.tiers.guard, slots)
        return Paged(storage.k, storage.v, torch.from_numpy(table).to(storage.device), length, storage.format)
