"""LoopServe's decode in recorded steps: the lines that the last queries choose every so many steps. Means what
``LoopServe.select_decode`` means."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.methods.loopserve.triton_recorded import Due, W, observed_of
from saccade.ops.triton import batched_best
from saccade.ops.triton.batched_best import find_best
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.best_parts import BOUNDS, WORDS, bounds_at, known_at, part_at, put_bounds
from saccade.ops.triton.common import LOG2E, TYPES, begin, cap_logits, launched, pad, pool_rows, precision, processors
from saccade.ops.triton.radix_select import taken_of
from saccade.ops.triton.readers import load_keys

KEYS = 64  # scored in one go
SPLITS = 16  # parts of the keys over which rows' log-sum-exps are found


def choose_lines(rows: LayerRows, every: int, due: Due) -> None:
    """Choose the lines of those whose turn it is, from the queries of the last ``every`` steps."""
    device, width, units = rows.q.device, rows.pages.longest, rows.kv_heads
    per = rows.heads // units
    row_bytes = pad(rows.q.shape[2]) * rows.q.element_size()
    wide = row_bytes > 512  # whose tiles exceed a multiprocessor's shared memory
    tile, keys = min(32 if wide else 64, pad(per * every)), KEYS // 2 if wide else KEYS
    tiles = triton.cdiv(per * every, tile)
    logs = torch.empty(rows.count * units, tiles * tile, SPLITS, dtype=torch.float32, device=device)
    static = {
        "HEADS": rows.heads, "KV_HEADS": units, "D": rows.q.shape[2], "D_PAD": pad(rows.q.shape[2]),
        "PAGE": rows.pages.k.shape[2], "TILE": tile, "TILES": tiles, "KEYS": keys,
        "CAPPED": rows.softcap is not None, "PRECISION": precision(rows.q.dtype), "TYPE": TYPES[rows.q.dtype],
        "num_warps": 4,
        "num_stages": 2 if row_bytes > 256 else 3, **launched(device),
    }  # fmt: skip
    shared = (rows.pages.k, rows.pages.tables, rows.pages.lengths, rows.words, due.now)
    numbers = (*rows.pages.table_strides, rows.words.stride(0), rows.scale * LOG2E, rows.softcap or 0.0)
    _row_logs[(SPLITS, units, rows.count)](*shared, logs, *numbers, SPLITS=SPLITS, **static)
    sums = torch.empty(rows.count * units, 2 * width, dtype=torch.float32, device=device)
    programs = max(1, min(triton.cdiv(width, keys), triton.cdiv(8 * processors(device), rows.count * units)))
    _line_sums[(programs, units, 2 * rows.count)](
        *shared, logs, sums, *numbers, 2 * width, PER_PAD=pad(per), SPLITS=SPLITS, **static
    )
    bounds = torch.empty(rows.count, BOUNDS, dtype=torch.int32, device=device)
    _line_bounds[(rows.count,)](
        rows.pages.lengths, rows.words, due.now, bounds, rows.words.stride(0), num_warps=1, **launched(device)
    )
    best = find_best(sums.view(rows.count, units, -1), bounds)
    _choose_lines[(best.parts, units, rows.count)](
        sums, bounds, best.words, best.taken, rows.words, due.now, rows.words.stride(0), 2 * width, UNITS=units,
        PARTS=triton.next_power_of_2(best.parts), WORDS=WORDS, SPAN=batched_best.SPAN, num_warps=8, **launched(device),
    )  # fmt: skip


@triton.jit
def _asked(
    own, length, tile, unit,
    ELEMENT: tl.constexpr, HEADS: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """A tile of the unit's observed queries [TILE, D_PAD], head by head; their positions, and which there are."""
    seen, count = observed_of(own, length)
    number = tile * TILE + tl.arange(0, TILE)
    real = number < PER * count
    at = number % tl.maximum(count, 1)
    which = seen - 1 - (count - 1 - at) * seen // tl.maximum(count, 1)
    position = length - seen + which
    head = unit * PER + number // tl.maximum(count, 1)
    every = tl.load(own + W.every).to(tl.int32)
    channel = tl.arange(0, D_PAD)
    queries = tl.load(own + W.queries).to(tl.pointer_type(ELEMENT))
    q = tl.load(
        queries + ((position % every) * HEADS + head).to(tl.int64)[:, None] * D + channel[None, :],
        mask=real[:, None] & (channel < D)[None, :],
        other=0.0,
    )
    return q, position, real


@triton.jit(
    do_not_specialize=["table_row", "table_head", "word_row"],
    do_not_specialize_on_alignment=["tables", "lengths", "words", "now"],
)
def _row_logs(
    k_pool, tables, lengths, words, now, logs, table_row, table_head, word_row, scale_log2, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, SPLITS: tl.constexpr, TYPE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    split, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(now + row) != 0:
        PER: tl.constexpr = HEADS // KV_HEADS
        length = tl.load(lengths + row)
        own = words + row.to(tl.int64) * word_row
        table = tables + row.to(tl.int64) * table_row + unit.to(tl.int64) * table_head
        channel = tl.arange(0, D_PAD)
        for tile in tl.range(0, TILES):
            q, position, real = _asked(own, length, tile, unit, TYPE, HEADS, PER, D, D_PAD, TILE)
            top = tl.full([TILE], float("-inf"), tl.float32)
            weight = tl.zeros([TILE], tl.float32)
            for part in tl.range(split, tl.cdiv(length, KEYS), SPLITS):
                key = part * KEYS + tl.arange(0, KEYS)
                at = pool_rows(table, key, key < length, unit, KV_HEADS, PAGE)
                k = load_keys(k_pool, at[:, None], channel[None, :], (key < length)[:, None], D, TYPE)
                score = cap_logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale_log2, softcap, CAPPED)
                seen = (key[None, :] <= position[:, None]) & real[:, None]
                score = tl.where(seen, score, float("-inf"))
                higher = tl.maximum(top, tl.max(score, 1))
                anchor = tl.where(higher == float("-inf"), 0.0, higher)
                weight = weight * tl.exp2(top - anchor) + tl.sum(tl.exp2(score - anchor[:, None]), 1)
                top = higher
            log = tl.where(weight > 0.0, top + tl.log2(tl.where(weight > 0.0, weight, 1.0)), float("-inf"))
            to = logs + ((row * KV_HEADS + unit) * TILES + tile).to(tl.int64) * TILE * SPLITS
            tl.store(to + tl.arange(0, TILE) * SPLITS + split, log)


@triton.jit
def _whole_log(logs, entry, place, there, LINES: tl.constexpr, SPLITS: tl.constexpr):
    """The log-sum-exps of the queries at ``place``, base 2; +inf where not ``there``, so that weights are 0."""
    part = tl.arange(0, SPLITS)
    at = logs + entry * LINES * SPLITS + place[:, None] * SPLITS + part[None, :]
    found = tl.load(at, mask=there[:, None], other=float("-inf"))
    top = tl.max(found, 1)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(found - anchor[:, None]), 1)
    return tl.where(there & (total > 0.0), anchor + tl.log2(tl.where(total > 0.0, total, 1.0)), float("inf"))


@triton.jit(
    do_not_specialize=["table_row", "table_head", "word_row", "width"],
    do_not_specialize_on_alignment=["tables", "lengths", "words", "now"],
)
def _line_sums(
    k_pool, tables, lengths, words, now, logs, sums, table_row, table_head, word_row, scale_log2, softcap, width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, PER_PAD: tl.constexpr, SPLITS: tl.constexpr, TYPE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Weights summed by key, and by distance behind the ``length - 1`` keys that may be chosen."""
    begin(EARLY)
    unit, row, by_distance = tl.program_id(1), tl.program_id(2) // 2, tl.program_id(2) % 2
    if tl.load(now + row) != 0:
        PER: tl.constexpr = HEADS // KV_HEADS
        LINES: tl.constexpr = TILES * TILE
        length = tl.load(lengths + row)
        own = words + row.to(tl.int64) * word_row
        entry = (row * KV_HEADS + unit).to(tl.int64)
        table = tables + row.to(tl.int64) * table_row + unit.to(tl.int64) * table_head
        channel = tl.arange(0, D_PAD)
        seen, count = observed_of(own, length)
        out = sums + entry * width
        if by_distance == 0:
            for part in tl.range(tl.program_id(0), tl.cdiv(length - 1, KEYS), tl.num_programs(0)):
                key = part * KEYS + tl.arange(0, KEYS)
                at = pool_rows(table, key, key < length, unit, KV_HEADS, PAGE)
                k = load_keys(k_pool, at[:, None], channel[None, :], (key < length)[:, None], D, TYPE)
                total = tl.zeros([KEYS], tl.float32)
                for tile in tl.range(0, TILES):
                    q, position, real = _asked(own, length, tile, unit, TYPE, HEADS, PER, D, D_PAD, TILE)
                    log = _whole_log(logs, entry, tile * TILE + tl.arange(0, TILE), real, LINES, SPLITS)
                    score = cap_logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale_log2, softcap, CAPPED)
                    seen_keys = (key[None, :] <= position[:, None]) & real[:, None]
                    total += tl.sum(tl.where(seen_keys, tl.exp2(score - log[:, None]), 0.0), 0)
                tl.store(out + key, total, mask=key < length - 1)
        else:
            every = tl.load(own + W.every).to(tl.int32)
            queries = tl.load(own + W.queries).to(tl.pointer_type(TYPE))
            member = tl.arange(0, PER_PAD)
            mine = member < PER
            for part in tl.range(tl.program_id(0), tl.cdiv(length, KEYS), tl.num_programs(0)):
                distance = part * KEYS + tl.arange(0, KEYS)
                total = tl.zeros([KEYS], tl.float32)
                for number in tl.range(0, count):
                    position = length - seen + seen - 1 - (count - 1 - number) * seen // count
                    key = position - distance
                    there = key >= 0
                    at = pool_rows(table, key, there, unit, KV_HEADS, PAGE)
                    k = load_keys(k_pool, at[:, None], channel[None, :], there[:, None], D, TYPE)
                    head = unit * PER + member
                    q = tl.load(
                        queries + ((position % every) * HEADS + head).to(tl.int64)[:, None] * D + channel[None, :],
                        mask=mine[:, None] & (channel < D)[None, :],
                        other=0.0,
                    )
                    log = _whole_log(logs, entry, member * count + number, mine, LINES, SPLITS)
                    score = cap_logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale_log2, softcap, CAPPED)
                    weight = tl.where(mine[:, None] & there[None, :], tl.exp2(score - log[:, None]), 0.0)
                    total += tl.sum(weight, 0)
                total = tl.where(distance == 0, -1.0, total)  # the row's own key is read anyway
                tl.store(out + length - 1 + distance, total, mask=distance < length)


@triton.jit(do_not_specialize=["word_row"], do_not_specialize_on_alignment=["lengths", "words", "now", "bounds"])
def _line_bounds(lengths, words, now, bounds, word_row, EARLY: tl.constexpr):
    begin(EARLY)
    row = tl.program_id(0)
    count, take = 0, 0
    if tl.load(now + row) != 0:
        length = tl.load(lengths + row)
        own = words + row.to(tl.int64) * word_row
        take = tl.load(own + W.budget).to(tl.int32)
        count = 2 * length - 1
    put_bounds(bounds, row, 0, count, 0, 0, take)


@triton.jit(
    do_not_specialize=["word_row", "width"],
    do_not_specialize_on_alignment=["bounds", "known", "taken", "words", "now"],
)
def _choose_lines(
    sums, bounds, known, taken, words, now, word_row, width,
    UNITS: tl.constexpr, PARTS: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    part, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = row * UNITS + unit
    if tl.load(now + row) != 0:
        own = words + row.to(tl.int64) * word_row
        budget = tl.load(own + W.budget).to(tl.int32)
        out = tl.load(own + W.chosen).to(tl.pointer_type(tl.int32)) + unit.to(tl.int64) * budget
        first, last, _low, _high, wanted, between = bounds_at(bounds, entry, UNITS)
        begins, ends = part_at(first, last, part, SPAN)
        if (wanted > 0) & (begins < ends):
            bound, spare, level, placed = known_at(known, taken, entry, part, begins, wanted, between, PARTS, WORDS)
            at = tl.arange(0, SPAN)
            line = sums + entry.to(tl.int64) * width
            for start in tl.range(begins, ends, SPAN):
                chosen, level = taken_of(line, start + at, start + at < ends, bound, spare, level)
                tl.store(out + placed + tl.cumsum(chosen.to(tl.int32), 0) - 1, start + at, mask=chosen)
                placed += tl.sum(chosen.to(tl.int32), 0)
