"""LoopServe's choice of lines on a GPU: weights, gains and the greedy cover stay there."""

from __future__ import annotations

from torch import Tensor

from saccade.methods.base import Chunk
from saccade.ops import triton
from saccade.selection import Lines


def on_device(chunk: Chunk, overlap: str) -> bool:
    """Whether :func:`select_lines` serves this chunk: exact overlaps, keys on a GPU."""
    return overlap == "exact" and chunk.q.is_cuda and triton.selects(chunk.q, chunk.kv)


def select_lines(chunk: Chunk, rows: Tensor, share: float) -> Lines:
    """Lines of every query head that recover ``share`` of the attention of ``rows`` (int64 [m], rising)."""
    from saccade.ops.triton.line_cover import cover_marks

    columns, distances = cover_marks(chunk.q, chunk.kv, chunk.shape, rows, share, chunk.scale, chunk.softcap)
    return Lines.from_masks(chunk.shape, columns, distances)
