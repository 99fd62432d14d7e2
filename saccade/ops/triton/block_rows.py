"""Block lists as kernels of other projects take them: rows of equal room with a count each, and the diagonal block, the
one that needs a mask, by itself. In one launch; the host learns no count."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.layout import flat
from saccade.selection import Blocks

WIDTH = 256  # entries that a program copies at once


class BlockRows(NamedTuple):
    """All int32: ``counts`` [heads, q_blocks] of the blocks left of the diagonal, whose ids are ``rows`` [heads,
    q_blocks, k_blocks], what follows them means nothing; ``diagonal_counts`` [heads, q_blocks] 1 where the diagonal
    block is read, whose id is ``diagonals`` [heads, q_blocks, 1]."""

    counts: Tensor
    rows: Tensor
    diagonal_counts: Tensor
    diagonals: Tensor


def block_rows(blocks: Blocks) -> BlockRows:
    """The lists of ``blocks``, sorted as they are, for every query head."""
    heads, q_blocks = blocks.shape.heads, blocks.q_blocks
    offsets, indices = flat(blocks.offsets, torch.int64), flat(blocks.indices, torch.int32)
    made = [
        torch.empty(heads, q_blocks, *more, dtype=torch.int32, device=offsets.device)
        for more in ((), (blocks.first_q_block + q_blocks,), (), (1,))
    ]
    _split[(q_blocks, heads)](
        offsets,
        indices,
        *made,
        blocks.first_q_block,
        q_blocks,
        made[1].shape[2],
        PER_UNIT=heads // blocks.units,
        WIDTH=WIDTH,
        num_warps=4,
    )
    return BlockRows(*made)


@triton.jit(do_not_specialize=["first", "q_blocks", "room"])
def _split(
    offsets, indices, counts, rows, diagonal_counts, diagonals, first, q_blocks, room,
    PER_UNIT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    line = (head // PER_UNIT) * q_blocks + block
    listed = tl.load(offsets + line)
    count = (tl.load(offsets + line + 1) - listed).to(tl.int32)
    last = tl.load(indices + listed + tl.maximum(count - 1, 0), mask=count > 0, other=-1)
    own = (last == first + block).to(tl.int32)  # lists are sorted: only the last can be
    line = head * q_blocks + block
    tl.store(counts + line, count - own)
    tl.store(diagonal_counts + line, own)
    tl.store(diagonals + line, first + block)
    rows += line.to(tl.int64) * room
    for start in range(0, count - own, WIDTH):
        at = start + tl.arange(0, WIDTH)
        tl.store(rows + at, tl.load(indices + listed + at, mask=at < count - own, other=0), mask=at < count - own)
