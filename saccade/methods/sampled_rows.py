"""Sampled rows: blocks of keys by the exact attention of a few rows of each query block.

``rows`` of the m rows of a query block, those in the middle of equal stretches (number floor((2i + 1) m / 2 rows)), are
multiplied with every key before them; their softmax weights,
summed over blocks of keys and averaged, are the estimate. Two rules choose by it. A cumulative one gives every head the
fewest blocks that hold ``gamma`` of the weight. And a block is read wherever it holds ``threshold`` of the weight of
its query block: a block costs the same in any head, so that one bar for all of them keeps most for what is read. Equal
shares of every head would spend on the heads that are spread.

The ``window_blocks`` last blocks are read whatever the sampled rows say. A head that looks a few tokens back asks for
the block before its own in the first rows of each query block alone, and none of these is sampled: with the diagonal
block only, such a head reads nothing that it looks for at every 128th token.

Sampling rows to choose keys by is SampleAttention's (Zhu et al., arXiv:2406.15486), which adds the rows of a whole
prompt up and reads a window and columns of single keys; MInference (arXiv:2407.02490) and FlexPrefill
(arXiv:2502.20766) go by the last rows alone. The cumulative rule is XAttention's (arXiv:2503.16428), a bar on what a
block weighs BLASST's (arXiv:2512.12087) and, relative to the heaviest block, FlashPrefill's.

The grid of blocks is anchored at position 0, so that any appended chunk works; of a block that a chunk cuts the
sampled rows are those of the part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from saccade.errors import ModelError
from saccade.methods.base import Chunk
from saccade.methods.options import require_choice, require_number, require_whole
from saccade.methods.tails import BlockMethod
from saccade.ops import triton
from saccade.ops.row_shares import row_shares, sampled_count
from saccade.ops.scores import NOT_FINITE, needed_shares
from saccade.selection import Blocks, Dense, Selection


@dataclass(frozen=True)
class SampledRows(BlockMethod):
    """Per query head and query block of ``block_size``: the first key block and the last ``window_blocks`` (the
    diagonal one among them), the fewest others with which all together reach ``gamma`` of the estimated weight, and
    every block that has ``threshold`` of it.
    ``threshold=0`` and ``gamma=1`` are dense."""

    name: ClassVar[str] = "sampled_rows"
    paper: ClassVar[str] = "rows sampled as in SampleAttention, arXiv:2406.15486"
    phases: ClassVar[tuple[str, ...]] = ("prefill",)

    threshold: float = 0.002
    gamma: float = 0.8
    rows: int = 8
    block_size: int = 128
    window_blocks: int = 2

    def __post_init__(self) -> None:
        require_number("threshold", self.threshold, 0.0, 1.0)
        require_number("gamma", self.gamma, 0.0, 1.0)
        require_choice("block_size", self.block_size, (32, 64, 128))
        require_whole("rows", self.rows, 1, self.block_size)
        require_whole("window_blocks", self.window_blocks, 1)
        self.check_tail()

    def select_prefill(self, chunk: Chunk) -> Selection:
        shape, size = chunk.shape, self.block_size
        if self.threshold <= 0.0 or self.gamma >= 1.0 or (shape.k_len - 1) // size <= self.window_blocks:
            return Dense(shape)
        at = chunk.q, chunk.kv, shape, self.rows, size
        chunk.cost.scored += sampled_count(shape, self.rows, size) * shape.k_len
        if chunk.q.is_cuda and triton.serves_tiles(chunk.q, chunk.kv, shape.k_len, size) is None:
            from saccade.ops.triton.row_shares import choose

            found = choose(*at, self.gamma, self.threshold, self.window_blocks, chunk.scale, chunk.softcap)
            return self.with_tail(chunk, found, size)
        taken = self._taken(row_shares(*at, chunk.scale, chunk.softcap), shape.q_start // size)
        return self.with_tail(chunk, Blocks.from_block_mask(shape, size, taken), size)

    def _taken(self, shares: Tensor, first: int) -> Tensor:
        """bool [heads, q_blocks, k_blocks]: what query blocks (the first one is block ``first``) read. ModelError for
        shares that are not finite."""
        q_blocks, k_blocks = shares.shape[1:]
        block = torch.arange(k_blocks, device=shares.device)
        own = first + torch.arange(q_blocks, device=shares.device)[:, None]
        always = (block == 0) | (block > own - self.window_blocks)
        rest = shares.masked_fill(always, 0.0)
        left = rest.sum(-1, keepdim=True, dtype=torch.float64)
        if not bool(left.isfinite().all()):
            raise ModelError(NOT_FINITE)
        have = shares.sum(-1, keepdim=True, dtype=torch.float64) - left
        wanted = (rest > 0) & (needed_shares(rest) * left + have < self.gamma)
        return (always | wanted | (shares >= self.threshold)) & (block <= own)
