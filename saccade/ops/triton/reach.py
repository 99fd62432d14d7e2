"""From the weights of some rows to the key blocks that query blocks read: the steps that choosing by sampled rows and
by antidiagonals have in common. Weights lie key block by key block, so that a kernel that makes them writes those of
neighbouring rows together. One kernel adds the rows of a query block up, many query blocks at a time, so that it reads
weights as they lie, and writes the sums of a query block together; few warps then find where they reach the threshold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.choose import listed
from saccade.ops.triton.common import also, pad, processors
from saccade.selection import Blocks, Shape

MOST_BYTES = 1 << 30  # of weights kept of heads at once
NO_BAR = 2.0  # a share that no block has
TILE = 2048  # weights that a program adds up at a time


class Reach:
    """What rows' weights become, and room for it.

    ``weights`` fp32 [heads together, k_blocks, rows]: base-2 logarithms, of as many heads as go together within
    MOST_BYTES; :meth:`add` takes them. ``each`` rows are a query block's; of the first query block, block ``own`` of
    the grid, the first ``ahead`` are not there.
    """

    def __init__(
        self, q: Tensor, blocks: tuple[int, int], own: int, rows: int, each: int, ahead: int, wants_shares: bool
    ) -> None:
        heads, device = len(q), q.device
        self.blocks, self.own, self.rows, self.each, self.ahead = blocks, own, rows, each, ahead
        together = max(1, min(heads, MOST_BYTES // (4 * rows * blocks[1])))
        self.weights = torch.empty(together, blocks[1], rows, dtype=torch.float32, device=device)
        self.sums = torch.empty(together, *blocks, dtype=torch.float32, device=device)
        self.taken = torch.empty(heads, *blocks, dtype=torch.int8, device=device)
        self.offsets = torch.empty(heads * blocks[0] + 1, dtype=torch.int64, device=device)
        self.wants_shares = wants_shares
        self.shares = torch.empty(self.taken.shape if wants_shares else (1,), dtype=torch.float32, device=device)

    def add(self, head: int, count: int, threshold: float, lagging: int, bar: float, window: int = 1) -> None:
        """Heads ``head .. head + count - 1``, whose weights are there; heads come one after the other. ``window``: the
        last blocks that are read in any case, the diagonal one among them."""
        q_blocks, k_blocks = self.blocks
        each = pad(self.each, 1)
        together = min(pad(q_blocks, 1), max(1, 128 // each))  # query blocks of a program
        while (
            together > 1 and together * each > 8 and -(-q_blocks // together) * count < 2 * processors(self.sums.device)
        ):
            together //= 2
        _add_rows[(-(-q_blocks // together), count)](
            self.weights, self.sums, self.rows, self.ahead, self.own, q_blocks, k_blocks, EACH=self.each,
            PADDED=each, TOGETHER=together, KEYS=min(TILE // (together * each), pad(k_blocks)), num_warps=4,
        )  # fmt: skip
        width = pad(k_blocks)
        _reach[(q_blocks, count)](
            self.sums, self.taken, self.shares, self.offsets, head, self.own, q_blocks, k_blocks, threshold, lagging,
            bar, window, WIDTH=width, SHARES=self.wants_shares, num_warps=min(8, max(1, width // 1024)),
        )  # fmt: skip

    def lists(self, shape: Shape, block_size: int) -> Blocks:
        """Of all heads, as :func:`choose.compact` makes them."""
        torch.cumsum(self.offsets[1:], 0, out=self.offsets[1:])  # of counts
        return Blocks(shape, block_size, self.offsets, listed(self.taken.flatten(0, 1), self.offsets))


@triton.jit(do_not_specialize=["ahead", "own", "q_blocks", "k_blocks"])
def _add_rows(
    weights, sums, rows, ahead, own, q_blocks, k_blocks,
    EACH: tl.constexpr, PADDED: tl.constexpr, TOGETHER: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Of ``TOGETHER`` query blocks: what each key block weighs in their rows, each brought to a sum of 1."""
    place = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    within = tl.arange(0, PADDED)
    row = (place * EACH - ahead)[:, None] + within[None, :]
    here = (row >= 0) & (row < rows) & (place < q_blocks)[:, None] & (within < EACH)[None, :]
    lines = weights + tl.program_id(1).to(tl.int64) * k_blocks * rows + row[None, :, :]
    end = tl.minimum(own + tl.minimum((tl.program_id(0) + 1) * TOGETHER, q_blocks), k_blocks)
    high = tl.full([KEYS, TOGETHER, PADDED], float("-inf"), tl.float32)
    weight = tl.zeros([KEYS, TOGETHER, PADDED], tl.float32)
    for start in tl.range(0, end, KEYS):
        block = start + tl.arange(0, KEYS)
        seen = (block[:, None] <= (own + place)[None, :]) & (block < end)[:, None]
        log = tl.load(
            lines + block.to(tl.int64)[:, None, None] * rows, mask=seen[:, :, None] & here[None, :, :],
            other=float("-inf"),
        )  # fmt: skip
        higher = tl.maximum(high, log)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weight = weight * tl.exp2(high - anchor) + tl.exp2(log - anchor)
        high = higher
    most = tl.max(high, 0)
    most = tl.where(most == float("-inf"), 0.0, most)
    total = tl.sum(weight * tl.exp2(high - most[None, :, :]), 0)
    factor = 1.0 / tl.maximum(total, 1e-37)  # a row may know no tile
    line = sums + (tl.program_id(1).to(tl.int64) * q_blocks + place) * k_blocks
    for start in tl.range(0, end, KEYS):
        block = start + tl.arange(0, KEYS)
        seen = (block[:, None] <= (own + place)[None, :]) & (block < end)[:, None]
        log = tl.load(
            lines + block.to(tl.int64)[:, None, None] * rows, mask=seen[:, :, None] & here[None, :, :],
            other=float("-inf"),
        )  # fmt: skip
        summed = tl.sum(tl.exp2(log - most[None, :, :]) * factor[None, :, :], 2)
        tl.store(line[None, :] + block[:, None], summed, mask=seen & (place < q_blocks)[None, :])


@triton.jit(do_not_specialize=["head_from", "own", "q_blocks", "k_blocks", "threshold", "lagging", "bar", "window"])
def _reach(
    sums, taken, found, offsets, head_from, own, q_blocks, k_blocks, threshold, lagging, bar, window,
    WIDTH: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """One query block: ``sums`` brought to a sum of 1, the blocks that it reads, those with a share of ``bar`` among
    them, and in ``offsets`` how many they are."""
    diagonal = own + tl.program_id(0)
    block = tl.arange(0, WIDTH)
    causal = (block <= diagonal) & (block < k_blocks)
    line = (tl.program_id(1).to(tl.int64) * q_blocks + tl.program_id(0)) * k_blocks
    total = tl.load(sums + line + block, mask=causal, other=0.0)
    share = total / tl.maximum(tl.sum(total, 0), 1e-37)
    line += head_from.to(tl.int64) * q_blocks * k_blocks
    if SHARES:
        tl.store(found + line + block, share, mask=block < k_blocks)
    always = causal & ((block == 0) | (block > diagonal - window))
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
    marks = (wanted | always).to(tl.int8)
    tl.store(taken + line + block, marks, mask=block < k_blocks)
    row = (head_from + tl.program_id(1)) * q_blocks + tl.program_id(0)
    if row == 0:
        tl.store(offsets, tl.cast(0, tl.int64))
    tl.store(offsets + 1 + row, tl.sum(marks.to(tl.int32), 0).to(tl.int64))
