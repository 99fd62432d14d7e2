"""XAttention's choice on the device: key blocks by strided antidiagonal sums, up to a share of each query block.

Keys are read once: a kernel takes the products of whole tiles of ``stride`` x ``stride`` pairs, which are as many
shorter products of strided rows, and keeps of every row of tiles and key block the logarithm of what its tiles weigh. A
second one, a program for each query block, brings these rows to a sum of 1, adds them, and finds which blocks reach the
threshold. Nothing goes to the host, and sums are added in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.layout import rows as in_rows
from saccade.ops.triton.choose import compact
from saccade.ops.triton.common import LOG2E, also, cap_logits, pad, pool_rows, precision
from saccade.selection import Blocks, Shape

MOST_BYTES = 1 << 30  # of weights kept of heads at once
NO_BAR = 2.0  # a share that no block has


def choose(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    stride: int,
    block_size: int,
    threshold: float,
    lagging: int,
    scale: float,
    softcap: float | None = None,
) -> Blocks:
    """The lists of ``methods.xattention`` for ``q`` [heads, q_len, head_dim]: of each query block the first and the
    diagonal key block, then the heaviest others (ties to the lower one) while what is there is short of ``threshold``;
    ``lagging``: as ``xattention._reach`` says. Sums are float32."""
    lagging = lagging if threshold > 0 else 0  # nothing lacks a share of 0
    taken, _ = _run(q, kv, shape, stride, block_size, threshold, lagging, scale, softcap, wants_shares=False)
    return compact(shape, block_size, taken)


def shares(
    q: Tensor, kv: KVView, shape: Shape, stride: int, block_size: int, scale: float, softcap: float | None = None
) -> Tensor:
    """``ops.scores.antidiagonal_shares``: fp32 [heads, q_blocks, k_blocks]."""
    return _run(q, kv, shape, stride, block_size, 0.0, 0, scale, softcap, wants_shares=True)[1]


def _run(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    stride: int,
    block_size: int,
    threshold: float,
    lagging: int,
    scale: float,
    softcap: float | None,
    wants_shares: bool,
) -> tuple[Tensor, Tensor]:
    heads, q_len, head_dim = q.shape
    given, paged = in_rows(q), kv.paged()
    each = block_size // stride  # tiles of a block
    first, last = shape.q_start // stride, (shape.q_start + q_len - 1) // stride
    own, tiles = first // each, last - first + 1
    q_blocks, k_blocks = last // each - own + 1, -(-shape.k_len // block_size)
    taken, found, weights = room(q, (q_blocks, k_blocks), tiles, wants_shares)
    together = len(weights)
    wide = q.element_size() == 2 and head_dim <= 128
    rows, keys = (128, 128) if wide else (32, max(32, each))
    for head in range(0, heads, together):
        count = min(together, heads - head)
        _weigh[(-(-k_blocks * each // keys), -(-tiles // rows), count)](
            given, paged.k, paged.block_table, weights, head, given.stride(0), given.stride(1), paged.head_stride,
            shape.q_start, q_len, shape.k_len, first, tiles, k_blocks, scale * LOG2E, softcap or 0.0,
            GROUP=heads // kv.kv_heads, KV_HEADS=kv.kv_heads, D=head_dim, D_PAD=pad(head_dim), PAGE=kv.block_size,
            STRIDE=stride, EACH=each, ROWS=rows, KEYS=keys, CAPPED=softcap is not None, PRECISION=precision(q.dtype),
            num_warps=8 if wide else 4, num_stages=3 if wide else 2,
        )  # fmt: skip
        reach[(q_blocks, count)](
            weights, taken, found, head, first, tiles, own, q_blocks, k_blocks, threshold, lagging, NO_BAR,
            EACH=each, WIDTH=pad(k_blocks), SHARES=wants_shares, num_warps=4 if k_blocks <= 2048 else 8,
        )  # fmt: skip
    return taken, found


def room(q: Tensor, blocks: tuple[int, int], rows: int, wants_shares: bool) -> tuple[Tensor, Tensor, Tensor]:
    """For what is taken, int8 [heads, q_blocks, k_blocks]; for shares, fp32 like it or of one element; and for weights
    of as many heads as go together within MOST_BYTES, fp32 [heads together, rows, k_blocks]."""
    heads = len(q)
    taken = torch.empty(heads, *blocks, dtype=torch.int8, device=q.device)
    found = torch.empty(taken.shape if wants_shares else (1,), dtype=torch.float32, device=q.device)
    together = max(1, min(heads, MOST_BYTES // (4 * rows * blocks[1])))
    return taken, found, torch.empty(together, rows, blocks[1], dtype=torch.float32, device=q.device)


@triton.jit(
    do_not_specialize=["head_from", "table_head", "q_start", "q_len", "k_len", "first", "tiles", "k_blocks"],
    do_not_specialize_on_alignment=["table"],
)
def _weigh(
    q_ptr, k_pool, table, weights, head_from, q_head, q_row, table_head, q_start, q_len, k_len, first, tiles, k_blocks,
    scale_log2, softcap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    STRIDE: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Base-2 logarithm of what the tiles of each key block weigh in ``ROWS`` rows of tiles: a tile's logit is the mean
    of its antidiagonal, over the pairs that exist."""
    own = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # rows of tiles from the call's first on
    tile = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    if tl.program_id(0) * KEYS <= first + tl.minimum(tl.program_id(1) * ROWS + ROWS, tiles) - 1:
        head = head_from + tl.program_id(2)
        kv_head = head // GROUP
        table += kv_head.to(tl.int64) * table_head
        channel = tl.arange(0, D_PAD)
        begin = (first + own) * STRIDE - q_start  # of the call's rows
        summed = tl.zeros([ROWS, KEYS], tl.float32)
        for step in tl.range(0, STRIDE):
            row = begin + STRIDE - 1 - step
            inside = (row >= 0) & (row < q_len)
            q = tl.load(
                q_ptr + head.to(tl.int64) * q_head + row.to(tl.int64)[:, None] * q_row + channel[None, :],
                mask=inside[:, None] & (channel[None, :] < D),
                other=0.0,
            )
            key = tile * STRIDE + step
            there = key < k_len
            at = pool_rows(table, key, there, kv_head, KV_HEADS, PAGE)[:, None] * D + channel[None, :]
            k = tl.load(k_pool + at, mask=there[:, None] & (channel[None, :] < D), other=0.0)
            summed = tl.dot(q, tl.trans(k), summed, input_precision=PRECISION)
        # Steps at which the row exists are those from STRIDE - its rows' end on; keys exist from step 0 on.
        from_step = tl.maximum(begin + STRIDE - q_len, 0)
        to_step = tl.minimum(begin + STRIDE, STRIDE)
        pairs = tl.minimum(to_step[:, None], (k_len - tile * STRIDE)[None, :]) - from_step[:, None]
        logits = cap_logits(summed / tl.maximum(pairs, 1).to(tl.float32), scale_log2, softcap, CAPPED)
        known = (pairs > 0) & (tile[None, :] <= (first + own)[:, None]) & (own < tiles)[:, None]
        logits = tl.reshape(tl.where(known, logits, float("-inf")), (ROWS, KEYS // EACH, EACH))
        high = tl.max(logits, 2)
        anchor = tl.where(high == float("-inf"), 0.0, high)
        total = tl.sum(tl.exp2(logits - anchor[:, :, None]), 2)
        found = tl.where(high == float("-inf"), float("-inf"), anchor + tl.log2(tl.maximum(total, 1e-37)))
        block = tl.program_id(0) * (KEYS // EACH) + tl.arange(0, KEYS // EACH)
        line = (tl.program_id(2).to(tl.int64) * tiles + own)[:, None] * k_blocks
        tl.store(weights + line + block[None, :], found, mask=(own < tiles)[:, None] & (block < k_blocks)[None, :])


@triton.jit(
    do_not_specialize=["head_from", "first", "tiles", "own", "q_blocks", "k_blocks", "threshold", "lagging", "bar"]
)
def reach(
    weights, taken, found, head_from, first, tiles, own, q_blocks, k_blocks, threshold, lagging, bar,
    EACH: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """One query block: its rows of tiles, each brought to a sum of 1, added; and the blocks that it reads, those with a
    share of ``bar`` among them."""
    diagonal = own + tl.program_id(0)
    block = tl.arange(0, WIDTH)
    causal = (block <= diagonal) & (block < k_blocks)
    total = tl.zeros([WIDTH], tl.float32)
    for within in tl.range(0, EACH):
        row = diagonal * EACH + within - first
        here = (row >= 0) & (row < tiles)
        line = weights + (tl.program_id(1).to(tl.int64) * tiles + tl.where(here, row, 0)) * k_blocks
        log = tl.load(line + block, mask=also(causal, here), other=float("-inf"))
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
