"""Rows in e4m3 (``ops.fp8``) as the passes between products leave them: a norm, a gate or a transposition that writes
8-bit values and a row's scale at once. A pass of its own over bfloat16 rows would cost what the faster product saves.

The e4m3 values are those of ``fp8.quantize`` over what ``ops.triton.rows`` computes, rounded to the activations' type
first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.fp8 import E4M3, LARGEST, LEAST, QuantizedRows
from saccade.ops.layout import rows as in_rows
from saccade.ops.triton.common import pad
from saccade.ops.triton.rows import _turned_in_place, rotate

__all__ = ["add_norm", "gated", "heads", "rotate"]


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> QuantizedRows:
    """``rows.add_norm``, its result quantized."""
    rows, channels = hidden.shape
    _turned_in_place(hidden=hidden)
    delta, weight = None if delta is None else in_rows(delta), weight.contiguous()
    out = _empty(hidden, channels)
    width, other = pad(channels), hidden if delta is None else delta
    if rows:
        _add_norm[(rows,)](
            hidden,
            other,
            weight,
            *out,
            hidden.stride(0),
            other.stride(0),
            epsilon,
            CHANNELS=channels,
            WIDTH=width,
            ADDS=delta is not None,
            LARGEST=LARGEST,
            LEAST=LEAST,
            num_warps=_warps(width),
        )
    return out


def gated(gate: Tensor, up: Tensor) -> QuantizedRows:
    """``silu(gate) * up`` of two [rows, n]; quantized."""
    rows, inner = gate.shape
    gate, up = in_rows(gate), in_rows(up)
    out = _empty(gate, inner)
    width = pad(inner)
    if rows:
        _gated[(rows,)](
            gate,
            up,
            *out,
            gate.stride(0),
            up.stride(0),
            INNER=inner,
            WIDTH=width,
            LARGEST=LARGEST,
            LEAST=LEAST,
            num_warps=_warps(width),
        )
    return out


def heads(attended: Tensor) -> QuantizedRows:
    """``attended`` [heads, rows, head_dim] as rows of all heads side by side; quantized [rows, heads * head_dim]."""
    count, rows, head_dim = attended.shape
    attended = in_rows(attended)
    out = _empty(attended[0], count * head_dim)
    if rows:
        _heads[(rows,)](
            attended,
            *out,
            attended.stride(0),
            attended.stride(1),
            HEADS=count,
            ALL=pad(count, 1),
            HEAD_DIM=head_dim,
            WIDTH=pad(head_dim),
            LARGEST=LARGEST,
            LEAST=LEAST,
            num_warps=4,
        )
    return out


def _empty(like: Tensor, channels: int) -> QuantizedRows:
    rows = like.shape[0]
    return QuantizedRows(
        torch.empty(rows, channels, dtype=E4M3, device=like.device),
        torch.empty(rows, 1, dtype=torch.float32, device=like.device),
    )


def _warps(width: int) -> int:
    return 4 if width <= 4096 else 8 if width <= 8192 else 16


@triton.jit
def scaled(x, largest, LARGEST: tl.constexpr, LEAST: tl.constexpr):
    """e4m3 values of ``x``, whose ``largest`` value becomes LARGEST; and the scale. ``largest`` is a scalar, or one for
    each of some axes of ``x``."""
    largest = tl.maximum(largest, LEAST)
    y = x * tl.div_rn(tl.full(largest.shape, LARGEST, tl.float32), largest)  # rounded once, as there
    return tl.minimum(tl.maximum(y, -LARGEST), LARGEST).to(tl.float8e4nv), largest * (1.0 / LARGEST)


@triton.jit
def _add_norm(
    hidden, delta, weight, out, scale, hidden_row, delta_row, epsilon,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, WIDTH)
    row = tl.program_id(0).to(tl.int64)
    real = channel < CHANNELS
    at = hidden + row * hidden_row + channel
    x = tl.load(at, mask=real, other=0.0)
    w = tl.load(weight + channel, mask=real, other=0.0)
    if ADDS:
        y = tl.load(delta + row * delta_row + channel, mask=real, other=0.0)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
        tl.store(at, x, mask=real)
    kind: tl.constexpr = hidden.dtype.element_ty
    x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / CHANNELS + epsilon)
    y = (x.to(w.dtype).to(tl.float32) * w.to(tl.float32)).to(kind).to(tl.float32)
    values, one = scaled(y, tl.max(tl.abs(y), 0), LARGEST, LEAST)
    tl.store(out + row * CHANNELS + channel, values, mask=real)
    tl.store(scale + row, one)


@triton.jit
def _gated(
    gates, ups, out, scale, gate_row, up_row,
    INNER: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, WIDTH)
    row = tl.program_id(0).to(tl.int64)
    real = channel < INNER
    gate = tl.load(gates + row * gate_row + channel, mask=real, other=0.0)
    y = gate.to(tl.float32)
    y = (y / (1.0 + tl.exp(-y))).to(gate.dtype).to(tl.float32)
    y = (y * tl.load(ups + row * up_row + channel, mask=real, other=0.0).to(tl.float32)).to(gate.dtype).to(tl.float32)
    values, one = scaled(y, tl.max(tl.abs(y), 0), LARGEST, LEAST)
    tl.store(out + row * INNER + channel, values, mask=real)
    tl.store(scale + row, one)


@triton.jit
def _heads(
    attended, out, scale, head_stride, row_stride,
    HEADS: tl.constexpr, ALL: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    LARGEST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    head, channel = tl.arange(0, ALL)[:, None], tl.arange(0, WIDTH)[None, :]
    row = tl.program_id(0).to(tl.int64)
    real = (head < HEADS) & (channel < HEAD_DIM)
    x = tl.load(attended + head.to(tl.int64) * head_stride + row * row_stride + channel, mask=real, other=0.0)
    x = x.to(tl.float32)
    values, one = scaled(x, tl.max(tl.max(tl.abs(x), 1), 0), LARGEST, LEAST)
    tl.store(out + row * (HEADS * HEAD_DIM) + head * HEAD_DIM + channel, values, mask=real)
    tl.store(scale + row, one)
