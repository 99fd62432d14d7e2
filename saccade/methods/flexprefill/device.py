"""FlexPrefill's selection on a GPU: every head at once, and no number read back to the host before the kernel runs.

With ``lines="block"`` it is a handful of launches, for chunk by chunk and layer by layer the time between many small
ones would add up. It decides as on a CPU, with two differences of rounding: sums are float32, and pooled block pairs of
equal weight at gamma's edge are all taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saccade.methods.base import Chunk
from saccade.ops.scores import block_sums
from saccade.selection import Blocks, Mixed

if TYPE_CHECKING:
    from saccade.methods.flexprefill.method import FlexPrefill


def select_blocks(method: FlexPrefill, chunk: Chunk) -> Blocks:
    """Block lists of every query head for a chunk on the GPU: ``lines="block"``."""
    from saccade.ops.triton.block_sums import line_sums

    columns, slashes = line_sums(chunk.q, chunk.kv, chunk.shape, method.block_size, chunk.scale, chunk.softcap)
    return _blocks(method, chunk, columns, slashes)[0]


def select_lines(method: FlexPrefill, chunk: Chunk) -> Mixed:
    """``lines="token"``: lines of the vertical-slash heads, blocks of the query-aware ones. Only the device knows which
    is which, so that each kind has lists of all heads, empty ones for the others."""
    from saccade.ops.triton.choose import compact_lines, kept_lines
    from saccade.ops.triton.line_sums import token_sums

    shape, size = chunk.shape, method.block_size
    rows = min(size, shape.q_len)
    mass = torch.stack(token_sums(chunk.q, chunk.kv, shape, rows, chunk.scale, chunk.softcap))
    blocks, by_pooled = _blocks(method, chunk, block_sums(mass[0], size))
    kept = kept_lines(mass, method.gamma, size, method.min_budget, method.max_budget)
    lines = compact_lines(shape, *(marks & ~by_pooled[:, None] for marks in kept))
    return Mixed(shape, (lines, blocks), by_pooled.long())


def _blocks(method: FlexPrefill, chunk: Chunk, columns: Tensor, slashes: Tensor | None = None) -> tuple[Blocks, Tensor]:
    """The blocks of query-aware heads, and of the others by their lines if there are ``slashes``; and which heads are
    query-aware, bool [heads]. ``columns``, ``slashes`` fp32 [heads, k_blocks]: the weight of the representative rows by
    key block and by group of distances."""
    from saccade.methods.flexprefill.triton_blocks import choose_blocks
    from saccade.methods.flexprefill.triton_pooled import pooled_shares
    from saccade.methods.flexprefill.triton_shares import decide
    from saccade.methods.flexprefill.triton_threshold import mass_threshold

    shape, size = chunk.shape, method.block_size
    means = chunk.kv.summary("mean", size)
    at = chunk.kv, means
    by_pooled, vertical, groups = decide(chunk.q, *at, size, chunk.scale, method.tau, columns, slashes)
    shares = pooled_shares(chunk.q, *at, shape, size, chunk.scale, by_pooled)
    threshold = mass_threshold(shares.flatten(1), method.gamma, by_pooled) if method.flatten else None
    chunk.cost.scored += min(size, shape.q_len) * shape.k_len
    chunk.cost.estimated += shares.shape[1] * shares.shape[2]
    known = method.known_blocks(shape)  # the last query blocks: true weights count
    blocks = choose_blocks(
        shape, size, vertical, groups, shares, by_pooled, threshold, columns, known, method.gamma, *method.budget_blocks
    )
    return blocks, by_pooled
