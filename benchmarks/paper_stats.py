"""Statistics of attention that the papers print, of plain tensors: float64 weights, sets of keys as bool."""

from __future__ import annotations

import torch
from torch import Tensor

NEIGHBOURS = (-1, 1, 2)  # LFPS, 4.2: how far candidates spread


def heaviest(weights: Tensor, count: int) -> Tensor:
    """bool like ``weights`` [..., n]: the ``count`` greatest of each row, ties to the lower index."""
    order = torch.sort(weights, dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, order, True)


def shifted(mask: Tensor, offset: int) -> Tensor:
    """``mask`` [..., n], each key's mark moved ``offset`` places on; what leaves is gone."""
    moved = torch.roll(mask, offset, -1)
    if offset > 0:
        moved[..., :offset] = False
    elif offset < 0:
        moved[..., offset:] = False
    return moved


def spread(mask: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """``mask`` with the places at ``offsets`` of each mark."""
    out = mask.clone()
    for offset in offsets:
        out |= shifted(mask, offset)
    return out


def held(wanted: Tensor, given: Tensor) -> Tensor:
    """Of the ``wanted`` keys, the share that is ``given``: bool [..., n] twice -> float64 [...]."""
    return (wanted & given).sum(-1).double() / wanted.sum(-1).clamp(min=1)


def history(sets: Tensor, back: int) -> tuple[Tensor, Tensor]:
    """What the ``back`` steps before each step read, by position and by distance: bool [heads, steps - back, n] each.
    ``sets`` bool [heads, steps, n]: the keys of steps that follow each other."""
    steps = sets.shape[1]
    by_position = torch.zeros_like(sets[:, back:])
    by_distance = torch.zeros_like(by_position)
    for ago in range(1, back + 1):
        before = sets[:, back - ago : steps - ago]
        by_position |= before
        by_distance |= shifted(before, ago)
    return by_position, by_distance


def near(sets: Tensor, distance: int) -> Tensor:
    """The share of each set's keys that lie within ``distance`` of another of them: [..., n] -> float64 [...]."""
    close = torch.zeros_like(sets)
    for offset in range(1, distance + 1):
        close |= shifted(sets, offset) | shifted(sets, -offset)
    return held(sets, close)


def clusters_met(before: Tensor, after: Tensor, gap: int) -> Tensor:
    """Of the clusters of ``after`` (keys at most ``gap`` apart), the share that holds a key within ``gap`` of one of
    ``before``: bool [..., n] twice -> float64 [...]."""
    offsets = tuple(offset for offset in range(-gap, gap + 1) if offset)
    hits = after & spread(before, offsets)
    preceded = torch.zeros_like(after)
    for offset in range(1, gap + 1):
        preceded |= shifted(after, offset)
    begins = after & ~preceded
    number = begins.long().cumsum(-1) * after  # 0: no cluster
    met = torch.zeros(*after.shape[:-1], after.shape[-1] + 1, dtype=torch.bool)
    met.scatter_(-1, number * hits, True)
    return met[..., 1:].sum(-1).double() / begins.sum(-1).clamp(min=1)


def line_share(weights: Tensor, distance: Tensor, share: float) -> float:
    """The weight on the heaviest ``share`` of all columns and diagonals. ``weights`` [r, n]; ``distance`` int64 [r,
    n]: how far each row's key lies back, below 0 where it cannot be seen."""
    n = weights.shape[-1]
    back = distance.clamp(min=0)
    diagonals = torch.zeros(n, dtype=weights.dtype).index_add_(0, back.flatten(), weights.flatten())
    taken = torch.cat([weights.sum(0), diagonals]).topk(max(1, int(2 * n * share))).indices
    column = torch.zeros(n, dtype=torch.bool).index_fill_(0, taken[taken < n], True)
    diagonal = torch.zeros(n, dtype=torch.bool).index_fill_(0, taken[taken >= n] - n, True)
    return float((weights * (column | diagonal[back])).sum() / weights.sum())


def by_interval(weights: Tensor, shares: Tensor, width: float) -> tuple[Tensor, Tensor]:
    """The sums of the rows of ``weights`` [steps, n] whose ``shares`` [steps] lie in each interval (0, width], (width,
    2 width], ... that has any: [intervals, n]; and bool [intervals], those above 0.9."""
    number = ((shares / width).ceil().long() - 1).clamp(min=0)
    some = number.unique()
    sums = torch.stack([weights[number == one].sum(0) for one in some])
    return sums, (some + 0.5) * width > 0.9


def variation(one: Tensor, other: Tensor) -> Tensor:
    """Total variation distance of two distributions (PrHS, eq. 7): [..., n] twice -> [...]."""
    return (one - other).abs().sum(-1) / 2


def relative(out: Tensor, true: Tensor) -> Tensor:
    """L2 distance of outputs [..., head_dim] relative to the true ones: [...]."""
    return (out.double() - true).norm(dim=-1) / true.norm(dim=-1).clamp(min=1e-30)


def best_masses(weights: Tensor) -> Tensor:
    """What the 0, 1, 2, ... heaviest keys of each row hold: [..., n] -> [..., n + 1]."""
    return torch.nn.functional.pad(weights.sort(-1, descending=True).values.cumsum(-1), (1, 0))


def page_scores(q: Tensor, keys: Tensor, size: int) -> Tensor:
    """Quest's upper bound of each key's product with a query, that of its page: ``q`` [group, d], ``keys`` [n, d] ->
    [group, n]."""
    rest = -len(keys) % size
    paged = torch.cat([keys, keys[-1:].expand(rest, -1)]).unflatten(0, (-1, size))
    bound = q.clamp(min=0) @ paged.amax(1).T + q.clamp(max=0) @ paged.amin(1).T
    return bound.repeat_interleave(size, -1)[:, : len(keys)]
