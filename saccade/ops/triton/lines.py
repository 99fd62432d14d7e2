"""Vertical-slash prefill from ``Lines``: MInference's pattern, exact line by line, inside a window or not.

Rows and keys are tiled alike, so which key tiles a set of distances touches depends on the tiles' difference alone: one
sorted list of differences a unit serves every tile of rows. A program reads those tiles, masked to the lines, and then
the columns outside them, gathered.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.triton.common import LN2, LOG2E, cap_logits, pad, pool_rows, precision
from saccade.selection import Lines
from saccade.selection.window import Cone

TILE = 64  # keys


def attend_lines(
    q: Tensor, kv: KVView, lines: Lines, cone: Cone | None = None, *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """``q`` [heads, q_len, head_dim] -> ``out`` like q, ``lse`` float32 [heads, q_len] (natural log). Inside ``cone``
    as ``selection.Windowed`` says: a row that would lose its last key keeps its own."""
    shape, units, device = lines.shape, lines.units, q.device
    heads, q_len, head_dim = q.shape
    wide = q.element_size() == 2 and head_dim <= 128
    rows = 128 if wide else TILE  # of a program
    per = rows // TILE
    tiles = -(-shape.k_len // TILE)
    is_distance = line_marks(lines.s_offsets, lines.distances, units, tiles * TILE)
    is_column = line_marks(lines.v_offsets, lines.columns, units, tiles * TILE)
    touched = _touched(is_distance.view(torch.bool).unflatten(1, (tiles, TILE)), per)
    # The lists of differences, padded: the touched ones first, in order.
    differences = torch.sort(~touched, dim=1, stable=True).indices.to(torch.int32)
    counts = touched.cumsum(1, dtype=torch.int32)
    columns_upto = is_column.unflatten(1, (tiles, TILE)).sum(-1, dtype=torch.int32).cumsum(1, dtype=torch.int32)
    out = torch.empty(heads, q_len, head_dim, dtype=q.dtype, device=device)
    lse = torch.empty(heads, q_len, dtype=torch.float32, device=device)
    starts = lowest = counts
    if cone is not None:
        starts = cone.starts(torch.arange(shape.q_start, shape.q_start + q_len, device=device))
        lowest = torch.stack([_first(is_column), _first(is_distance)]).amin(0)  # rows from here on read keys
    first = shape.q_start // rows
    _lines[(heads, (shape.q_start + q_len - 1) // rows - first + 1)](
        q,
        kv.k_pool,
        kv.v_pool,
        kv.table,
        is_distance,
        is_column,
        touched.view(torch.int8),
        differences,
        counts,
        lines.columns if lines.columns.numel() else counts,  # a pointer even to nothing
        lines.v_offsets,
        columns_upto,
        starts,
        lowest,
        out,
        lse,
        q.stride(0),
        q.stride(1),
        first,
        shape.q_start,
        q_len,
        tiles,
        0 if cone is None else cone.sink_keys,
        scale * LOG2E,
        softcap or 0.0,
        HEADS=heads,
        KV_HEADS=kv.kv_heads,
        UNITS=units,
        D=head_dim,
        D_PAD=pad(head_dim),
        PAGE=kv.block_size,
        ROWS=rows,
        TILE=TILE,
        CONE=cone is not None,
        CAPPED=softcap is not None,
        PRECISION=precision(q.dtype),
        LN2=LN2,
        num_warps=8 if wide else 4,
        num_stages=2,
    )
    return out, lse


def line_marks(offsets: Tensor, indices: Tensor, units: int, width: int) -> Tensor:
    """int8 [units, width]: 1 where a unit lists the index. ``offsets`` int64 [units + 1], ``indices`` int32, with room
    behind the last offset."""
    marks = torch.zeros(units, width, dtype=torch.int8, device=offsets.device)
    longest = min(indices.numel(), width)
    if longest:
        _mark[(triton.cdiv(longest, 1024), units)](offsets, indices, marks, width, SPAN=1024, num_warps=4)
    return marks


def _touched(by_tile: Tensor, per: int) -> Tensor:
    """Which tile differences hold a distance, bool [units, tiles + per - 1], from the distances by tile, bool [units,
    tiles, TILE]. Entry ``i`` is a tile of keys ``i - per + 1`` tiles before the first of the ``per`` tiles of a
    program's rows, whose pairs are between TILE - 1 more and per * TILE - 1 less than that many tiles apart."""
    tiles = by_tile.shape[1]
    whole = torch.nn.functional.pad(by_tile.any(-1), (per - 1, per - 1))
    touched = whole[:, : tiles + per - 1].clone()
    for ahead in range(1, per):
        touched |= whole[:, ahead : ahead + tiles + per - 1]
    touched[:, per:] |= by_tile[:, :-1, 1:].any(-1)
    return touched


def _first(marks: Tensor) -> Tensor:
    """The first place that is marked, int64 [units]; behind the last where none is."""
    return torch.where(marks.any(1), marks.argmax(1), marks.shape[1])


@triton.jit(do_not_specialize=["width"])
def _mark(offsets, indices, marks, width, SPAN: tl.constexpr):
    unit = tl.program_id(1).to(tl.int64)
    start = tl.load(offsets + unit)
    number = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    valid = number < tl.load(offsets + unit + 1) - start
    place = tl.load(indices + start + number, mask=valid, other=0)
    tl.store(marks + unit * width + place, tl.full([SPAN], 1, tl.int8), mask=valid)


@triton.jit
def _line_step(
    acc, weight, top, q, key, seen, valid, k_pool, v_pool, table, kv_head, scale_log2, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys, ``seen`` [rows, keys], with ``valid`` keys to load: online softmax."""
    channel = tl.arange(0, D_PAD)
    at = pool_rows(table, key, valid, kv_head, KV_HEADS, PAGE)[:, None] * D + channel[None, :]
    there = valid[:, None] & (channel[None, :] < D)
    k = tl.load(k_pool + at, mask=there, other=0.0)
    scores = cap_logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale_log2, softcap, CAPPED)
    scores = tl.where(seen & valid[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - anchor)
    p = tl.exp2(scores - anchor[:, None])
    v = tl.load(v_pool + at, mask=there, other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, weight * shrink + tl.sum(p, 1), higher


@triton.jit(do_not_specialize=["first", "q_start", "q_len", "tiles", "sinks"])
def _lines(
    q_ptr, k_pool, v_pool, table, is_distance, is_column, touched, differences, counts, columns, v_offsets,
    columns_upto, starts, lowest, out, lse, q_head, q_row, first, q_start, q_len, tiles, sinks, scale_log2, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, CONE: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = ROWS // TILE
    head = tl.program_id(0)
    tile = (first + tl.num_programs(1) - 1 - tl.program_id(1)) * PER  # the first of the rows' tiles
    kv_head = head // (HEADS // KV_HEADS)
    unit = (head // (HEADS // UNITS)).to(tl.int64)
    position = tile * TILE + tl.arange(0, ROWS)
    row = (position - q_start).to(tl.int64)
    inside = (row >= 0) & (row < q_len)
    limit = q_start + q_len
    channel = tl.arange(0, D_PAD)
    q = tl.load(
        q_ptr + head.to(tl.int64) * q_head + row[:, None] * q_row + channel[None, :],
        mask=inside[:, None] & (channel[None, :] < D),
        other=0.0,
    )
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    start_of = position
    hidden_upto = 0
    if CONE:
        start_of = tl.load(starts + row, mask=inside, other=1 << 30).to(tl.int32)
        hidden_upto = tl.min(start_of, 0)  # what the first row does not see, no other does
    differing = tiles + PER - 1
    by_distance = is_distance + unit * tiles * TILE
    by_column = is_column + unit * tiles * TILE
    nearest = tile + PER - 1
    listed_tiles = counts + unit * differing
    many = tl.load(listed_tiles + nearest)
    skip_from, skipped = many, 0
    if CONE:  # tiles between the sinks and what the first row sees
        skip_from = tl.load(listed_tiles + nearest - hidden_upto // TILE)
        ahead = nearest - tl.cdiv(sinks, TILE)
        resume = tl.load(listed_tiles + ahead, mask=ahead >= 0, other=0)
        skipped = tl.maximum(resume - skip_from, 0)
    for i in tl.range(0, many - skipped):
        turn = i + tl.where(i >= skip_from, skipped, 0)
        key = (nearest - tl.load(differences + unit * differing + turn)) * TILE + tl.arange(0, TILE)
        distance = position[:, None] - key[None, :]
        valid = key < limit
        on_column = tl.load(by_column + key, mask=valid, other=0) != 0
        on_slash = tl.load(by_distance + distance, mask=(distance >= 0) & inside[:, None], other=0) != 0
        seen = (on_slash | on_column[None, :]) & (distance >= 0)
        if CONE:
            seen = seen & ((key < sinks)[None, :] | (key[None, :] >= start_of[:, None]))
        acc, weight, top = _line_step(
            acc, weight, top, q, key, seen, valid, k_pool, v_pool, table, kv_head, scale_log2, softcap,
            KV_HEADS, D, D_PAD, PAGE, CAPPED, PRECISION,
        )  # fmt: skip
    listed = columns + tl.load(v_offsets + unit)
    count = tl.load(columns_upto + unit * tiles + tl.minimum(nearest, tiles - 1))
    for start in tl.range(0, count, TILE):
        number = start + tl.arange(0, TILE)
        valid = number < count
        key = tl.load(listed + number, mask=valid, other=0)
        done = tl.load(touched + unit * differing + nearest - key // TILE, mask=valid, other=1)
        valid = valid & (done == 0) & (key < limit)
        if CONE:
            valid = valid & ((key < sinks) | (key >= hidden_upto))
        if tl.max(valid.to(tl.int32), 0) > 0:
            seen = key[None, :] <= position[:, None]
            if CONE:
                seen = seen & ((key < sinks)[None, :] | (key[None, :] >= start_of[:, None]))
            acc, weight, top = _line_step(
                acc, weight, top, q, key, seen, valid, k_pool, v_pool, table, kv_head, scale_log2, softcap,
                KV_HEADS, D, D_PAD, PAGE, CAPPED, PRECISION,
            )  # fmt: skip
    if CONE:
        emptied = inside & (weight == 0.0) & (position >= tl.load(lowest + unit))
        if tl.max(emptied.to(tl.int32), 0) > 0:
            for part in tl.static_range(PER):
                key = (tile + part) * TILE + tl.arange(0, TILE)
                seen = (key[None, :] == position[:, None]) & emptied[:, None]
                acc, weight, top = _line_step(
                    acc, weight, top, q, key, seen, key < limit, k_pool, v_pool, table, kv_head, scale_log2, softcap,
                    KV_HEADS, D, D_PAD, PAGE, CAPPED, PRECISION,
                )  # fmt: skip
    total = tl.where(weight == 0.0, 1.0, weight)
    tl.store(
        out + (head.to(tl.int64) * q_len + row)[:, None] * D + channel[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=inside[:, None] & (channel[None, :] < D),
    )
    tl.store(
        lse + head.to(tl.int64) * q_len + row,
        tl.where(weight == 0.0, float("-inf"), top + tl.log2(total)) * LN2,
        mask=inside,
    )
