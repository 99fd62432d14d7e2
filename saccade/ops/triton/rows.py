"""What a Llama-shaped decoder layer does to rows between its matrix products: norms, rotations, gates, each in one
launch and one pass. torch takes some thirty launches a layer for it, which at a step of few rows cost more than the
work, and at many rows several passes over them. Rounding is transformers'.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.ops.layer_weights import HeadNorms
from saccade.ops.layout import rows as in_rows
from saccade.ops.triton.common import begin, launched, pad

NORM_TILE = 2048  # values of short rows that one program norms
ROTATED_HEADS = 16  # heads of a row that one program turns where rows are many
FEW_ROWS = 64  # rows up to which a program takes one head, as the GPU is not full


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Add ``delta`` to ``hidden`` (both [rows, channels], the values of a row one after another) in place; returns the
    RMS norm of the sum, times ``weight`` [channels]."""
    rows, channels = hidden.shape
    _turned_in_place(hidden=hidden)
    delta, weight = None if delta is None else in_rows(delta), weight.contiguous()
    out = torch.empty(rows, channels, dtype=hidden.dtype, device=hidden.device)
    width = pad(channels)
    each = max(1, NORM_TILE // width)
    other = hidden if delta is None else delta
    _add_norm[(triton.cdiv(rows, each),)](
        hidden,
        other,
        weight,
        out,
        rows,
        hidden.stride(0),
        other.stride(0),
        epsilon,
        CHANNELS=channels,
        WIDTH=width,
        ROWS=each,
        ADDS=delta is not None,
        num_warps=8 if channels > 4096 else 4,
        **launched(hidden.device),
    )
    return out


def rotate(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None) -> None:
    """Rotary embedding (Su et al., 2021), halves of the first n channels against each other, in place: ``q`` [rows,
    heads, head_dim], ``k`` [rows, kv_heads, head_dim], ``cos``, ``sin`` [rows, n]. With ``norms`` every
    head is RMS-normed first (Qwen3); then n is head_dim."""
    rows, heads, _ = q.shape
    _turned_in_place(q=q, k=q if k is None else k)
    cos, sin = cos.contiguous(), sin.contiguous()
    more = 0 if k is None else k.shape[1]
    each = 1 if rows <= FEW_ROWS else ROTATED_HEADS
    q_tiles = triton.cdiv(heads, each)
    other = q if k is None else k
    query_weight, key_weight, epsilon = (cos, cos, 0.0) if norms is None else norms
    _rotate[(rows, q_tiles + triton.cdiv(more, each))](
        q,
        other,
        cos,
        sin,
        query_weight,
        key_weight,
        epsilon,
        q.stride(0),
        q.stride(1),
        other.stride(0),
        other.stride(1),
        heads,
        more,
        q_tiles,
        HALF=cos.shape[-1] // 2,
        WIDTH=pad(cos.shape[-1] // 2),
        EACH=each,
        NORMS=norms is not None,
        num_warps=1 if each == 1 else 4,
        enable_fp_fusion=False,  # a product that is added to another is rounded first
        **launched(q.device),
    )


def turn(x: Tensor, balance: Tensor | None = None) -> None:
    """As ``row_passes.turn``, to the bit: heads ``x`` [heads, rows, head_dim] in place."""
    heads, rows, head_dim = x.shape
    _turned_in_place(x=x)
    size = head_dim & -head_dim
    each = max(1, NORM_TILE // pad(head_dim) // (2 if rows > FEW_ROWS else 16))
    if rows:
        _turn[(triton.cdiv(rows, each), heads)](
            x, x if balance is None else balance.contiguous(), rows, x.stride(0), x.stride(1), size**-0.5,
            D=head_dim, SIZE=size, STEPS=size.bit_length() - 1, PARTS=pad(head_dim // size, 1), EACH=each,
            BALANCED=balance is not None, num_warps=4 if rows > FEW_ROWS else 1,
            enable_fp_fusion=False,  # a product that is added to another is rounded first
            **launched(x.device),
        )  # fmt: skip


def _turned_in_place(**parts: Tensor) -> None:
    """SaccadeError unless the values of the last axis lie together: what is written to a copy would be lost."""
    for name, part in parts.items():
        if part.stride(-1) != 1:
            raise SaccadeError(
                f"{name} is written in place: the values of a row must lie together, got strides {part.stride()}"
            )


def heads(attended: Tensor) -> Tensor:
    """``attended`` [heads, rows, head_dim] as rows of all heads side by side."""
    return attended.transpose(0, 1).reshape(attended.shape[1], -1)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, both [rows, channels]; written over ``gate`` if that is contiguous."""
    gate, up = in_rows(gate), in_rows(up)
    rows, channels = gate.shape
    out = gate if gate.is_contiguous() else torch.empty_like(gate, memory_format=torch.contiguous_format)
    width = 1024
    _gated[(rows, triton.cdiv(channels, width))](
        gate, up, out, channels, gate.stride(0), up.stride(0), WIDTH=width, num_warps=4, **launched(gate.device)
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _turn(
    x, balance, rows, head_stride, row_stride, factor, D: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr,
    PARTS: tl.constexpr, EACH: tl.constexpr, BALANCED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some rows of one head. Each step pairs neighbours, and leaves their sums in front of their differences."""
    head = tl.program_id(1).to(tl.int64)
    part = tl.arange(0, EACH * PARTS)[:, None]
    row, channel = tl.program_id(0) * EACH + part // PARTS, part % PARTS * SIZE + tl.arange(0, SIZE)[None, :]
    there = (row < rows) & (channel < D)
    at = x + head * head_stride + row.to(tl.int64) * row_stride + channel
    begin(EARLY)
    wide = tl.load(at, mask=there, other=0.0).to(tl.float32)
    if BALANCED:
        wide *= tl.load(balance + head * D + channel, mask=channel < D, other=0.0)
    for _ in tl.static_range(STEPS):
        first, second = tl.split(tl.reshape(wide, [EACH * PARTS, SIZE // 2, 2]))
        joined = tl.join(first + second, first - second)
        wide = tl.reshape(tl.permute(joined, (0, 2, 1)), [EACH * PARTS, SIZE])
    tl.store(at, (wide * factor).to(x.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    hidden, delta, weight, out, rows, hidden_row, delta_row, epsilon,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ADDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    channel = tl.arange(0, WIDTH)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    real = (row < rows) & (channel < CHANNELS)
    at = hidden + row * hidden_row + channel
    x = tl.load(at, mask=real, other=0.0)
    w = tl.load(weight + channel, mask=channel < CHANNELS, other=0.0)
    if ADDS:
        y = tl.load(delta + row * delta_row + channel, mask=real, other=0.0)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
        tl.store(at, x, mask=real)
    x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / CHANNELS + epsilon)[:, None]
    y = x.to(w.dtype).to(tl.float32) * w.to(tl.float32)
    tl.store(out + row * CHANNELS + channel, y.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["heads", "more", "q_tiles"])
def _rotate(
    q, k, cos, sin, q_weight, k_weight, epsilon, q_row, q_head, k_row, k_head, heads, more, q_tiles,
    HALF: tl.constexpr, WIDTH: tl.constexpr, EACH: tl.constexpr, NORMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = q + row * q_row
    count, stride, weight = heads, q_head, q_weight
    if tile >= q_tiles:
        base = k + row * k_row
        count, stride, weight = more, k_head, k_weight
        tile -= q_tiles
    channel = tl.arange(0, WIDTH)[None, :]
    head = tile * EACH + tl.arange(0, EACH)[:, None]
    real = (head < count) & (channel < HALF)
    low = base + head.to(tl.int64) * stride + channel
    first = tl.load(low, mask=real, other=0.0)
    second = tl.load(low + HALF, mask=real, other=0.0)
    if NORMS:
        x, other = first.to(tl.float32), second.to(tl.float32)
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(other * other, 1)) / (2 * HALF) + epsilon)[:, None]
        inside = channel < HALF
        x_weight = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
        other_weight = tl.load(weight + HALF + channel, mask=inside, other=0.0).to(tl.float32)
        first = ((x * scale).to(first.dtype).to(tl.float32) * x_weight).to(first.dtype)
        second = ((other * scale).to(first.dtype).to(tl.float32) * other_weight).to(first.dtype)
    angle = row * 2 * HALF + channel
    for half in tl.static_range(2):
        c = tl.load(cos + angle + half * HALF, mask=channel < HALF, other=0.0).to(tl.float32)
        s = tl.load(sin + angle + half * HALF, mask=channel < HALF, other=0.0).to(tl.float32)
        if half == 0:
            x, other = first.to(tl.float32), -second.to(tl.float32)
        else:
            x, other = second.to(tl.float32), first.to(tl.float32)
        straight, crossed = (x * c).to(first.dtype).to(tl.float32), (other * s).to(first.dtype).to(tl.float32)
        tl.store(low + half * HALF, (straight + crossed).to(first.dtype), mask=real)


@triton.jit
def _gated(gate, up, out, channels, gate_row, up_row, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = channel < channels
    x = tl.load(gate + row * gate_row + channel, mask=real, other=0.0)
    y = x.to(tl.float32)
    y = (y / (1.0 + tl.exp(-y))).to(x.dtype).to(tl.float32)
    y = y * tl.load(up + row * up_row + channel, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * channels + channel, y.to(x.dtype), mask=real)
