"""How much each block of keys holds of the attention of a few rows of every query block, by their exact scores."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops import cpu_sums, triton
from saccade.ops.scores import block_sums, row_weights
from saccade.selection import Shape

MOST = 2**24  # weights held at once: 64 MiB


def sampled_rows(shape: Shape, rows: int, block_size: int) -> tuple[Tensor, Tensor]:
    """``rows`` of the rows that this call has of each query block, or all of fewer, in the middle of equal stretches:
    int64 [m] numbers within the call, rising, and of each the query block, counted from the call's first one; both on
    the CPU. The grid of blocks is anchored at position 0."""
    ahead = shape.q_start % block_size
    q_blocks = (ahead + shape.q_len - 1) // block_size + 1
    start = torch.arange(q_blocks, device="cpu") * block_size - ahead
    low, high = start.clamp(min=0), (start + block_size).clamp(max=shape.q_len)
    taken = (high - low).clamp(max=rows)
    turn = torch.arange(rows, device="cpu")
    row = low[:, None] + (2 * turn + 1) * (high - low)[:, None] // (2 * taken[:, None])
    there = turn < taken[:, None]
    return row[there], torch.arange(q_blocks, device="cpu")[:, None].expand_as(there)[there]


def sampled_count(shape: Shape, rows: int, block_size: int) -> int:
    """How many rows :func:`sampled_rows` has."""
    first, last = shape.q_start // block_size, (shape.q_start + shape.q_len - 1) // block_size
    if first == last:
        return min(rows, shape.q_len)
    ahead = (first + 1) * block_size - shape.q_start
    behind = shape.q_start + shape.q_len - last * block_size
    return min(rows, ahead) + (last - first - 1) * min(rows, block_size) + min(rows, behind)


def row_shares(
    q: Tensor, kv: KVView, shape: Shape, rows: int, block_size: int, scale: float, softcap: float | None = None
) -> Tensor:
    """Mean share of each key block in the softmax weights of a query block's :func:`sampled_rows`: fp32 [heads,
    q_blocks, k_blocks], every query block's adding up to 1; NaN where logits are not finite.

    ``q`` [heads, q_len, head_dim]. Keys are read once; no row's weights are kept.
    """
    if q.is_cuda and triton.serves_tiles(q, kv, shape.k_len, block_size) is None:
        from saccade.ops.triton.row_shares import shares as found

        return found(q, kv, shape, rows, block_size, scale, softcap)
    if cpu_sums.serves_row_shares(q, kv, rows, block_size) is None:
        shares = cpu_sums.row_shares(q, kv, shape, rows, block_size, scale, softcap)
    else:
        shares = _sums(q, kv, shape, *sampled_rows(shape, rows, block_size), block_size, scale, softcap)
    return shares / shares.sum(-1, keepdim=True)


def row_sums(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    rows: Tensor,
    places: Tensor,
    block_size: int,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Softmax weights of ``rows``, summed over blocks of keys, and over the rows of each place: fp32 [heads, places,
    k_blocks]; NaN where logits are not finite.

    ``q`` [heads, q_len, head_dim]. ``rows`` int64 [r]: numbers within the call, rising; ``places`` int64 [r]: of each
    row, rising from 0. Elsewhere than on the C++ kernels weights of single keys are held, for a few rows at once.
    """
    if cpu_sums.serves_row_shares(q, kv, 1, block_size) is None:
        return cpu_sums.row_sums(q, kv, shape, rows, places, block_size, scale, softcap)
    return _sums(q, kv, shape, rows, places, block_size, scale, softcap)


def _sums(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    rows: Tensor,
    places: Tensor,
    block_size: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """:func:`row_sums` in torch."""
    sums = torch.zeros(shape.heads, int(places[-1]) + 1, -(-shape.k_len // block_size), device=q.device)
    which, places = rows.to(q.device), places.to(q.device)
    each = max(1, MOST // (shape.group * shape.k_len))
    for kv_head in range(shape.kv_heads):
        heads = sums[kv_head * shape.group : (kv_head + 1) * shape.group]
        for start in range(0, which.numel(), each):
            part = slice(start, start + each)
            weights = row_weights(q, kv, shape, kv_head, which[part], scale, softcap)
            heads.index_add_(1, places[part], block_sums(weights, block_size))
    return sums
