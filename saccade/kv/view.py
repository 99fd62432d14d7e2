"""What an op or a method sees of one layer of one sequence: a block table over the pool."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.pool import BlockPool

_has_triton = importlib.util.find_spec("triton") is not None


@dataclass(frozen=True, eq=False)
class KVView:
    """``length`` tokens: token ``i`` lies in slot ``table[i // block_size]`` at offset ``i % block_size``.

    ``k_pool``, ``v_pool`` [slots, kv_heads, block_size, head_dim]; ``table`` int32 [>= ceil(length / block_size)],
    contiguous, on the pool's device.
    """

    k_pool: Tensor
    v_pool: Tensor
    table: Tensor
    length: int
    summaries: Callable[[str, int], Tensor] | None = None

    @classmethod
    def from_tensors(cls, k: Tensor, v: Tensor, block_size: int = 32, shuffle_seed: int | None = None) -> KVView:
        """Page contiguous ``k``, ``v`` [kv_heads, n, head_dim] into a pool of their own.

        ``shuffle_seed`` scatters the blocks over the pool, as an engine under load would.
        """
        if k.dim() != 3 or k.shape != v.shape:
            raise SaccadeError(
                f"k and v must both be [kv_heads, n, head_dim], got {tuple(k.shape)} and {tuple(v.shape)}"
            )
        kv_heads, length, head_dim = k.shape
        blocks = -(-length // block_size)
        pool = BlockPool(blocks, kv_heads, head_dim, block_size=block_size, dtype=k.dtype, device=k.device)
        # Unwritten tail slots must never matter: NaN shows any op that reads them.
        pool.k.fill_(float("nan"))
        pool.v.fill_(float("nan"))
        table = torch.arange(blocks, dtype=torch.int32)
        if shuffle_seed is not None:
            order = torch.randperm(blocks, generator=torch.Generator().manual_seed(shuffle_seed), device="cpu")
            table = order.to(torch.int32)
        view = cls(pool.k, pool.v, table.to(k.device), length)
        view.write(0, k, v)
        return view

    @property
    def block_size(self) -> int:
        return self.k_pool.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.k_pool.shape[1]

    @property
    def head_dim(self) -> int:
        return self.k_pool.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.k_pool.dtype

    @property
    def blocks(self) -> int:
        """Number of blocks in use, the partial last one included."""
        return -(-self.length // self.block_size)

    def upto(self, length: int) -> KVView:
        """The first ``length`` tokens of this view."""
        if length == self.length:
            return self
        return KVView(self.k_pool, self.v_pool, self.table, length, self.summaries)

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Store ``k``, ``v`` [kv_heads, t, head_dim] at positions ``start ..``; only new rows move."""
        size, done, count = self.block_size, 0, k.shape[1]
        if _on_gpu(self.k_pool):
            from saccade.kv import device

            device.store((self.k_pool, self.v_pool), self.table.to(self.k_pool.device), start, (k, v))
            return
        if self.k_pool.is_cuda:  # slots are not known on the host, and asking for them would wait
            positions = torch.arange(start, start + count, device=self.k_pool.device)
            slots, offsets = self.table[positions // size].long(), positions % size
            self.k_pool[slots, :, offsets] = k.transpose(0, 1).to(self.dtype)
            self.v_pool[slots, :, offsets] = v.transpose(0, 1).to(self.dtype)
            return
        while done < count:
            block, offset = divmod(start + done, size)
            if offset == 0 and count - done >= size:  # whole blocks in one go
                whole = (count - done) // size
                slots = self.table[block : block + whole].long()
                rows = slice(done, done + whole * size)
                self.k_pool[slots] = k[:, rows].unflatten(1, (whole, size)).transpose(0, 1).to(self.dtype)
                self.v_pool[slots] = v[:, rows].unflatten(1, (whole, size)).transpose(0, 1).to(self.dtype)
                done += whole * size
                continue
            step = min(size - offset, count - done)
            slot = int(self.table[block])
            self.k_pool[slot, :, offset : offset + step] = k[:, done : done + step].to(self.dtype)
            self.v_pool[slot, :, offset : offset + step] = v[:, done : done + step].to(self.dtype)
            done += step

    def keys(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Contiguous copy of keys ``start .. stop - 1``: [kv_heads, stop - start, head_dim]."""
        return self._span(self.k_pool, start, self.length if stop is None else stop)

    def values(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Contiguous copy of values ``start .. stop - 1``."""
        return self._span(self.v_pool, start, self.length if stop is None else stop)

    def head_keys(self, kv_head: int, stop: int) -> Tensor:
        """Contiguous copy of one KV head's first ``stop`` keys: [stop, head_dim]."""
        slots = self.table[: -(-stop // self.block_size)].long()
        return self.k_pool[slots, kv_head].flatten(0, 1)[:stop]

    def take(self, positions: Tensor, kv_head: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one KV head at int positions [m]: two [m, head_dim]."""
        index = positions.long()
        slots, offsets = self.table.long()[index // self.block_size], index % self.block_size
        return self.k_pool[slots, kv_head, offsets], self.v_pool[slots, kv_head, offsets]

    def summary(self, kind: str, block_size: int) -> Tensor:
        """Summary of every *full* block of ``block_size`` tokens: [full, parts, kv_heads, head_dim], fp32 or the keys'
        dtype (see summaries.py)."""
        if self.summaries is not None:
            return self.summaries(kind, block_size)[: self.length // block_size]
        from saccade.kv.summaries import summarize_view

        return summarize_view(self, kind, block_size, 0, self.length // block_size)

    def _span(self, pool: Tensor, start: int, stop: int) -> Tensor:
        if not 0 <= start <= stop <= self.length:
            raise SaccadeError(f"positions {start}..{stop} do not lie within the {self.length} stored tokens")
        if _on_gpu(pool):
            from saccade.kv import device

            return device.gather(pool, self.table.to(pool.device), start, stop)
        size = self.block_size
        first = start // size
        slots = self.table[first : -(-stop // size)].long()
        rows = pool[slots].transpose(0, 1).flatten(1, 2)
        return rows[:, start - first * size : stop - first * size].contiguous()


def _on_gpu(pool: Tensor) -> bool:
    return pool.is_cuda and _has_triton
