"""From the weights of some rows to the key blocks that query blocks read: the step that choosing by sampled rows and by
antidiagonals have in common. Weights lie key block by key block, so that a kernel that makes them writes those of
neighbouring rows together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.common import also

MOST_BYTES = 1 << 30  # of weights kept of heads at once
NO_BAR = 2.0  # a share that no block has


def room(q: Tensor, blocks: tuple[int, int], rows: int, wants_shares: bool) -> tuple[Tensor, Tensor, Tensor]:
    """For what is taken, int8 [heads, q_blocks, k_blocks]; for shares, fp32 like it or of one element; and for weights
    of as many heads as go together within MOST_BYTES, fp32 [heads together, k_blocks, rows]."""
    heads = len(q)
    taken = torch.empty(heads, *blocks, dtype=torch.int8, device=q.device)
    found = torch.empty(taken.shape if wants_shares else (1,), dtype=torch.float32, device=q.device)
    together = max(1, min(heads, MOST_BYTES // (4 * rows * blocks[1])))
    return taken, found, torch.empty(together, blocks[1], rows, dtype=torch.float32, device=q.device)


@triton.jit(
    do_not_specialize=["head_from", "first", "rows", "own", "q_blocks", "k_blocks", "threshold", "lagging", "bar"]
)
def reach(
    weights, taken, found, head_from, first, rows, own, q_blocks, k_blocks, threshold, lagging, bar,
    EACH: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """One query block: its rows, each brought to a sum of 1, added; and the blocks that it reads, those with a share of
    ``bar`` among them. ``weights``: base-2 logarithms, [heads, k_blocks, rows], of ``EACH`` rows a query block, the
    first of which is row ``first`` of the sequence's."""
    diagonal = own + tl.program_id(0)
    block = tl.arange(0, WIDTH)
    causal = (block <= diagonal) & (block < k_blocks)
    total = tl.zeros([WIDTH], tl.float32)
    for within in tl.range(0, EACH):
        row = diagonal * EACH + within - first
        here = (row >= 0) & (row < rows)
        line = weights + tl.program_id(1).to(tl.int64) * k_blocks * rows + tl.where(here, row, 0)
        log = tl.load(line + block.to(tl.int64) * rows, mask=also(causal, here), other=float("-inf"))
        high = tl.max(log, 0)
        weight = tl.exp2(log - tl.where(high == float("-inf"), 0.0, high))
        total += weight / tl.maximum(tl.sum(weight, 0), 1e-37)  # a row may know no tile
    share = total / tl.maximum(tl.sum(total, 0), 1e-37)
    line = ((head_from + tl.program_id(1)).to(tl.int64) * q_blocks + tl.program_id(0)) * k_blocks
    if SHARES:
        tl.store(found + line + block, share, mask=block < k_blocks)
    always = causal & ((block == 0) | (block == diagonal))
    lags = diagonal < lagging  # then block 0 is ranked like the others
    ahead = always & also(block == diagonal, lags) | also(always, diagonal >= lagging)  # what comes before all others
    rest = causal & (ahead == 0)
    have = tl.sum(tl.where(ahead, share, 0.0), 0)
    # The greatest bits whose shares, with those above, reach the threshold: bits of floats from 0 on order as they do.
    bits = tl.where(rest, share.to(tl.int32, bitcast=True), -1)
    least = q_blocks * 0
    for place in tl.range(0, 31):
        higher = least | (1 << (30 - place))
        least = tl.where(have + tl.sum(tl.where(bits >= higher, share, 0.0), 0) >= threshold, higher, least)
    level = bits == least
    value = tl.max(tl.where(level, share, 0.0), 0)
    before = have + tl.sum(tl.where(bits > least, share, 0.0), 0)
    before += (tl.cumsum(level.to(tl.int32), 0) - 1).to(tl.float32) * value
    wanted = also(rest & ((bits > least) | (level & (before < threshold))), have < threshold)
    left = tl.where(rest & (wanted == 0), bits, -1)
    most = tl.max(left, 0)
    one_more = tl.min(tl.where((left == most) & rest, block, WIDTH), 0)  # the sum lags a block behind
    wanted = wanted | also(rest & (block == one_more), lags) | (rest & (share >= bar))
    tl.store(taken + line + block, (wanted | always).to(tl.int8), mask=block < k_blocks)
