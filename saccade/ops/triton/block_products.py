"""Products of few rows with weights in blocks (``ops.block_weights``) on a GPU. Integers of a block are exact in 16
bits, so the tensor cores sum a block, and its scale follows in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.layout import rows as in_rows
from saccade.ops.triton.common import begin, launched, pad, runs_on

if TYPE_CHECKING:
    from saccade.ops.block_weights import BlockMatrix

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # which the kernel reads
MOST_ROWS = 32
OUTPUTS = 32  # of a program


def serves(x: Tensor, matrix: BlockMatrix) -> bool:
    """Whether the kernel takes so many rows; more are worth dequantising a piece of the matrix for."""
    return matrix.format in FORMATS and 0 < x.shape[0] <= MOST_ROWS and runs_on(x)


def part_of(name: str) -> int:
    """Weights that share a scale in format ``name``."""
    return 16 if name == "Q6_K" else 32


def product(x: Tensor, matrix: BlockMatrix) -> Tensor:
    """``x`` [rows, channels] times ``matrix``: [rows, outputs] in the dtype of ``x``, summed in float32."""
    x, weight, bias = in_rows(x), matrix.weight, matrix.bias
    rows, outputs = x.shape[0], matrix.outputs
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _product[(triton.cdiv(outputs, OUTPUTS),)](
        x, weight, out if bias is None else bias, out, rows, outputs, matrix.channels // matrix.block, x.stride(0),
        weight.stride(0), FORMAT=matrix.format, BLOCK=matrix.block, PART=part_of(str(matrix.format)),
        BYTES=matrix.block_bytes, ROWS=pad(rows), OUTPUTS=OUTPUTS, BIASED=bias is not None,
        EXACT=x.dtype == torch.float32, num_warps=4, **launched(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _half(at):
    return tl.load(at.to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def _codes(at, part, FORMAT: tl.constexpr):
    """int32 [outputs, channels of a part]: codes of part number ``part`` of the blocks that begin at the bytes ``at``
    [outputs, 1]."""
    if FORMAT == "Q6_K":
        first = part % 8 * 16  # in its half of the block: halves have 64 bytes of lower bits, and 32 of upper ones
        weight = tl.arange(0, 16)[None, :]
        low = tl.load(at + part // 8 * 64 + first % 64 + weight).to(tl.int32) >> first // 64 * 4
        high = tl.load(at + 128 + part // 8 * 32 + first % 32 + weight).to(tl.int32) >> first // 32 * 2
        codes = low & 15 | (high & 3) << 4
    else:
        weight = tl.arange(0, 32)[None, :]
        if FORMAT == "Q8_0":
            codes = tl.load((at + 2 + weight).to(tl.pointer_type(tl.int8))).to(tl.int32)
        elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
            codes = tl.load(at + (16 if FORMAT == "Q4_K" else 48) + part // 2 * 32 + weight).to(tl.int32)
            codes = codes >> part % 2 * 4 & 15
            if FORMAT == "Q5_K":
                codes = codes | (tl.load(at + 16 + weight).to(tl.int32) >> part & 1) << 4
        else:
            skipped: tl.constexpr = 2 if FORMAT == "Q4_0" or FORMAT == "Q5_0" else 4
            fifth: tl.constexpr = 4 if FORMAT == "Q5_0" or FORMAT == "Q5_1" else 0
            codes = tl.load(at + skipped + fifth + weight % 16).to(tl.int32) >> weight // 16 * 4 & 15
            if fifth:
                codes = codes | (tl.load(at + skipped + weight // 8).to(tl.int32) >> weight % 8 & 1) << 4
    return codes


@triton.jit
def _block(at, part, FORMAT: tl.constexpr):
    """Of part number ``part`` of the blocks that begin at the bytes ``at`` [outputs]: integers [outputs, channels of a
    part], what they count for, and what is taken off [outputs]. Each is worth what ``ops.block_weights`` says."""
    codes = _codes(at[:, None], part, FORMAT)
    least = tl.zeros([at.shape[0]], tl.float32)
    if FORMAT == "Q6_K":
        scale = _half(at + 208) * tl.load((at + 192 + part).to(tl.pointer_type(tl.int8))).to(tl.float32)
        codes = codes - 32
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K":  # 6 bits of scales and minima, of the last four in three places
        late = part >= 4
        one = tl.load(at + 4 + part).to(tl.int32)  # a scale, or upper bits of it and lower ones of a minimum
        two = tl.load(at + 8 + part).to(tl.int32)
        first = tl.load(at + tl.where(late, part, 4)).to(tl.int32)
        scale = _half(at) * tl.where(late, two & 15 | first >> 2 & 48, one & 63).to(tl.float32)
        least = _half(at + 2) * tl.where(late, two >> 4 | one >> 2 & 48, two & 63).to(tl.float32)
    else:
        scale = _half(at)
        if FORMAT == "Q4_0":
            codes = codes - 8
        elif FORMAT == "Q5_0":
            codes = codes - 16
        elif FORMAT == "Q4_1" or FORMAT == "Q5_1":
            least = -_half(at + 2)
    return codes, scale, least


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, bias, out, rows, outputs, blocks, x_row, weight_row,
    FORMAT: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, BYTES: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, BIASED: tl.constexpr, EXACT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    held = tl.minimum(output, outputs - 1).to(tl.int64)  # what is read beyond the last is not stored
    row, channel = tl.arange(0, ROWS)[None, :], tl.arange(0, PART)[:, None]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for number in range(blocks * (BLOCK // PART)):
        at = weight + held * weight_row + number // (BLOCK // PART) * BYTES
        integers, scale, least = _block(at, number % (BLOCK // PART), FORMAT)
        values = tl.load(x + row * x_row + number * PART + channel, mask=row < rows, other=0.0)
        if EXACT:
            made = tl.dot(integers.to(tl.float32), values, input_precision="ieee")
        else:
            made = tl.dot(integers.to(values.dtype), values)
        total += made * scale[:, None]
        if FORMAT == "Q4_1" or FORMAT == "Q5_1" or FORMAT == "Q4_K" or FORMAT == "Q5_K":
            total -= least[:, None] * tl.sum(values.to(tl.float32), 0)[None, :]
    if BIASED:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    real = (row < rows) & (output < outputs)[:, None]
    tl.store(out + row * outputs + output[:, None], total.to(out.dtype.element_ty), mask=real)
