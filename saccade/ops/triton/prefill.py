"""Causal prefill over paged keys: dense, a band, or selected key blocks. One program serves a tile of rows of one head.

Query tiles lie on the grid anchored at position 0, as block selections do. Keys that need no mask come first, in a loop
of their own; the loop over the rest masks. Programs start with the last rows, which have most to read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.layout import flat, rows
from saccade.ops.triton.common import LN2, LOG2E, cap_logits, is_hopper, pad, pool_rows, precision
from saccade.ops.triton.means import Means, mean_steps
from saccade.ops.triton.pages import LONG, gather, tiles_of
from saccade.ops.triton.readers import load_keys, load_values
from saccade.selection import Band, Blocks, Dense, Selection

DENSE, BAND, BLOCKS = 0, 1, 2
LONG_BLOCKS = 4096  # LONG of calls that read few of the keys


@dataclass(frozen=True)
class Config:
    """Tile of rows and keys, warps and pipeline depth of one launch."""

    rows: int = 128
    keys: int = 64
    warps: int = 8
    stages: int = 3
    copy: bool = False  # lay the keys out in one piece first and fetch tiles by the copy engine


FILLED = FILLED_BLOCKS = Config(128, 64, 8, 3, copy=True)  # of keys of up to LONGEST channels with shorter values
LONGEST = 192


def config_for(q: Tensor, selection: Selection, filled: int | None = None) -> Config:
    """The choice measured on a Hopper GPU (docs/performance-gpu.md) where it was measured: 16-bit storage, dense or
    blocks of 128. Elsewhere what fits shared memory: rows of more bytes get smaller tiles. ``filled``: KVFormat's."""
    rows = min(selection.block_size, 128) if isinstance(selection, Blocks) else 128
    if filled is not None and q.shape[-1] <= LONGEST and rows == 128 and q.element_size() == 2 and is_hopper(q.device):
        return FILLED_BLOCKS if isinstance(selection, Blocks) else FILLED
    row_bytes = pad(q.shape[-1]) * q.element_size()
    if row_bytes > 512:
        return Config(min(rows, 32), 32, 4, 2)
    if row_bytes > 256:
        return Config(min(rows, 64), 64, 4, 2)
    if rows == 128 and q.element_size() == 2 and not isinstance(selection, Band) and is_hopper(q.device):
        if q.shape[1] >= (LONG_BLOCKS if isinstance(selection, Blocks) else LONG):
            return Config(128, 128, 8, 3, copy=True)
        return Config(128, 128, 8, 2) if isinstance(selection, Blocks) else Config(64, 64, 4, 3)
    return Config(rows, 64, 8 if rows == 128 else 4, 3)


def attend_prefill(
    q: Tensor,
    kv: KVView,
    selection: Dense | Band | Blocks,
    *,
    scale: float,
    softcap: float | None = None,
    config: Config | None = None,
    means: Means | None = None,
) -> tuple[Tensor, Tensor]:
    """``q`` [heads, q_len, head_dim] -> ``out`` like q, ``lse`` float32 [heads, q_len] (natural log).

    ``Blocks`` need a block size that the row tile divides (64 or 128), and units that divide the query heads. The
    causal tile loop is FlashAttention-2's (Dao, 2023); block lists are walked as they are, sorted. ``means``: what
    stands for the others, within the same loop's softmax.
    """
    shape = selection.shape
    heads, q_len, head_dim = q.shape
    filled = None if means is not None or kv.format.filled == head_dim else kv.format.filled
    config = config or config_for(q, selection, filled)
    # Keys that are longer than values are met in two parts, which together are no wider than they are.
    rest = 0 if filled is None else rest_of(head_dim)
    values = head_dim if filled is None else filled
    q = rows(q)
    if scale <= 0:
        q, scale = q * scale, 1.0
    # Heads of a row one after another: the product that follows reads rows.
    out = torch.empty(q_len, heads, head_dim, dtype=q.dtype, device=q.device).transpose(0, 1)
    lse = torch.empty(heads, q_len, dtype=torch.float32, device=q.device)
    mode, window, sinks, size, units = DENSE, 0, 0, config.rows, 1
    paged = kv.paged()
    offsets = indices = paged.block_table  # unused pointers must still be pointers
    if isinstance(selection, Band):
        mode, window, sinks = BAND, selection.window, selection.sinks
    elif isinstance(selection, Blocks):
        mode, size, units = BLOCKS, selection.block_size, selection.units
        offsets, indices = flat(selection.offsets, torch.int64), flat(selection.indices, torch.int32)
    first = shape.q_start // config.rows
    tiles = (shape.q_start + q_len - 1) // config.rows - first + 1
    keys = min(config.keys, size)
    limit = shape.q_start + q_len
    k, v, k_rest = paged.k, paged.v, paged.k
    if config.copy:
        k, v = (gather(part, paged.block_table, 0, limit) for part in (k, v))
        k_rest = tiles_of(k, keys, rest or None)
        k, v = tiles_of(k, keys, head_dim - rest), tiles_of(v, keys, values)
    _prefill[(heads, tiles)](
        q,
        k,
        k_rest,
        v,
        paged.block_table,
        offsets,
        indices,
        *((offsets,) * 3 if means is None else (means.keys, means.values, means.marks)),
        0 if means is None else means.full,
        out,
        lse,
        q.stride(0),
        q.stride(1),
        paged.head_stride,
        out.stride(0),
        out.stride(1),
        first,
        shape.q_start,
        q_len,
        window,
        sinks,
        scale * LOG2E,
        softcap or 0.0,
        LN2,
        HEADS=heads,
        KV_HEADS=kv.kv_heads,
        UNITS=units,
        D=head_dim,
        D_PAD=pad(head_dim - rest),
        REST=rest,
        V=values,
        V_PAD=pad(values),
        PAGE=kv.block_size,
        SIZE=size,
        ROWS=config.rows,
        KEYS=keys,
        MODE=mode,
        CAPPED=softcap is not None,
        PRECISION=precision(q.dtype),
        STAGES=config.stages,
        COPIED=config.copy,
        TILE=0 if means is None else means.tile,
        LOG_SIZE=math.log2(size),
        num_warps=config.warps,
    )
    return out, lse


def rest_of(head_dim: int) -> int:
    """Channels of the second part of keys, where two powers of two that add up to ``head_dim`` are narrower than one;
    else 0."""
    first = 1 << (head_dim.bit_length() - 1)
    rest = head_dim - first
    return rest if rest >= 16 and rest & (rest - 1) == 0 else 0


@triton.jit
def _step(
    acc, weight, top, q, q_rest, position, start, limit, k_pool, k_rest, v_pool, table, kv_head, window, sinks,
    scale_log2, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, REST: tl.constexpr, V: tl.constexpr,
    V_PAD: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, BANDED: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """One tile of keys from ``start`` on: online softmax with maximum ``top``, sum ``weight``, output ``acc``."""
    key = start + tl.arange(0, KEYS)
    channel = tl.arange(0, D_PAD)
    piece = (kv_head * limit + start).to(tl.int32)
    row = 0
    there = (key < limit)[:, None] & (channel[None, :] < D) if MASKED or D < D_PAD else None
    if COPIED:
        k = k_pool.load([piece, 0])
    else:
        row = pool_rows(table, key, (key < limit) if MASKED else (key >= 0), kv_head, KV_HEADS, PAGE)[:, None]
        k = load_keys(k_pool, row, channel[None, :], there, D)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if REST > 0:
        if COPIED:
            k = k_rest.load([piece, D_PAD])
        else:
            beyond = D_PAD + tl.arange(0, REST)
            k = load_keys(k_pool, row, beyond[None, :], (key < limit)[:, None] if MASKED else None, D)
        scores = tl.dot(q_rest, tl.trans(k), scores, input_precision=PRECISION)
    if CAPPED:
        scores, scale_log2 = cap_logits(scores, scale_log2, softcap, True), 1.0
    if MASKED:
        seen = key[None, :] <= position[:, None]
        if BANDED:
            seen = seen & ((key[None, :] < sinks) | (position[:, None] - key[None, :] < window))
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale_log2)  # the scale is above 0: it may come after the maximum
    anchor = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    shrink = tl.exp2(top - anchor)
    p = tl.exp2(scores * scale_log2 - anchor[:, None])
    weight = weight * shrink + tl.sum(p, 1)
    if COPIED:
        v = v_pool.load([piece, 0])
    elif V < D:
        of_value = tl.arange(0, V_PAD)
        there = (key < limit)[:, None] & (of_value[None, :] < V) if MASKED or V < V_PAD else None
        v = load_values(v_pool, row, of_value[None, :], there, D)
    else:
        v = load_values(v_pool, row, channel[None, :], there, D)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, weight, higher


@triton.jit(do_not_specialize=["table_head", "first", "q_start", "q_len", "window", "sinks", "full"])
def _prefill(
    q_ptr, k_pool, k_rest, v_pool, table, offsets, indices, mean_keys, mean_values, marks, full, out, lse, q_head,
    q_row, table_head, out_head, out_row, first, q_start, q_len, window, sinks, scale_log2, softcap, ln2,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    REST: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MODE: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, COPIED: tl.constexpr,
    TILE: tl.constexpr, LOG_SIZE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = first + tl.num_programs(1) - 1 - tl.program_id(1)
    attend_tile(
        q_ptr, k_pool, k_rest, v_pool, table, offsets, indices, mean_keys, mean_values, marks, full, out, lse, q_head,
        q_row, table_head, out_head, out_row, q_len, head, tile, q_start, q_len, window, sinks, scale_log2, softcap,
        ln2, HEADS, KV_HEADS, UNITS, D, D_PAD, REST, V, V_PAD, PAGE, SIZE, ROWS, KEYS, MODE, CAPPED, PRECISION,
        STAGES, COPIED, TILE, LOG_SIZE,
    )  # fmt: skip


@triton.jit
def attend_tile(
    q_ptr, k_pool, k_rest, v_pool, table, offsets, indices, mean_keys, mean_values, marks, full, out, lse, q_head,
    q_row, table_head, out_head, out_row, lse_head, head, tile, q_start, q_len, window, sinks, scale_log2, softcap, ln2,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    REST: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MODE: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, COPIED: tl.constexpr,
    TILE: tl.constexpr, LOG_SIZE: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one head of one sequence, whose rows ``q_ptr``, ``out`` and ``lse`` begin with."""
    kv_head = head // (HEADS // KV_HEADS)
    table += kv_head.to(tl.int64) * table_head
    begin = tile * ROWS  # position of the tile's first row
    position = begin + tl.arange(0, ROWS)
    row = position - q_start
    inside = (row >= 0) & (row < q_len)
    channel = tl.arange(0, D_PAD)
    q = tl.load(
        q_ptr + head.to(tl.int64) * q_head + row.to(tl.int64)[:, None] * q_row + channel[None, :],
        mask=inside[:, None] & (channel[None, :] < D),
        other=0.0,
    )
    limit = q_start + q_len  # no key from here on is causal for any row, and pages there may not exist
    q_rest = q
    if REST > 0:
        beyond = D_PAD + tl.arange(0, REST)
        q_rest = tl.load(
            q_ptr + head.to(tl.int64) * q_head + row.to(tl.int64)[:, None] * q_row + beyond[None, :],
            mask=inside[:, None],
            other=0.0,
        )
    of_value = tl.arange(0, V_PAD)
    acc = tl.zeros([ROWS, V_PAD], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    if MODE == 2:
        per: tl.constexpr = SIZE // KEYS
        list_at = (head // (HEADS // UNITS)) * ((limit - 1) // SIZE - q_start // SIZE + 1)
        list_at += begin // SIZE - q_start // SIZE
        listed = tl.load(offsets + list_at)
        count = (tl.load(offsets + list_at + 1) - listed).to(tl.int32)
        ids = indices + listed
        # Lists are sorted: only the last block can be the diagonal one.
        plain = tl.maximum(count - 1, 0) * per
        masked = count * per
        block = tl.load(ids, mask=masked > 0, other=0)
        for i in tl.range(0, plain, num_stages=STAGES):
            start = block * SIZE + (i % per) * KEYS
            # The next is read a turn ahead: fetching a tile waits for its place.
            block = tl.load(ids + tl.minimum(i + 1, masked - 1) // per)
            acc, weight, top = _step(
                acc, weight, top, q, q_rest, position, start, limit, k_pool, k_rest, v_pool, table, kv_head,
                window, sinks, scale_log2, softcap, KV_HEADS, D, D_PAD, REST, V, V_PAD, PAGE, KEYS, False, False,
                CAPPED, PRECISION, COPIED,
            )  # fmt: skip
        for i in tl.range(plain, masked, num_stages=1):
            start = tl.load(ids + i // per) * SIZE + (i % per) * KEYS
            acc, weight, top = _step(
                acc, weight, top, q, q_rest, position, start, limit, k_pool, k_rest, v_pool, table, kv_head,
                window, sinks, scale_log2, softcap, KV_HEADS, D, D_PAD, REST, V, V_PAD, PAGE, KEYS, True, False,
                CAPPED, PRECISION, COPIED,
            )  # fmt: skip
        if TILE > 0:
            acc, weight, top = mean_steps(
                acc, weight, top, q, position, marks + list_at.to(tl.int64) * full, mean_keys, mean_values, kv_head, 0,
                tl.minimum((begin + ROWS) // SIZE, full), scale_log2, softcap, KV_HEADS, D, D_PAD, SIZE, TILE,
                LOG_SIZE, CAPPED, PRECISION,
            )  # fmt: skip
    elif MODE == 1:
        low = tl.maximum(tl.maximum(begin, q_start) - window + 1, 0) // KEYS
        last = tl.cdiv(tl.minimum(begin + ROWS, limit), KEYS)
        sunk = tl.minimum(tl.cdiv(sinks, KEYS), low)
        for i in tl.range(0, sunk + last - low, num_stages=STAGES):
            start = tl.where(i < sunk, i, low + i - sunk) * KEYS
            acc, weight, top = _step(
                acc, weight, top, q, q_rest, position, start, limit, k_pool, k_rest, v_pool, table, kv_head,
                window, sinks, scale_log2, softcap, KV_HEADS, D, D_PAD, REST, V, V_PAD, PAGE, KEYS, True, True,
                CAPPED, PRECISION, COPIED,
            )  # fmt: skip
    else:
        plain = begin // KEYS
        masked = tl.cdiv(tl.minimum(begin + ROWS, limit), KEYS)
        for i in tl.range(0, plain, num_stages=STAGES):
            acc, weight, top = _step(
                acc, weight, top, q, q_rest, position, i * KEYS, limit, k_pool, k_rest, v_pool, table, kv_head,
                window, sinks, scale_log2, softcap, KV_HEADS, D, D_PAD, REST, V, V_PAD, PAGE, KEYS, False, False,
                CAPPED, PRECISION, COPIED,
            )  # fmt: skip
        for i in tl.range(plain, masked, num_stages=1):
            acc, weight, top = _step(
                acc, weight, top, q, q_rest, position, i * KEYS, limit, k_pool, k_rest, v_pool, table, kv_head,
                window, sinks, scale_log2, softcap, KV_HEADS, D, D_PAD, REST, V, V_PAD, PAGE, KEYS, True, False,
                CAPPED, PRECISION, COPIED,
            )  # fmt: skip
    total = tl.where(weight == 0.0, 1.0, weight)
    rows = row.to(tl.int64)
    tl.store(
        out + head.to(tl.int64) * out_head + rows[:, None] * out_row + of_value[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=inside[:, None] & (of_value[None, :] < V),
    )
    top = tl.where(weight == 0.0, float("-inf"), top + tl.log2(total))
    tl.store(lse + head.to(tl.int64) * lse_head + rows, top * ln2, mask=inside)
