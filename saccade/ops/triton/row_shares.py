"""Blocks by the exact attention of sampled rows, on the device: rows of many query blocks share a tile, a program takes
a stretch of key blocks, and :class:`saccade.ops.triton.reach.Reach` brings rows to a sum of 1 and chooses.

Each query block has as many slots as it may have rows; slots without a row weigh nothing. A score is computed once:
what a block weighs in a row is kept as a logarithm, so that no pass before has to find the row's maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.layout import flat
from saccade.ops.layout import rows as in_rows
from saccade.ops.triton.common import LOG2E, cap_logits, is_hopper, pad, pool_rows, precision
from saccade.ops.triton.pages import gather, tiles_of
from saccade.ops.triton.reach import MOST_BYTES, Reach
from saccade.ops.triton.readers import load_keys
from saccade.selection import Blocks, Shape

FEW = 65536  # rows up to which half as long stretches of key blocks even out what programs have to do
LONG = 4096  # rows from which on a copy of the keys pays


@dataclass(frozen=True)
class Config:
    """Sampled rows of a tile, key blocks of a program, warps and pipeline depth; ``copy``: lay the keys out in one
    piece first and fetch tiles by the copy engine."""

    rows: int = 128
    span: int = 64
    warps: int = 8
    stages: int = 2
    copy: bool = False


def config_for(q: Tensor) -> Config:
    copy = is_hopper(q.device) and q.shape[1] >= LONG
    if q.element_size() > 2 or (q.shape[-1] > 128 and not copy):
        return Config(rows=32, warps=4)
    return Config(span=32 if q.shape[1] <= FEW else 64, stages=3 if q.shape[-1] <= 64 else 2, copy=copy)


def choose(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    rows: int,
    block_size: int,
    gamma: float,
    threshold: float,
    window: int,
    scale: float,
    softcap: float | None = None,
) -> Blocks:
    """The lists of ``methods.sampled_rows`` for ``q`` [heads, q_len, head_dim]: of each query block the first key block
    and the last ``window``, the diagonal one among them, the heaviest others (ties to the lower one) while what is
    there is short of ``gamma``, and all of at least ``threshold``. Sums are float32."""
    found = _run(q, kv, shape, rows, block_size, gamma, threshold, window, scale, softcap, wants_shares=False)
    return found.lists(shape, block_size)


def shares(
    q: Tensor, kv: KVView, shape: Shape, rows: int, block_size: int, scale: float, softcap: float | None = None
) -> Tensor:
    """``ops.row_shares.row_shares``: fp32 [heads, q_blocks, k_blocks]."""
    return _run(q, kv, shape, rows, block_size, 0.0, 2.0, 1, scale, softcap, wants_shares=True).shares


def sums(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    rows: Tensor,
    starts: Tensor,
    blocks: Tensor,
    block_size: int,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """``ops.row_shares.row_sums``: fp32 [heads, m, k_blocks], NaN for a query block with a row of which a logit is no
    number. ``rows`` int64 [r], rising; those of query block ``blocks[j]`` (int64 [m], numbers on the grid) are
    ``rows[starts[j] : starts[j + 1]]`` (int64 [m + 1]); all on the device."""
    rows, starts, blocks = (flat(part, torch.int64) for part in (rows, starts, blocks))
    heads, q_len, head_dim = q.shape
    config = config_for(q)
    if scale <= 0:
        q, scale = q * scale, 1.0
    given, paged = in_rows(q), kv.paged()
    slots, m, k_blocks = rows.numel(), blocks.numel(), -(-shape.k_len // block_size)
    found = torch.empty(heads, m, k_blocks, dtype=torch.float32, device=q.device)
    together = max(1, min(heads, MOST_BYTES // (4 * slots * k_blocks)))
    weights = torch.empty(together, k_blocks, slots, dtype=torch.float32, device=q.device)
    keys = tiles_of(gather(paged.k, paged.block_table, 0, shape.k_len, q.dtype), block_size) if config.copy else paged.k
    for head in range(0, heads, together):
        count = min(together, heads - head)
        _weigh[(-(-slots // config.rows), -(-k_blocks // config.span), count)](
            given, keys, paged.block_table, rows, weights, head, given.stride(0), given.stride(1), paged.head_stride,
            shape.q_start, q_len, shape.k_len, 0, slots, k_blocks, scale * LOG2E, softcap or 0.0,
            GROUP=heads // kv.kv_heads, KV_HEADS=kv.kv_heads, D=head_dim, D_PAD=pad(head_dim), PAGE=kv.block_size,
            EACH=1, SIZE=block_size, ROWS=config.rows, SPAN=config.span, COPIED=config.copy, LISTED=True,
            CAPPED=softcap is not None, PRECISION=precision(q.dtype), STAGES=config.stages, num_warps=config.warps,
        )  # fmt: skip
        _add[(m, count)](
            weights, starts, blocks, found, head, slots, k_blocks,
            WIDTH=pad(k_blocks), num_warps=4 if k_blocks <= 2048 else 8,
        )  # fmt: skip
    return found


def _run(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    rows: int,
    block_size: int,
    gamma: float,
    threshold: float,
    window: int,
    scale: float,
    softcap: float | None,
    wants_shares: bool,
    config: Config | None = None,
) -> Reach:
    heads, q_len, head_dim = q.shape
    config = config or config_for(q)
    if scale <= 0:
        q, scale = q * scale, 1.0
    given, paged = in_rows(q), kv.paged()
    # First of all, for the device copies while the host sees to the rest.
    keys = tiles_of(gather(paged.k, paged.block_table, 0, shape.k_len, q.dtype), block_size) if config.copy else paged.k
    own = shape.q_start // block_size
    q_blocks = (shape.q_start + q_len - 1) // block_size - own + 1
    slots, k_blocks = q_blocks * rows, -(-shape.k_len // block_size)
    found = Reach(q, (q_blocks, k_blocks), own, slots, rows, 0, wants_shares)
    weights, together = found.weights, len(found.weights)
    for head in range(0, heads, together):
        count = min(together, heads - head)
        _weigh[(-(-slots // config.rows), -(-k_blocks // config.span), count)](
            given, keys, paged.block_table, weights, weights, head, given.stride(0), given.stride(1),
            paged.head_stride, shape.q_start, q_len, shape.k_len, own, slots, k_blocks, scale * LOG2E, softcap or 0.0,
            GROUP=heads // kv.kv_heads, KV_HEADS=kv.kv_heads, D=head_dim, D_PAD=pad(head_dim), PAGE=kv.block_size,
            EACH=rows, SIZE=block_size, ROWS=config.rows, SPAN=config.span, COPIED=config.copy, LISTED=False,
            CAPPED=softcap is not None, PRECISION=precision(q.dtype), STAGES=config.stages, num_warps=config.warps,
        )  # fmt: skip
        found.add(head, count, gamma, 0, threshold, window)
    return found


@triton.jit
def _block_logs(
    q, start, position, k_len, k_pool, table, kv_head, scale_log2, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
    COPIED: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr, STRICT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Base-2 logarithm of what the block of keys from ``start`` on weighs in rows ``q`` at ``position``. ``STRICT``:
    NaN where a logit is, which a maximum passes over."""
    key = start + tl.arange(0, SIZE)
    if COPIED:
        k = k_pool.load([(kv_head * k_len + start).to(tl.int32), 0])
    else:
        channel = tl.arange(0, D_PAD)
        there = (key < k_len) if MASKED else (key >= 0)
        place = pool_rows(table, key, there, kv_head, KV_HEADS, PAGE)[:, None]
        k = load_keys(k_pool, place, channel[None, :], there[:, None] if MASKED else None, D, q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAPPED:
        scores, scale_log2 = cap_logits(scores, scale_log2, softcap, True), 1.0
    if MASKED:
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    most = tl.max(scores, 1) * scale_log2  # the scale is above 0: it may come after the maximum
    anchor = tl.where(most == float("-inf"), 0.0, most) if MASKED or STRICT else most
    total = tl.sum(tl.exp2(scores * scale_log2 - anchor[:, None]), 1)  # the greatest counts 1
    total = tl.where(total < 1.0, 1.0, total) if STRICT else tl.maximum(total, 1.0)
    return most + tl.log2(total)


@triton.jit(
    do_not_specialize=["head_from", "table_head", "q_start", "q_len", "k_len", "own", "slots", "k_blocks"],
    do_not_specialize_on_alignment=["table", "listed"],
)
def _weigh(
    q_ptr, k_pool, table, listed, weights, head_from, q_head, q_row, table_head, q_start, q_len, k_len, own, slots,
    k_blocks, scale_log2, softcap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    EACH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr, COPIED: tl.constexpr,
    LISTED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Base-2 logarithms of what ``SPAN`` key blocks weigh in ``ROWS`` sampled rows: those of
    ``ops.row_shares.sampled_rows``, or ``listed`` ones (int64 [slots], rising). Neighbouring programs read the same
    keys."""
    begin = tl.program_id(0) * ROWS
    slot = begin + tl.arange(0, ROWS)
    end = tl.minimum(begin + ROWS, slots) - 1
    if LISTED:
        given = slot < slots
        row = tl.load(listed + slot, mask=given, other=0).to(tl.int32)
        clear = (q_start + tl.load(listed + begin).to(tl.int32)) // SIZE
        seen = (q_start + tl.load(listed + end).to(tl.int32)) // SIZE + 1
    else:
        start = (own + slot // EACH) * SIZE - q_start
        low, high = tl.maximum(start, 0), tl.minimum(start + SIZE, q_len)
        count = tl.minimum(high - low, EACH)
        turn = slot % EACH
        given = (slot < slots) & (turn < count)
        row = tl.where(given, low + (2 * turn + 1) * (high - low) // (2 * tl.maximum(count, 1)), 0)
        clear = own + begin // EACH  # blocks that all rows see whole
        seen = own + end // EACH + 1  # blocks that some row sees
    position = tl.where(given, q_start + row, -1)
    first = tl.program_id(1) * SPAN
    last = tl.minimum(first + SPAN, tl.minimum(seen, k_blocks))
    if first < last:
        head = head_from + tl.program_id(2)
        kv_head = head // GROUP
        table += kv_head.to(tl.int64) * table_head
        channel = tl.arange(0, D_PAD)
        q = tl.load(
            q_ptr + head.to(tl.int64) * q_head + row.to(tl.int64)[:, None] * q_row + channel[None, :],
            mask=given[:, None] & (channel[None, :] < D),
            other=0.0,
        )
        line = weights + tl.program_id(2).to(tl.int64) * k_blocks * slots + slot
        plain = tl.maximum(tl.minimum(clear, last), first)
        for block in tl.range(first, plain, num_stages=STAGES):
            found = _block_logs(
                q, block * SIZE, position, k_len, k_pool, table, kv_head, scale_log2, softcap,
                KV_HEADS, D, D_PAD, PAGE, SIZE, COPIED, CAPPED, False, LISTED, PRECISION,
            )  # fmt: skip
            found = tl.where(given, found, float("-inf"))
            tl.store(line + slots.to(tl.int64) * block, found, mask=slot < slots)
        for block in tl.range(plain, last, num_stages=1):
            found = _block_logs(
                q, block * SIZE, position, k_len, k_pool, table, kv_head, scale_log2, softcap,
                KV_HEADS, D, D_PAD, PAGE, SIZE, COPIED, CAPPED, True, LISTED, PRECISION,
            )  # fmt: skip
            tl.store(line + slots.to(tl.int64) * block, found, mask=slot < slots)


@triton.jit(
    do_not_specialize=["head_from", "slots", "k_blocks"],
    do_not_specialize_on_alignment=["starts", "blocks"],
)
def _add(weights, starts, blocks, found, head_from, slots, k_blocks, WIDTH: tl.constexpr):
    """One query block: its rows, each brought to a sum of 1, added. ``weights`` are logarithms, [heads, k_blocks,
    slots]."""
    place, head = tl.program_id(0), head_from + tl.program_id(1)
    own = tl.load(blocks + place)
    block = tl.arange(0, WIDTH)
    seen = (block <= own) & (block < k_blocks)
    line = weights + tl.program_id(1).to(tl.int64) * k_blocks * slots + block.to(tl.int64) * slots
    total = tl.zeros([WIDTH], tl.float32)
    for row in tl.range(tl.load(starts + place), tl.load(starts + place + 1)):
        log = tl.load(line + row, mask=seen, other=float("-inf"))
        weight = tl.exp2(log - tl.max(log, 0))  # a row without a finite logit comes out NaN, as softmax has it
        total += weight / tl.sum(weight, 0)
    to = found + (head.to(tl.int64) * tl.num_programs(0) + place) * k_blocks
    tl.store(to + block, total, mask=block < k_blocks)
