"""Copies of rows into slots and out of them by torch's indexing, on any device; and the interface of faster ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from saccade.kv.paged import Paged

Blocks = tuple[Tensor, ...]  # keys and values, or what is stored of them


class Filler(Protocol):
    def __call__(
        self,
        pool: Blocks,
        dtype: torch.dtype,
        tables: Tensor,
        kind: str,
        block_size: int,
        first: int,
        last: int,
        out: Sequence[Tensor],
    ) -> None:
        """Write the summaries of full blocks ``first .. last - 1`` of all layers to their places in ``out``, each
        layer's [>= last, parts, kv_heads, head_dim], contiguous. ``pool`` are a storage's two, which give rows of
        ``dtype``, ``tables`` int32
        [layers, kv_heads or 1, >= blocks] the slots of a sequence."""


class RowMover(Protocol):
    """Copies rows between plain tensors and slots that are resident: this module, or one with kernels for a device."""

    def store(self, paged: Paged, start: int, k: Tensor, v: Tensor) -> None:
        """Write ``k``, ``v`` [kv_heads, t, head_dim], of any strides, to positions ``start ..`` of ``paged``; or rows
        as they are stored, [kv_heads, t, width]."""

    def gather(self, pool: Tensor, block_table: Tensor, start: int, stop: int) -> Tensor:
        """Positions ``start .. stop - 1`` of ``pool``, one of a Paged's two, as they are stored, in one piece:
        [kv_heads, stop - start, width]."""

    def copy_blocks(self, source: Blocks, which: Tensor, target: Blocks, where: Tensor) -> None:
        """Copy blocks ``which`` of ``source`` to ``where`` in ``target``, the parts of storage ([blocks, kv_heads,
        block_size, head_dim] each) of a device, or of host memory that it reaches. Both int64 [n] on the host."""

    def summarize(self, paged: Paged, kind: str, block_size: int, first: int, last: int) -> Tensor | None:
        """Summaries of full blocks ``first .. last - 1`` (see summaries.py), in the keys' dtype; None where torch is to
        make them."""

    def summarize_rows(self, rows: Tensor, kind: str, block_size: int) -> Tensor | None:
        """Summaries of ``rows`` [kv_heads, blocks * block_size, head_dim]: [blocks, parts, kv_heads, head_dim], the
        bits that a :class:`Filler` gives; None where torch is to make them."""

    def filler(self, dtype: torch.dtype, kind: str, block_size: int) -> Filler | None:
        """What makes such summaries of keys of ``dtype`` in pools, of all layers at once; None where torch is to make
        them, layer by layer."""


def store(paged: Paged, start: int, k: Tensor, v: Tensor) -> None:
    """See RowMover."""
    size, count, table = paged.format.block_size, k.shape[1], paged.block_table
    layout = paged.format
    parts = zip(layout.stored(paged.k, paged.v), layout.parts, layout.stored(k, v))
    pools = [(pool, rows.encode(given, pool.dtype)) for pool, rows, given in parts]
    if table.shape[0] > 1 or table.is_cuda:  # a GPU's slots are not known here, and asking for them would wait
        positions = torch.arange(start, start + count, device=table.device)
        slots = table[:, positions // size].long()  # [kv_heads or 1, t]
        heads = torch.arange(k.shape[0], device=table.device)[:, None]
        for pool, rows in pools:
            pool[slots, heads, positions % size] = rows
        return
    shared, done = table[0], 0
    while done < count:
        block, offset = divmod(start + done, size)
        whole = (count - done) // size if offset == 0 else 0
        if whole:  # blocks in one go
            slots, step = shared[block : block + whole].long(), whole * size
            for pool, rows in pools:
                pool[slots] = rows[:, done : done + step].unflatten(1, (whole, size)).transpose(0, 1)
        else:
            slot, step = int(shared[block]), min(size - offset, count - done)
            for pool, rows in pools:
                pool[slot, :, offset : offset + step] = rows[:, done : done + step]
        done += step


def gather(pool: Tensor, block_table: Tensor, start: int, stop: int) -> Tensor:
    """See RowMover."""
    size = pool.shape[2]
    first, last = start // size, -(-stop // size)
    if block_table.shape[0] == 1:
        rows = pool[block_table[0, first:last].long()].transpose(0, 1)
    else:
        heads = torch.arange(block_table.shape[0], device=pool.device)[:, None]
        rows = pool[block_table[:, first:last].long(), heads]
    return rows.flatten(1, 2)[:, start - first * size : stop - first * size].contiguous()


def copy_blocks(source: Blocks, which: Tensor, target: Blocks, where: Tensor) -> None:
    """See RowMover."""
    for ours, theirs in zip(source, target):
        theirs[where.to(theirs.device)] = ours[which.to(ours.device)].to(theirs.device)


def summarize(paged: Paged, kind: str, block_size: int, first: int, last: int) -> Tensor | None:
    """See RowMover."""
    return None


def summarize_rows(rows: Tensor, kind: str, block_size: int) -> Tensor | None:
    """See RowMover."""
    return None


def filler(dtype: torch.dtype, kind: str, block_size: int) -> None:
    """See RowMover."""
    return None
