"""The C++ kernels of LoopServe's greedy covers."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import ModelError
from saccade.kv.view import KVView
from saccade.ops import cpu
from saccade.ops.cpu_structs import Reads, native
from saccade.ops.scores import NOT_FINITE
from saccade.selection import Shape


def cover_rows(
    q: Tensor, kv: KVView, shape: Shape, rows: Tensor, scale: float, softcap: float | None, share: float
) -> list[tuple[Tensor, Tensor]]:
    """For every query head the lines, (columns, distances) int32 as they were added, that recover ``share`` of the
    softmax weights of ``rows`` (int64, rising numbers within the call): ``line_cover.cover_lines`` of each head with
    exact overlaps, for calls that :func:`saccade.ops.cpu.serves` allows and whose rows are the last positions."""
    call = Reads(q, kv, shape, scale, softcap, None)
    numbers, positions = rows.int().contiguous(), shape.q_start + rows.long()
    lines = torch.empty(2, shape.heads, shape.k_len, dtype=torch.int32)
    counts = torch.empty(shape.heads, 2, dtype=torch.int64)
    covers = native.RowCovers(
        rows=numbers.data_ptr(),
        count=numbers.numel(),
        k_len=shape.k_len,
        positions=positions.data_ptr(),
        share=share,
        columns=lines[0].data_ptr(),
        distances=lines[1].data_ptr(),
        counts=counts.data_ptr(),
    )
    cpu.kernels().cover_rows(call.threads, call.pool, call.table, call.queries(0, shape.q_len), covers)
    chosen = counts.tolist()
    if any(columns < 0 for columns, _ in chosen):
        raise ModelError(NOT_FINITE)
    return [
        (lines[0, head, :columns].clone(), lines[1, head, :distances].clone())
        for head, (columns, distances) in enumerate(chosen)
    ]


def cover(weights: Tensor, positions: Tensor, first: int, share: float) -> tuple[Tensor, Tensor, float]:
    """``line_cover.cover_lines`` with exact overlaps, to the last bit: (columns, distances, recovered)."""
    count, keys = weights.shape
    by_key, positions = weights.float().T.contiguous(), positions.long().contiguous()
    if by_key.data_ptr() == weights.data_ptr():
        by_key = by_key.clone()  # one row: its transpose is itself, and the kernel writes over it
    lines = torch.empty(2, keys, dtype=torch.int32, device="cpu")  # whatever device is the default
    counts = torch.empty(2, dtype=torch.int64, device="cpu")
    recovered = cpu.kernels().cover(
        native.Cover(
            weights=by_key.data_ptr(),
            positions=positions.data_ptr(),
            count=count,
            keys=keys,
            first=first,
            share=share,
            columns=lines[0].data_ptr(),
            distances=lines[1].data_ptr(),
            counts=counts.data_ptr(),
        )
    )
    columns, distances = counts.tolist()
    return lines[0, :columns].long(), lines[1, :distances].long(), recovered
