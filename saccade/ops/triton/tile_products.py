"""Products with quantised weights in tiles (``ops.tile_weights``), and their values, on a GPU.

Codes are exact as 16-bit floats (``tile_operands``), so the tensor cores sum the channels that have a scale in common,
and it follows in float32; what a format takes off a weight is times sums of activations, which a product with ones
gives.

The sums of an output are split among programs by the sizes of the matrix alone, and added up in order: results of a row
hang neither on the number of rows nor on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.layout import rows as in_rows
from saccade.ops.tile_weights import TILE, Layout, TileMatrix
from saccade.ops.triton.common import arrivals, begin, interpreted, launched, pad, processors, runs_on
from saccade.ops.triton.products import _ask_for
from saccade.ops.triton.tile_operands import integers, operand

MOST_ROWS = 32
PROGRAMS = 4  # of a processor, at most, where channels are split
FEWEST = 2  # spans of a program, where several share an output's channels
WARPS, STAGES = 2, 3
LINE = 128  # bytes of a cache line


def serves(x: Tensor) -> bool:
    """Whether the kernel takes so many rows; more are worth unpacking a piece of the matrix for."""
    return 0 < x.shape[0] <= MOST_ROWS and runs_on(x)


def product(x: Tensor, matrix: TileMatrix) -> Tensor:
    """``x`` [rows, channels] times ``matrix``: [rows, outputs] in the dtype of ``x``, summed in float32."""
    x, bias = in_rows(x), matrix.bias
    rows, outputs = x.shape[0], matrix.outputs
    tiles, spans = len(matrix.weight), -(-matrix.channels // matrix.layout.span)
    splits = _splits(tiles, spans, processors(x.device))
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    parts = out if splits == 1 else torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    _product[(tiles, splits)](
        x, *_views(matrix), out if bias is None else bias, out, parts, arrivals(x.device, tiles), rows, outputs,
        matrix.channels, spans, x.stride(0), matrix.weight.stride(0), ROWS=pad(rows, 8), SPLITS=splits,
        BIASED=bias is not None, MAGIC=_magic(x.dtype), FULL=matrix.channels % matrix.layout.span == 0,
        TILE=TILE, LINE=LINE, STAGES=STAGES, **_constants(matrix.layout), num_warps=WARPS, **launched(x.device),
    )  # fmt: skip
    return out


def values(matrix: TileMatrix, outputs: Tensor | range, dtype: torch.dtype) -> Tensor:
    """Rows ``outputs`` (int64 [n], or a range of consecutive ones) of the weight, in ``dtype`` [n, channels]."""
    count, listed = len(outputs), isinstance(outputs, Tensor)
    out = torch.empty(count, matrix.channels, dtype=dtype, device=matrix.weight.device)
    if count:
        spans = -(-matrix.channels // matrix.layout.span)
        ids: Any = outputs.contiguous() if isinstance(outputs, Tensor) else out
        _values[(triton.cdiv(count, TILE), spans)](
            *_views(matrix), ids, out, count, 0 if isinstance(outputs, Tensor) else outputs.start, matrix.channels,
            spans, matrix.weight.stride(0), LISTED=listed, TILE=TILE, **_constants(matrix.layout), num_warps=4,
        )  # fmt: skip
    return out


def _views(matrix: TileMatrix) -> Sequence[Tensor]:
    """The tiles as words, halves and bytes."""
    return matrix.weight.view(torch.int16), matrix.weight.view(matrix.layout.kind), matrix.weight


def _constants(layout: Layout) -> dict[str, Any]:
    names = ("bits", "more", "part", "group", "zero", "factors", "signed", "least", "minima", "zeros", "span")
    return {name.upper(): getattr(layout, name) for name in names}


def _magic(dtype: torch.dtype) -> int:
    """The bits of the 16-bit float whose last place is worth 1; 0: codes are converted, as float32 rows need it and the
    interpreter, which knows no assembly."""
    if interpreted or dtype == torch.float32:
        return 0
    return 0x4300 if dtype == torch.bfloat16 else 0x6400


def _splits(tiles: int, spans: int, count: int) -> int:
    """In how many parts to sum an output's channels. Only the sizes of the matrix decide."""
    splits = 1
    while tiles * splits * 2 <= PROGRAMS * count and spans >= 2 * splits * FEWEST:
        splits *= 2
    return splits


@triton.jit
def _sections(
    spans, TILE: tl.constexpr, BITS: tl.constexpr, MORE: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr,
    LEAST: tl.constexpr, FACTORS: tl.constexpr, MINIMA: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Bytes of a tile at which further bits, scales, what is taken off, factors of either, and codes of 0 begin."""
    more = spans * (SPAN * TILE * BITS // 8)
    scales = more + spans * (SPAN * TILE * MORE // 8)
    size = tl.cdiv(spans * SPAN, GROUP) * (2 * TILE)
    factors = scales + size * (2 if LEAST else 1)
    bytes_each = spans * (SPAN // PART * TILE)
    minima = factors + (bytes_each if FACTORS else 0)
    return more, scales, scales + size, factors, minima, minima + (bytes_each if MINIMA else 0)


@triton.jit
def _group(span, NUMBER: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr):
    """Number of the channels that have a 16-bit scale in common, with part NUMBER of a span."""
    if GROUP % SPAN == 0:
        return span // (GROUP // SPAN)
    else:
        return span * (SPAN // GROUP) + NUMBER * PART // GROUP


@triton.jit
def _number(at, which, own, TILE: tl.constexpr):
    """float32 [outputs]: numbers of the group or part ``which``."""
    return tl.load(at + which * TILE + own).to(tl.float32)


@triton.jit
def _signed(at, which, own, SIGNED: tl.constexpr, TILE: tl.constexpr):
    """The same of bytes, perhaps signed ones."""
    found = tl.load(at + which * TILE + own)
    return (found.to(tl.int8, bitcast=True) if SIGNED else found).to(tl.float32)


@triton.jit
def _dot(a, b):
    if b.dtype == tl.float32:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def _add_part(
    total, ones, x, x_row, seen_rows, channels, word, further, scale, off, span, NUMBER: tl.constexpr,
    FIELD: tl.constexpr, BITS: tl.constexpr, MORE: tl.constexpr, PART: tl.constexpr, ZERO: tl.constexpr,
    LEAST: tl.constexpr, SPAN: tl.constexpr, MAGIC: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``total`` [outputs, rows] with the products of part NUMBER of a span."""
    channel = (span * SPAN + NUMBER * PART + tl.arange(0, PART))[:, None]
    seen = seen_rows if FULL else seen_rows & (channel < channels)
    value = tl.load(x + tl.arange(0, ROWS)[None, :] * x_row + channel, mask=seen, other=0.0)
    codes = operand(word, further, FIELD * BITS, NUMBER * MORE, BITS, MORE, ZERO, MAGIC, value.dtype)
    total += _dot(codes, value) * scale[:, None]
    if LEAST:
        total -= _dot(ones, value) * off[:, None]
    return total


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["parts"])
def _product(
    x, words, halves, stored, bias, out, parts, arrived, rows, outputs, channels, spans, x_row, tile_bytes,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr, MAGIC: tl.constexpr, FULL: tl.constexpr,
    TILE: tl.constexpr, LINE: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr, MORE: tl.constexpr,
    PART: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, FACTORS: tl.constexpr, SIGNED: tl.constexpr,
    LEAST: tl.constexpr, MINIMA: tl.constexpr, ZEROS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    start = split * tl.cdiv(spans, SPLITS)
    stop = tl.minimum(start + tl.cdiv(spans, SPLITS), spans)
    at = tile.to(tl.int64) * tile_bytes
    size: tl.constexpr = SPAN * TILE * BITS // 8  # bytes of a span's codes
    if EARLY:  # nothing on the way writes weights
        _ask_for(stored + at + tl.minimum(start, spans - 1) * size + tl.arange(0, size // LINE) * LINE)
    begin(EARLY)
    more, scales, least, factors, minima, zeros = _sections(
        spans, TILE, BITS, MORE, PART, GROUP, LEAST, FACTORS, MINIMA, SPAN
    )
    words, halves, stored = words + at // 2, halves + at // 2, stored + at
    row, own = tl.arange(0, ROWS)[None, :], tl.arange(0, TILE)
    place = own[:, None] * PART + tl.arange(0, PART)[None, :]
    ones = tl.full([TILE, PART], 1.0, x.dtype.element_ty)
    total = tl.zeros([TILE, ROWS], tl.float32)
    for span in tl.range(start, stop, num_stages=STAGES):
        further = place.to(tl.int16)
        if MORE:
            further = tl.load(words + more // 2 + span * (TILE * PART) + place, eviction_policy="evict_first")
        whole = tl.zeros([TILE], tl.float32)
        less = whole
        for number in tl.static_range(SPAN // PART * BITS // 16):
            word = tl.load(words + span * (size // 2) + number * (TILE * PART) + place, eviction_policy="evict_first")
            for field in tl.static_range(16 // BITS):
                if (number * (16 // BITS) + field) * PART % GROUP == 0 or (number == 0 and field == 0):
                    group = _group(span, number * (16 // BITS) + field, PART, GROUP, SPAN)
                    whole = _number(halves + scales // 2, group, own, TILE)
                    if LEAST:
                        less = _number(halves + least // 2, group, own, TILE)
                    if ZEROS:
                        less = whole * (_number(stored + zeros, group, own, TILE) - ZERO)
                part = span * (SPAN // PART) + number * (16 // BITS) + field
                scale, off = whole, less
                if FACTORS:
                    scale = whole * _signed(stored + factors, part, own, SIGNED, TILE)
                if MINIMA:
                    off = less * _number(stored + minima, part, own, TILE)
                total = _add_part(
                    total, ones, x, x_row, row < rows, channels, word, further, scale, off, span,
                    number * (16 // BITS) + field, field, BITS, MORE, PART, ZERO, LEAST or ZEROS, SPAN, MAGIC,
                    FULL, ROWS,
                )  # fmt: skip
    output = tile * TILE + own
    real = (row < rows) & (output < outputs)[:, None]
    place = row * outputs + output[:, None]
    last = True
    if SPLITS > 1:
        tl.store(parts + split * rows * outputs + place, total, mask=real)
        tl.debug_barrier()  # all threads' stores come before the arrival that one of them announces
        last = tl.atomic_add(arrived + tile, tl.cast(1, tl.int64), sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        if SPLITS > 1:
            total = tl.zeros([TILE, ROWS], tl.float32)
            for number in tl.static_range(SPLITS):  # in their order, whoever came last
                total += tl.load(parts + number * rows * outputs + place, mask=real, other=0.0, volatile=True)
            tl.store(arrived + tile, tl.cast(0, tl.int64))
        if BIASED:
            total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=real)


@triton.jit
def _values(
    words, halves, stored, ids, out, count, first, channels, spans, tile_bytes, LISTED: tl.constexpr,
    TILE: tl.constexpr, BITS: tl.constexpr, MORE: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, FACTORS: tl.constexpr, SIGNED: tl.constexpr, LEAST: tl.constexpr, MINIMA: tl.constexpr,
    ZEROS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    number, span = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1)
    output = number.to(tl.int64) + first
    if LISTED:
        output = tl.load(ids + number, mask=number < count, other=0)
    output = tl.where(number < count, output, first)
    at, own = output // TILE * tile_bytes, (output % TILE).to(tl.int32)
    more, scales, least, factors, minima, zeros = _sections(
        spans, TILE, BITS, MORE, PART, GROUP, LEAST, FACTORS, MINIMA, SPAN
    )
    lane = tl.arange(0, PART)
    words = words + (at // 2 + own * PART)[:, None] + lane[None, :]
    halves, stored = halves + at // 2, stored + at
    row = out + number.to(tl.int64)[:, None] * channels
    further = tl.load(words + more // 2 + span * (TILE * PART)) if MORE else 0
    for part in tl.static_range(SPAN // PART):
        word = tl.load(words + span * (SPAN * TILE * BITS // 16) + part // (16 // BITS) * (TILE * PART))
        code = integers(word, further, part % (16 // BITS) * BITS, part * MORE, BITS, MORE, ZERO)
        group, run = _group(span, part, PART, GROUP, SPAN), span * (SPAN // PART) + part
        scale = _number(halves + scales // 2, group, own, TILE)
        if ZEROS:
            code += ZERO - tl.load(stored + zeros + group * TILE + own).to(tl.int32)[:, None]
        if FACTORS:
            scale *= _signed(stored + factors, run, own, SIGNED, TILE)
        value = code.to(tl.float32) * scale[:, None]
        if LEAST:
            less = _number(halves + least // 2, group, own, TILE)
            if MINIMA:
                less *= _number(stored + minima, run, own, TILE)
            value -= less[:, None]
        channel = span * SPAN + part * PART + lane[None, :]
        seen = (number < count)[:, None] & (channel < channels)
        tl.store(row + channel, value.to(out.dtype.element_ty), mask=seen)
