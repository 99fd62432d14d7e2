"""Decode rows of several sequences in one call of the C++ kernels: a step of many short contexts otherwise spends more
time between calls than in them. What each row gets is to the last bit what a call of its own would give it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.format import KVFormat
from saccade.kv.row_formats import format_of
from saccade.kv.view import KVView
from saccade.ops import cpu, debug
from saccade.ops.cpu_structs import STORAGE, check_length, keys_of, native, pool_of
from saccade.ops.layout import written as checked
from saccade.selection import Band, Blocks, Dense, Selection

# A row, its slot (or a tuple of one for each KV head) and its offset in the slot.
Place = tuple[int, int | tuple[int, ...], int]


def serves(q: Tensor, kv: KVView, backend: str) -> str | None:
    """Why decode rows ``q`` [heads, rows, head_dim] over the pool of ``kv`` cannot share a call on this backend; None
    where they can."""
    if backend not in ("auto", "cpu"):
        return f"backend {backend!r} runs each row by itself"
    if q.stride(-1) != 1:
        return "the channels of a query do not lie together"
    return cpu.serves(q, kv)


def stores(pool: Tensor, layout: KVFormat, backend: str) -> bool:
    """Whether rows can be stored in this pool without torch, on this backend."""
    kernels = backend in ("auto", "cpu") and cpu.available() and pool.is_cpu
    return kernels and layout.dtype in STORAGE and layout.head_dim % 16 == 0 and layout.head_dim <= cpu.MAX_HEAD_DIM


def serves_row(kv: KVView, selection: Selection) -> str | None:
    """Why one row's selection cannot share the call; None where it can: everything, a band, or lists of blocks."""
    if type(selection) not in (Dense, Band, Blocks) or selection.shape.q_len != 1:
        return f"a row of {type(selection).__name__} has a call of its own"
    return cpu.uneven(selection.units, kv.kv_heads)


def attend(
    q: Tensor,
    rows: Sequence[int],
    views: Sequence[KVView],
    selections: Sequence[Selection],
    out: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    threads: int | None = None,
) -> Tensor:
    """Attention of the rows ``rows`` of ``q`` [heads, n, head_dim], each over its own selection of its own view; all
    views lie in one pool. Written to the same rows of ``out`` [n, heads, head_dim], contiguous and of q's dtype. The
    caller has checked :func:`serves` and :func:`serves_row`. SaccadeError where a selection reads beyond its view."""
    first = views[0].paged()
    checked("out", out, q.dtype)
    kept: list[object] = []  # until the call returns
    calls = []
    for row, view, selection in zip(rows, views, selections):
        if debug.ON:
            debug.check(view, selection)
        paged = view.paged()
        shape, table = selection.shape, paged.block_table
        check_length(shape, paged)
        keys, lists = keys_of(selection)
        kept += (table, lists)
        heads, blocks = table.shape
        calls.append(
            native.DecodeRow(
                row=row,
                q_start=shape.q_start,
                slots=table.data_ptr(),
                head_stride=0 if heads == 1 else table.stride(0),
                blocks=blocks,
                keys=keys,
            )
        )
    pool = pool_of(first.k, first.v, q.dtype, first.format.value_dim)
    return attend_calls(q, pool, calls, out, scale, softcap, threads)


def attend_calls(
    q: Tensor,
    pool: Any,
    calls: list[Any],
    out: Tensor,
    scale: float,
    softcap: float | None,
    threads: int | None,
) -> Tensor:
    """:func:`attend` of rows of ``pool`` (pool_of), structs already: DecodeRow. Their log-sum-exps, fp32 [n, heads]."""
    head_stride, row_stride, _ = q.stride()
    heads, count, _ = q.shape
    lse = torch.empty(out.shape[0], out.shape[1])
    queries = native.Queries(
        q=q.data_ptr(),
        head_stride=head_stride,
        row_stride=row_stride,
        heads=heads,
        q_len=count,
        q_start=0,
        scale=scale,
        softcap=softcap or 0.0,
    )
    written = native.Output(out=out.data_ptr(), lse=lse.data_ptr(), rows=out.shape[0])
    threads = max(1, torch.get_num_threads() if threads is None else threads)
    cpu.kernels().attend_rows(threads, pool, queries, calls, written)
    return lse


def store(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, places: Sequence[Place]) -> None:
    """Copy rows of ``k``, ``v`` [kv_heads, n, head_dim] to their places in pools [slots, kv_heads, block_size, width]
    of rows of their dtype. SaccadeError unless the last axis of k and v is contiguous and their strides are equal."""
    if k.stride() != v.stride() or k.stride(2) != 1:
        raise SaccadeError(
            f"k and v need equal strides and channels that lie together, got {k.stride()} and {v.stride()}; make both "
            "contiguous()"
        )
    checked("k_pool", k_pool, format_of(k_pool, k.dtype).dtype(k.dtype))
    checked("v_pool", v_pool, format_of(v_pool, v.dtype).dtype(v.dtype))
    head_stride, row_stride, _ = k.stride()
    rows = native.NewRows(
        k=k.data_ptr(), v=v.data_ptr(), head_stride=head_stride, row_stride=row_stride, count=k.shape[1]
    )
    native.store_rows(pool_of(k_pool, v_pool, k.dtype), rows, places)
