"""Decode rows of several sequences in one call of the C++ kernels: a step of many short contexts otherwise spends more
time between calls than in them. What each row gets is to the last bit what a call of its own would give it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.ops import cpu
from saccade.selection import Band, Blocks, Dense, Selection

__all__ = ["attend", "joins", "reads", "store"]


def reads(q: Tensor, kv: KVView, backend: str) -> bool:
    """Whether decode rows ``q`` [heads, rows, head_dim] over the pool of ``kv`` can be joined on this backend."""
    return backend in ("auto", "cpu") and q.stride(-1) == 1 and cpu.reads(q, kv)


def joins(kv: KVView, selection: Selection) -> bool:
    """Whether one row's selection can share a call: everything, a band, or lists of blocks."""
    if type(selection) not in (Dense, Band, Blocks) or selection.shape.q_len != 1:
        return False
    few, many = sorted((selection.units, kv.kv_heads))
    return many % few == 0


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
) -> None:
    """Attention of the rows ``rows`` of ``q`` [heads, n, head_dim], each over its own selection of its own view; all
    views lie in one pool. Written to the same rows of ``out`` [n, heads, head_dim], contiguous and of q's dtype. The
    caller has checked :func:`reads` and :func:`joins`. SaccadeError where a selection reads beyond its view."""
    first = views[0]
    kept: list[Tensor] = []  # until the call returns
    calls = []
    for row, view, selection in zip(rows, views, selections):
        if selection.shape.k_len > view.length or view.table.numel() < view.blocks:
            raise SaccadeError(f"the selection reads {selection.shape.k_len} keys but the view holds {view.length}")
        kind, numbers, lists = cpu.plain(selection)
        table = view.table if view.table.dtype == torch.int32 else view.table.int()
        kept += (table, *lists)
        offsets, indices = (lists[0].data_ptr(), lists[1].data_ptr()) if lists else (0, 0)
        calls.append(
            (row, table.data_ptr(), selection.shape.q_start, kind, *numbers, selection.units, offsets, indices)
        )
    lse = torch.empty(out.shape[0], out.shape[1])
    cpu._kernels.attend_rows(
        cpu._isa_index(),
        max(1, torch.get_num_threads() if threads is None else threads),
        cpu._STORAGE[q.dtype],
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        first.k_pool.data_ptr(),
        first.v_pool.data_ptr(),
        q.shape[0],
        first.kv_heads,
        first.head_dim,
        first.block_size,
        scale,
        softcap or 0.0,
        out.data_ptr(),
        lse.data_ptr(),
        calls,
    )


def store(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, places: Sequence[tuple[int, int, int]]) -> None:
    """Copy rows of ``k``, ``v`` [kv_heads, n, head_dim] into pools [slots, kv_heads, block_size, head_dim] of their
    dtype: (row, slot, offset in the slot) each. The last axis of k and v is contiguous, their strides are equal."""
    cpu._kernels.store_rows(
        k.element_size(),
        k.data_ptr(),
        v.data_ptr(),
        k.stride(0),
        k.stride(1),
        k_pool.data_ptr(),
        v_pool.data_ptr(),
        *k_pool.shape[1:],
        places,
    )
