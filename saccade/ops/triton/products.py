"""Matrix products of few rows, as a decode step has them: what takes the time is reading the weights.

torch's own products reach 80 to 90 % of the rate at which the device reads, and wait for the launch before them to
end. These are launched early (common.begin) and ask for their first weights, which nothing on the way writes, before
they wait; a gated MLP's two products and its gate are one launch. Results of a row hang neither on the number of
rows nor on the other rows. Weights in e4m3 with scales of their own (``ops.fp8_weights``) are read as they lie.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.fp8_weights import KERNEL_CHANNELS, ScaledFp8Matrix
from saccade.ops.layout import rows as in_rows
from saccade.ops.matrices import DenseMatrix, Matrix, PartMatrix
from saccade.ops.triton.common import arrivals, begin, is_hopper, launched, pad, processors, runs_on
from saccade.ops.triton.rows import gated as gate_rows

MOST_ROWS = 32
OUTPUTS, CHANNELS = 64, KERNEL_CHANNELS  # of a tile of weights
LINE = 64  # 16-bit values of a cache line
FETCHED = 2  # tiles that a program asks for before it waits
FEWEST_TILES = 4  # of a program, where several share an output's channels


def product(x: Any, matrix: Matrix) -> Tensor:
    """``x`` [rows, channels] times ``matrix``: [rows, outputs] in the dtype of ``x``, summed in float32."""
    if isinstance(matrix, PartMatrix):
        return matrix.through(product, x)
    if not serves(x, matrix):
        return matrix.product(x)
    return _launch(x, matrix, None)


def gated(x: Tensor, gate: Matrix, up: Matrix) -> Tensor:
    """``silu(x times gate) * (x times up)``, each factor rounded to the dtype of ``x`` first, as transformers does."""
    if not (
        serves(x, gate) and serves(x, up) and gate.weight.shape == up.weight.shape and gate.bias is up.bias is None
    ):
        return gate_rows(gate.product(x), up.product(x))
    return _launch(x, gate, up)


def serves(x: Any, matrix: Matrix) -> bool:
    """Whether the kernel takes this product; the matrix's own does otherwise."""
    return isinstance(matrix, DenseMatrix) and matrix.weight.dtype == x.dtype and _reads(x, matrix.weight)


def scaled(x: Tensor, matrix: ScaledFp8Matrix) -> Tensor | None:
    """As :func:`product` of a matrix that ``has_kernel``: sums of a tile are multiplied by its scale in float32. None
    for rows that the kernel does not take."""
    if not _reads(x, matrix.weight):
        return None
    return _launch(x, matrix, None, matrix.scales, matrix.width if matrix.scales.shape[1] > 1 else matrix.channels)


def _reads(x: Tensor, weight: Tensor) -> bool:
    return (
        0 < x.shape[0] <= MOST_ROWS
        and runs_on(x)
        and x.element_size() == 2
        and weight.shape[1] % CHANNELS == 0
        and weight.stride(1) == 1
        and weight.stride(0) * weight.element_size() % 16 == 0
    )


def _launch(
    x: Tensor, matrix: Matrix, up: Matrix | None, scales: Tensor | None = None, width: int = CHANNELS
) -> Tensor:
    x, weight, bias = in_rows(x), matrix.weight, matrix.bias
    (rows, channels), outputs = x.shape, weight.shape[0]
    other = weight if up is None else up.weight
    tiles = triton.cdiv(outputs, OUTPUTS)
    splits, stages = _cut(tiles, channels // CHANNELS, processors(x.device), up is not None)
    if x.is_cuda and not is_hopper(x.device):
        stages = 2  # what the shared memory of smaller GPUs holds
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    parts = (
        out
        if splits == 1
        else torch.empty(splits * (1 if up is None else 2), rows, outputs, dtype=torch.float32, device=x.device)
    )
    _product[(tiles, splits)](
        x, weight, other, weight if bias is None else bias, weight if scales is None else scales, out, parts,
        arrivals(x.device, tiles), rows, outputs, channels, x.stride(0), weight.stride(0), other.stride(0),
        1 if scales is None else scales.stride(0), width, ROWS=pad(rows), OUTPUTS=OUTPUTS, CHANNELS=CHANNELS,
        SPLITS=splits, GATED=up is not None, BIASED=bias is not None, SCALED=scales is not None, FETCHED=FETCHED,
        LINE=LINE, STAGES=stages, num_warps=4, **launched(x.device),
    )  # fmt: skip
    return out


def _cut(tiles: int, steps: int, programs: int, both: bool) -> tuple[int, int]:
    """In how many parts to sum an output's channels, so that at most ``programs`` processors are busy, one program on
    each; and how many tiles of weights a program has under way. Only the sizes of the matrix decide."""
    splits = 1
    while tiles * splits * 2 <= programs and steps >= 2 * splits * FEWEST_TILES:
        splits *= 2
    return splits, 4 if both or tiles > programs else 6


@triton.jit
def _ask_for(places):
    """Have the lines at ``places`` brought into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["parts"])
def _product(
    x, weight, other, bias, scales, out, parts, arrived, rows, outputs, channels, x_row, weight_row, other_row,
    scales_row, width, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, SPLITS: tl.constexpr,
    GATED: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, FETCHED: tl.constexpr, LINE: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    held = tl.minimum(output, outputs - 1)[:, None].to(tl.int64)  # what is read beyond the last is not stored
    channel = tl.arange(0, CHANNELS)
    each = tl.cdiv(channels // CHANNELS, SPLITS) * CHANNELS
    start = split * each
    stop = tl.minimum(start + each, channels)
    if EARLY:
        for number in tl.static_range(FETCHED):
            line = tl.minimum(start + number * CHANNELS, channels - CHANNELS) + tl.arange(0, CHANNELS // LINE) * LINE
            _ask_for(weight + held * weight_row + line[None, :])
            if GATED:
                _ask_for(other + held * other_row + line[None, :])
    begin(EARLY)
    row = tl.arange(0, ROWS)[None, :]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    second = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for first in tl.range(start, stop, CHANNELS, num_stages=STAGES):
        a = tl.load(weight + held * weight_row + (first + channel)[None, :], eviction_policy="evict_first")
        b = tl.load(x + row * x_row + (first + channel)[:, None], mask=row < rows, other=0.0)
        if SCALED:
            scale = tl.load(scales + held * scales_row + first // width)
            total += tl.dot(a.to(b.dtype), b) * scale
        else:
            total = tl.dot(a, b, total)
        if GATED:
            a = tl.load(other + held * other_row + (first + channel)[None, :], eviction_policy="evict_first")
            second = tl.dot(a, b, second)
    real = (row < rows) & (output < outputs)[:, None]
    place = row * outputs + output[:, None]
    last = True
    if SPLITS > 1:
        tl.store(parts + split * rows * outputs + place, total, mask=real)
        if GATED:
            tl.store(parts + (SPLITS + split) * rows * outputs + place, second, mask=real)
        tl.debug_barrier()  # all threads' stores come before the arrival that one of them announces
        last = tl.atomic_add(arrived + tile, tl.cast(1, tl.int64), sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        if SPLITS > 1:
            total = tl.zeros([OUTPUTS, ROWS], tl.float32)
            second = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for number in tl.static_range(SPLITS):  # in their order, whichever came last
                total += tl.load(parts + number * rows * outputs + place, mask=real, other=0.0, volatile=True)
                if GATED:
                    at = parts + (SPLITS + number) * rows * outputs + place
                    second += tl.load(at, mask=real, other=0.0, volatile=True)
            tl.store(arrived + tile, tl.cast(0, tl.int64))
        if BIASED:
            total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
        made = total.to(out.dtype.element_ty)
        if GATED:
            value = made.to(tl.float32)
            value = (value / (1.0 + tl.exp(-value))).to(made.dtype).to(tl.float32)
            made = (value * second.to(made.dtype).to(tl.float32)).to(made.dtype)
        tl.store(out + place, made, mask=real)
