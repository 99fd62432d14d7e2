"""One pool of KV blocks for all layers of all sequences (PSA, section 3.4).

A slot holds one layer's block of one sequence: ``block_size`` tokens of every KV head. Slots are interchangeable
between layers, so a layer that keeps little leaves room for one that keeps much.
"""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

from saccade.errors import CapacityError, SaccadeError
from saccade.machine import show_bytes

BLOCK_SIZES = (16, 32, 64, 128)
HUGE_PAGE = 1 << 21


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
        try:
            self.k = torch.empty(shape, dtype=dtype, device=device)
            self.v = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            wanted = num_blocks * self.block_bytes(kv_heads, head_dim, block_size, dtype)
            raise CapacityError(
                f"a KV pool of {show_bytes(wanted)} cannot be had on {device}; give a smaller kv_memory"
            ) from error
        for part in (self.k, self.v):
            ask_for_huge_pages(part)
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


def ask_for_huge_pages(tensor: Tensor, least: int = 16) -> None:
    """Let Linux back a CPU tensor of at least ``least`` pages of 2 MiB with such pages. Scattered rows of 4 KiB pages
    cost a page walk each, and even reading in order is slower. Only advice: without it everything works as before."""
    size = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or size < least * HUGE_PAGE or not sys.platform.startswith("linux"):
        return
    start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    stop = (tensor.data_ptr() + size) // HUGE_PAGE * HUGE_PAGE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), 14)  # MADV_HUGEPAGE
