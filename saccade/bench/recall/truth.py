"""True attention of sampled rows, what a selection keeps of it, and the fewest blocks that keep as much.

All of it is plain fp32 arithmetic over queries and keys: nothing here asks a method or a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.selection import Blocks, Selection

TILE_ROWS = 64  # rows of one head whose logits exist at once
SMALL = 1e-5  # sums of fp32 weights are this far from what they should be


def true_weights(q: Tensor, k: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Softmax weights of dense causal attention: fp32 [heads, r, n]. ``q`` [heads, n, head_dim], ``k`` [kv_heads, n,
    head_dim], of any dtype and strides; ``rows`` int64 [r]: places of query rows, the same as positions of keys."""
    heads, n = q.shape[0], k.shape[1]
    group = heads // k.shape[0]
    weights = torch.empty(heads, rows.numel(), n, device=q.device)
    keys_at = torch.arange(n, device=q.device)
    rows = rows.to(q.device)
    for head in range(heads):
        keys = k[head // group].float().T
        for start in range(0, rows.numel(), TILE_ROWS):
            part = rows[start : start + TILE_ROWS]
            scores = (q[head, part].float() @ keys) * scale
            scores.masked_fill_(keys_at > part[:, None], -torch.inf)
            weights[head, start : start + TILE_ROWS] = torch.softmax(scores, -1)
    return weights


@dataclass(frozen=True, eq=False)
class Truth:
    """``rows`` int64 [r], sorted; ``weights`` fp32 [heads, r, n], as :func:`true_weights` gives them."""

    rows: Tensor
    weights: Tensor
    _pooled: dict[int, Tensor] = field(default_factory=dict)

    def pooled(self, block_size: int) -> Tensor:
        """Weight of every block of keys: fp32 [heads, r, blocks]."""
        if block_size not in self._pooled:
            self._pooled[block_size] = pool(self.weights, block_size)
        return self._pooled[block_size]

    def row(self, at: int, length: int) -> Truth:
        """Of the sampled row ``at`` alone, over the first ``length`` keys."""
        return Truth(self.rows[at : at + 1], self.weights[:, at : at + 1, :length])

    def kept(self, selection: Selection) -> Tensor:
        """The share of each sampled row's weight on keys that ``selection`` lets it read: fp32 [heads, r]."""
        shape = selection.shape
        first = int(self.rows[0])
        if first < shape.q_start or int(self.rows[-1]) >= shape.q_start + shape.q_len:
            raise SaccadeError(f"sampled rows lie outside of the selection's rows from {shape.q_start} on")
        device = self.weights.device
        if isinstance(selection, Blocks):
            rows = self.rows.to(device)
            mask = selection.block_mask().to(device)[:, rows // selection.block_size - selection.first_q_block]
            mask = mask.repeat_interleave(shape.heads // selection.units, 0)
            pooled = self.pooled(selection.block_size)[..., : mask.shape[-1]]
            return (pooled * mask).sum(-1)
        kept = torch.empty(self.weights.shape[:2], device=device)
        per_unit = shape.heads // selection.units
        for unit in range(selection.units):
            heads = slice(unit * per_unit, (unit + 1) * per_unit)
            for at, row in enumerate(self.rows.tolist()):
                mask = selection.row_mask(unit, row - shape.q_start, row - shape.q_start + 1)[0].to(device)
                kept[heads, at] = (self.weights[heads, at, : mask.numel()] * mask).sum(-1)
        return kept


def pool(weights: Tensor, block_size: int) -> Tensor:
    """Sums over blocks of the last axis, the last one cut off where the axis ends."""
    n = weights.shape[-1]
    whole = n // block_size * block_size
    sums = weights[..., :whole].unflatten(-1, (-1, block_size)).sum(-1)
    return sums if whole == n else torch.cat([sums, weights[..., whole:].sum(-1, keepdim=True)], -1)


@dataclass(frozen=True, eq=False)
class Oracle:
    """The fewest blocks of keys that keep a share of the true weight, of those who know it.

    ``shares`` fp32 [lists, blocks]: the mean weight that the rows of a list give each block, a list being a query head
    and a block of rows (or one row); ``pairs`` int64 [lists, blocks]: how many (row, key) pairs reading a block costs,
    0 where no row sees it.
    """

    shares: Tensor
    pairs: Tensor

    @classmethod
    def of_rows(cls, q: Tensor, k: Tensor, q_blocks: list[int], block_size: int, scale: float) -> Oracle:
        """Lists are blocks of rows, ``q_blocks`` on the grid of ``block_size``, of every query head."""
        n = k.shape[1]
        shares, pairs = [], []
        for block in q_blocks:
            rows = torch.arange(block * block_size, min((block + 1) * block_size, n))
            shares.append(pool(true_weights(q, k, rows, scale), block_size).mean(1))
            seen = torch.arange(n)[None] <= rows[:, None]
            pairs.append(pool(seen.sum(0), block_size).expand(q.shape[0], -1))
        return cls(torch.cat(shares), torch.cat(pairs).to(q.device))

    @classmethod
    def of_truth(cls, truth: Truth, block_size: int) -> Oracle:
        """Lists are the sampled rows of every query head."""
        shares = truth.pooled(block_size)
        n = truth.weights.shape[-1]
        seen = pool((torch.arange(n)[None] <= truth.rows.cpu()[:, None]).long(), block_size)
        pairs = seen.expand(shares.shape[0], -1, -1).flatten(0, 1)
        return cls(shares.flatten(0, 1), pairs.to(shares.device))

    def each(self, recall: float) -> float:
        """Density of the fewest blocks with which every list keeps ``recall`` of its weight."""
        order = torch.sort(self.shares, dim=-1, descending=True, stable=True).indices
        before = self.shares.gather(-1, order).double().cumsum(-1) - self.shares.gather(-1, order)
        return self._density(order, before < recall - SMALL)

    def mean(self, recall: float) -> float:
        """Density of the fewest blocks, over all lists together, with which the lists' mean recall is ``recall``: lists
        whose weight is spread may keep less."""
        flat = self.shares.flatten()
        order = torch.sort(flat, descending=True, stable=True).indices
        before = flat[order].double().cumsum(0) - flat[order]
        taken = before < (recall - SMALL) * self.shares.shape[0]
        return float(self.pairs.flatten()[order[taken]].sum()) / float(self.pairs.sum())

    def _density(self, order: Tensor, taken: Tensor) -> float:
        return float((self.pairs.gather(-1, order) * taken).sum()) / float(self.pairs.sum())

    @staticmethod
    def together(parts: list[Oracle]) -> Oracle:
        """All lists of several oracles over as many blocks."""
        return Oracle(torch.cat([one.shares for one in parts]), torch.cat([one.pairs for one in parts]))


def sampled_rows(length: int, count: int, seed: int = 0) -> Tensor:
    """``count`` of ``length`` rows without repeats, or all: sorted int64 on the CPU, one from each of ``count`` equal
    stretches."""
    if count >= length:
        return torch.arange(length)
    edges = torch.arange(count + 1) * length // count
    draws = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    return edges[:-1] + (draws * edges.diff()).long()


def spread_blocks(blocks: int, count: int) -> list[int]:
    """``count`` of ``blocks`` blocks in the middle of equal stretches, or all."""
    return list(range(blocks)) if count >= blocks else [(2 * i + 1) * blocks // (2 * count) for i in range(count)]
