"""The arithmetic that selections rest on: exact rows, pooled blocks, line sums, block criticality. Indices are methods'
work."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import ModelError
from saccade.kv.view import KVView
from saccade.ops import cpu, cpu_sums, triton
from saccade.ops.fp8_tiles import rounded
from saccade.ops.reference import logits, soft_capped
from saccade.selection import Shape

NOT_FINITE = (
    "attention weights are not finite: the model's weights are broken, or its activations overflow in this dtype; "
    "try dtype='float32'"
)


def row_logits(
    q: Tensor, kv: KVView, shape: Shape, kv_head: int, start: int, stop: int, scale: float, softcap: float | None = None
) -> Tensor:
    """Exact logits of rows ``start .. stop - 1`` for one KV head's group: fp32 [group, rows, k_len], acausal entries
    -inf."""
    heads = slice(kv_head * shape.group, (kv_head + 1) * shape.group)
    visible = shape.q_start + stop
    # Passes over [rows, keys] are what this costs: the scale goes into q, and only the last columns need the mask.
    scores = logits(q[heads, start:stop].float() * scale, kv.head_keys(kv_head, visible).float(), 1.0, softcap)
    acausal = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).triu(1)
    scores[..., shape.q_start + start :].masked_fill_(acausal, -torch.inf)
    if visible < shape.k_len:
        scores = torch.nn.functional.pad(scores, (0, shape.k_len - visible), value=-torch.inf)
    return scores


def row_weights(
    q: Tensor, kv: KVView, shape: Shape, kv_head: int, rows: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """Softmax weights of rows ``rows`` (int64 [r], numbers within the call) for one KV head's group: fp32 [group, r,
    k_len], acausal entries 0."""
    heads = slice(kv_head * shape.group, (kv_head + 1) * shape.group)
    scores = logits(q[heads, rows].float() * scale, kv.head_keys(kv_head, shape.k_len).float(), 1.0, softcap)
    acausal = torch.arange(shape.k_len, device=rows.device)[None, :] > shape.q_start + rows[:, None]
    return torch.softmax(scores.masked_fill(acausal, -torch.inf), -1)


def block_sums(weights: Tensor, block_size: int) -> Tensor:
    """Sum ``weights`` [..., n] over blocks of keys: [..., ceil(n / block_size)]."""
    n = weights.shape[-1]
    padded = torch.nn.functional.pad(weights, (0, -n % block_size))
    return padded.unflatten(-1, (-1, block_size)).sum(-1)


def line_sums(
    q: Tensor, kv: KVView, shape: Shape, rows: int, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax weights of the last ``rows`` rows of the call, summed by key and by distance from the row: two fp32
    [heads, k_len].

    The C++ and Triton kernels run it where they can. They add in another order, so sums agree to a few parts in a
    million, and what is chosen by them may differ where two candidates (or a sum and its threshold) are as close as
    that.
    """
    if cpu.serves(q, kv) is None:
        return cpu_sums.line_sums(q, kv, shape, rows, scale, softcap)
    if q.is_cuda and triton.serves_sums(q, kv, rows) is None:
        from saccade.ops.triton.line_sums import token_sums

        return token_sums(q, kv, shape, rows, scale, softcap)
    which, end = torch.arange(shape.q_len - rows, shape.q_len, device=q.device), shape.q_start + shape.q_len
    sums = torch.zeros(2, shape.heads, shape.k_len, device=q.device)
    for kv_head in range(shape.kv_heads):
        heads = slice(kv_head * shape.group, (kv_head + 1) * shape.group)
        weights = row_weights(q, kv, shape, kv_head, which, scale, softcap)[..., :end]
        sums[0, heads, :end], sums[1, heads, :end] = weights.sum(1), slash_sums(weights, end - rows)
    return sums[0], sums[1]


def slash_sums(weights: Tensor, first_row: int) -> Tensor:
    """Sum ``weights`` [g, r, n] along diagonals: fp32 [g, n] by distance ``row position - key``.

    Row ``j`` stands at position ``first_row + j`` = n - r + j (the rows are the last ones), acausal entries must be 0.
    """
    g, r, n = weights.shape
    if first_row + r != n:
        raise ValueError("slash_sums needs the rows to be the last positions")
    # After r columns of padding, row j holds distance o at column n - o + j: a stride one longer lines distances up.
    width = n + r
    padded = torch.nn.functional.pad(weights, (r, 0))
    skewed = torch.as_strided(padded, (g, r, n), (r * width, width + 1, 1), 1)
    return skewed.sum(1).flip(-1)


def mean_queries(q: Tensor, shape: Shape, block_size: int) -> Tensor:
    """Mean query of every block of the grid anchored at position 0, over the rows of this call alone: ``q`` [h, q_len,
    d] -> fp32 [h, q_blocks, d]."""
    block_of = shape.to(q.device).rows // block_size - shape.q_start // block_size
    q_blocks = int(block_of[-1]) + 1
    sums = torch.zeros(q.shape[0], q_blocks, q.shape[-1], device=q.device).index_add_(1, block_of, q.float())
    return sums / torch.bincount(block_of, minlength=q_blocks)[:, None]


def mean_keys(kv: KVView, block_size: int) -> Tensor:
    """Mean key of every block, the partial last one over its real keys: fp32 [kv_heads, ceil(n / block_size),
    head_dim]."""
    full = kv.length // block_size
    means = kv.summary("mean", block_size)[:full, 0].transpose(0, 1)
    if kv.length % block_size:
        tail = kv.keys(full * block_size).float().mean(1, keepdim=True)
        means = torch.cat([means, tail], 1)
    return means


def antidiagonal_shares(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    stride: int,
    block_size: int,
    scale: float,
    softcap: float | None = None,
    fp8: bool = False,
) -> Tensor:
    """Estimated share of each key block in the attention of each query block: fp32 [heads, q_blocks, k_blocks].

    Tiles of ``stride`` x ``stride`` pairs, on a grid anchored at position 0, are scored by the mean logit of their
    antidiagonal (of the pairs that exist, where this call or the context cuts the tile), then by a softmax over the
    tiles up to the row of tiles' own; blocks sum tiles. The shares of a query block add up to 1. XAttention's estimate.
    ``fp8``: of rows in e4m3, as ``fp8_tiles`` rounds them: by FP8 products where the device has them, else of what
    rounding leaves.
    """
    if fp8 and not (q.is_cuda and triton.serves_fp8_tiles(q, kv, shape.k_len, block_size) is None):
        q, kv = rounded(q, kv, shape, stride, softcap)
        fp8 = False
    if cpu_sums.serves_tiles(q, kv, stride, block_size) is None:
        shares = cpu_sums.antidiagonals(q, kv, shape, stride, block_size, scale, softcap)
    elif q.is_cuda and triton.serves_tiles(q, kv, shape.k_len, block_size) is None:
        from saccade.ops.triton.antidiagonals import shares as tile_shares

        return tile_shares(q, kv, shape, stride, block_size, scale, softcap, fp8)
    else:
        shares = torch.cat(
            [_group_shares(q, kv, shape, g, stride, block_size, scale, softcap) for g in range(shape.kv_heads)]
        )
    return shares / shares.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def _group_shares(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    kv_head: int,
    stride: int,
    block_size: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """``antidiagonal_shares`` of one KV head's query heads, not brought to a sum of 1: [group, q_blocks, k_blocks]."""
    heads = slice(kv_head * shape.group, (kv_head + 1) * shape.group)
    k = kv.head_keys(kv_head, shape.k_len)
    ahead, first = shape.q_start % stride, shape.q_start // stride
    keys, has_key = _tiles(k.float(), 0, stride)
    rows, has_row = _tiles(q[heads].float(), ahead, stride)
    rows, has_row = rows.flip(-2).flatten(-2), has_row.flip(-1)  # one product is an antidiagonal sum
    keys = keys.flatten(-2)
    per_block, q_tiles, k_tiles = block_size // stride, rows.shape[1], keys.shape[0]
    block_of = (first + torch.arange(q_tiles, device=q.device)) // per_block - first // per_block
    shares = torch.zeros(shape.group, int(block_of[-1]) + 1, -(-k_tiles // per_block), device=q.device)
    step = max(1, 2**24 // (shape.group * k_tiles))  # bounds the scores held at once to 64 MiB
    for start in range(0, q_tiles, step):
        stop = min(start + step, q_tiles)
        visible = min(first + stop, k_tiles)
        pairs = has_row[start:stop] @ has_key[:visible].T
        scores = rows[:, start:stop] @ keys[:visible].T * (scale / pairs)
        scores = soft_capped(scores, softcap)
        tile, own = torch.arange(visible, device=q.device), torch.arange(start, stop, device=q.device)
        unknown = (tile > first + own[:, None]) | (pairs == 0)
        weights = torch.softmax(scores.masked_fill(unknown, -torch.inf), -1).nan_to_num(0.0)  # a row may know no tile
        sums = block_sums(weights, per_block)
        shares[..., : sums.shape[-1]].index_add_(1, block_of[start:stop], sums)
    return shares


def _tiles(x: Tensor, ahead: int, stride: int) -> tuple[Tensor, Tensor]:
    """``x`` [..., n, d] behind ``ahead`` missing rows, cut into tiles: [..., tiles, stride, d] with zeros for what is
    missing, and fp32 [tiles, stride] 1 where a row is there."""
    n = x.shape[-2]
    behind = -(ahead + n) % stride
    there = torch.nn.functional.pad(torch.ones(n, device=x.device), (ahead, behind)).unflatten(0, (-1, stride))
    return torch.nn.functional.pad(x, (0, 0, ahead, behind)).unflatten(-2, (-1, stride)), there


def cuboid_scores(q: Tensor, summary: Tensor) -> Tensor:
    """ArkVale's block criticality sum_d max(q_d hi_d, q_d lo_d), unscaled (docs/algorithms.md 4.2).

    ``q`` [heads, d], ``summary`` fp32 [blocks, 2, kv_heads, d] -> [heads, blocks].
    """
    group = q.shape[0] // summary.shape[2]
    grouped = q.float().unflatten(0, (-1, group))  # [G, g, d]
    hi, lo = summary[:, 0].transpose(0, 1), summary[:, 1].transpose(0, 1)  # [G, blocks, d]
    scores = grouped.clamp(min=0) @ hi.transpose(1, 2) + grouped.clamp(max=0) @ lo.transpose(1, 2)
    return scores.flatten(0, 1)


def top_places(scores: Tensor, count: int) -> Tensor:
    """Places of the ``count`` highest of each row, ties to the lower place: ``scores`` [m, n] with count <= n -> int64
    [m, count], rising. Finds the last value that gets in, which is many times faster than to sort. ModelError for NaN.
    """
    if count == 0:
        return torch.empty(scores.shape[0], 0, dtype=torch.int64, device=scores.device)
    least = torch.topk(scores, count, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, level = scores > least, scores == least
    spare = count - above.sum(1, keepdim=True)
    places = (above | (level & (level.cumsum(1) <= spare))).nonzero()[:, 1]
    if places.numel() != scores.shape[0] * count:  # NaN is above and below nothing
        raise ModelError(NOT_FINITE)
    return places.view(scores.shape[0], count)


def among_least(values: Tensor, count: int) -> Tensor:
    """bool like ``values`` [r, m]: the ``count`` least entries of each row, ties to the lower index."""
    if not 0 < count < values.shape[1]:
        return torch.full_like(values, count > 0, dtype=torch.bool)
    edge = values.kthvalue(count, dim=1, keepdim=True).values
    below, equal = values < edge, values == edge
    return below | (equal & (equal.cumsum(1) <= count - below.sum(1, keepdim=True)))


def needed_shares(mass: Tensor) -> Tensor:
    """For each entry the share of all heavier ones of its row (ties: lower index first), float64: the entries whose
    value is below gamma are the fewest whose share reaches gamma. ``mass`` [..., m]; all 0 where a row has no mass to
    compare."""
    if cpu_sums.serves_shares(mass) is None:
        return cpu_sums.needed_shares(mass)
    values, order = torch.sort(mass.double(), dim=-1, descending=True, stable=True)
    total = values.sum(-1, keepdim=True)
    shares = torch.where(torch.isfinite(total) & (total > 0), values / total, 0.0)
    before = torch.nn.functional.pad(shares.cumsum(-1)[..., :-1], (1, 0))
    return torch.zeros_like(before).scatter_(-1, order, before)


def root_jsd(p: Tensor, q: Tensor) -> Tensor:
    """Square root of the Jensen-Shannon divergence over the last axis, natural log, 0 log 0 = 0: within [0, sqrt(ln
    2)]."""
    middle = (p + q) / 2
    terms = torch.special.xlogy(p, p) + torch.special.xlogy(q, q) - 2 * torch.special.xlogy(middle, middle)
    return (terms.sum(-1) / 2).clamp(min=0).sqrt()
