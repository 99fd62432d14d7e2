"""Rows into slots and out of them on a CPU: by torch, but for summaries of blocks, which C++ makes of all layers in one
call. A batch fills some block in every step. This module is a kv.rows.RowMover."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.kv.rows import Blocks, Filler, copy_blocks, gather, store, summarize
from saccade.kv.summaries import PARTS, kept_dtype
from saccade.ops.cpu_structs import STORAGE, native, pool_of

__all__ = ["copy_blocks", "filler", "gather", "store", "summarize", "summarize_rows"]

KINDS = {"cuboid": 0, "minmax": 1, "mean": 2, "stored_mean": 2, "mean_value": 2, "moments": 3}
LONGEST = 256  # keys of a block


def summarize_rows(rows: Tensor, kind: str, block_size: int) -> Tensor | None:
    """See RowMover."""
    if not rows.is_cpu or filler(rows.dtype, kind, block_size) is None:
        return None
    rows = rows.contiguous()
    heads, count, head_dim = rows.shape
    blocks, dtype = count // block_size, kept_dtype(kind, rows.dtype)
    made = torch.empty(blocks, PARTS[kind], heads, head_dim, dtype=dtype)
    native.summarize_rows(
        native.RowSummaries(
            threads=torch.get_num_threads(),
            kind=KINDS[kind],
            storage=STORAGE[rows.dtype],
            out_storage=STORAGE[dtype],
            rows=rows.data_ptr(),
            out=made.data_ptr(),
            size=block_size,
            blocks=blocks,
            heads=heads,
            head_dim=head_dim,
        )
    )
    return made


def filler(dtype: torch.dtype, kind: str, block_size: int) -> Filler | None:
    """See RowMover."""
    return fill_summaries if kind in KINDS and block_size <= LONGEST and dtype in STORAGE else None


def fill_summaries(
    pool: Blocks,
    dtype: torch.dtype,
    tables: Tensor,
    kind: str,
    block_size: int,
    first: int,
    last: int,
    out: Sequence[Tensor],
) -> None:
    """See kv.rows.Filler. ValueError where a block is in no slot."""
    k, v = pool
    layers, heads, blocks = tables.shape
    layer_stride, head_stride, _ = tables.stride()
    native.summarize_blocks(
        native.Summaries(
            threads=torch.get_num_threads(),
            kind=KINDS[kind],
            out_storage=STORAGE[out[0].dtype],
            of_values=kind == "mean_value",
            size=block_size,
            first=first,
            last=last,
            layers=layers,
            layer_stride=layer_stride,
        ),
        pool_of(k, v, dtype),
        native.BlockTable(slots=tables.data_ptr(), head_stride=0 if heads == 1 else head_stride, blocks=blocks),
        [one.data_ptr() for one in out],
    )
