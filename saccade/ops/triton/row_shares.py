"""Blocks by the exact attention of sampled rows, on the device: rows of many query blocks share a tile, a program takes
a stretch of key blocks, and :func:`saccade.ops.triton.antidiagonals.reach` brings rows to a sum of 1 and chooses.

Each query block has as many slots as it may have rows; slots without a row weigh nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.layout import rows as in_rows
from saccade.ops.triton.antidiagonals import reach, room
from saccade.ops.triton.choose import compact
from saccade.ops.triton.common import LOG2E, cap_logits, pad, pool_rows, precision
from saccade.selection import Blocks, Shape

SPAN = 16  # key blocks of a program: what a row keeps of them is a cache line's half


def choose(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    rows: int,
    block_size: int,
    gamma: float,
    threshold: float,
    scale: float,
    softcap: float | None = None,
) -> Blocks:
    """The lists of ``methods.sampled_rows`` for ``q`` [heads, q_len, head_dim]: of each query block the first and the
    diagonal key block, the heaviest others (ties to the lower one) while what is there is short of ``gamma``, and all
    of at least ``threshold``. Sums are float32."""
    taken, _ = _run(q, kv, shape, rows, block_size, gamma, threshold, scale, softcap, wants_shares=False)
    return compact(shape, block_size, taken)


def shares(
    q: Tensor, kv: KVView, shape: Shape, rows: int, block_size: int, scale: float, softcap: float | None = None
) -> Tensor:
    """``ops.row_shares.row_shares``: fp32 [heads, q_blocks, k_blocks]."""
    return _run(q, kv, shape, rows, block_size, 0.0, 2.0, scale, softcap, wants_shares=True)[1]


def _run(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    rows: int,
    block_size: int,
    gamma: float,
    threshold: float,
    scale: float,
    softcap: float | None,
    wants_shares: bool,
) -> tuple[Tensor, Tensor]:
    heads, q_len, head_dim = q.shape
    given, paged = in_rows(q), kv.paged()
    own = shape.q_start // block_size
    q_blocks = (shape.q_start + q_len - 1) // block_size - own + 1
    slots, k_blocks = q_blocks * rows, -(-shape.k_len // block_size)
    taken, found, weights = room(q, (q_blocks, k_blocks), slots, wants_shares)
    together = len(weights)
    wide = q.element_size() == 2 and head_dim <= 128
    tile = 128 if wide else 32
    for head in range(0, heads, together):
        count = min(together, heads - head)
        _weigh[(-(-k_blocks // SPAN), -(-slots // tile), count)](
            given, paged.k, paged.block_table, weights, head, given.stride(0), given.stride(1), paged.head_stride,
            shape.q_start, q_len, shape.k_len, own, slots, k_blocks, scale * LOG2E, softcap or 0.0,
            GROUP=heads // kv.kv_heads, KV_HEADS=kv.kv_heads, D=head_dim, D_PAD=pad(head_dim), PAGE=kv.block_size,
            EACH=rows, SIZE=block_size, ROWS=tile, SPAN=SPAN, CAPPED=softcap is not None, PRECISION=precision(q.dtype),
            num_warps=8 if wide else 4, num_stages=3 if wide else 2,
        )  # fmt: skip
        reach[(q_blocks, count)](
            weights, taken, found, head, own * rows, slots, own, q_blocks, k_blocks, gamma, 0, threshold,
            EACH=rows, WIDTH=pad(k_blocks), SHARES=wants_shares, num_warps=4 if k_blocks <= 2048 else 8,
        )  # fmt: skip
    return taken, found


@triton.jit(
    do_not_specialize=["head_from", "table_head", "q_start", "q_len", "k_len", "own", "slots", "k_blocks"],
    do_not_specialize_on_alignment=["table"],
)
def _weigh(
    q_ptr, k_pool, table, weights, head_from, q_head, q_row, table_head, q_start, q_len, k_len, own, slots, k_blocks,
    scale_log2, softcap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    EACH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Base-2 logarithm of what ``SPAN`` key blocks weigh in ``ROWS`` sampled rows."""
    slot = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # The rows of `ops.row_shares.sampled_rows`.
    start = (own + slot // EACH) * SIZE - q_start
    low, high = tl.maximum(start, 0), tl.minimum(start + SIZE, q_len)
    count = tl.minimum(high - low, EACH)
    turn = slot % EACH
    given = (slot < slots) & (turn < count)
    row = tl.where(given, low + (2 * turn + 1) * (high - low) // (2 * tl.maximum(count, 1)), 0)
    position = tl.where(given, q_start + row, -1)
    first = tl.program_id(0) * SPAN
    seen = tl.minimum(tl.max(position, 0) // SIZE + 1, k_blocks)  # key blocks that some row sees
    if first < seen:
        head = head_from + tl.program_id(2)
        kv_head = head // GROUP
        table += kv_head.to(tl.int64) * table_head
        channel = tl.arange(0, D_PAD)
        q = tl.load(
            q_ptr + head.to(tl.int64) * q_head + row.to(tl.int64)[:, None] * q_row + channel[None, :],
            mask=given[:, None] & (channel[None, :] < D),
            other=0.0,
        )
        part = tl.arange(0, SPAN)
        found = tl.full([ROWS, SPAN], float("-inf"), tl.float32)
        for at in tl.range(0, tl.minimum(SPAN, seen - first)):
            key = (first + at) * SIZE + tl.arange(0, SIZE)
            there = key < k_len
            place = pool_rows(table, key, there, kv_head, KV_HEADS, PAGE)[:, None] * D + channel[None, :]
            k = tl.load(k_pool + place, mask=there[:, None] & (channel[None, :] < D), other=0.0)
            logits = cap_logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale_log2, softcap, CAPPED)
            logits = tl.where(key[None, :] <= position[:, None], logits, float("-inf"))
            most = tl.max(logits, 1)
            anchor = tl.where(most == float("-inf"), 0.0, most)
            total = tl.sum(tl.exp2(logits - anchor[:, None]), 1)
            weight = tl.where(most == float("-inf"), most, anchor + tl.log2(tl.maximum(total, 1e-37)))
            found = tl.where(part[None, :] == at, weight[:, None], found)
        line = (tl.program_id(2).to(tl.int64) * slots + slot)[:, None] * k_blocks
        block = first + part
        tl.store(weights + line + block[None, :], found, mask=(slot < slots)[:, None] & (block < k_blocks)[None, :])
