"""How keys and values lie in memory: the one source of block bytes and shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.row_formats import AUTO, RowFormat

BLOCK_SIZES = (16, 32, 64, 128)
VERSION = 1  # of what is written to disk


@dataclass(frozen=True)
class KVFormat:
    """The layout of a block's keys, and of its values: contiguous rows [kv_heads, block_size, width].

    Rows of ``head_dim`` values go in and come out in ``dtype``; ``k`` and ``v`` say how keys and values are stored.
    ``turned``: keys are in the basis of ``kv_rotate`` (models/key_turns.py); ``balanced``: in that of a model whose
    layers run as modules and have a bias of keys, which 0.3.0 did not balance. ``value_dim``: None, or that a value is
    the first so many channels of its key, and is not stored (latent attention): reading values reads keys, and of
    what comes of them the channels behind those mean nothing. ``filled``: None, or that values are zeros behind so many
    channels, which kernels need not read; nor do those of what comes of them mean anything. ``block_size``: tokens of a
    block, one of BLOCK_SIZES.
    Raises SaccadeError for a layout that does not exist.
    """

    dtype: torch.dtype
    kv_heads: int
    head_dim: int
    block_size: int = 32
    k: RowFormat = AUTO
    v: RowFormat = AUTO
    turned: bool = False
    balanced: bool = False
    value_dim: int | None = None
    filled: int | None = None

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise SaccadeError(f"block_size={self.block_size} is not one of {BLOCK_SIZES}")
        if self.kv_heads < 1 or self.head_dim < 1:
            raise SaccadeError(f"kv_heads={self.kv_heads} and head_dim={self.head_dim} must both be at least 1")
        if self.head_dim % self.k.multiple:
            raise SaccadeError(
                f"kv_dtype={self.k.name!r} takes a head_dim that is a multiple of {self.k.multiple}, got "
                f"{self.head_dim}; leave kv_dtype at 'auto'"
            )
        if self.k is not self.v:
            raise SaccadeError(
                f"keys of format {self.k.name!r} and values of {self.v.name!r}: kernels find both by one offset; give "
                "one format for both"
            )
        for name, channels in (("value_dim", self.value_dim), ("filled", self.filled)):
            if channels is not None and not 1 <= channels <= self.head_dim:
                raise SaccadeError(f"{name}={channels} must be from 1 to head_dim={self.head_dim}")

    @property
    def joined(self) -> bool:
        """Whether values are channels of the keys."""
        return self.value_dim is not None

    @property
    def parts(self) -> tuple[RowFormat, ...]:
        """Of what is stored: keys and values, or keys alone."""
        return (self.k,) if self.joined else (self.k, self.v)

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Of keys and values, in any shape, those that are stored, one for each of :attr:`parts`."""
        return (k,) if self.joined else (k, v)

    def shape(self, slots: int, rows: RowFormat) -> tuple[int, int, int, int]:
        """Of the tensor of all keys, or of all values: [slots, kv_heads, block_size, width]."""
        return slots, self.kv_heads, self.block_size, rows.width(self.head_dim)

    def half_bytes(self, rows: RowFormat) -> int:
        """Bytes of one slot's keys, or of its values: one layer's of one block, all KV heads."""
        return math.prod(self.shape(1, rows)) * rows.dtype(self.dtype).itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one slot: one layer's keys and values of one block, all KV heads."""
        return sum(map(self.half_bytes, self.parts))

    def decode(self, stored: Tensor, rows: RowFormat) -> Tensor:
        """Stored rows [..., width] as keys, or values, [..., head_dim]."""
        return rows.decode(stored, self.dtype)

    def blocks(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens, the partial last one included."""
        return -(-tokens // self.block_size)
