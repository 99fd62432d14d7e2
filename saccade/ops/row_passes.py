"""What a layer does to rows between its matrix products, each in one pass over them: norms, rotations, gated
activations. In C++ or on a GPU in Triton where :func:`fits`; callers keep torch code for the rest.

In the storage type's rounding: each step rounds where torch code that runs the steps one by one does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.ops import cpu, triton

_STORAGE = {torch.float32: 0, torch.bfloat16: 1}
_RMS_NORM, _SILU_MUL, _ROTATE = range(3)
WIDTH = 16  # values are handled in whole vectors


def fits(*rows: Tensor) -> bool:
    """Whether the kernels can run over these tensors: of one dtype (float32, bfloat16 or on a GPU float16), on one
    device, with rows of a multiple of 16 values that lie together."""
    first = rows[0]
    if _on_gpu(first):
        known = triton.available() and first.dtype in (*_STORAGE, torch.float16)
    else:
        known = first.device.type == "cpu" and first.dtype in _STORAGE and hasattr(cpu._kernels, "row_pass")
    return known and all(
        x.dtype == first.dtype and x.device == first.device and x.shape[-1] % WIDTH == 0 and x.stride(-1) == 1
        for x in rows
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis of ``x`` [rows, n], computed in float32 and rounded
    before the weight joins. With ``add`` [rows, n], ``x += add`` comes first, in place."""
    if _on_gpu(x):
        from saccade.ops.triton.rows import add_norm

        return add_norm(x, add, weight.contiguous(), eps)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _run(_RMS_NORM, x, 0, x.shape[-1], add, weight.contiguous(), out, eps)
    return out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of two [rows, n]; the first factor is rounded before the product. Written over ``gate`` if
    its rows lie together."""
    if _on_gpu(gate):
        from saccade.ops.triton.rows import gated

        return gated(gate.contiguous(), up.contiguous())
    out = gate if gate.is_contiguous() else torch.empty_like(gate, memory_format=torch.contiguous_format)
    _run(_SILU_MUL, gate, 0, gate.shape[-1], up, None, out)
    return out


def rotates(x: Tensor, cos: Tensor) -> bool:
    """Whether :func:`rotate` can turn ``x`` by ``cos``: see :func:`fits`; half a rotation is a multiple of 16 too, or
    on a GPU of 8."""
    half = WIDTH // 2 if _on_gpu(x) else WIDTH
    return fits(x, cos) and cos.shape[-1] % (2 * half) == 0 and cos.shape[-1] <= x.shape[-1]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding in place: the first n channels of ``x`` [heads, rows, head_dim] become ``x * cos + (-x2, x1) *
    sin`` with halves x1, x2 and factors [rows, n]."""
    if _on_gpu(x):
        from saccade.ops.triton.rows import rotate as turn

        turn(x.transpose(0, 1), None, cos.contiguous(), sin.contiguous())
    else:
        _run(_ROTATE, x, x.stride(0), cos.shape[-1], sin.contiguous(), cos.contiguous(), x)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


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
    cpu._kernels.row_pass(
        cpu._isa_index(),
        torch.get_num_threads(),
        _STORAGE[x.dtype],
        op,
        x.shape[-2],
        width,
        x.shape[0] if op == _ROTATE else 1,
        x.data_ptr(),
        x.stride(-2),
        head_stride,
        0 if other is None else other.data_ptr(),
        0 if other is None else other.stride(-2),
        0 if weight is None else weight.data_ptr(),
        out.data_ptr(),
        eps,
    )
