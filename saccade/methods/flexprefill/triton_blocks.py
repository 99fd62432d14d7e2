"""FlexPrefill's block lists on the device, from what every line and every pair of blocks weighs: two launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.flexprefill.triton_threshold import row_threshold
from saccade.ops.layout import flat
from saccade.ops.triton.choose import SCANNED, listed, scan_offsets
from saccade.ops.triton.common import also, arrivals, pad
from saccade.selection import Blocks, Shape


def warps_for(k_blocks: int) -> int:
    """A program's time goes to some 40 sums over its row, one after another; with one or two warps it takes longer."""
    return 4 if k_blocks <= 2048 else 8


def choose_blocks(
    shape: Shape,
    block_size: int,
    vertical: Tensor | None,
    groups: Tensor | None,
    pooled: Tensor,
    by_pooled: Tensor,
    threshold: Tensor | None,
    columns: Tensor,
    known: int,
    gamma: float,
    least: int,
    most: int | None,
) -> Blocks:
    """Block lists of every query head and query block, never read back to the host.

    A head reads key block c of query block r if ``vertical[c]`` or ``groups`` at r - c or at r - c - 1 is below
    ``gamma`` (fp32 [heads, k_blocks]: the gamma from which on the line is wanted; a diagonal lies in two groups), or,
    where ``by_pooled`` (bool [heads]), if ``pooled`` (fp32 [heads, q_blocks, k_blocks], of a sum of 1) is at least
    ``threshold`` (fp32 [heads]), without one if it is among the heaviest of its query block that hold ``gamma``. In the
    last ``known`` query blocks the latter goes by ``columns`` (fp32 [heads, k_blocks]), the true weights over the rows
    that were looked at, ``min(block_size, q_len)`` of them.

    Every query block keeps its first and its diagonal block, at least ``least`` blocks and at most ``most``, in the
    order in which a growing gamma would add them (ties to the lower block). Without ``vertical`` and ``groups`` the
    lists of heads that do not go by ``pooled`` are empty.
    """
    heads, q_blocks, k_blocks = pooled.shape
    pooled, columns, by_pooled = flat(pooled, torch.float32), flat(columns, torch.float32), flat(by_pooled, torch.bool)
    bound = pooled if threshold is None else flat(threshold, torch.float32)
    lines = [pooled if part is None else flat(part, torch.float32) for part in (vertical, groups)]
    taken = torch.empty(heads * q_blocks, k_blocks, dtype=torch.int8, device=pooled.device)
    offsets = torch.empty(heads * q_blocks + 1, dtype=torch.int64, device=pooled.device)
    _choose[(q_blocks, heads)](
        *lines, pooled, by_pooled, bound, columns, taken, offsets, arrivals(pooled.device, 1),
        shape.q_start // block_size, q_blocks, k_blocks, q_blocks - known, min(block_size, shape.q_len),
        max(gamma, 1e-9), least, k_blocks if most is None else most,
        PER_ROW=threshold is None, BY_LINE=vertical is not None, WIDTH=pad(k_blocks), SCANNED=SCANNED,
        num_warps=warps_for(k_blocks),
    )  # fmt: skip
    return Blocks(shape, block_size, offsets, listed(taken, offsets))


@triton.jit
def _first_n(rank, n):
    """Whether each entry of ``rank`` (int32 from 0 on) is among the ``n`` least, ties to the lower place."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0x7FFFFFFF, tl.int32)
    for _ in tl.range(0, 31):  # the least bound with n entries at or below it
        middle = low + ((high - low) >> 1)
        enough = tl.sum((rank <= middle).to(tl.int32), 0) >= n
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    below, level = rank < high, rank == high
    spare = n - tl.sum(below.to(tl.int32), 0)
    return below | (level & (tl.cumsum(level.to(tl.int32), 0) <= spare))


@triton.jit(
    do_not_specialize=["first", "q_blocks", "k_blocks", "unknown", "looked_at", "least", "most"],
    do_not_specialize_on_alignment=["vertical", "groups", "threshold"],
)
def _choose(
    vertical, groups, pooled, by_pooled, threshold, columns, taken, offsets, arrived, first, q_blocks, k_blocks,
    unknown, looked_at, gamma, least, most,
    PER_ROW: tl.constexpr, BY_LINE: tl.constexpr, WIDTH: tl.constexpr, SCANNED: tl.constexpr,
):  # fmt: skip
    q_block, head = tl.program_id(0), tl.program_id(1)
    block = tl.arange(0, WIDTH)
    distance = first + q_block - block
    inside = block < k_blocks
    causal = (distance >= 0) & inside
    row = head * q_blocks + q_block
    line, wide = head.to(tl.int64) * k_blocks, row.to(tl.int64) * k_blocks
    aware = tl.load(by_pooled + head) != 0
    if aware:
        if q_block >= unknown:
            share = tl.load(columns + line + block, mask=inside, other=0.0) / looked_at
            bound = row_threshold(share, gamma)
        else:
            share = tl.load(pooled + wide + block, mask=inside, other=0.0)
            if PER_ROW:
                bound = row_threshold(share, gamma)
            else:
                bound = tl.load(threshold + head)
        wanted = share >= bound
        rank = (1 << 30) - share.to(tl.int32, bitcast=True)  # the bits of floats from 0 on order as they do
    elif BY_LINE:
        needed = tl.load(vertical + line + block, mask=inside, other=1.0)
        for back in tl.static_range(2):
            group = tl.maximum(distance - back, 0)
            needed = tl.minimum(needed, tl.load(groups + line + group, mask=causal, other=1.0))
        wanted = needed < gamma
        rank = needed.to(tl.int32, bitcast=True)
    else:
        wanted = block < 0
        rank = block
    forced = causal & ((block == 0) | (distance == 0))
    if not BY_LINE:
        forced = also(forced, aware)
        least = tl.where(aware, least, 0)
    # Forced ones come first, what is not there last.
    rank = tl.where(causal, tl.where(forced, 0, rank + 1), 0x7FFFFFFF)
    chosen = forced | (wanted & causal)
    if tl.sum(chosen.to(tl.int32), 0) > most:
        chosen = forced | (wanted & causal & _first_n(rank, most))
    if tl.sum(chosen.to(tl.int32), 0) < least:
        chosen = chosen | (_first_n(rank, least) & causal)
    tl.store(taken + wide + block, chosen.to(tl.int8), mask=inside)
    scan_offsets(offsets, arrived, row, tl.sum(chosen.to(tl.int32), 0), tl.num_programs(1) * q_blocks, SCANNED)
