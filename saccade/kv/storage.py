"""One pool of KV slots for all layers of all sequences (PSA, section 3.4): the memory, not who uses it.

A slot holds one layer's block of one sequence: ``block_size`` tokens of every KV head. Slots are interchangeable
between layers, so a layer that keeps little leaves room for one that keeps much. Who has which slot is known to the
BlockManager.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import CapacityError
from saccade.kv import rows
from saccade.kv.format import KVFormat
from saccade.kv.rows import RowMover
from saccade.machine import ask_for_huge_pages, show_bytes

HOST = torch.device("cpu")
ALIGNED = 4096  # bytes: pools begin where any row may


class KVStorage:
    """``k`` and ``v``: [num_blocks, kv_heads, block_size, width], laid out as ``format`` says, never moved; one tensor
    where values are channels of the keys. ``parts``: the tensors that there are.

    ``mover`` copies rows into slots and out of them. By default it is torch's indexing; code that makes storage on a
    GPU hands in what has a kernel for it. Raises CapacityError where there is no room for one slot, or no such memory.
    """

    def __init__(
        self, format: KVFormat, num_blocks: int, device: str | torch.device = "cpu", mover: RowMover | None = None
    ) -> None:
        if num_blocks < 1:
            raise CapacityError(f"a KV pool needs at least one block, got {num_blocks}; raise kv_memory")
        self.format = format
        self.num_blocks = num_blocks
        self.mover: RowMover = rows if mover is None else mover
        try:
            self.parts = tuple(
                _aligned(format.shape(num_blocks, rows), rows.dtype(format.dtype), device) for rows in format.parts
            )
        except RuntimeError as error:
            wanted = num_blocks * format.block_bytes
            raise CapacityError(
                f"a KV pool of {show_bytes(wanted)} cannot be allocated on {device}; give a smaller kv_memory"
            ) from error
        self.k, self.v = self.parts[0], self.parts[-1]
        for part in self.parts:
            ask_for_huge_pages(part)

    @property
    def device(self) -> torch.device:
        return self.k.device

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the rows of slots ``source`` to slots ``target``, int [n, kv_heads or 1] on the host: with a column for
        each KV head, that head's rows alone."""
        source, target = (slots.long().to(self.device) for slots in (source, target))
        for part in self.parts:
            if source.shape[1] == 1:
                part[target[:, 0]] = part[source[:, 0]]
            else:
                heads = torch.arange(source.shape[1], device=self.device)
                part[target, heads] = part[source, heads]


@dataclass(frozen=True)
class CellStorage:
    """A host tier's cells, from 0, as kernels on a CPU and a disk behind it know a pool's slots."""

    k: Tensor
    v: Tensor
    format: KVFormat
    mover: RowMover = rows
    device: torch.device = HOST

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """See KVStorage."""
        return self.format.stored(self.k, self.v)


def _aligned(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """An empty tensor that begins where a row may: kernels count rows from it to those of another memory."""
    count = math.prod(shape) * dtype.itemsize
    whole = torch.empty(count + ALIGNED, dtype=torch.uint8, device=device)
    return whole[-whole.data_ptr() % ALIGNED :][:count].view(dtype).view(shape)
