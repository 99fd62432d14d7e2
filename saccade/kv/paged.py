"""Where a kernel finds the tokens of one layer of one sequence."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from saccade.kv.format import KVFormat


class Paged(NamedTuple):
    """``length`` tokens: KV head g's token i lies in slot ``block_table[g, i // block_size]`` at offset ``i %
    block_size``.

    ``k``, ``v``: [slots, kv_heads, block_size, width], contiguous, as ``format`` says. ``block_table``: int32
    [kv_heads or 1, >= blocks], each row contiguous, on the same device; one row serves all KV heads, and with a row
    for each of them heads do not share slots. A slot of -1 means that the block is not resident.
    """

    k: Tensor
    v: Tensor
    block_table: Tensor
    length: int
    format: KVFormat

    @property
    def head_stride(self) -> int:
        """Entries of ``block_table`` between one KV head's row and the next one's: 0 where they share a row."""
        return 0 if self.block_table.shape[0] == 1 else self.block_table.stride(0)
