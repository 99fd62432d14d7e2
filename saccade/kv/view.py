"""What an op or a method sees of one layer of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv import rows as by_torch
from saccade.kv.block_codes import BlockCodes
from saccade.kv.format import KVFormat
from saccade.kv.paged import Paged
from saccade.kv.row_formats import AUTO, RowFormat
from saccade.kv.rows import RowMover
from saccade.kv.storage import KVStorage
from saccade.kv.summaries import summarize_view

if TYPE_CHECKING:
    from saccade.kv.kept_summaries import KeptSummaries


class KVView:
    """Keys and values of ``length`` tokens, read by position. Kernels take :meth:`paged`.

    ``summaries(kind, block_size)`` gives block summaries that are kept, up to date; without it they are made anew. With
    ``gaps`` some of the table's blocks may not be resident: keys and values of those are asked for in vain, with a
    SaccadeError.
    """

    __slots__ = ("_gaps", "_mover", "_paged", "_summaries")

    def __init__(
        self,
        paged: Paged,
        summaries: Callable[[str, int], KeptSummaries] | None = None,
        mover: RowMover = by_torch,
        gaps: bool = False,
    ) -> None:
        table = paged.block_table  # kernels read it by address
        if table.dtype != torch.int32 or table.dim() != 2 or table.stride(1) != 1:
            raise SaccadeError(
                f"a block table must be int32 [kv_heads or 1, blocks] with contiguous rows, got {table.dtype} "
                f"{tuple(table.shape)} with strides {table.stride()}"
            )
        if not (paged.k.is_contiguous() and paged.v.is_contiguous()):
            raise SaccadeError(f"k and v must be contiguous, got strides {paged.k.stride()} and {paged.v.stride()}")
        if table.shape[0] not in (1, paged.format.kv_heads):
            raise SaccadeError(
                f"a block table has one row or one for each of {paged.format.kv_heads} KV heads, got {table.shape[0]}"
            )
        self._paged, self._summaries, self._mover, self._gaps = paged, summaries, mover, gaps

    @classmethod
    def from_tensors(
        cls, k: Tensor, v: Tensor, block_size: int = 32, shuffle_seed: int | None = None, rows: RowFormat = AUTO
    ) -> KVView:
        """Page contiguous ``k``, ``v`` [kv_heads, n, head_dim] into storage of their own, stored as ``rows``.

        ``shuffle_seed`` scatters the blocks over the storage, as an engine under load would.
        """
        if k.dim() != 3 or k.shape != v.shape:
            raise SaccadeError(
                f"k and v must both be [kv_heads, n, head_dim], got {tuple(k.shape)} and {tuple(v.shape)}"
            )
        kv_heads, length, head_dim = k.shape
        own = KVFormat(k.dtype, kv_heads, head_dim, block_size, rows, rows)
        storage = KVStorage(own, own.blocks(length), k.device)
        table = torch.arange(storage.num_blocks, dtype=torch.int32, device="cpu")
        if shuffle_seed is not None:
            order = torch.randperm(
                storage.num_blocks, generator=torch.Generator().manual_seed(shuffle_seed), device="cpu"
            )
            table = order.to(torch.int32)
        view = cls(Paged(storage.k, storage.v, table[None].to(k.device), length, own))
        view.write(0, k, v)
        return view

    @property
    def in_pieces(self) -> bool:
        """Whether memory cannot hold all of it at once (see tiered.py): kernels that read everything cannot run."""
        return False

    def paged(self, start: int = 0) -> Paged:
        """Where the tokens lie, for kernels; the caller reads none before ``start``."""
        return self._paged

    def layout(self) -> Paged:
        """Like :meth:`paged`, for callers that ask how tokens lie and read none."""
        return self._paged

    @property
    def length(self) -> int:
        return self._paged.length

    @property
    def format(self) -> KVFormat:
        return self._paged.format

    @property
    def block_size(self) -> int:
        return self._paged.format.block_size

    @property
    def kv_heads(self) -> int:
        return self._paged.format.kv_heads

    @property
    def head_dim(self) -> int:
        return self._paged.format.head_dim

    @property
    def dtype(self) -> torch.dtype:
        return self._paged.format.dtype

    @property
    def device(self) -> torch.device:
        return self._paged.k.device

    @property
    def blocks(self) -> int:
        """Number of blocks in use, the partial last one included."""
        return self._paged.format.blocks(self._paged.length)

    def upto(self, length: int) -> KVView:
        """The first ``length`` tokens of this view."""
        own = self._paged
        if length == own.length:
            return self
        shorter = Paged(own.k, own.v, own.block_table, length, own.format)
        return KVView(shorter, self._summaries, self._mover, self._gaps)

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Store ``k``, ``v`` [kv_heads, t, head_dim] at positions ``start ..``; only new rows move."""
        if self._gaps:
            self._require(self._paged.block_table, start, start + k.shape[1])
        self._mover.store(self._paged, start, k, v)

    def keys(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Contiguous copy of keys ``start .. stop - 1``: [kv_heads, stop - start, head_dim]."""
        own = self._paged
        return self.format.decode(self._mover.gather(own.k, own.block_table, *self._span(start, stop)), self.format.k)

    def values(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Contiguous copy of values ``start .. stop - 1``; of a format's ``value_dim`` channels are values."""
        own = self._paged
        return self.format.decode(self._mover.gather(own.v, own.block_table, *self._span(start, stop)), self.format.v)

    def stored(self, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values ``start .. stop - 1`` as they are stored, which :meth:`write` takes too: contiguous copies
        [kv_heads, stop - start, width]."""
        own, span = self._paged, self._span(start, stop)
        parts = [self._mover.gather(part, own.block_table, *span) for part in self.format.stored(own.k, own.v)]
        return parts[0], parts[-1]

    def head_keys(self, kv_head: int, stop: int) -> Tensor:
        """Contiguous copy of one KV head's first ``stop`` keys: [stop, head_dim]."""
        table = self._table(kv_head)
        if self._gaps:
            self._require(table, 0, stop)
        slots = table[: self.format.blocks(stop)].long()
        return self.format.decode(self._paged.k[slots, kv_head].flatten(0, 1)[:stop], self.format.k)

    def take(self, positions: Tensor, kv_head: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one KV head at int positions [m]: two [m, head_dim]."""
        index, own = positions.long(), self._paged
        slots, offsets = self._table(kv_head)[index // self.block_size].long(), index % self.block_size
        if self._gaps and (slots < 0).any():
            raise SaccadeError("keys of a block that is not resident were asked for: admit it first")
        return self._rows([part[slots, kv_head, offsets] for part in self.format.stored(own.k, own.v)])

    def summary(self, kind: str, block_size: int) -> Tensor:
        """Summary of every *full* block of ``block_size`` tokens: [full, parts, kv_heads, head_dim], fp32 or the keys'
        dtype (see summaries.py)."""
        if self._summaries is not None:
            return self._summaries(kind, block_size).made[: self.length // block_size]
        return summarize_view(self, kind, block_size, 0, self.length // block_size)

    @property
    def mover(self) -> RowMover:
        """Moves and summarizes its rows."""
        return self._mover

    def summarized(self, kind: str, block_size: int, first: int, last: int) -> Tensor | None:
        """Summaries of full blocks ``first .. last - 1``, made where the keys lie; None where torch is to make them."""
        if self._gaps:
            self._require(self._paged.block_table, first * block_size, last * block_size)
        return self._mover.summarize(self._paged, kind, block_size, first, last)

    def codes(self, kind: str, block_size: int) -> BlockCodes | None:
        """What is kept of :meth:`summary` in 4 bits, of its first blocks or of more than there are here; None where
        nothing is."""
        return None if self._summaries is None else self._summaries(kind, block_size).codes()

    def _table(self, kv_head: int) -> Tensor:
        table = self._paged.block_table
        return table[0 if table.shape[0] == 1 else kv_head]

    def _require(self, table: Tensor, start: int, stop: int) -> None:
        """Raise SaccadeError where a block of positions ``start .. stop - 1`` has no slot: as an index, -1 would be the
        last one."""
        missing = (table[..., start // self.block_size : self.format.blocks(stop)] < 0).any()
        if missing:
            raise SaccadeError(f"positions {start}..{stop} lie in a block that is not resident: admit it first")

    def _rows(self, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of rows as they are stored."""
        parts = [self.format.decode(part, rows) for part, rows in zip(stored, self.format.parts)]
        return parts[0], parts[-1]

    def _span(self, start: int, stop: int | None) -> tuple[int, int]:
        """Positions ``start .. stop - 1``, all stored and resident; SaccadeError where they are not."""
        own = self._paged
        stop = own.length if stop is None else stop
        if not 0 <= start <= stop <= own.length:
            raise SaccadeError(f"positions {start}..{stop} do not lie within the {own.length} stored tokens")
        if self._gaps:
            self._require(own.block_table, start, stop)
        return start, stop
