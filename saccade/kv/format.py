"""How keys and values lie in memory: the one source of block bytes, shapes and strides."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from saccade.errors import SaccadeError

BLOCK_SIZES = (16, 32, 64, 128)
VERSION = 1


@dataclass(frozen=True)
class KVFormat:
    """The layout of a block's keys, and of its values: contiguous [kv_heads, block_size, head_dim] of ``dtype``.

    ``block_size``: tokens of a block, one of BLOCK_SIZES. ``scale_planes``: planes of quantisation scales that a block
    has beside its keys and values; this version has none. ``version`` names the layout, so that stored blocks of
    another one are refused. Raises SaccadeError for a layout that does not exist.
    """

    dtype: torch.dtype
    kv_heads: int
    head_dim: int
    block_size: int = 32
    scale_planes: int = 0
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise SaccadeError(f"block_size={self.block_size} is not one of {BLOCK_SIZES}")
        if self.kv_heads < 1 or self.head_dim < 1:
            raise SaccadeError(f"kv_heads={self.kv_heads} and head_dim={self.head_dim} must both be at least 1")
        if self.scale_planes:
            raise SaccadeError(f"scale_planes={self.scale_planes}: this layout has no scales; leave it at 0")
        if self.version != VERSION:
            raise SaccadeError(f"KV of layout version {self.version} cannot be read, only version {VERSION}")

    def shape(self, slots: int) -> tuple[int, int, int, int]:
        """Of the tensor of all keys, and of all values: [slots, kv_heads, block_size, head_dim]."""
        return slots, self.kv_heads, self.block_size, self.head_dim

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Elements between neighbours along the axes of ``shape``."""
        row, head = self.head_dim, self.block_size * self.head_dim
        return self.kv_heads * head, head, row, 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one slot: one layer's keys and values of one block, all KV heads."""
        return 2 * self.strides[0] * self.dtype.itemsize

    def blocks(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens, the partial last one included."""
        return -(-tokens // self.block_size)
