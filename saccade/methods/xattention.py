"""XAttention (Xu et al., 2025): blocks of keys by strided antidiagonal sums, up to a cumulative share of each query
block.

Tiles of ``stride`` x ``stride`` (row, key) pairs are scored by their antidiagonal alone; a softmax over the tiles of a
row of tiles gives the share of every key block. The grid of tiles and blocks is anchored at position 0 and any appended
chunk works: a tile that the chunk or the context cuts is scored by the mean of the pairs it has (the published code
pads with zeros, which flattens the softmax of such rows).

An antidiagonal crosses every column, but of the slashes only those at odd distances (an even stride leaves row - key =
stride - 1 mod 2): a slash is found by the neighbours it has, as in the paper, and one of a single even distance is not.

The first block counts towards the threshold like any other that is read. In the first 16,384 rows, which the published
code takes in one go, its sum lets go of that block and of the block before last, so that it reads one block more:
``sink="published"``.

The paper forces the first and the diagonal block alone, and a threshold is a share of a whole query block. A head that
looks D tokens back asks for the block before in the first D of 128 rows: up to D = 12 the diagonal block holds 0.9, and
these rows read nothing that they look for, whatever the stride (docs/results/block-starts.md). ``window_blocks=2``
reads that block, too, and is the better choice where every row counts; 1 is the paper's, and the default.

``products="fp8"`` multiplies rows in e4m3 with float32 sums (``ops.fp8_tiles``), in half the time where a GPU has such
products; elsewhere their rounding is emulated. Only the choice hangs on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from saccade.methods.base import Chunk
from saccade.methods.options import require, require_choice, require_number, require_whole
from saccade.methods.tails import BlockMethod
from saccade.ops import triton
from saccade.ops.scores import antidiagonal_shares
from saccade.selection import Blocks, Dense, Selection

PUBLISHED_ROWS = 16384  # rows that the published code scores at once
NOTE = "prefill: 'xattention' chose by FP8 products (products=fp8; products=full takes whole ones)"


@dataclass(frozen=True)
class XAttention(BlockMethod):
    """Per query head and query block of ``block_size``: the first key block and the last ``window_blocks`` (the
    diagonal one among them), then others in descending share until all together reach ``threshold``. ``stride`` divides
    ``block_size``. ``threshold=1`` is dense. ``sink="published"`` counts as the published code does: for the rows below
    16384 the first block's share counts only in its turn, and a block is read if those before the one ahead of it fall
    short. ``products``: of sums in ``full``, or in ``fp8``."""

    name: ClassVar[str] = "xattention"
    paper: ClassVar[str] = "XAttention, arXiv:2503.16428"
    phases: ClassVar[tuple[str, ...]] = ("prefill",)

    threshold: float = 0.9
    stride: int = 8
    block_size: int = 128
    sink: str = "counted"
    products: str = "full"
    window_blocks: int = 1

    def __post_init__(self) -> None:
        require_number("threshold", self.threshold, 0.0, 1.0)
        require_choice("block_size", self.block_size, (32, 64, 128))
        require_choice("sink", self.sink, ("counted", "published"))
        require_choice("products", self.products, ("full", "fp8"))
        require_whole("stride", self.stride, 1)
        require_whole("window_blocks", self.window_blocks, 1)
        self.check_tail()
        require(
            self.stride <= self.block_size and self.block_size % self.stride == 0,
            "stride",
            self.stride,
            f"a divisor of block_size={self.block_size}",
        )

    def select_prefill(self, chunk: Chunk) -> Selection:
        shape, size = chunk.shape, self.block_size
        first, last = shape.q_start // size, (shape.k_len - 1) // size
        if self.threshold >= 1.0 or last <= self.window_blocks:  # with the first all are read
            return Dense(shape)
        chunk.cost.estimated += shape.q_len * -(-shape.k_len // self.stride)
        lagging = PUBLISHED_ROWS // size if self.sink == "published" else 0
        fp8 = self.products == "fp8"
        if fp8 and NOTE not in chunk.cost.notes:
            chunk.cost.notes.append(NOTE)
        serves = triton.serves_fp8_tiles if fp8 else triton.serves_tiles
        if chunk.q.is_cuda and serves(chunk.q, chunk.kv, shape.k_len, size) is None:
            from saccade.ops.triton.antidiagonals import choose

            at = chunk.q, chunk.kv, shape, self.stride, size, self.threshold, lagging
            return self.with_tail(chunk, choose(*at, chunk.scale, chunk.softcap, fp8, self.window_blocks), size)
        shares = antidiagonal_shares(chunk.q, chunk.kv, shape, self.stride, size, chunk.scale, chunk.softcap, fp8)
        taken = _reach(shares, first, self.threshold, lagging, self.window_blocks)
        return self.with_tail(chunk, Blocks.from_block_mask(shape, size, taken), size)


def _reach(shares: Tensor, first: int, threshold: float, lagging: int = 0, window: int = 1) -> Tensor:
    """bool [h, q_blocks, k_blocks]: block 0 and the last ``window``, the diagonal one among them, then the heaviest
    others (ties to the lower one) while what is there is short of ``threshold``. In query blocks below ``lagging`` all
    but the diagonal one are ranked like the others, and the sum lags a block behind."""
    q_blocks, k_blocks = shares.shape[1:]
    block = torch.arange(k_blocks, device=shares.device)
    diagonal = first + torch.arange(q_blocks, device=shares.device)[:, None]
    lags = diagonal < lagging
    always = (block == 0) | (block > diagonal - window)
    first_ranked = (always & ~lags) | (block == diagonal)
    ranked = shares.double().masked_fill(first_ranked, torch.inf).masked_fill(block > diagonal, -torch.inf)
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices
    sorted_shares = shares.double().gather(-1, order)
    sums = sorted_shares.cumsum(-1) - sorted_shares
    sums = torch.where(lags, torch.nn.functional.pad(sums[..., :-1], (1, 0)), sums)
    before = torch.zeros_like(sorted_shares).scatter_(-1, order, sums)
    return ((before < threshold) | always) & (block <= diagonal)
