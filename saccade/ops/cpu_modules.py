"""What modules of families that are not of Llama's shape are made of, by C++ kernels on a CPU: RMS norms in one pass,
products of few rows at the rate at which weights are read. On a GPU ``ops.triton.norms`` and ``products`` are that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.ops import cpu, row_passes
from saccade.ops.cpu_structs import STORAGE, address, native
from saccade.ops.layer_rows import MOST_ROWS
from saccade.ops.matrices import DenseMatrix
from saccade.ops.norming import PLUS_ONE, ROUNDED, WHOLE, Norming

WEIGHT_NUMBERS = {ROUNDED: 0, PLUS_ONE: 1, WHOLE: 2}


def norm(x: Tensor, weight: Tensor, epsilon: float, how: Norming, gate: Tensor | None = None) -> Tensor:
    """``x`` [..., channels] normed, times ``weight`` [channels]; ``gate`` [..., channels] through silu is a factor. All
    of one dtype (float32 or bfloat16), or ``x`` is float32."""
    flat, other = _rows(x), None if gate is None else _rows(gate)
    if x.dtype == torch.float32:
        weight, other = weight.float(), None if other is None else other.float()
    if any(one is not None and one.dtype != x.dtype for one in (weight, other)) or x.dtype not in STORAGE:
        raise ValueError(f"a norm of {x.dtype} takes weights and gates of it, got {weight.dtype}")
    out = torch.empty(flat.shape, dtype=x.dtype)
    if not out.numel():  # rows whose output is not read have left the last layer
        return out.view(x.shape)
    cpu.kernels().norm_rows(norm_rows(flat, weight, epsilon, how, other, out, torch.get_num_threads()))
    return out.view(x.shape)


def norm_rows(
    x: Tensor, weight: Tensor, epsilon: float, how: Norming, gate: Tensor | None, out: Tensor, threads: int
) -> Any:
    """The kernels' call that norms ``x`` [rows, channels] into ``out``, all of one dtype. It keeps addresses alone."""
    return native.NormRows(
        threads=threads,
        storage=STORAGE[out.dtype],
        weights=WEIGHT_NUMBERS[how.weights],
        gates_first=how.gates_first,
        rows=x.shape[0],
        channels=x.shape[1],
        groups=how.groups,
        x=x.data_ptr(),
        x_stride=x.stride(0),
        gate=0 if gate is None else gate.data_ptr(),
        gate_stride=0 if gate is None else gate.stride(0),
        weight=address(weight),
        epsilon=epsilon,
        out=address(out),
    )


def product(x: Tensor, matrix: DenseMatrix) -> Tensor:
    """``x`` [rows, channels] times the matrix: [rows, outputs]."""
    rows, own = x.shape[0], None
    if 0 < rows <= MOST_ROWS.get(x.dtype, 0):
        own = matrix.native(x.dtype)
    if own is None:
        return matrix.product(x)
    x, out = x.contiguous(), x.new_empty(rows, matrix.outputs)
    cpu.kernels().product_rows(product_rows(x, matrix, own, out, torch.get_num_threads()))
    return out


def product_rows(x: Tensor, matrix: DenseMatrix, own: Any, out: Tensor, threads: int) -> Any:
    """The kernels' call that multiplies ``x`` [rows, channels] by ``matrix``, ``own`` to them, into ``out``. It keeps
    addresses alone."""
    return native.ProductRows(
        threads=threads,
        storage=STORAGE[out.dtype],
        rows=out.shape[0],
        channels=matrix.channels,
        x=address(x),
        matrix=own,
        out=address(out),
    )


def gated(x: Tensor, gate: DenseMatrix, up: DenseMatrix) -> Tensor:
    """``silu(gate(x)) * up(x)`` of ``x`` [rows, channels]."""
    return row_passes.gated(product(x, gate), product(x, up))


def _rows(x: Tensor) -> Tensor:
    """[rows, channels], the channels of a row one after another."""
    flat = x.flatten(0, -2)
    return flat if flat.stride(-1) == 1 else flat.contiguous()
