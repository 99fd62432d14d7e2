"""FlexPrefill's selection on a GPU: every head at once, and no number read back to the host before the kernel runs.

It decides as on a CPU, with two differences of rounding: sums are float32, and pooled block pairs of equal weight at
gamma's edge are all taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saccade.methods.base import Chunk
from saccade.ops.scores import block_sums, mean_keys
from saccade.selection import Blocks, Mixed

if TYPE_CHECKING:
    from saccade.methods.flexprefill.method import FlexPrefill


def select_blocks(method: FlexPrefill, chunk: Chunk) -> Blocks:
    """Block lists of every query head for a chunk on the GPU: ``lines="block"``."""
    from saccade.methods.flexprefill.triton_shares import needed_shares
    from saccade.ops.triton.block_sums import line_sums

    columns, slashes = line_sums(chunk.q, chunk.kv, chunk.shape, method.block_size, chunk.scale, chunk.softcap)
    vertical, groups = needed_shares(columns), needed_shares(slashes)
    diagonals = torch.minimum(groups, torch.cat([groups[:, :1], groups[:, :-1]], 1))
    return _blocks(method, chunk, columns, vertical, diagonals)[0]


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


def _blocks(
    method: FlexPrefill,
    chunk: Chunk,
    columns: Tensor,
    vertical: Tensor | None = None,
    diagonals: Tensor | None = None,
) -> tuple[Blocks, Tensor]:
    """The blocks of query-aware heads, and of the others by the lines ``vertical`` and ``diagonals`` (fp32 [heads,
    k_blocks]) if there are any; and which heads are query-aware, bool [heads]. ``columns`` fp32 [heads, k_blocks]: the
    weight of the representative rows by key block."""
    from saccade.methods.flexprefill.triton_shares import close_to, pooled_shares
    from saccade.ops.triton.choose import choose_blocks, mass_threshold

    shape, size = chunk.shape, method.block_size
    rows = min(size, shape.q_len)
    chunk.cost.scored += rows * shape.k_len
    pooled = mean_keys(chunk.kv, size)  # [G, k_blocks, d]
    queries = _block_means(chunk.q, shape.q_start % size, size)  # [H, q_blocks, d]
    scores = _grouped(queries, pooled) * chunk.scale  # [H, q_blocks, k_blocks]
    q_blocks, k_blocks = scores.shape[1:]
    chunk.cost.estimated += q_blocks * k_blocks
    last = chunk.q[:, -rows:].mean(1, keepdim=True, dtype=torch.float32)
    by_pooled = close_to(_grouped(last, pooled)[:, 0] * chunk.scale, columns, rows, method.tau)
    shares = pooled_shares(scores, shape.q_start // size)
    if method.flatten:
        threshold = mass_threshold(shares.flatten(1), method.gamma, by_pooled)
    else:
        each = by_pooled.repeat_interleave(q_blocks, output_size=by_pooled.numel() * q_blocks)
        threshold = mass_threshold(shares.flatten(0, 1), method.gamma, each)
    threshold = threshold.view(shape.heads, -1).expand(-1, q_blocks).clone()
    if method.mode == "fixed":
        known = method.known_blocks(shape)  # the last query blocks, whose true weights count
        shares[:, -known:] = (columns / rows)[:, None]
        threshold[:, -known:] = mass_threshold(columns / rows, method.gamma, by_pooled)[:, None]
    least, most = method.budget_blocks
    blocks = choose_blocks(shape, size, vertical, diagonals, shares, by_pooled, threshold, method.gamma, least, most)
    return blocks, by_pooled


def _grouped(rows: Tensor, keys: Tensor) -> Tensor:
    """``rows`` [H, r, d] times the transposed ``keys`` [G, m, d] of each head's KV head: [H, r, m]."""
    group = rows.shape[0] // keys.shape[0]
    return (rows.unflatten(0, (-1, group)).flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, (group, -1)).flatten(0, 1)


def _block_means(q: Tensor, ahead: int, size: int) -> Tensor:
    """Mean query of every block of the grid that begins ``ahead`` rows before ``q`` [h, q_len, d]: fp32 [h, q_blocks,
    d]."""
    head = min(size - ahead, q.shape[1]) if ahead else 0
    whole = (q.shape[1] - head) // size * size
    parts = []
    if head:
        parts.append(q[:, :head].mean(1, keepdim=True, dtype=torch.float32))
    if whole:
        parts.append(q[:, head : head + whole].unflatten(1, (-1, size)).mean(2, dtype=torch.float32))
    if head + whole < q.shape[1]:
        parts.append(q[:, head + whole :].mean(1, keepdim=True, dtype=torch.float32))
    return torch.cat(parts, 1)
