"""The C++ kernels of a Llama-shaped decoder layer on a few rows: all of it but attention, each weight read once for all
rows. torch's bfloat16 product of one row reads weights at a fraction of the memory's speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.ops import cpu

MOST_ROWS = 16  # from more rows on torch's matrix products are faster


@dataclass(frozen=True, eq=False)
class Matrix:
    """``weight`` [out, in] with ``bias`` [out]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Norm:
    """RMS norm: ``weight`` [channels] times what it norms."""

    weight: Tensor
    epsilon: float


def reads(*tensors: Tensor | None) -> bool:
    """Whether the kernels can work on weights: on the CPU, contiguous, all float32 or all bfloat16."""
    there = [part for part in tensors if part is not None]
    return (
        hasattr(cpu._kernels, "make_layer")
        and len({part.dtype for part in there}) == 1
        and there[0].dtype in cpu._STORAGE
        and all(part.device.type == "cpu" and part.is_contiguous() for part in there)
    )


class RowLayer:
    """One layer's weights. ``query_norm`` and ``key_norm`` norm each head before it is rotated.

    For weights that :func:`reads` allows and whose shapes fit: channels are those of ``norm``.
    """

    def __init__(
        self,
        norm: Norm,
        query: Matrix,
        key: Matrix,
        value: Matrix,
        output: Matrix,
        second_norm: Norm,
        gate: Matrix,
        up: Matrix,
        down: Matrix,
        head_dim: int,
        query_norm: Norm | None = None,
        key_norm: Norm | None = None,
    ) -> None:
        parts = (query, key, value, output, gate, up, down)
        self._kept = (norm, second_norm, query_norm, key_norm, *parts)  # the kernels hold addresses
        self.heads, self.kv_heads = (part.weight.shape[0] // head_dim for part in (query, key))
        self.head_dim, self.dtype = head_dim, query.weight.dtype
        self._layer = cpu._kernels.make_layer(
            cpu._STORAGE[self.dtype],
            norm.weight.numel(),
            head_dim,
            norm.weight.data_ptr(),
            norm.epsilon,
            0 if query_norm is None else query_norm.weight.data_ptr(),
            0 if key_norm is None else key_norm.weight.data_ptr(),
            0.0 if query_norm is None else query_norm.epsilon,
            second_norm.weight.data_ptr(),
            second_norm.epsilon,
            [_address(part) for part in parts],
        )

    def project(self, hidden: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of ``hidden`` [rows, channels]: [heads or kv_heads, rows, head_dim], rotated by
        ``cos``, ``sin`` [rows, head_dim] if there are any. All contiguous, of the weights' dtype."""
        rows = hidden.shape[0]
        q = torch.empty(rows, self.heads, self.head_dim, dtype=self.dtype)
        k = torch.empty(rows, self.kv_heads, self.head_dim, dtype=self.dtype)
        v = torch.empty(rows, self.kv_heads, self.head_dim, dtype=self.dtype)
        cpu._kernels.project_rows(
            self._layer,
            cpu._isa_index(),
            torch.get_num_threads(),
            rows,
            hidden.data_ptr(),
            0 if cos is None else cos.data_ptr(),
            0 if sin is None else sin.data_ptr(),
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
        )
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)

    def finish(self, hidden: Tensor, attended: Tensor) -> None:
        """Add to ``hidden`` [rows, channels], in place, the output projection of ``attended`` [heads, rows, head_dim]
        and then what the MLP makes of that."""
        rows = hidden.shape[0]
        attended = attended.transpose(0, 1).contiguous()
        cpu._kernels.finish_rows(
            self._layer,
            cpu._isa_index(),
            torch.get_num_threads(),
            rows,
            hidden.data_ptr(),
            attended.data_ptr(),
        )


def head(hidden: Tensor, norm: Norm, matrix: Matrix) -> Tensor:
    """Logits [rows, out] of ``hidden`` [rows, channels], in its dtype."""
    out = torch.empty(hidden.shape[0], matrix.weight.shape[0], dtype=hidden.dtype)
    cpu._kernels.head_rows(
        cpu._isa_index(),
        torch.get_num_threads(),
        cpu._STORAGE[hidden.dtype],
        *hidden.shape,
        hidden.data_ptr(),
        norm.weight.data_ptr(),
        norm.epsilon,
        *_address(matrix)[:2],
        matrix.weight.shape[0],
        out.data_ptr(),
    )
    return out


def _address(part: Matrix) -> list[Any]:
    return [part.weight.data_ptr(), 0 if part.bias is None else part.bias.data_ptr(), part.weight.shape[0]]
