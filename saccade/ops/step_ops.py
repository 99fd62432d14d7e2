"""Kernels' calls of a decode step one after another, over buffers of a fixed number of rows: what C++ runs in one call
(csrc/step_ops.h) where some of a model's layers keep a state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.ops import cpu, row_passes
from saccade.ops.cpu_modules import norm_rows, product_rows
from saccade.ops.cpu_structs import STORAGE, address, native
from saccade.ops.matrices import DenseMatrix
from saccade.ops.norming import Norming

ADD, TIMES, TIMES_SIGMOID, RATES, DECAYS = range(5)  # csrc/step_ops.h


class OpList:
    """Calls on tensors of ``rows`` rows in ``dtype``. What a call writes, it returns. Tensors that are read may be
    columns of others; addresses are kept, and the tensors with them."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self.rows, self.dtype, self.threads = rows, dtype, torch.get_num_threads()
        self.native = native.StepOps()
        self._kept: list[Any] = []

    def room(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """[rows, *shape], for what a call writes."""
        return torch.empty(self.rows, *shape, dtype=dtype or self.dtype)

    def _add(self, call: Any, *kept: Any) -> None:
        self.native.add(call)
        self._kept += kept

    def product(self, x: Tensor, matrix: DenseMatrix) -> Tensor:
        """``x`` [rows, channels], contiguous, times the matrix: [rows, outputs]."""
        own = matrix.native(self.dtype)
        assert own is not None, "the kernels read it"
        out = self.room(matrix.outputs)
        self._add(product_rows(x, matrix, own, out, self.threads), x, matrix, out)
        return out

    def norm(self, x: Tensor, weight: Tensor, epsilon: float, how: Norming, gate: Tensor | None = None) -> Tensor:
        """As of ``cpu_modules.norm``, over ``x`` [n, channels]: a new [n, channels]."""
        out = torch.empty(x.shape, dtype=self.dtype)
        self._add(norm_rows(x, weight, epsilon, how, gate, out, self.threads), x, gate, weight, out)
        return out

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """``silu(gate) * up``, written over ``gate``."""
        self._add(row_passes.gated_call(gate, up, gate), gate, up)
        return gate

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """As of ``row_passes.rotate``: ``x`` [rows, heads, head_dim] by ``cos``, ``sin`` [rows, n], in place."""
        self._add(row_passes.rotate_call(x, cos, sin), x, cos, sin)

    def mix(self, kind: int, x: Tensor, y: Tensor | None, out: Tensor, *, log: Any = None, bias: Any = None) -> Tensor:
        """Value by value (csrc/step_ops.h), over rows of ``x``, ``y``, ``out`` [n, width]."""
        self._add(
            native.MixCall(
                kind=kind,
                storage=STORAGE[self.dtype],
                threads=self.threads,
                rows=x.shape[0],
                width=x.shape[1],
                x=x.data_ptr(),
                x_stride=x.stride(0),
                y=0 if y is None else y.data_ptr(),
                y_stride=0 if y is None else y.stride(0),
                log=address(log),
                bias=address(bias),
                out=out.data_ptr(),
                out_stride=out.stride(0),
            ),
            x,
            y,
            out,
            log,
            bias,
        )
        return out

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, pool: Tensor, slots: Tensor
    ) -> Tensor:
        """As of ``cpu_keeping.convolve``, of a token of each row's sequence: ``x`` [rows, channels], whose states are
        ``pool``'s [slots, channels, kept] at ``slots`` int64 [rows]."""
        out = self.room(x.shape[1])
        self._add(
            native.CausalConv(
                threads=self.threads,
                storage=STORAGE[self.dtype],
                silu=silu,
                sequences=self.rows,
                tokens=1,
                channels=x.shape[1],
                taps=weight.shape[-1],
                kept=pool.shape[-1],
                x=native.TokenRows(at=x.data_ptr(), sequence=x.stride(0), token=x.stride(0)),
                weight=address(weight),
                bias=address(bias),
                states=_slots(pool, slots),
                out=address(out),
            ),
            x,
            weight,
            bias,
            pool,
            slots,
            out,
        )
        return out

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor
    ) -> Tensor:
        """As of ``cpu_keeping.delta_rule``, normalized, of a token of each row's sequence: ``q``, ``k`` [rows, key
        heads, d_k], ``v`` [rows, value heads, d_v], ``g`` and ``beta`` float32 [rows, value heads]."""
        out = torch.empty(v.shape, dtype=self.dtype)
        states = [native.TokenRows(at=one.data_ptr(), sequence=one.stride(0), token=one.stride(0)) for one in (q, k, v)]
        self._add(
            native.DeltaRule(
                threads=self.threads,
                storage=STORAGE[self.dtype],
                normalize=True,
                sequences=self.rows,
                tokens=1,
                key_heads=k.shape[1],
                value_heads=v.shape[1],
                d_k=k.shape[2],
                d_v=v.shape[2],
                q=states[0],
                k=states[1],
                v=states[2],
                g=address(g),
                beta=address(beta),
                states=_slots(pool, slots),
                out=address(out),
            ),
            q,
            k,
            v,
            g,
            beta,
            pool,
            slots,
            out,
        )
        return out

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Layer ``layer`` of those that attend stores ``k``, ``v`` [rows, kv_heads, head_dim], and attends for ``q``
        [rows, heads, head_dim] as the step says: shaped like q."""
        out, lse = torch.empty(q.shape, dtype=self.dtype), self.room(q.shape[1], dtype=torch.float32)
        self._add(
            native.AttendCall(
                layer=layer,
                rows=self.rows,
                heads=q.shape[1],
                kv_heads=k.shape[1],
                head_dim=q.shape[2],
                q=address(q),
                k=address(k),
                v=address(v),
                out=address(out),
                lse=address(lse),
                scale=scale,
            ),
            q,
            k,
            v,
            out,
            lse,
        )
        return out

    def run(self) -> None:
        """All calls of a list without attention."""
        kernels: Any = cpu.kernels()
        kernels.run_calls(self.native)


def _slots(pool: Tensor, slots: Tensor) -> Any:
    return native.StateSlots(pool=pool.data_ptr(), count=pool.shape[0], stride=pool.stride(0), slots=slots.data_ptr())
