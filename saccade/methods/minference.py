"""MInference's online patterns (Jiang et al., 2024): vertical-slash lines and pooled block-sparse attention.

The paper fixes a pattern and its sizes per head offline; here they are options, by default what its code gives a head
it has not searched. Differences from that code:

* any appended chunk works: the sampled rows are the chunk's last ones and the block grid is anchored at position 0;
* the lines are read as they are. The code's kernel widens each slash to 64 columns per block of 64 rows, so it reads
  a superset; nothing here relies on that;
* a line that is forced is read even where the size asked for is smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from saccade.errors import PolicyError
from saccade.methods.base import Chunk, require_choice, require_whole
from saccade.methods.tails import BlockMethod
from saccade.ops import triton
from saccade.ops.scores import line_sums, mean_keys, mean_queries
from saccade.selection import Blocks, Dense, Lines, Selection


@dataclass(frozen=True)
class MInference(BlockMethod):
    """``pattern="vertical_slash"``: the ``vertical`` heaviest key columns and ``slash`` heaviest distances by the
    weight of the chunk's last ``last_rows`` rows; the first ``keep_columns`` columns and the nearest ``keep_diagonals``
    distances are always among them. ``pattern="block_sparse"``: per query block of 64 the ``blocks`` key blocks of
    highest mean-query mean-key product, none forced. Every query head chooses for itself."""

    name: ClassVar[str] = "minference"
    paper: ClassVar[str] = "MInference, arXiv:2407.02490"
    phases: ClassVar[tuple[str, ...]] = ("prefill",)

    pattern: str = "vertical_slash"
    vertical: int = 1000
    slash: int = 6096
    last_rows: int = 64
    keep_columns: int = 30
    keep_diagonals: int = 100
    blocks: int = 100
    block_size: int = 64

    def __post_init__(self) -> None:
        require_choice("pattern", self.pattern, ("vertical_slash", "block_sparse"))
        require_whole("vertical", self.vertical, 0)
        require_whole("slash", self.slash, 0)
        require_whole("last_rows", self.last_rows, 1)
        require_whole("keep_columns", self.keep_columns, 0)
        require_whole("keep_diagonals", self.keep_diagonals, 1)  # distance 0: no row without a key
        require_whole("blocks", self.blocks, 1)
        require_choice("block_size", self.block_size, (32, 64, 128))
        self.check_tail()
        if self.stands_in and self.pattern != "block_sparse":
            raise PolicyError(
                f"tail={self.tail} stands for unread blocks and pattern={self.pattern} reads lines; "
                "give pattern=block_sparse, or leave tail out"
            )

    def select_prefill(self, chunk: Chunk) -> Selection:
        return self._lines(chunk) if self.pattern == "vertical_slash" else self._blocks(chunk)

    def _lines(self, chunk: Chunk) -> Selection:
        shape = chunk.shape
        vertical, slash = max(self.vertical, self.keep_columns), max(self.slash, self.keep_diagonals)
        if max(vertical, slash) >= shape.k_len:
            return Dense(shape)
        rows = min(self.last_rows, shape.q_len)
        chunk.cost.scored += rows * shape.k_len
        columns, slashes = line_sums(chunk.q, chunk.kv, shape, rows, chunk.scale, chunk.softcap)
        if columns.is_cuda and triton.serves_scores(chunk.q, chunk.kv) is None:
            from saccade.ops.triton.heaviest import heaviest_lines

            return heaviest_lines(shape, columns, slashes, vertical, slash, self.keep_columns, self.keep_diagonals)
        return Lines.from_lists(
            shape, _heaviest(columns, vertical, self.keep_columns), _heaviest(slashes, slash, self.keep_diagonals)
        )

    def _blocks(self, chunk: Chunk) -> Selection:
        shape, size = chunk.shape, self.block_size
        k_blocks = -(-shape.k_len // size)
        if k_blocks <= self.blocks:
            return Dense(shape)
        means, first = mean_keys(chunk.kv, size), shape.q_start // size
        chunk.cost.estimated += ((shape.q_start + shape.q_len - 1) // size - first + 1) * k_blocks
        if chunk.q.is_cuda and triton.serves_scores(chunk.q, chunk.kv) is None:
            from saccade.ops.triton.heaviest import best_blocks

            return self.with_tail(chunk, best_blocks(chunk.q, means, shape, size, self.blocks), size)
        scores = mean_queries(chunk.q, shape, size) @ means.repeat_interleave(shape.group, 0).transpose(1, 2)
        q_blocks = first + torch.arange(scores.shape[1], device=scores.device)
        scores = scores.masked_fill(torch.arange(k_blocks, device=scores.device) > q_blocks[:, None], -torch.inf)
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., : self.blocks]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
        return self.with_tail(chunk, Blocks.from_block_mask(shape, size, chosen), size)


def _heaviest(sums: Tensor, count: int, forced: int) -> list[Tensor]:
    """Per head the ``count`` lines of greatest sum, ties to the lower one, the first ``forced`` before all others."""
    sums = sums.clone()
    sums[:, :forced] = torch.inf
    return list(torch.sort(sums, dim=-1, descending=True, stable=True).indices[:, :count])
