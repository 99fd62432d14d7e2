"""LoopServe's choice of lines on a GPU: weights, gains and the greedy cover stay there."""

from __future__ import annotations

from torch import Tensor

from saccade.methods.base import Chunk
from saccade.ops import triton
from saccade.selection import Lines


def serves(chunk: Chunk, overlap: str) -> str | None:
    """Why :func:`select_lines` cannot decide this chunk; None where it can: exact overlaps, keys on a GPU."""
    if overlap != "exact" or not chunk.q.is_cuda:
        return f"it counts exact overlaps on a GPU; got overlap={overlap} on {chunk.q.device}"
    return triton.serves_scores(chunk.q, chunk.kv)


def select_lines(chunk: Chunk, rows: Tensor, share: float) -> Lines:
    """Lines of every query head that recover ``share`` of the attention of ``rows`` (int64 [m], rising)."""
    from saccade.methods.loopserve.triton_line_cover import cover_marks

    columns, distances = cover_marks(chunk.q, chunk.kv, chunk.shape, rows, share, chunk.scale, chunk.softcap)
    return Lines.from_masks(chunk.shape, columns, distances)
