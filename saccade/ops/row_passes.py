"""What a layer does to rows between its matrix products, each in one pass over them: norms, rotations, gated
activations. In C++ where the kernels read the rows, in torch elsewhere; ``ops.triton.rows`` is the same on a GPU.

In the storage type's rounding: each step rounds where transformers' modules, which run the steps one by one, do. A long
prompt's rows fall out of the caches between two passes, which then cost as much as a small product of matrices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.ops import cpu, triton
from saccade.ops.cpu_structs import STORAGE, address, native
from saccade.ops.layer_weights import HeadNorms

_RMS_NORM, _SILU_MUL, _ROTATE, _TURN = range(4)
_WIDTH = 16  # values are handled in whole vectors
MOST_TURNED = 1024  # channels of a head


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Add ``delta`` to ``hidden`` (both [rows, channels]) in place; returns the RMS norm of the sum, ``x /
    sqrt(mean(x^2) + epsilon) * weight``, contiguous. It is computed in float32 and rounded before the weight joins."""
    rows = (hidden,) if delta is None else (hidden, delta)
    if not _reads(*rows, weight):
        return _torch_norm(hidden if delta is None else hidden.add_(delta), weight, epsilon)
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    _run(_RMS_NORM, hidden, 0, hidden.shape[-1], delta, weight.contiguous(), out, epsilon)
    return out


def heads(attended: Tensor) -> Tensor:
    """``attended`` [heads, rows, head_dim] as rows of all heads side by side."""
    return attended.transpose(0, 1).reshape(attended.shape[1], -1)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of two [rows, n]; the first factor is rounded before the product. May be
    written over ``gate``."""
    if not _reads(gate, up):
        return torch.nn.functional.silu(gate) * up
    out = gate if gate.is_contiguous() else torch.empty_like(gate, memory_format=torch.contiguous_format)
    _run(_SILU_MUL, gate, 0, gate.shape[-1], up, None, out)
    return out


def rotate(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None) -> None:
    """Rotary embedding (Su et al., 2021) in place: the first n channels of ``q`` [rows, heads, head_dim] and ``k``
    [rows, kv_heads, head_dim] become ``x * cos + (-x2, x1) * sin`` with halves x1, x2 and factors [rows, n]. With
    ``norms`` every head is RMS-normed first."""
    cos, sin = cos.contiguous(), sin.contiguous()
    for x, weight in ((q, None if norms is None else norms.query), (k, None if norms is None else norms.key)):
        if x is None:
            continue
        if norms is not None and weight is not None:
            _norm_heads(x, weight, norms.epsilon)
        if rotates(x, sin, cos):
            if x.numel():
                cpu.kernels().row_pass(rotate_call(x, cos, sin))
        else:
            _torch_rotate(x[..., : cos.shape[-1]], cos[:, None], sin[:, None])


def turn(x: Tensor, balance: Tensor | None = None) -> None:
    """Turn heads in place: channels of ``x`` [heads, rows, head_dim], times ``balance`` (float32 [heads, head_dim], or
    None for 1), become their products with Hadamard's matrix over the root of its size: of the greatest power of two
    that divides head_dim, and of the channels beyond by themselves. In float32; products of two vectors that are turned
    stay what they were."""
    if _reads(x) and x.shape[-1] <= MOST_TURNED:
        _run(_TURN, x, x.stride(0), x.shape[-1], None, balance, x)
    elif x.is_cuda and triton.available():
        from saccade.ops.triton import rows  # needs Triton

        rows.turn(x, balance)
    else:
        x.copy_(_torch_turn(x.float() if balance is None else x.float() * balance[:, None]))


def _reads(*rows: Tensor) -> bool:
    """Whether the C++ kernels can run over these tensors: on the CPU, all float32 or all bfloat16, with rows of a
    multiple of 16 values that lie together."""
    dtype = rows[0].dtype
    if dtype not in STORAGE or not cpu.available():
        return False
    for x in rows:  # noqa: SIM110  (a generator would be a call for each)
        if x.dtype != dtype or not x.is_cpu or x.shape[-1] % _WIDTH or x.stride(-1) != 1:
            return False
    return True


def _norm_heads(x: Tensor, weight: Tensor, epsilon: float) -> None:
    heads = x.reshape(-1, x.shape[-1])
    if x.is_contiguous() and _reads(heads, weight):
        _run(_RMS_NORM, heads, 0, heads.shape[-1], None, weight.contiguous(), heads, epsilon)
    else:
        x.copy_(add_norm(heads, None, weight, epsilon).view(x.shape))


def _torch_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def _torch_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    first, second = x.chunk(2, -1)
    x.copy_(x * cos + torch.cat((-second, first), -1) * sin)


def _torch_turn(x: Tensor) -> Tensor:
    """Each step pairs neighbours, and leaves their sums in front of their differences."""
    channels = x.shape[-1]
    size = channels & -channels
    parts = x.unflatten(-1, (-1, size))
    for _ in range(size.bit_length() - 1):
        first, second = parts[..., ::2], parts[..., 1::2]
        parts = torch.cat((first + second, first - second), -1)
    return parts.flatten(-2) * size**-0.5


def _run(
    op: int,
    x: Tensor,
    head_stride: int,
    width: int,
    other: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    eps: float = 0.0,
) -> None:
    if x.numel() == 0:  # rows of a prefill whose output is not read have left the last layer
        return
    cpu.kernels().row_pass(_call(op, x, head_stride, width, other, weight, out, eps))


def gated_call(gate: Tensor, up: Tensor, out: Tensor) -> Any:
    """The call of :func:`gated` on tensors that the kernels read."""
    return _call(_SILU_MUL, gate, 0, gate.shape[-1], up, None, out)


def gates(width: int) -> bool:
    """Whether :func:`gated_call` takes rows of so many values: whole vectors, else it writes behind them."""
    return width % _WIDTH == 0


def rotate_call(x: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """That of :func:`rotate`, of ``x`` [rows, heads, head_dim]."""
    heads = x.transpose(0, 1)
    return _call(_ROTATE, heads, heads.stride(0), cos.shape[-1], sin, cos, heads)


def rotates(*rows: Tensor) -> bool:
    """Whether the kernels rotate these heads by factors [rows, n], the last of ``rows``."""
    return _reads(*rows) and rows[-1].shape[-1] % (2 * _WIDTH) == 0


def _call(
    op: int,
    x: Tensor,
    head_stride: int,
    width: int,
    other: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    eps: float = 0.0,
) -> Any:
    return native.RowPass(
        kind=op,
        threads=torch.get_num_threads(),
        storage=STORAGE[x.dtype],
        rows=x.shape[-2],
        width=width,
        heads=x.shape[0] if op in (_ROTATE, _TURN) else 1,
        x=x.data_ptr(),
        row_stride=x.stride(-2),
        head_stride=head_stride,
        other=0 if other is None else other.data_ptr(),
        other_stride=0 if other is None else other.stride(-2),
        weight=address(weight),
        out=out.data_ptr(),
        eps=eps,
    )
