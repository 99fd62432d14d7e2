"""Column and diagonal sums of the attention of a chunk's last rows by key block and by group of distances: what
FlexPrefill decides by where its lines are blocks.

The keys are read once: of every row and key block a kernel keeps the largest logit and the sums of the weights relative
to it, and a head's last program finds every row's log-sum-exp; a second kernel weighs the sums. The weights [rows,
keys] are never stored, and sums are added in a fixed order, so that they do not change from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.layout import rows as in_rows
from saccade.ops.triton.common import LOG2E, arrivals, cap_logits, pad, pool_rows, precision, processors
from saccade.ops.triton.line_sums import rows_of
from saccade.ops.triton.readers import load_keys
from saccade.selection import Shape

BLOCKS_EACH = 16  # most key blocks one program reads with the same queries at hand
MOST_BYTES = 1 << 28  # kept of heads at once
WEIGHED = 4  # key blocks that one program weighs
LOGS = 16  # stretches of keys whose logarithms are added at a time


def line_sums(
    q: Tensor, kv: KVView, shape: Shape, block_size: int, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax weights of the last ``min(block_size, q_len)`` rows of ``q`` [heads, q_len, head_dim], summed over rows.

    Returns ``columns`` and ``slashes``, fp32 [heads, ceil(k_len / block_size)]: by block of ``block_size`` keys and by
    group of ``block_size`` distances (row position - key). ``block_size`` is 64 or 128.
    """
    heads, _, head_dim = q.shape
    rows = min(block_size, shape.q_len)
    visible = shape.q_start + shape.q_len
    first = visible - rows  # position of the first of these rows
    k_blocks, used = -(-shape.k_len // block_size), -(-visible // block_size)
    lowest = (first - block_size + 1) // block_size  # group of the least distance to key block 0
    # Row r and key c of block b are first + r - c - b * size apart: group lowest - b + (ahead + r - c) // size
    ahead = first - lowest * block_size
    each = max(2, min(BLOCKS_EACH, used * heads // (4 * processors(q.device))))
    splits = -(-used // each)
    columns, slashes = torch.empty(2, heads, k_blocks, dtype=torch.float32, device=q.device)
    together = max(1, min(heads, MOST_BYTES // (16 * used * block_size)))
    parts = torch.empty(together, used, 4, block_size, dtype=torch.float32, device=q.device)
    logs = torch.empty(together, splits + 1, block_size, dtype=torch.float32, device=q.device)  # the last one: of all
    arrived = arrivals(q.device, together)
    lowest_block = min(0, lowest - k_blocks + 1)  # whose group is the last one
    given, paged = in_rows(q[:, -rows:]), kv.paged()
    for head in range(0, heads, together):
        count = min(together, heads - head)
        _read_blocks[(count, splits)](
            given,
            paged.k,
            paged.block_table,
            parts,
            logs,
            arrived,
            head,
            given.stride(0),
            given.stride(1),
            paged.head_stride,
            rows,
            first,
            visible,
            used,
            ahead,
            each,
            scale * LOG2E,
            softcap or 0.0,
            GROUP=heads // kv.kv_heads,
            KV_HEADS=kv.kv_heads,
            D=head_dim,
            D_PAD=pad(head_dim),
            PAGE=kv.block_size,
            SIZE=block_size,
            ALIGNED=ahead == block_size,
            CAPPED=softcap is not None,
            PRECISION=precision(q.dtype),
            LOGS=LOGS,
            num_warps=4 if block_size == 64 else 8,
            maxnreg=128 if block_size == 128 else None,  # two programs at a time hide more than spilling costs
        )
        _weigh_blocks[(triton.cdiv(k_blocks - lowest_block, WEIGHED), count)](
            parts,
            logs,
            columns,
            slashes,
            head,
            rows,
            used,
            k_blocks,
            splits,
            lowest,
            lowest_block,
            SIZE=block_size,
            EACH=WEIGHED,
            ALIGNED=ahead == block_size,
            num_warps=4,
        )
    return columns, slashes


@triton.jit
def _read_block(
    top, weight, q, k_pool, table, kv_head, at, parts, rows, first, visible, ahead, scale_log2, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
    ALIGNED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keep what ``q`` [SIZE, D] makes of key block ``at``; the rows' maximum and sum so far."""
    row, within, channel = tl.arange(0, SIZE), tl.arange(0, SIZE), tl.arange(0, D_PAD)
    key = at * SIZE + within
    there = (key < visible) if MASKED else (key >= 0)
    place = pool_rows(table, key, there, kv_head, KV_HEADS, PAGE)[:, None]
    k = load_keys(k_pool, place, channel[None, :], there[:, None] if MASKED else None, D, q.dtype)
    scores = cap_logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale_log2, softcap, CAPPED)
    if MASKED:
        scores = tl.where(key[None, :] <= first + row[:, None], scores, float("-inf"))
    high = tl.max(scores, 1)
    anchor = tl.where(high == float("-inf"), 0.0, high) if MASKED else high
    weights = tl.exp2(scores - anchor[:, None])
    apart = ahead + row[:, None] - within[None, :]
    low = tl.sum(tl.where(apart < SIZE, weights, 0.0), 1)
    if ALIGNED:
        middle = tl.sum(tl.where(apart >= SIZE, weights, 0.0), 1)
        both = low + middle
    else:
        middle = tl.sum(tl.where((apart >= SIZE) & (apart < 2 * SIZE), weights, 0.0), 1)
        far = tl.sum(tl.where(apart >= 2 * SIZE, weights, 0.0), 1)
        both = low + middle + far
        tl.store(parts + 3 * SIZE + row, far)
    tl.store(parts + row, high)
    tl.store(parts + SIZE + row, low)
    tl.store(parts + 2 * SIZE + row, middle)
    higher = tl.maximum(top, high)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, weight * tl.exp2(top - base) + both * tl.exp2(high - base)


@triton.jit(do_not_specialize=["head_from", "table_head", "rows", "first", "visible", "used", "ahead", "each"])
def _read_blocks(
    q_ptr, k_pool, table, parts, logs, arrived, head_from, q_head, q_row, table_head, rows, first, visible, used, ahead,
    each, scale_log2, softcap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, ALIGNED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    mine, split = tl.program_id(0), tl.program_id(1)
    head = head_from + mine
    kv_head = head // GROUP
    table += kv_head.to(tl.int64) * table_head
    row = tl.arange(0, SIZE)
    q = rows_of(q_ptr, head, q_head, q_row, rows, D, D_PAD, SIZE)
    top = tl.full([SIZE], float("-inf"), tl.float32)
    weight = tl.zeros([SIZE], tl.float32)
    begin = split * each
    end = tl.minimum(begin + each, used)
    plain = tl.minimum((first + 1) // SIZE, end)  # blocks up to here lie before all rows
    out = parts + mine.to(tl.int64) * used * 4 * SIZE
    for at in tl.range(begin, plain, num_stages=2):
        top, weight = _read_block(
            top, weight, q, k_pool, table, kv_head, at, out + at * 4 * SIZE, rows, first, visible, ahead, scale_log2,
            softcap, KV_HEADS, D, D_PAD, PAGE, SIZE, ALIGNED, CAPPED, PRECISION, False,
        )  # fmt: skip
    for at in tl.range(tl.maximum(begin, plain), end, num_stages=1):
        top, weight = _read_block(
            top, weight, q, k_pool, table, kv_head, at, out + at * 4 * SIZE, rows, first, visible, ahead, scale_log2,
            softcap, KV_HEADS, D, D_PAD, PAGE, SIZE, ALIGNED, CAPPED, PRECISION, True,
        )  # fmt: skip
    found = tl.where(weight == 0.0, float("-inf"), top + tl.log2(tl.where(weight == 0.0, 1.0, weight)))
    splits = tl.num_programs(1)
    logs += mine.to(tl.int64) * (splits + 1) * SIZE + row
    tl.store(logs + split * SIZE, found)
    tl.debug_barrier()  # all threads' stores come before the arrival that one of them announces
    others = tl.atomic_add(arrived + mine, tl.cast(1, tl.int64), sem="acq_rel", scope="gpu")
    if others == splits - 1:
        tl.store(arrived + mine, tl.cast(0, tl.int64))
        top = tl.full([SIZE], float("-inf"), tl.float32)
        weight = tl.zeros([SIZE], tl.float32)
        for start in tl.range(0, splits, LOGS):  # in their order, whichever came last
            part = start + tl.arange(0, LOGS)[:, None]
            log = tl.load(logs[None, :] + part * SIZE, mask=part < splits, other=float("-inf"), volatile=True)
            higher = tl.maximum(top, tl.max(log, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weight = weight * tl.exp2(top - base) + tl.sum(tl.exp2(log - base[None, :]), 0)
            top = higher
        tl.store(logs + splits * SIZE, top + tl.log2(weight))


@triton.jit
def _share(parts, part: tl.constexpr, block, known, row, rows, used, SIZE: tl.constexpr):
    """What weighs in part ``part`` of key blocks ``block`` [EACH], which may not be there, in all rows: [EACH]."""
    there = ((block >= 0) & (block < used))[:, None] & (row < rows)[None, :]
    at = parts + block[:, None] * 4 * SIZE + row[None, :]
    high = tl.load(at, mask=there, other=float("-inf"))
    return tl.sum(tl.exp2(high - known[None, :]) * tl.load(at + part * SIZE, mask=there, other=0.0), 1)


@triton.jit(do_not_specialize=["head_from", "rows", "used", "k_blocks", "splits", "lowest", "lowest_block"])
def _weigh_blocks(
    parts, logs, columns, slashes, head_from, rows, used, k_blocks, splits, lowest, lowest_block,
    SIZE: tl.constexpr, EACH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Part j of key block c belongs to group ``lowest`` - c + j."""
    mine = tl.program_id(1)
    block = lowest_block + tl.program_id(0) * EACH + tl.arange(0, EACH)
    row = tl.arange(0, SIZE)
    parts += mine.to(tl.int64) * used * 4 * SIZE
    known = tl.load(logs + (mine.to(tl.int64) * (splits + 1) + splits) * SIZE + row)
    low = _share(parts, 1, block, known, row, rows, used, SIZE)
    column = low + _share(parts, 2, block, known, row, rows, used, SIZE)
    slash = low + _share(parts, 2, block + 1, known, row, rows, used, SIZE)
    if not ALIGNED:
        column += _share(parts, 3, block, known, row, rows, used, SIZE)
        slash += _share(parts, 3, block + 2, known, row, rows, used, SIZE)
    group = lowest - block
    line = (head_from + mine).to(tl.int64) * k_blocks
    tl.store(columns + line + block, column, mask=(block >= 0) & (block < k_blocks))
    tl.store(slashes + line + group, slash, mask=(group >= 0) & (group < k_blocks))
