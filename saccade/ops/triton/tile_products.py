"""Products with quantised weights in tiles (``ops.tile_weights``), and their values, on a GPU.

Codes are exact as 16-bit floats, so the tensor cores sum the channels that have a scale in common, and it follows in
float32; what a format takes off a weight is times sums of activations, which a product with ones gives. On GPUs of
NVIDIA's 16-bit rows take the same road by ``tile_rows``, which is much faster.

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
from saccade.ops.tile_weights import TILE, Layout, TileExperts, TileMatrix
from saccade.ops.triton import tile_rows
from saccade.ops.triton.common import arrivals, begin, launched, pad, processors, runs_on

MOST_ROWS = 32
PLAIN = tile_rows.Launch(4, 8, 2, 16)
STAGES = 2
TYPICAL = 4  # experts of a row: how many rows there are must not decide what a row gives


def serves(x: Tensor) -> bool:
    """Whether the kernels take so many rows; more are worth unpacking a piece of the matrix for."""
    return 0 < x.shape[0] <= MOST_ROWS and runs_on(x)


def product(x: Tensor, matrix: TileMatrix) -> Tensor:
    """``x`` [rows, channels] times ``matrix``: [rows, outputs] in the dtype of ``x``, summed in float32."""
    x, bias, layout, device = in_rows(x), matrix.bias, matrix.layout, x.device
    rows, outputs, wide = x.shape[0], matrix.outputs, pad(x.shape[0], 8)
    steps = -(-matrix.channels // layout.step)
    quick = tile_rows.serves(x)
    launch, each = (tile_rows.LAUNCH, tile_rows.OUTPUTS) if quick else (PLAIN, TILE)
    blocks = len(matrix.weight) * (TILE // each)
    splits = _splits(blocks, -(-steps // launch.warps) if quick else steps, processors(device), launch)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=device)
    parts = out if splits == 1 else torch.empty(splits, blocks, each, wide, dtype=torch.float32, device=device)
    words, halves, stored = _views(matrix)
    places = rows, outputs, matrix.channels, steps, x.stride(0), matrix.weight.stride(0), *matrix.places[1:]
    others = out if bias is None else bias, out, parts, arrivals(device, blocks)
    shared = _constants(layout) | launched(device) | {"TILE": TILE, "ROWS": wide, "SPLITS": splits}
    shared |= {"BIASED": bias is not None, "FULL": matrix.channels % layout.step == 0, **launch.options(rows)}
    if quick:
        own = tile_rows.constants(x.dtype, layout.kind)
        tile_rows.product[(blocks, splits)](x, words, stored, *others, *places, **shared, **own)
    else:
        _product[(blocks, splits)](
            x, words, halves, stored, *others, *places, out, 0, 1, **shared, GROUPED=False, STAGES=STAGES
        )
    return out


def grouped(x: Tensor, experts: TileExperts, chosen: Tensor, each: int) -> Tensor:
    """Row ``i // each`` of ``x`` [rows, channels] times the expert ``chosen[i]`` (int64 [n]), for every i at once: [n,
    outputs]. What no row chose is not read, and the host need not know."""
    x, first, device, count = in_rows(x), experts.first, x.device, len(chosen)
    layout, blocks = first.layout, len(first.weight)
    steps = -(-first.channels // layout.step)
    splits = _splits(blocks * TYPICAL, steps, processors(device), PLAIN)
    out = torch.empty(count, first.outputs, dtype=x.dtype, device=device)
    parts = out if splits == 1 else torch.empty(count, splits, first.outputs, dtype=torch.float32, device=device)
    _product[(blocks, splits, count)](
        x, *_views(experts), out if experts.bias is None else experts.bias, out, parts,
        arrivals(device, blocks * count), 1, first.outputs, first.channels, steps, x.stride(0),
        first.weight.stride(0), *first.places[1:], chosen.contiguous(), experts.weight.stride(0), each,
        **_constants(layout), **launched(device), TILE=TILE, ROWS=pad(1, 8), SPLITS=splits,
        BIASED=experts.bias is not None, FULL=first.channels % layout.step == 0, GROUPED=True, STAGES=STAGES,
        **PLAIN.options(1),
    )  # fmt: skip
    return out


def values(matrix: TileMatrix, outputs: Tensor | range, dtype: torch.dtype) -> Tensor:
    """Rows ``outputs`` (int64 [n], or a range of consecutive ones) of the weight, in ``dtype`` [n, channels]."""
    count, listed = len(outputs), isinstance(outputs, Tensor)
    out = torch.empty(count, matrix.channels, dtype=dtype, device=matrix.weight.device)
    if count:
        steps = -(-matrix.channels // matrix.layout.step)
        ids: Any = outputs.contiguous() if isinstance(outputs, Tensor) else out
        _values[(triton.cdiv(count, TILE), steps)](
            *_views(matrix), ids, out, count, 0 if isinstance(outputs, Tensor) else outputs.start, matrix.channels,
            matrix.weight.stride(0), *matrix.places[1:], LISTED=listed, TILE=TILE, **_constants(matrix.layout),
            num_warps=4,
        )  # fmt: skip
    return out


def _views(matrix: TileMatrix | TileExperts) -> Sequence[Tensor]:
    """The tiles as words, halves and bytes."""
    return matrix.weight.view(torch.int16), matrix.weight.view(matrix.layout.kind), matrix.weight


def _constants(layout: Layout) -> dict[str, Any]:
    names = ("bits", "more", "part", "group", "zero", "factors", "signed", "least", "minima", "zeros", "step", "span")
    return {name.upper(): getattr(layout, name) for name in names}


def _splits(blocks: int, turns: int, count: int, launch: tile_rows.Launch) -> int:
    """In how many parts to sum the channels of a block of outputs. Only the sizes of the matrix decide."""
    splits = 1
    while (
        2 * splits <= launch.splits
        and 2 * splits * blocks <= launch.programs * count
        and turns >= 2 * splits * launch.fewest
    ):
        splits *= 2
    return splits


@triton.jit
def _place(step, own, NUMBER: tl.constexpr, EACH: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr):
    """Where the number of part NUMBER of a step lies, of numbers for EACH channels."""
    if EACH > STEP:
        return step // (EACH // STEP) * TILE + own
    else:
        return (step * TILE + own) * (STEP // EACH) + NUMBER


@triton.jit
def _number(at, place, SIGNED: tl.constexpr):
    """float32 of the numbers at ``place``; of bytes, perhaps signed ones."""
    found = tl.load(at + place)
    return (found.to(tl.int8, bitcast=True) if SIGNED else found).to(tl.float32)


@triton.jit
def _dot(a, b):
    if b.dtype == tl.float32:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def _integers(
    word, further, SHIFT: tl.constexpr, MORE_SHIFT: tl.constexpr, BITS: tl.constexpr, MORE: tl.constexpr,
    ZERO: tl.constexpr,
):  # fmt: skip
    """int32: codes less their zero."""
    codes = word.to(tl.int32) >> SHIFT & ((1 << BITS) - 1)
    if MORE:
        codes = codes | (further.to(tl.int32) >> MORE_SHIFT & ((1 << MORE) - 1)) << 4
    return codes - ZERO


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["parts"])
def _product(
    x, words, halves, stored, bias, out, parts, arrived, rows, outputs, channels, steps, x_row, tile_bytes, more,
    scales, least, factors, minima, zeros, chosen, expert_bytes, each, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    BIASED: tl.constexpr, FULL: tl.constexpr, GROUPED: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, MORE: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    FACTORS: tl.constexpr, SIGNED: tl.constexpr, LEAST: tl.constexpr, MINIMA: tl.constexpr, ZEROS: tl.constexpr,
    STEP: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    start = split * tl.cdiv(steps, SPLITS)
    stop = tl.minimum(start + tl.cdiv(steps, SPLITS), steps)
    at = tile.to(tl.int64) * tile_bytes
    begin(EARLY)
    if GROUPED:  # one row by an expert of its own
        pair = tl.program_id(2)
        expert = tl.load(chosen + pair)
        at += expert * expert_bytes
        x, bias, out = x + pair // each * x_row, bias + expert * outputs, out + pair.to(tl.int64) * outputs
        parts, arrived = parts + pair * SPLITS * outputs, arrived + pair * tl.num_programs(0)
    words, halves, stored = words + at // 2, halves + at // 2, stored + at
    row, own = tl.arange(0, ROWS)[None, :], tl.arange(0, TILE)
    place = own[:, None] * PART + tl.arange(0, PART)[None, :]
    ones = tl.full([TILE, PART], 1.0, x.dtype.element_ty)
    total = tl.zeros([TILE, ROWS], tl.float32)
    for step in tl.range(start, stop, num_stages=STAGES):
        word = tl.load(words + step * (TILE * PART) + place, eviction_policy="evict_first")
        further = word
        if MORE:
            further = tl.load(words + more // 2 + step // (SPAN // STEP) * (TILE * PART) + place)
            further = further.to(tl.int32) >> step % (SPAN // STEP) * (16 // BITS * MORE)
        for field in tl.static_range(16 // BITS):
            group = _place(step, own, field * PART // GROUP, GROUP, STEP, TILE)
            part = _place(step, own, field, PART, STEP, TILE)
            scale = _number(halves + scales // 2, group, False)
            if LEAST:
                off = _number(halves + least // 2, group, False)
            if ZEROS:
                off = scale * (_number(stored + zeros, group, False) - ZERO)
            if FACTORS:
                scale *= _number(stored + factors, part, SIGNED)
            if MINIMA:
                off *= _number(stored + minima, part, False)
            channel = (step * STEP + field * PART + tl.arange(0, PART))[:, None]
            seen = row < rows if FULL else (row < rows) & (channel < channels)
            value = tl.load(x + row * x_row + channel, mask=seen, other=0.0)
            codes = _integers(word, further, field * BITS, field * MORE, BITS, MORE, ZERO).to(value.dtype)
            total += _dot(codes, value) * scale[:, None]
            if LEAST or ZEROS:
                total -= _dot(ones, value) * off[:, None]
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
            for number in tl.static_range(SPLITS):  # in their order, whichever came last
                total += tl.load(parts + number * rows * outputs + place, mask=real, other=0.0, volatile=True)
            tl.store(arrived + tile, tl.cast(0, tl.int64))
        if BIASED:
            total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=real)


@triton.jit
def _values(
    words, halves, stored, ids, out, count, first, channels, tile_bytes, more, scales, least, factors, minima, zeros,
    LISTED: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, MORE: tl.constexpr, PART: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, FACTORS: tl.constexpr, SIGNED: tl.constexpr, LEAST: tl.constexpr,
    MINIMA: tl.constexpr, ZEROS: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    which, step = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1)
    output = which.to(tl.int64) + first
    if LISTED:
        output = tl.load(ids + which, mask=which < count, other=0)
    output = tl.where(which < count, output, first)
    at, own = output // TILE * tile_bytes, (output % TILE).to(tl.int32)
    lane = tl.arange(0, PART)
    words = words + (at // 2 + own * PART)[:, None] + lane[None, :]
    halves, stored = halves + at // 2, stored + at
    row = out + which.to(tl.int64)[:, None] * channels
    word = tl.load(words + step * (TILE * PART))
    further = word
    if MORE:
        further = tl.load(words + more // 2 + step // (SPAN // STEP) * (TILE * PART))
        further = further.to(tl.int32) >> step % (SPAN // STEP) * (16 // BITS * MORE)
    for field in tl.static_range(16 // BITS):
        code = _integers(word, further, field * BITS, field * MORE, BITS, MORE, ZERO)
        group = _place(step, own, field * PART // GROUP, GROUP, STEP, TILE)
        part = _place(step, own, field, PART, STEP, TILE)
        scale = _number(halves + scales // 2, group, False)
        if ZEROS:
            code += ZERO - tl.load(stored + zeros + group).to(tl.int32)[:, None]
        if FACTORS:
            scale *= _number(stored + factors, part, SIGNED)
        value = code.to(tl.float32) * scale[:, None]
        if LEAST:
            less = _number(halves + least // 2, group, False)
            if MINIMA:
                less *= _number(stored + minima, part, False)
            value -= less[:, None]
        channel = step * STEP + field * PART + lane[None, :]
        seen = (which < count)[:, None] & (channel < channels)
        tl.store(row + channel, value.to(out.dtype.element_ty), mask=seen)
