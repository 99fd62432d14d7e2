"""How many pairs of query rows and keys lists of blocks hold, counted in one launch: for every layer and chunk of a
prefill, a GPU would else be asked for some thirty."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.layout import flat
from saccade.selection import Blocks

SPAN = 256  # query blocks at a time


def pairs(blocks: Blocks) -> Tensor:
    """``blocks.pairs()``: int64 [heads], on the lists' device."""
    shape, units = blocks.shape, blocks.units
    found = torch.empty(shape.heads, dtype=torch.int64, device=blocks.offsets.device)
    offsets, indices = flat(blocks.offsets, torch.int64), flat(blocks.indices, torch.int32)
    _pairs[(shape.heads,)](
        offsets, indices, found, blocks.first_q_block, blocks.q_blocks, shape.q_start, shape.q_start + shape.q_len,
        shape.heads // units, SIZE=blocks.block_size, SPAN=SPAN, num_warps=4,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["first", "q_blocks", "q_start", "stop", "each"])
def _pairs(
    offsets, indices, found, first, q_blocks, q_start, stop, each, SIZE: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """One head; ``each`` heads share lists."""
    head = tl.program_id(0)
    offsets += (head // each).to(tl.int64) * q_blocks
    total = tl.zeros([SPAN], tl.int64)
    for start in tl.range(0, q_blocks, SPAN):
        turn = start + tl.arange(0, SPAN)
        inside = turn < q_blocks
        begin = tl.load(offsets + turn, mask=inside, other=0)
        count = tl.load(offsets + turn + 1, mask=inside, other=0) - begin
        last = tl.load(indices + begin + count - 1, mask=inside & (count > 0), other=-1)
        block = first + turn
        low = tl.maximum(block * SIZE, q_start) - block * SIZE  # rows of the block before those of the call
        high = tl.minimum((block + 1) * SIZE, stop) - block * SIZE
        cut = (last == block).to(tl.int64)  # lists are sorted: only the last block can be the diagonal one
        below = ((high - low) * SIZE).to(tl.int64)
        diagonal = (high * (high + 1) - low * (low + 1)) // 2
        total += tl.where(inside, (count - cut) * below + cut * diagonal, 0)
    tl.store(found + head, tl.sum(total, 0))
