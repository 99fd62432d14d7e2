"""What a Llama-shaped decoder layer does to a few rows between its matrix products: norms, rotations, gates. torch
takes some thirty launches a layer for it, which at a step of few rows cost more than the work. Rounding is
transformers'.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.common import pad


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Add ``delta`` to ``hidden`` (both [rows, channels], contiguous) in place; returns the RMS norm of the sum, times
    ``weight`` [channels]."""
    rows, channels = hidden.shape
    out = torch.empty_like(hidden)
    _add_norm[(rows,)](
        hidden,
        hidden if delta is None else delta,
        weight,
        out,
        epsilon,
        CHANNELS=channels,
        WIDTH=pad(channels),
        ADDS=delta is not None,
        num_warps=8 if channels > 2048 else 4,
    )
    return out


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding (Su et al., 2021), halves of a head against each other, in place: ``q`` [rows, heads, head_dim],
    ``k`` [rows, kv_heads, head_dim], the heads of a row one after another, ``cos``, ``sin`` [rows, head_dim]."""
    rows, heads, head_dim = q.shape
    _rotate[(heads + k.shape[1], rows)](
        q,
        k,
        cos,
        sin,
        q.stride(0),
        k.stride(0),
        HEADS=heads,
        HALF=head_dim // 2,
        WIDTH=pad(head_dim // 2),
        num_warps=1,
    )


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, both [rows, channels], contiguous."""
    out = torch.empty_like(gate)
    _gated[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), WIDTH=1024, num_warps=4)
    return out


@triton.jit
def _add_norm(hidden, delta, weight, out, epsilon, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr):
    channel = tl.arange(0, WIDTH)
    real = channel < CHANNELS
    at = tl.program_id(0).to(tl.int64) * CHANNELS + channel
    x = tl.load(hidden + at, mask=real, other=0.0)
    w = tl.load(weight + channel, mask=real, other=0.0)
    if ADDS:
        x = (x.to(tl.float32) + tl.load(delta + at, mask=real, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(hidden + at, x, mask=real)
    x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / CHANNELS + epsilon)
    y = x.to(w.dtype).to(tl.float32) * w.to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=real)


@triton.jit
def _rotate(
    q, k, cos, sin, q_row, k_row, HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    real = channel < HALF
    base = q + row * q_row + head * 2 * HALF
    if head >= HEADS:
        base = k + row * k_row + (head - HEADS) * 2 * HALF
    first = tl.load(base + channel, mask=real, other=0.0)
    second = tl.load(base + HALF + channel, mask=real, other=0.0)
    angle = row * 2 * HALF + channel
    for half in tl.static_range(2):
        c = tl.load(cos + angle + half * HALF, mask=real, other=0.0).to(tl.float32)
        s = tl.load(sin + angle + half * HALF, mask=real, other=0.0).to(tl.float32)
        if half == 0:
            x, other = first.to(tl.float32), -second.to(tl.float32)
        else:
            x, other = second.to(tl.float32), first.to(tl.float32)
        straight, crossed = (x * c).to(first.dtype).to(tl.float32), (other * s).to(first.dtype).to(tl.float32)
        tl.store(base + half * HALF + channel, (straight + crossed).to(first.dtype), mask=real)


@triton.jit(do_not_specialize=["count"])
def _gated(gate, up, out, count, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(gate + at, mask=at < count, other=0.0)
    y = x.to(tl.float32)
    y = (y / (1.0 + tl.exp(-y))).to(x.dtype).to(tl.float32)
    y = y * tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=at < count)
