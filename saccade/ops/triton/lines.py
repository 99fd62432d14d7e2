"""Vertical-slash prefill from ``Lines``: MInference's pattern, exact line by line, inside a window or not.

A tile of rows reads, for each distance, the keys that lie so far behind its rows: as many as it has rows, one after the
other. Where they lie depends on the distances alone, counted back from the tile's last row, so that one list of
stretches a unit, cut into spans of ``TILE`` keys, serves every tile of rows. A program reads those spans, masked to the
lines, and then the columns outside them, gathered. Which keys of a span a row reads hangs on the span's distance alone:
it is one word of as many bits, so that a tile's mask is a word for each row. Tiles for which that would take longer
than whole blocks read blocks (``line_blocks.py``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.layout import flat, rows
from saccade.ops.triton import line_blocks
from saccade.ops.triton.choose import lists_of
from saccade.ops.triton.common import LN2, LOG2E, also, cap_logits, pad, pool_rows, precision
from saccade.ops.triton.pages import LONG, gather
from saccade.ops.triton.readers import load_keys, load_values
from saccade.selection import Lines
from saccade.selection.window import Cone

TILE = 64
WARPS, STAGES = 4, 3


def attend_lines(
    q: Tensor, kv: KVView, lines: Lines, cone: Cone | None = None, *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """``q`` [heads, q_len, head_dim] -> ``out`` like q, ``lse`` float32 [heads, q_len] (natural log). Inside ``cone``
    as ``selection.Windowed`` says: a row that would lose its last key keeps its own."""
    shape, units, device = lines.shape, lines.units, q.device
    heads, q_len, head_dim = q.shape
    q, columns, v_offsets = rows(q), flat(lines.columns, torch.int32), flat(lines.v_offsets, torch.int64)
    tiles = -(-shape.k_len // TILE)
    is_distance = line_marks(lines.s_offsets, lines.distances, units, tiles * TILE)
    is_column = line_marks(v_offsets, columns, units, tiles * TILE)
    begins = _spans(is_distance)
    begins_upto = begins.cumsum(1, dtype=torch.int32)
    words = _words_of(is_distance)
    span_offsets, spans = lists_of(begins)
    columns_upto = is_column.unflatten(1, (tiles, TILE)).sum(-1, dtype=torch.int32).cumsum(1, dtype=torch.int32)
    out = torch.empty(heads, q_len, head_dim, dtype=q.dtype, device=device)
    lse = torch.empty(heads, q_len, dtype=torch.float32, device=device)
    starts = lowest = columns_upto
    if cone is not None:
        starts = cone.starts(torch.arange(shape.q_start, shape.q_start + q_len, device=device))
        lowest = torch.stack([_first(is_column), _first(is_distance)]).amin(0)  # rows from here on read keys
    first = shape.q_start // TILE
    paged, copied = kv.paged(), q_len >= LONG
    k, v = paged.k, paged.v
    if copied:
        k, v = (gather(part, paged.block_table, 0, shape.q_start + q_len, q.dtype) for part in (k, v))
    elsewhere, of_unit = is_column, 0  # a pointer even to nothing
    if cone is None and copied and line_blocks.serves(q):
        steps = begins_upto[:, TILE - 1 :: TILE] + (columns_upto + TILE - 1) // TILE
        covered = line_blocks.cover(shape, is_distance, is_column, steps)
        line_blocks.attend(q, shape, covered, words, k, v, out, lse, scale, softcap)
        elsewhere, of_unit = covered.marks, covered.marks.shape[1]
    _lines[(heads, (shape.q_start + q_len - 1) // TILE - first + 1)](
        q,
        k,
        v,
        paged.block_table,
        words,
        is_column,
        spans,
        span_offsets,
        begins_upto,
        columns if columns.numel() else columns_upto,  # a pointer even to nothing
        v_offsets,
        columns_upto,
        starts,
        lowest,
        elsewhere,
        out,
        lse,
        q.stride(0),
        q.stride(1),
        paged.head_stride,
        of_unit,
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
        TILE=TILE,
        CONE=cone is not None,
        COPIED=copied,
        CAPPED=softcap is not None,
        PRECISION=precision(q.dtype),
        LN2=LN2,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out, lse


def _spans(is_distance: Tensor) -> Tensor:
    """Where spans of TILE keys begin that hold, for each marked distance (int8 [units, n]), the TILE keys from it on
    towards the row: bool [units, n + TILE - 1] by the number of keys between a span's nearest key and the last row of a
    tile. Stretches that touch are cut as one; the last span of one may reach into the next, whose keys count once."""
    n = is_distance.shape[1]
    upto = torch.nn.functional.pad(is_distance.cumsum(1, dtype=torch.int32), (TILE, 0))
    upto = torch.cat([upto, upto[:, -1:].expand(-1, TILE - 1)], 1)
    wanted = upto[:, TILE:] > upto[:, :-TILE]  # a distance o wants o .. o + TILE - 1
    number = torch.arange(n + TILE - 1, dtype=torch.int32, device=wanted.device)
    opens = wanted & ~torch.nn.functional.pad(wanted[:, :-1], (1, 0))
    since = number - torch.where(opens, number, 0).cummax(1).values
    return wanted & (since % TILE == 0)


def _words_of(is_distance: Tensor) -> Tensor:
    """int64 [units, n + 2 * TILE]: bit c of word x says whether distance x - c is marked (int8 [units, n])."""
    units, n = is_distance.shape
    words = torch.empty(units, n + 2 * TILE, dtype=torch.int64, device=is_distance.device)
    _pack[(triton.cdiv(n + 2 * TILE, 256), units)](
        is_distance, words, n, n + 2 * TILE, BITS=TILE, SPAN=256, num_warps=4
    )
    return words


def line_marks(offsets: Tensor, indices: Tensor, units: int, width: int) -> Tensor:
    """int8 [units, width]: 1 where a unit lists the index. ``offsets`` int64 [units + 1], ``indices`` int32, with room
    behind the last offset."""
    offsets, indices = flat(offsets, torch.int64), flat(indices, torch.int32)
    marks = torch.zeros(units, width, dtype=torch.int8, device=offsets.device)
    longest = min(indices.numel(), width)
    if longest:
        _mark[(triton.cdiv(longest, 1024), units)](offsets, indices, marks, width, SPAN=1024, num_warps=4)
    return marks


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


@triton.jit(do_not_specialize=["n", "width"])
def _pack(is_distance, words, n, width, BITS: tl.constexpr, SPAN: tl.constexpr):
    unit = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    word = tl.zeros([SPAN], tl.int64)
    for bit in tl.range(0, BITS):
        distance = number - bit
        found = tl.load(is_distance + unit * n + distance, mask=(distance >= 0) & (distance < n), other=0)
        word |= (found != 0).to(tl.int64) << bit
    tl.store(words + unit * width + number, word, mask=number < width)


@triton.jit
def _line_step(
    acc, weight, top, q, key, seen, valid, limit, k_pool, v_pool, table, kv_head, scale_log2, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, COPIED: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys, ``seen`` [rows, keys], with ``valid`` keys to load: online softmax."""
    channel = tl.arange(0, D_PAD)
    if COPIED:
        row = kv_head.to(tl.int64) * limit + key
    else:
        row = pool_rows(table, key, valid, kv_head, KV_HEADS, PAGE)
    k = load_keys(k_pool, row[:, None], channel[None, :], valid[:, None], D, q.dtype)
    scores = cap_logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale_log2, softcap, CAPPED)
    scores = tl.where(seen & valid[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - anchor)
    p = tl.exp2(scores - anchor[:, None])
    v = load_values(v_pool, row[:, None], channel[None, :], valid[:, None], D, q.dtype)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, weight * shrink + tl.sum(p, 1), higher


@triton.jit(
    do_not_specialize=["table_head", "of_unit", "first", "q_start", "q_len", "tiles", "sinks"],
    do_not_specialize_on_alignment=["table", "columns"],
)
def _lines(
    q_ptr, k_pool, v_pool, table, words, is_column, spans, span_offsets, begins_upto, columns, v_offsets,
    columns_upto, starts, lowest, elsewhere, out, lse, q_head, q_row, table_head, of_unit, first, q_start, q_len, tiles,
    sinks, scale_log2, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, CONE: tl.constexpr, COPIED: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = first + tl.num_programs(1) - 1 - tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    table += kv_head.to(tl.int64) * table_head
    unit = (head // (HEADS // UNITS)).to(tl.int64)
    position = tile * TILE + tl.arange(0, TILE)
    row = (position - q_start).to(tl.int64)
    inside = (row >= 0) & (row < q_len)
    passed = 0  # whether line_blocks.py serves the tile
    if of_unit > 0:
        passed = tl.load(elsewhere + unit * of_unit + tile // 2 - q_start // (2 * TILE)).to(tl.int32)
        inside = also(inside, passed == 0)
    limit = q_start + q_len
    channel = tl.arange(0, D_PAD)
    q = tl.load(
        q_ptr + head.to(tl.int64) * q_head + row[:, None] * q_row + channel[None, :],
        mask=inside[:, None] & (channel[None, :] < D),
        other=0.0,
    )
    acc = tl.zeros([TILE, D_PAD], tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    top = tl.full([TILE], float("-inf"), tl.float32)
    start_of = position
    hidden_upto = 0
    if CONE:
        start_of = tl.load(starts + row, mask=inside, other=1 << 30).to(tl.int32)
        hidden_upto = tl.min(start_of, 0)  # what the first row does not see, no other does
    by_distance = words + unit * (tiles + 2) * TILE + tl.arange(0, TILE)  # of each row
    bit = tl.arange(0, TILE)[None, :]
    by_column = is_column + unit * tiles * TILE
    behind = (tile + 1) * TILE - 1  # the last row; spans count back from it
    begins_upto += unit * (tiles * TILE + TILE - 1)
    listed_spans = spans + tl.load(span_offsets + unit)
    many = tl.where(passed == 0, tl.load(begins_upto + behind), 0)
    skip_from, skipped = many, 0
    if CONE:  # spans between the sinks and what the first row sees
        skip_from = tl.load(begins_upto + behind - hidden_upto)
        far = behind - TILE + 1 - sinks
        resume = tl.load(begins_upto + far, mask=far >= 0, other=0)
        skipped = tl.maximum(resume - skip_from, 0)
    for i in tl.range(0, many - skipped):
        turn = i + tl.where(i >= skip_from, skipped, 0)
        nearest = tl.load(listed_spans + turn)  # a row and a key of it are nearest + their numbers' difference apart
        back = nearest + TILE - 1 - tl.arange(0, TILE)
        done = tl.load(listed_spans + turn - 1, mask=turn > 0, other=-TILE) + TILE  # the span before reaches to here
        key = behind - back
        valid = (key >= 0) & (key < limit) & (back >= done)
        on_column = tl.load(by_column + key, mask=valid, other=0) != 0
        on_slash = ((tl.load(by_distance + nearest)[:, None] >> bit) & 1) != 0  # never ahead of its row
        seen = on_slash | (on_column[None, :] & (key[None, :] <= position[:, None]))
        if CONE:
            seen = seen & ((key < sinks)[None, :] | (key[None, :] >= start_of[:, None]))
        acc, weight, top = _line_step(
            acc, weight, top, q, key, seen, valid, limit, k_pool, v_pool, table, kv_head, scale_log2, softcap,
            KV_HEADS, D, D_PAD, PAGE, COPIED, CAPPED, PRECISION,
        )  # fmt: skip
    listed = columns + tl.load(v_offsets + unit)
    count = tl.where(passed == 0, tl.load(columns_upto + unit * tiles + tile), 0)
    for start in tl.range(0, count, TILE):
        number = start + tl.arange(0, TILE)
        valid = number < count
        key = tl.load(listed + number, mask=valid, other=0)
        back = behind - key
        opened = tl.load(begins_upto + back, mask=valid, other=1)
        closed = tl.load(begins_upto + back - TILE, mask=valid & (back >= TILE), other=0)
        valid = valid & (opened == closed) & (key < limit)  # in none of the spans
        if CONE:
            valid = valid & ((key < sinks) | (key >= hidden_upto))
        seen = key[None, :] <= position[:, None]
        if CONE:
            seen = seen & ((key < sinks)[None, :] | (key[None, :] >= start_of[:, None]))
        acc, weight, top = _line_step(
            acc, weight, top, q, key, seen, valid, limit, k_pool, v_pool, table, kv_head, scale_log2, softcap,
            KV_HEADS, D, D_PAD, PAGE, COPIED, CAPPED, PRECISION,
        )  # fmt: skip
    if CONE:
        emptied = inside & (weight == 0.0) & (position >= tl.load(lowest + unit))
        if tl.max(emptied.to(tl.int32), 0) > 0:
            key = tile * TILE + tl.arange(0, TILE)
            seen = (key[None, :] == position[:, None]) & emptied[:, None]
            acc, weight, top = _line_step(
                acc, weight, top, q, key, seen, key < limit, limit, k_pool, v_pool, table, kv_head, scale_log2, softcap,
                KV_HEADS, D, D_PAD, PAGE, COPIED, CAPPED, PRECISION,
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
