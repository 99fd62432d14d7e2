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

MOST_ROWS = 32
OUTPUTS = 32  # of a program


def serves(x: Tensor) -> bool:
    """Whether the kernel takes so many rows; more are worth dequantising a piece of the matrix for."""
    return 0 < x.shape[0] <= MOST_ROWS and runs_on(x)


def product(x: Tensor, matrix: BlockMatrix) -> Tensor:
    """``x`` [rows, channels] times ``matrix``: [rows, outputs] in the dtype of ``x``, summed in float32."""
    x, weight, bias = in_rows(x), matrix.weight, matrix.bias
    rows, outputs = x.shape[0], matrix.outputs
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _product[(triton.cdiv(outputs, OUTPUTS),)](
        x, weight, out if bias is None else bias, out, rows, outputs, matrix.channels // matrix.block, x.stride(0),
        weight.stride(0), FORMAT=matrix.number, BLOCK=matrix.block, BYTES=matrix.block_bytes, ROWS=pad(rows),
        OUTPUTS=OUTPUTS, BIASED=bias is not None, EXACT=x.dtype == torch.float32, num_warps=4, **launched(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _block(at, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    """Of the blocks that begin at the bytes ``at`` [outputs]: integers [outputs, BLOCK], and what they count for
    [outputs]. A format is a branch here."""
    weight = tl.arange(0, BLOCK)[None, :]
    if FORMAT == 1:  # Q8_0
        scale = tl.load(at.to(tl.pointer_type(tl.float16)))
        integers = tl.load((at[:, None] + 2 + weight).to(tl.pointer_type(tl.int8)))
    return integers, scale.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, bias, out, rows, outputs, blocks, x_row, weight_row,
    FORMAT: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    BIASED: tl.constexpr, EXACT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    held = tl.minimum(output, outputs - 1).to(tl.int64)  # what is read beyond the last is not stored
    row, channel = tl.arange(0, ROWS)[None, :], tl.arange(0, BLOCK)[:, None]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for block in range(blocks):
        integers, scale = _block(weight + held * weight_row + block * BYTES, FORMAT, BLOCK)
        values = tl.load(x + row * x_row + block * BLOCK + channel, mask=row < rows, other=0.0)
        if EXACT:
            part = tl.dot(integers.to(tl.float32), values, input_precision="ieee")
        else:
            part = tl.dot(integers.to(values.dtype), values)
        total += part * scale[:, None]
    if BIASED:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    real = (row < rows) & (output < outputs)[:, None]
    tl.store(out + row * outputs + output[:, None], total.to(out.dtype.element_ty), mask=real)
