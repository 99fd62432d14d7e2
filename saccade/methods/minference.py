"""MInference's online patterns (Jiang et al., 2024): vertical-slash lines and pooled block-sparse attention.

The paper fixes a pattern and its sizes per head offline: ``pattern=searched`` reads those of ``saccade calibrate
patterns`` (see offline). The other patterns hold for all heads, by default with the sizes that its code gives a
head it has not searched. Differences from that code:

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
from saccade.methods.base import Chunk
from saccade.methods.options import require_choice, require_whole
from saccade.methods.tails import BlockMethod
from saccade.ops import triton
from saccade.ops.scores import line_sums, mean_keys, mean_queries
from saccade.selection import Blocks, Dense, Lines, Mixed, Selection

CALIBRATION = "patterns"
SIZES = "patterns"  # the calibration's tensor: a row (kind, columns, distances, blocks) for each query head
A_SHAPE, LINES, BLOCKS = 0, 1, 2  # kinds: the first columns and distances, the heaviest ones, the best blocks
PATTERNS = ("vertical_slash", "block_sparse", "searched")


@dataclass(frozen=True)
class MInference(BlockMethod):
    """``pattern="vertical_slash"``: the ``vertical`` heaviest key columns and ``slash`` heaviest distances by the
    weight of the chunk's last ``last_rows`` rows; the first ``keep_columns`` columns and the nearest ``keep_diagonals``
    distances are always among them. ``pattern="block_sparse"``: per query block of 64 the ``blocks`` key blocks of
    highest mean-query mean-key product, none forced. Every query head chooses for itself. ``pattern="searched"``: each
    query head has the pattern and sizes that a search found for it offline; ``vertical``, ``slash`` and ``blocks`` play
    no part."""

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
        require_choice("pattern", self.pattern, PATTERNS)
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

    @property
    def calibration(self) -> str | None:
        return CALIBRATION if self.pattern == "searched" else None

    def select_prefill(self, chunk: Chunk) -> Selection:
        if self.pattern == "searched":
            assert chunk.offline is not None, "the engine hands over the calibration that a method asks for"
            return self.of_sizes(chunk, chunk.offline[SIZES])
        return self._lines(chunk) if self.pattern == "vertical_slash" else self._blocks(chunk)

    def of_sizes(self, chunk: Chunk, sizes: Tensor) -> Selection:
        """Each query head by its row (kind, columns, distances, blocks) of ``sizes`` [heads, 4]: lines of the a-shape's
        and the vertical-slash heads, blocks of the others."""
        shape, device = chunk.shape, chunk.q.device
        kinds, verticals, slashes, blocks = sizes.long().cpu().T
        by_blocks = kinds == BLOCKS
        most = torch.where(by_blocks, blocks * self.block_size, torch.maximum(verticals, slashes))
        if int(most.min()) >= shape.k_len:
            return Dense(shape)
        lists = _nothing(shape.heads, device), _nothing(shape.heads, device)
        if bool((kinds == LINES).any()):
            rows = min(self.last_rows, shape.q_len)
            chunk.cost.scored += round(rows * shape.k_len * float((kinds == LINES).double().mean()))
            sums = line_sums(chunk.q, chunk.kv, shape, rows, chunk.scale, chunk.softcap)
        for head in (~by_blocks).nonzero()[:, 0].tolist():
            forced = (self.keep_columns, self.keep_diagonals)
            for at, (least, size) in enumerate(zip(forced, (int(verticals[head]), int(slashes[head])))):
                count = min(max(size, least), shape.k_len)
                if int(kinds[head]) == A_SHAPE:
                    lists[at][head] = torch.arange(count, device=device)
                else:
                    lists[at][head] = _heaviest(sums[at][head : head + 1], count, least)[0]
        lines = Lines.from_lists(shape, *lists)
        if not bool(by_blocks.any()):
            return lines
        chosen = self._best_blocks(
            chunk, torch.where(by_blocks, blocks, 0).to(device), float(by_blocks.double().mean())
        )
        return Mixed(shape, (lines, chosen), by_blocks.long().to(device))

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
        if -(-shape.k_len // size) <= self.blocks:
            return Dense(shape)
        if chunk.q.is_cuda and triton.serves_scores(chunk.q, chunk.kv) is None:
            from saccade.ops.triton.heaviest import best_blocks

            self._count_blocks(chunk)
            means = mean_keys(chunk.kv, size)
            return self.with_tail(chunk, best_blocks(chunk.q, means, shape, size, self.blocks), size)
        counts = torch.full((shape.heads,), self.blocks, device=chunk.q.device)
        return self.with_tail(chunk, self._best_blocks(chunk, counts), size)

    def _count_blocks(self, chunk: Chunk, share: float = 1.0) -> None:
        """Scores of block pairs, in the ``share`` of the heads that need them."""
        shape, size = chunk.shape, self.block_size
        rows = (shape.q_start + shape.q_len - 1) // size - shape.q_start // size + 1
        chunk.cost.estimated += round(rows * -(-shape.k_len // size) * share)

    def _best_blocks(self, chunk: Chunk, counts: Tensor, share: float = 1.0) -> Blocks:
        """The ``counts`` [heads] key blocks of highest product for each query block."""
        shape, size = chunk.shape, self.block_size
        self._count_blocks(chunk, share)
        means, first = mean_keys(chunk.kv, size), shape.q_start // size
        scores = mean_queries(chunk.q, shape, size) @ means.repeat_interleave(shape.group, 0).transpose(1, 2)
        q_blocks = first + torch.arange(scores.shape[1], device=scores.device)
        k_blocks = torch.arange(scores.shape[2], device=scores.device)
        scores = scores.masked_fill(k_blocks > q_blocks[:, None], -torch.inf)
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
        taken = (k_blocks < counts[:, None, None]).expand_as(order)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, taken)
        return Blocks.from_block_mask(shape, size, chosen)


def _nothing(heads: int, device: torch.device) -> list[Tensor]:
    return [torch.empty(0, dtype=torch.int32, device=device)] * heads


def _heaviest(sums: Tensor, count: int, forced: int) -> list[Tensor]:
    """Per head the ``count`` lines of greatest sum, ties to the lower one, the first ``forced`` before all others."""
    sums = sums.clone()
    sums[:, :forced] = torch.inf
    return list(torch.sort(sums, dim=-1, descending=True, stable=True).indices[:, :count])
