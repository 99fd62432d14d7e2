"""FlashPrefill (Fan et al., 2026): blocks of keys whose share comes near that of the heaviest one.

Every row of a query block is multiplied with the mean key of every key block that it sees whole. A key block is read if
the sum of what its mean would get (the exponentials of those scores) is at least ``alpha`` times the largest such sum:
nothing is sorted, and what a threshold on a cumulative share would owe to a long tail of light blocks is left out.
Definitions are those of the authors' code, github.com/qhfan/FlashPrefill; ``unit=kv_head`` is how its second version
(arXiv:2608.19758) shares lists, which packs the query heads of a group into a tile.

The grid of blocks is anchored at position 0, so that any appended chunk works. The authors' code prefills a prompt in
one call, and reads everything in its last query blocks: here these are the last of each chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from saccade.errors import ModelError
from saccade.methods.base import Chunk
from saccade.methods.options import require_choice, require_number, require_whole
from saccade.methods.tails import BlockMethod
from saccade.ops.block_energies import block_energies
from saccade.ops.scores import NOT_FINITE
from saccade.selection import Blocks, Dense, Selection


@dataclass(frozen=True)
class FlashPrefill(BlockMethod):
    """Per query head (or group: ``unit=kv_head``) and query block of ``block_size``: the first ``sink_blocks``, the
    last ``window_blocks`` (its own among them), and every block whose energy is at least ``alpha`` times the largest.
    The last ``last_blocks`` query blocks of a chunk read everything. ``alpha=0`` is dense."""

    name: ClassVar[str] = "flashprefill"
    paper: ClassVar[str] = "FlashPrefill, github.com/qhfan/FlashPrefill"
    phases: ClassVar[tuple[str, ...]] = ("prefill",)

    alpha: float = 0.1
    sink_blocks: int = 2
    window_blocks: int = 4
    last_blocks: int = 2
    block_size: int = 128
    unit: str = "q_head"

    def __post_init__(self) -> None:
        require_number("alpha", self.alpha, 0.0, 1.0)
        require_whole("sink_blocks", self.sink_blocks, 0)
        require_whole("window_blocks", self.window_blocks, 1)
        require_whole("last_blocks", self.last_blocks, 0)
        require_choice("block_size", self.block_size, (32, 64, 128))
        require_choice("unit", self.unit, ("q_head", "kv_head"))
        self.check_tail()

    def reads_all(self, start: int, stop: int) -> bool:
        size = self.block_size
        few = -(-stop // size) <= self.sink_blocks + self.window_blocks
        return self.alpha == 0 or few or (stop - 1) // size - start // size + 1 <= self.last_blocks

    def select_prefill(self, chunk: Chunk) -> Selection:
        shape, size = chunk.shape, self.block_size
        first, k_blocks = shape.q_start // size, -(-shape.k_len // size)
        if self.reads_all(shape.q_start, shape.q_start + shape.q_len):
            return Dense(shape)
        chunk.cost.estimated += shape.q_len * k_blocks
        energies = block_energies(chunk.q, chunk.kv, shape, size, chunk.scale, chunk.softcap)
        if self.unit == "kv_head":
            energies = energies.unflatten(0, (shape.kv_heads, -1)).logsumexp(1)
        taken = self._near(energies, first)
        if taken.is_cuda:
            from saccade.ops.triton.choose import compact

            return self.with_tail(chunk, compact(shape, size, taken), size)
        if energies.isnan().any():
            raise ModelError(NOT_FINITE)
        return self.with_tail(chunk, Blocks.from_block_mask(shape, size, taken), size)

    def _near(self, energies: Tensor, first: int) -> Tensor:
        """bool [units, q_blocks, k_blocks]: what query blocks (the first one is block ``first``) read."""
        q_blocks, k_blocks = energies.shape[1:]
        block = torch.arange(k_blocks, device=energies.device)
        own = first + torch.arange(q_blocks, device=energies.device)[:, None]
        forced = (block < self.sink_blocks) | (block > own - self.window_blocks)
        forced |= own >= first + q_blocks - self.last_blocks
        # A query block that sees no key block whole has no largest energy, and few blocks.
        near = energies >= energies.amax(-1, keepdim=True) + math.log(self.alpha)
        return (near | forced) & (block <= own)
