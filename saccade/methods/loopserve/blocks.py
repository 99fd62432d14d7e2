"""Lines of blocks: the cover in rounds over query blocks and key blocks, for a kernel that reads blocks.

Of the grid that is anchored at position 0, entry (i, j) of a matrix holds what the sampled rows of query block i give
to key block j together. Its lines are column blocks, key block j for every query block, and distance blocks, key block
i - d for every query block i; its cells are whole block pairs, where a chunk cuts a query block too. ``rounds.py``
covers it as it covers rows and keys, and forces column 0 and the last few distances: the first block and those before
and at the row's own. The distance of one block belongs to them: a line of one key may lie at distance 1, of which a
query block asks the block before in its first row alone, and among a few sampled rows there may be none such.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import ModelError
from saccade.methods.base import Chunk
from saccade.methods.loopserve.rounds import cover_rounds
from saccade.ops import triton
from saccade.ops.row_shares import row_sums
from saccade.ops.scores import NOT_FINITE
from saccade.selection import Blocks, Shape


def select_blocks(chunk: Chunk, rows: Tensor, share: float, block_size: int, shape: Shape, near: int) -> Blocks:
    """For ``shape``, the chunk's own or that of its last rows, the blocks of every query head on the lines that recover
    ``share`` of the attention of ``rows`` (int64 [m] on the CPU, rising numbers within the chunk), distances below
    ``near`` among them. On a GPU no number goes to the host; elsewhere ModelError where weights are NaN."""
    if chunk.q.is_cuda and triton.serves_tiles(chunk.q, chunk.kv, chunk.shape.k_len, block_size) is None:
        from saccade.methods.loopserve.triton_blocks import select_on_device

        return select_on_device(chunk, rows, share, block_size, shape, near)
    own, first = chunk.shape, chunk.shape.q_start // block_size
    blocks, places = query_blocks(own, rows, block_size)
    weights = row_sums(chunk.q, chunk.kv, own, rows, places, block_size, chunk.scale, chunk.softcap).cpu()
    if not bool(weights.sum().isfinite()):
        raise ModelError(NOT_FINITE)
    marks = torch.zeros(2, own.heads, weights.shape[2], dtype=torch.bool, device="cpu")
    for head in range(own.heads):
        lines = cover_rounds(weights[head].numpy(), blocks.numpy(), first, share, near)
        for kind, line in enumerate(lines):
            marks[kind, head, torch.from_numpy(line)] = True
    return Blocks.from_block_mask(shape, block_size, on_lines(shape, block_size, marks).to(chunk.q.device))


def query_blocks(shape: Shape, rows: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """The query blocks in which ``rows`` lie, int64 [m], rising numbers on the grid, and of each row its place among
    them."""
    blocks, places = torch.unique_consecutive((shape.q_start + rows) // block_size, return_inverse=True)
    return blocks, places


def on_lines(shape: Shape, block_size: int, marks: Tensor) -> Tensor:
    """bool [heads, q_blocks, k_blocks] of what lies on the lines ``marks``, bool [2, heads, k_blocks]: which columns
    and which distances. Acausal blocks are False."""
    block = torch.arange(marks.shape[2], device=marks.device)
    last = (shape.q_start + shape.q_len - 1) // block_size
    distance = torch.arange(shape.q_start // block_size, last + 1, device=marks.device)[:, None] - block
    return (marks[0][:, None] | marks[1][:, distance.clamp(min=0)]) & (distance >= 0)
