"""The heaviest lines of a call and the best blocks of its query blocks on the device: MInference's two choices.

How many are chosen is known beforehand, so that every list has its place and no number goes to the host. The least that
is chosen is found digit by digit of its bits; equal weights go to the lower number, as on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.layout import flat
from saccade.ops.layout import rows as in_rows
from saccade.ops.triton.common import pad, precision
from saccade.ops.triton.radix_select import least_taken, taken_of
from saccade.selection import Blocks, Lines, Shape

MOST_BYTES = 1 << 28  # of scores kept of heads at once
TILE = 64  # mean keys at a time
ROWS = 16  # query blocks of one program


def heaviest_lines(
    shape: Shape, columns: Tensor, slashes: Tensor, vertical: int, slash: int, keep_columns: int, keep_diagonals: int
) -> Lines:
    """Per head the ``vertical`` columns and ``slash`` distances of greatest weight (fp32 [heads, k_len] each), ties to
    the lower one, with the first ``keep_columns`` and ``keep_diagonals`` among them. Both numbers are below k_len, and
    no less than what is kept."""
    heads, n = columns.shape
    columns, slashes = flat(columns, torch.float32), flat(slashes, torch.float32)
    found = torch.empty(heads * (vertical + slash), dtype=torch.int32, device=columns.device)
    _heaviest[(heads, 2)](
        columns, slashes, found, heads, n, vertical, slash, keep_columns, keep_diagonals,
        SPAN=min(4096, pad(n, 256)), num_warps=8,
    )  # fmt: skip
    number = torch.arange(heads + 1, device=columns.device)
    return Lines(shape, number * vertical, found[: heads * vertical], number * slash, found[heads * vertical :])


def best_blocks(q: Tensor, means: Tensor, shape: Shape, block_size: int, count: int) -> Blocks:
    """Per head and query block of ``q`` [heads, q_len, head_dim] the ``count`` causal key blocks of greatest mean-query
    mean-key product, or all where there are no more; ties to the lower block. ``means`` fp32 [kv_heads, k_blocks,
    head_dim]; the grid is anchored at position 0. Products and means are float32."""
    heads, q_len, head_dim = q.shape
    given, means = in_rows(q), flat(means, torch.float32)
    k_blocks, device = means.shape[1], q.device
    first = shape.q_start // block_size
    q_blocks = (shape.q_start + q_len - 1) // block_size - first + 1
    sizes = torch.clamp(first + 1 + torch.arange(q_blocks, device=device), max=count).repeat(heads)
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    short = max(0, min(q_blocks, count - first))  # query blocks that see no more than ``count``
    total = short * first + short * (short + 1) // 2 + (q_blocks - short) * count
    found = torch.empty(heads * total, dtype=torch.int32, device=device)
    together = max(1, min(heads, MOST_BYTES // (4 * q_blocks * k_blocks)))
    scores = torch.empty(together, q_blocks, k_blocks, dtype=torch.float32, device=device)
    for head in range(0, heads, together):
        _best[(-(-q_blocks // ROWS), min(together, heads - head))](
            given, means, scores, offsets, found, head, given.stride(0), given.stride(1), shape.q_start, q_len, first,
            q_blocks, k_blocks, count, GROUP=heads // means.shape[0], D=head_dim, D_PAD=pad(head_dim), SIZE=block_size,
            ROWS=ROWS, TILE=TILE, SPAN=min(2048, pad(k_blocks, 128)), PRECISION=precision(torch.float32), num_warps=4,
        )  # fmt: skip
    return Blocks(shape, block_size, offsets, found)


@triton.jit
def _listed(line, first, last, wanted, out, SPAN: tl.constexpr):
    """Write the ``wanted`` highest of entries ``first .. last - 1`` of ``line``, rising, to ``out``."""
    if wanted > 0:
        bound, spare = least_taken(line, first, last, 0, 0, wanted, SPAN)
        level = bound.to(tl.int32) * 0
        done = level
        for start in tl.range(first, last, SPAN):
            number = start + tl.arange(0, SPAN)
            taken, level = taken_of(line, number, number < last, bound, spare, level)
            here = taken.to(tl.int32)
            tl.store(out + done + tl.cumsum(here, 0) - 1, number, mask=here > 0)
            done += tl.sum(here, 0)


@triton.jit(do_not_specialize=["heads", "n", "vertical", "slash", "keep_columns", "keep_diagonals"])
def _heaviest(
    columns, slashes, found, heads, n, vertical, slash, keep_columns, keep_diagonals, SPAN: tl.constexpr
):  # fmt: skip
    head, by_distance = tl.program_id(0).to(tl.int64), tl.program_id(1) == 1
    count = tl.where(by_distance, slash, vertical)
    kept = tl.where(by_distance, keep_diagonals, keep_columns)
    found += tl.where(by_distance, heads.to(tl.int64) * vertical, 0) + head * count
    for start in tl.range(0, kept, SPAN):
        number = start + tl.arange(0, SPAN)
        tl.store(found + number, number, mask=number < kept)
    if by_distance:
        _listed(slashes + head * n, kept, n, count - kept, found + kept, SPAN)
    else:
        _listed(columns + head * n, kept, n, count - kept, found + kept, SPAN)


@triton.jit(do_not_specialize=["head_from", "q_start", "q_len", "first", "q_blocks", "k_blocks", "count"])
def _best(
    q_ptr, means, scores, offsets, found, head_from, q_head, q_row, q_start, q_len, first, q_blocks, k_blocks, count,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``ROWS`` query blocks of a head: their products with the mean keys, and then each one's list."""
    head = head_from + tl.program_id(1)
    channel = tl.arange(0, D_PAD)
    mine = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = (first + mine) * SIZE - q_start
    q_ptr += head.to(tl.int64) * q_head
    total = tl.zeros([ROWS, D_PAD], tl.float32)
    for within in tl.range(0, SIZE):
        row = (begin + within).to(tl.int64)
        there = ((row >= 0) & (row < q_len))[:, None] & (channel < D)[None, :]
        total += tl.load(q_ptr + row[:, None] * q_row + channel[None, :], mask=there, other=0.0).to(tl.float32)
    rows = tl.minimum(begin + SIZE, q_len) - tl.maximum(begin, 0)
    mean = total / tl.maximum(rows, 1).to(tl.float32)[:, None]
    lines = scores + (tl.program_id(1).to(tl.int64) * q_blocks + mine)[:, None] * k_blocks
    means += (head // GROUP).to(tl.int64) * k_blocks * D
    last = tl.minimum(first + tl.program_id(0) * ROWS + ROWS, k_blocks)  # blocks that the last of them sees
    for start in tl.range(0, last, TILE):
        block = start + tl.arange(0, TILE)
        inside = (block < k_blocks)[:, None] & (channel < D)[None, :]
        keys = tl.load(means + block[:, None].to(tl.int64) * D + channel[None, :], mask=inside, other=0.0)
        score = tl.dot(mean, tl.trans(keys), input_precision=PRECISION)
        tl.store(lines + block[None, :], score, mask=(mine < q_blocks)[:, None] & (block < k_blocks)[None, :])
    tl.debug_barrier()  # other threads read the scores
    for turn in tl.range(0, tl.minimum(ROWS, q_blocks - tl.program_id(0) * ROWS)):
        at = tl.program_id(0) * ROWS + turn
        seen = first + at + 1
        line = scores + (tl.program_id(1).to(tl.int64) * q_blocks + at) * k_blocks
        out = found + tl.load(offsets + head.to(tl.int64) * q_blocks + at)
        _listed(line, seen * 0, seen, tl.minimum(count, seen), out, SPAN)
