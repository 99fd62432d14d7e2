"""One pool of KV blocks for all layers of all sequences (PSA, section 3.4).

A slot holds one layer's block of one sequence: ``block_size`` tokens of every KV head. Slots are interchangeable
between layers, so a layer that keeps little leaves room for one that keeps much.
"""

from __future__ import annotations

import torch

from saccade.errors import CapacityError, SaccadeError

BLOCK_SIZES = (16, 32, 64, 128)


class BlockPool:
    """``k`` and ``v``: [num_blocks, kv_heads, block_size, head_dim] of the storage dtype, contiguous."""

    def __init__(
        self,
        num_blocks: int,
        kv_heads: int,
        head_dim: int,
        *,
        block_size: int = 32,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        if block_size not in BLOCK_SIZES:
            raise SaccadeError(f"block_size={block_size} is not one of {BLOCK_SIZES}")
        if num_blocks < 1:
            raise CapacityError(f"a KV pool needs at least one block, got {num_blocks}; raise kv_memory")
        self.block_size = block_size
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        shape = (num_blocks, kv_heads, block_size, head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        return self.k.shape[0]

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype

    @staticmethod
    def block_bytes(kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one slot, keys and values together."""
        return 2 * kv_heads * block_size * head_dim * dtype.itemsize

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` slots, or raise CapacityError and take none."""
        if count > len(self._free):
            raise CapacityError(f"{count} KV blocks wanted but {len(self._free)} of {self.num_blocks} are free")
        if count <= 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        return taken

    def release(self, slots: list[int]) -> None:
        """Give slots back."""
        self._free.extend(reversed(slots))
