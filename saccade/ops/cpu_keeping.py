"""Layers that keep a state, on a CPU: the C++ kernels for convolutions, the gated delta rule and Mamba-2, over states
in slots of a pool, which they change where they lie. A call is rows of several sequences, as many of each.

Computed in float32, on ``torch.get_num_threads()`` threads; a result does not depend on their number. Rows of other
types than float32 and bfloat16 are made float32 first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.ops import cpu
from saccade.ops.cpu_structs import STORAGE, address, native
from saccade.ops.slots import NewRows, Slots


def convolve(new: NewRows, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Causal convolution by channel of ``new``, whose slots hold [channels, kept]: [sequences, channels, tokens], in
    the dtype of the rows. ``weight`` [channels, taps], ``bias`` [channels]; with ``silu`` that comes last."""
    slots, dtype = new.slots, new.slots.pool.dtype
    if dtype not in STORAGE:
        raise ValueError(f"convolutions keep float32 or bfloat16, not {dtype}")
    rows = _together(new.rows.transpose(1, 2), dtype)
    sequences, tokens, channels = rows.shape
    kept, taps = slots.pool.shape[-1], weight.shape[-1]
    if slots.pool.shape[1:] != (channels, kept) or weight.shape != (channels, taps):
        raise ValueError(
            f"states {list(slots.pool.shape[1:])} and weights {list(weight.shape)} are not of {channels} channels"
        )
    weight = weight.to(dtype).contiguous()
    bias = None if bias is None else bias.to(dtype).contiguous()
    out = torch.empty(sequences, tokens, channels, dtype=dtype)
    cpu.kernels().causal_conv(
        native.CausalConv(
            threads=torch.get_num_threads(),
            storage=STORAGE[dtype],
            silu=silu,
            sequences=sequences,
            tokens=tokens,
            channels=channels,
            taps=taps,
            kept=kept,
            x=_rows(rows),
            weight=weight.data_ptr(),
            bias=address(bias),
            states=_slots(slots, sequences),
            out=out.data_ptr(),
        )
    )
    return out.transpose(1, 2).to(new.rows.dtype)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, slots: Slots, normalize: bool = False
) -> Tensor:
    """Outputs [sequences, tokens, value heads, d_v] in the dtype of ``q``.

    ``q``, ``k`` [sequences, tokens, key heads, d_k]; ``v`` as the outputs; ``g`` (the logarithm of the decay) and
    ``beta`` [sequences, tokens, value heads]; slots hold float32 [value heads, d_k, d_v]. ``normalize``: queries and
    keys are divided by the root of their sum of squares.
    """
    dtype = q.dtype if q.dtype in STORAGE else torch.float32
    rows = [_together(one.flatten(2), dtype) for one in (q, k, v)]
    sequences, tokens, key_heads, d_k = k.shape
    value_heads, d_v = v.shape[-2:]
    _check(slots, (value_heads, d_k, d_v))
    if q.shape != k.shape or g.shape != v.shape[:-1] or beta.shape != g.shape:
        raise ValueError(f"queries {list(q.shape)} and keys {list(k.shape)}, or decays, rates and values, do not match")
    decay, rate = g.float().contiguous(), beta.float().contiguous()
    out = torch.empty(v.shape, dtype=dtype)
    cpu.kernels().delta_rule(
        native.DeltaRule(
            threads=torch.get_num_threads(),
            storage=STORAGE[dtype],
            normalize=normalize,
            sequences=sequences,
            tokens=tokens,
            key_heads=key_heads,
            value_heads=value_heads,
            d_k=d_k,
            d_v=d_v,
            q=_rows(rows[0]),
            k=_rows(rows[1]),
            v=_rows(rows[2]),
            g=decay.data_ptr(),
            beta=rate.data_ptr(),
            states=_slots(slots, sequences),
            out=out.data_ptr(),
        )
    )
    return out.to(q.dtype)


def state_space(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    slots: Slots,
    *,
    softplus: bool = False,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Mamba-2's outputs [sequences, tokens, heads, head_dim] in the dtype of ``x``, which is as large.

    ``dt`` [sequences, tokens, heads] before ``dt_bias`` is added, ``softplus`` taken, and the result kept within
    ``limits``; ``a`` (negative), ``d`` and ``dt_bias`` [heads]; ``b``, ``c`` [sequences, tokens, groups, size]; slots
    hold float32 [heads, head_dim, size].
    """
    dtype = x.dtype if x.dtype in STORAGE else torch.float32
    rows = [_together(one.flatten(2), dtype) for one in (x, b, c)]
    sequences, tokens, heads, head_dim = x.shape
    groups, size = b.shape[-2:]
    _check(slots, (heads, head_dim, size))
    if b.shape != c.shape or dt.shape != x.shape[:-1]:
        raise ValueError(f"times {list(dt.shape)} and rows {list(x.shape)}, or the groups' rows, do not match")
    times, rate = dt.float().contiguous(), a.float().contiguous()
    skip, bias = (None if one is None else one.float().contiguous() for one in (d, dt_bias))
    out = torch.empty(x.shape, dtype=dtype)
    cpu.kernels().state_space(
        native.StateSpace(
            threads=torch.get_num_threads(),
            storage=STORAGE[dtype],
            softplus=softplus,
            low=limits[0],
            high=limits[1],
            sequences=sequences,
            tokens=tokens,
            heads=heads,
            head_dim=head_dim,
            groups=groups,
            size=size,
            x=_rows(rows[0]),
            b=_rows(rows[1]),
            c=_rows(rows[2]),
            dt=times.data_ptr(),
            a=rate.data_ptr(),
            d=address(skip),
            dt_bias=address(bias),
            states=_slots(slots, sequences),
            out=out.data_ptr(),
        )
    )
    return out.to(x.dtype)


def _together(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[sequences, tokens, values] in ``dtype``, the values of a row one after another."""
    rows = rows.to(dtype)
    return rows if rows.stride(-1) == 1 and rows.stride(0) >= 0 and rows.stride(1) >= 0 else rows.contiguous()


def _rows(rows: Tensor) -> Any:
    return native.TokenRows(at=rows.data_ptr(), sequence=rows.stride(0), token=rows.stride(1))


def _slots(slots: Slots, sequences: int) -> Any:
    where = slots.reads
    if where is not slots.writes:
        raise ValueError("kernels on a CPU change states where they lie: reads and writes must be one tensor")
    if where.shape != (sequences,) or where.dtype != torch.int64 or not where.is_contiguous():
        raise ValueError(f"{sequences} sequences need int64 [{sequences}] slots, got {where.dtype} {list(where.shape)}")
    pool = slots.pool
    if pool.stride(0) and not pool[0].is_contiguous():
        raise ValueError("the values of a slot must lie one after another")
    return native.StateSlots(pool=pool.data_ptr(), count=pool.shape[0], stride=pool.stride(0), slots=where.data_ptr())


def _check(slots: Slots, shape: tuple[int, ...]) -> None:
    if slots.pool.shape[1:] != shape or slots.pool.dtype != torch.float32:
        raise ValueError(f"states must be float32 {list(shape)}, got {slots.pool.dtype} {list(slots.pool.shape[1:])}")
