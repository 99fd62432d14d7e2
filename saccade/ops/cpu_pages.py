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
PAGE = 16  # keys of a slot, where plain rows are read as a pool


def summarize_rows(rows: Tensor, kind: str, block_size: int) -> Tensor | None:
    """See RowMover. Rows of a head are a layer of a pool with one KV head, block after block."""
    heads, count, head_dim = rows.shape
    if not count or not rows.is_cpu or filler(rows.dtype, kind, block_size) is None:
        return None
    pool = torch.nn.functional.pad(rows, (0, 0, 0, -count % PAGE)).contiguous().view(-1, 1, PAGE, head_dim)
    tables = torch.arange(len(pool), dtype=torch.int32, device="cpu").view(heads, 1, -1)
    blocks, dtype = count // block_size, kept_dtype(kind, rows.dtype)
    made = torch.empty(heads, blocks, PARTS[kind], head_dim, dtype=dtype, device="cpu")
    fill_summaries((pool, pool), rows.dtype, tables, kind, block_size, 0, blocks, list(made))
    return made.permute(1, 2, 0, 3)


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
