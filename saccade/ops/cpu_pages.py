"""Rows into slots and out of them on a CPU: by torch, but for summaries of blocks that have just filled, of all layers
in one C++ call. A batch fills some block in every step. This module is a kv.rows.RowMover."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.kv.rows import Blocks, copy_blocks, gather, store, summarize
from saccade.ops.cpu_structs import STORAGE, native, pool_of

__all__ = ["copy_blocks", "fill_summaries", "gather", "store", "summarize"]

KINDS = {"cuboid": 0, "minmax": 1, "mean": 2, "stored_mean": 2, "mean_value": 2, "moments": 3}
LONGEST = 256  # keys of a block: torch sums longer ones in another order
MOST = 16  # blocks of a layer; torch makes the summaries of a prompt


def fill_summaries(
    pool: Blocks, tables: Tensor, kind: str, block_size: int, first: int, last: int, out: Sequence[Tensor]
) -> bool:
    """See RowMover. What is written are the bits of kv.summaries.summarize. ValueError where a block is in no slot."""
    k, v = pool
    layers, heads, blocks = tables.shape
    if kind not in KINDS or block_size > LONGEST or last - first > MOST or k.dtype not in STORAGE:
        return False
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
        pool_of(k, v),
        native.BlockTable(slots=tables.data_ptr(), head_stride=0 if heads == 1 else head_stride, blocks=blocks),
        [one.data_ptr() for one in out],
    )
    return True
