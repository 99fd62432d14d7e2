"""LoopServe's choice of lines on a GPU: weights, gains and the greedy cover stay there."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.methods.base import Chunk
from saccade.ops import triton
from saccade.selection import Lines

MOST_BYTES = 8 << 30  # of weights held at once, and no more than half of what is free


def serves(chunk: Chunk, overlap: str) -> str | None:
    """Why :func:`select_lines` cannot decide this chunk; None where it can: exact overlaps, keys on a GPU."""
    if overlap != "exact" or not chunk.q.is_cuda:
        return f"it counts exact overlaps on a GPU; got overlap={overlap} on {chunk.q.device}"
    return triton.serves_scores(chunk.q, chunk.kv)


def select_lines(chunk: Chunk, rows: Tensor, share: float, rounds: bool) -> Lines:
    """Lines of every query head that recover ``share`` of the attention of ``rows`` (int64 [m], rising), in rounds or
    one after another. No number goes to the host."""
    from saccade.methods.loopserve import triton_line_cover, triton_rounds
    from saccade.ops.triton.choose import compact_lines
    from saccade.ops.triton.row_weights import row_weights

    shape = chunk.shape
    marks = torch.empty(2, shape.heads, shape.k_len, dtype=torch.int8, device=chunk.q.device)
    cover = triton_rounds.cover if rounds else triton_line_cover.cover
    together = max(1, _room(chunk.q.device) // (4 * rows.numel() * shape.k_len))  # heads at once
    for start in range(0, shape.heads, together):
        heads = range(start, min(start + together, shape.heads))
        weights = row_weights(chunk.q, chunk.kv, shape, heads, rows, chunk.scale, chunk.softcap)
        marks[:, heads.start : heads.stop] = cover(weights, shape.q_start + rows, shape.q_start, share)
    return compact_lines(shape, marks[0], marks[1])


def _room(device: torch.device) -> int:
    """Bytes that weights may take at once."""
    if device.type != "cuda":
        return MOST_BYTES
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, unused
    return min(MOST_BYTES, (torch.cuda.mem_get_info(device)[0] + kept) // 2)
