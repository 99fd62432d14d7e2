"""What kernels of decode are told of a batch: where its keys lie, and which of them each row reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.view import KVView


@dataclass(frozen=True)
class Pages:
    """Keys of a batch: pools [slots, kv_heads, page, head_dim], block tables int32 [batch, kv_heads or 1, blocks],
    lengths int32 [batch], all on the device; ``longest`` bounds the lengths. One table row serves all KV heads of a
    sequence; with a row for each of them heads do not share slots. With ``host``, keys and values of host memory as of
    the pools, a table's entry -1 - c is cell c there: attend_decode and attend_progressive read it by its address. With
    ``value_dim`` rows are latents: there is one KV head, ``v`` is ``k``, and a value is so many first channels."""

    k: Tensor
    v: Tensor
    tables: Tensor
    lengths: Tensor
    longest: int
    host: tuple[Tensor, Tensor] | None = None
    value_dim: int | None = None

    def __post_init__(self) -> None:
        if not (self.k.is_contiguous() and self.v.is_contiguous() and self.lengths.is_contiguous()):
            raise SaccadeError("the storage of keys and values and the lengths must be contiguous")
        if self.tables.stride(-1) != 1 or self.tables.dtype != torch.int32:
            raise SaccadeError(
                f"block tables must be int32 with contiguous rows, got {self.tables.dtype} with strides "
                f"{self.tables.stride()}"
            )

    @property
    def table_strides(self) -> tuple[int, int]:
        """Entries of ``tables`` between sequences, and between KV heads: 0 where they share a row."""
        return self.tables.stride(0), 0 if self.tables.shape[1] == 1 else self.tables.stride(1)

    @property
    def parts(self) -> int:
        """Of a block: its keys and its values, or its latents."""
        return 2 if self.value_dim is None else 1

    @property
    def far(self) -> tuple[int, int]:
        """Rows of head_dim from the pools of keys and of values to those of ``host``; see :func:`rows_between`."""
        if self.host is None:
            return 0, 0
        apart = [rows_between(pool, there) for pool, there in zip((self.k, self.v), self.host)]
        assert apart[0] is not None
        assert apart[1] is not None
        return apart[0], apart[1]


def rows_between(pool: Tensor, other: Tensor) -> int | None:
    """Rows of ``pool`` [..., head_dim] from its address to that of ``other``, which kernels reach too; None where these
    are no whole number."""
    rows, rest = divmod(other.data_ptr() - pool.data_ptr(), pool.shape[-1] * pool.element_size())
    return None if rest else rows


@dataclass(frozen=True)
class KeyLists:
    """Which keys each unit of each sequence reads: list ``b * units + u`` is ``counts`` entries of ``indices`` from
    ``starts`` on, each entry a block of ``size`` keys or, with ``size=1``, a key. Both are int [batch * units], but for
    two cases: without ``starts`` lists lie ``longest`` apart; without ``counts`` every list ends where the next begins,
    and ``starts`` has one entry more. ``longest`` bounds the counts. Entries are unique; their order is free."""

    starts: Tensor | None
    counts: Tensor | None
    indices: Tensor
    units: int
    size: int
    longest: int


def pages_of(views: list[KVView]) -> Pages:
    """Sequences of one pool as one batch."""
    parts = [view.paged() for view in views]
    first, blocks = parts[0], max(view.blocks for view in views)
    if len(views) == 1:
        tables = first.block_table[None]
    else:
        rows = max(part.block_table.shape[0] for part in parts)
        tables = torch.stack(
            [
                torch.nn.functional.pad(part.block_table[:, : view.blocks], (0, blocks - view.blocks)).expand(rows, -1)
                for part, view in zip(parts, views)
            ]
        )
    lengths = torch.empty(len(views), dtype=torch.int32, device=first.k.device)
    for row, view in enumerate(views):
        lengths[row].fill_(view.length)  # a fill, unlike a copy from the host, waits for nothing
    longest = max(view.length for view in views)
    return Pages(first.k, first.v, tables, lengths, longest, value_dim=first.format.value_dim)


@cache
def even_splits(lists: int, resident: int, most: int) -> int:
    """Into how many parts, at most ``most``, to cut each of ``lists`` for a device that holds ``resident`` programs at
    once: ``most`` where one round takes them, else the fewest that fill the last round nearly as well as any number
    does, in two rounds at most."""
    if lists * most <= resident:
        return most
    choices = range(1, max(1, min(most, 2 * resident // lists)) + 1)
    filled = [lists * splits / (-(-lists * splits // resident) * resident) for splits in choices]
    return next(splits for splits, share in zip(choices, filled) if share >= 0.96 * max(filled))


@triton.jit
def listed_keys(ids, number, valid, SIZE: tl.constexpr):
    """The ``number``-th keys of a list."""
    if SIZE == 0:
        key = number
    elif SIZE == 1:
        key = tl.load(ids + number, mask=valid, other=0)
    else:
        key = tl.load(ids + number // SIZE, mask=valid, other=0) * SIZE + number % SIZE
    return key
