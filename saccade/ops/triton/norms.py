"""RMS norms of modules that are not Llama's, each in one launch and one pass: with weights that are added to 1, with a
gate before or behind them, by groups of channels. Rounding is that of the module (:class:`Norming`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.norming import Norming
from saccade.ops.triton.common import begin, launched, pad

TILE = 2048  # values of short rows that one program norms


def norm(x: Tensor, weight: Tensor, epsilon: float, how: Norming, gate: Tensor | None = None) -> Tensor:
    """``x`` [..., channels] normed, times ``weight`` [channels]; ``gate`` [..., channels] through silu is a factor."""
    channels = x.shape[-1]
    flat = x.flatten(0, -2)
    other = flat if gate is None else gate.flatten(0, -2)
    flat, other = (one if one.stride(-1) == 1 else one.contiguous() for one in (flat, other))
    rows, size = flat.shape[0], channels // how.groups
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    width = pad(size)
    each = max(1, TILE // width)
    if not rows:
        return out.view(x.shape)
    _norm[(triton.cdiv(rows, each), how.groups)](
        flat, other, weight, out, rows, flat.stride(0), other.stride(0), epsilon, CHANNELS=channels, SIZE=size,
        WIDTH=width, ROWS=each, GATED=gate is not None, FIRST=how.gates_first, WEIGHTS=how.weights,
        num_warps=8 if width > 4096 else 4, **launched(x.device),
    )  # fmt: skip
    return out.view(x.shape)


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x, gate, weight, out, rows, x_row, gate_row, epsilon, CHANNELS: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr, FIRST: tl.constexpr, WEIGHTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    place = tl.arange(0, WIDTH)[None, :]
    channel = tl.program_id(1) * SIZE + place
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    real = (row < rows) & (place < SIZE)
    y = tl.load(x + row * x_row + channel, mask=real, other=0.0).to(tl.float32)
    w = tl.load(weight + channel, mask=place < SIZE, other=0.0)
    if GATED:
        z = tl.load(gate + row * gate_row + channel, mask=real, other=0.0).to(tl.float32)
        z = z / (1.0 + tl.exp(-z))
        if FIRST:
            y = y * z
    y = y * tl.rsqrt(tl.sum(y * y, 1) / SIZE + epsilon)[:, None]
    kind = out.dtype.element_ty
    if WEIGHTS == "rounded":
        y = (y.to(kind).to(tl.float32) * w.to(tl.float32)).to(kind).to(tl.float32)
    elif WEIGHTS == "plus_one":
        y = y * (1.0 + w.to(tl.float32))
    else:
        y = y * w.to(tl.float32)
    if GATED and not FIRST:
        y = y * z
    tl.store(out + row * CHANNELS + channel, y.to(kind), mask=real)
