"""FlexPrefill: per head and input, query-aware blocks or vertical-slash lines up to a cumulative weight gamma (ICLR
2025).

This is the block-level form of the paper's Alg. 1-4 with the promise of its eq. 3 restored: the published code turns a
token count into a block count and may miss gamma on the very rows it looked at (algorithms.md 2.3-2.5). Here

* vertical blocks and slash groups are each counted by cumulative mass >= gamma;
* a slash group of ``block_size`` distances straddles two block diagonals, and both are taken, so the blocks cover the
  lines;
* the budget holds for the union of both directions, in tokens per query block;
* any appended chunk works: representative rows are the chunk's last ones and the block grid is anchored at position 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from saccade.errors import PolicyError
from saccade.methods.base import Chunk, Method, require_choice, require_number, require_whole
from saccade.ops.scores import block_sums, mean_keys, row_logits, slash_sums
from saccade.selection import Blocks, Dense, Selection, Shape


@dataclass(frozen=True)
class FlexPrefill(Method):
    """``gamma`` of the attention weight of the chunk's last ``block_size`` rows is kept; a head is query-aware when the
    square root of the Jensen-Shannon divergence between pooled and true block weights is below ``tau``; at least
    ``min_budget`` and, if given, at most ``max_budget`` tokens are kept per query block. ``gamma=1`` is dense."""

    name: ClassVar[str] = "flexprefill"
    paper: ClassVar[str] = "FlexPrefill, arXiv:2502.20766"
    phases: ClassVar[tuple[str, ...]] = ("prefill",)

    gamma: float = 0.95
    tau: float = 0.1
    block_size: int = 128
    min_budget: int = 1024
    max_budget: int | None = None

    def __post_init__(self) -> None:
        require_number("gamma", self.gamma, 0.0, 1.0)
        require_number("tau", self.tau, 0.0, 1.0)
        require_choice("block_size", self.block_size, (64, 128))
        require_whole("min_budget", self.min_budget, 0)
        if self.max_budget is not None:
            require_whole("max_budget", self.max_budget, self.block_size)
            if self.max_budget < self.min_budget:
                raise PolicyError(f"max_budget={self.max_budget} is below min_budget={self.min_budget}")

    def select_prefill(self, chunk: Chunk) -> Selection:
        shape, size = chunk.shape, self.block_size
        if self.gamma >= 1.0 or shape.k_len <= max(2 * size, -(-self.min_budget // size) * size):
            return Dense(shape)
        pooled = mean_keys(chunk.kv, size)
        masks = [self._group(chunk, kv_head, pooled[kv_head]) for kv_head in range(shape.kv_heads)]
        return Blocks.from_block_mask(shape, size, torch.cat(masks))

    def head_kinds(self, chunk: Chunk) -> Tensor:
        """bool [heads]: which heads count as query-aware for this chunk."""
        pooled = mean_keys(chunk.kv, self.block_size)
        groups = [self._divergence(chunk, g, pooled[g], self._sample(chunk, g)) for g in range(chunk.shape.kv_heads)]
        return torch.cat(groups) < self.tau

    def _sample(self, chunk: Chunk, kv_head: int) -> Tensor:
        """Attention weights of the representative rows: [g, r, n]."""
        shape = chunk.shape
        rows = min(self.block_size, shape.q_len)
        chunk.cost.scored += shape.group * rows * shape.k_len // shape.heads
        start = shape.q_len - rows
        return torch.softmax(
            row_logits(chunk.q, chunk.kv, shape, kv_head, start, shape.q_len, chunk.scale, chunk.softcap), -1
        )

    def _divergence(self, chunk: Chunk, kv_head: int, pooled: Tensor, weights: Tensor) -> Tensor:
        """Square root of the JSD between pooled and true block weights of the representative rows (Alg. 2): [g]."""
        shape = chunk.shape
        heads = slice(kv_head * shape.group, (kv_head + 1) * shape.group)
        mean_q = chunk.q[heads, -weights.shape[1] :].float().mean(1)
        estimate = torch.softmax(mean_q @ pooled.T * chunk.scale, -1)
        return _root_jsd(estimate, block_sums(weights, self.block_size).mean(1))

    def _group(self, chunk: Chunk, kv_head: int, pooled: Tensor) -> Tensor:
        """Blocks for the query heads of one KV head: bool [g, q_blocks, k_blocks]."""
        shape, size = chunk.shape, self.block_size
        weights = self._sample(chunk, kv_head)
        query_aware = self._divergence(chunk, kv_head, pooled, weights) < self.tau
        first = shape.q_start // size
        q_blocks = (shape.q_start + shape.q_len - 1) // size - first + 1
        masks = []
        for head in range(shape.group):
            if query_aware[head]:
                mask = self._query_aware(chunk, kv_head * shape.group + head, pooled, first, q_blocks)
            else:
                mask = self._vertical_slash(weights[head], shape, first, q_blocks, pooled.shape[0])
            masks.append(mask)
        return torch.stack(masks)

    def _vertical_slash(self, weights: Tensor, shape: Shape, first: int, q_blocks: int, k_blocks: int) -> Tensor:
        """Alg. 3 on blocks: vertical blocks and slash groups reaching gamma, first block and main diagonal forced."""
        size, last = self.block_size, k_blocks - 1
        vertical = block_sums(weights, size).sum(0)
        slash = block_sums(slash_sums(weights[None], shape.q_start + shape.q_len - weights.shape[0])[0], size)
        v_order, v_count = _reach(vertical, self.gamma)
        s_order, s_count = _reach(slash, self.gamma)
        # One ranking of both kinds: what gamma asks for first, the rest by mass (used only to meet the minimum).
        lines = [
            (is_slash, index, value, rank < count)
            for is_slash, mass, order, count in ((False, vertical, v_order, v_count), (True, slash, s_order, s_count))
            for rank, (index, value) in enumerate(zip(order.tolist(), mass[order].tolist()))
        ]
        lines.sort(key=lambda line: (not line[3], -line[2]))
        least, most = self._blocks_allowed(k_blocks)
        columns, groups, row = {0}, {0}, {0, last, max(0, last - 1)}  # `row`: blocks of the last query block
        for is_slash, index, _, wanted in lines:
            touched = {max(0, last - index), max(0, last - index - 1)} if is_slash else {index}
            if not wanted and len(row) >= least:
                break
            if len(row | touched) > most:
                continue
            row |= touched
            (groups if is_slash else columns).add(index)
        is_column = torch.zeros(k_blocks, dtype=torch.bool)
        is_column[list(columns)] = True
        is_diagonal = torch.zeros(k_blocks + 1, dtype=torch.bool)
        is_diagonal[[d for group in groups for d in (group, group + 1)]] = True
        distance = (first + torch.arange(q_blocks))[:, None] - torch.arange(k_blocks)[None, :]
        return is_column[None, :] | (is_diagonal[distance.clamp(min=0)] & (distance >= 0))

    def _query_aware(self, chunk: Chunk, head: int, pooled: Tensor, first: int, q_blocks: int) -> Tensor:
        """Alg. 4: block pairs by pooled attention, the smallest set whose share of the whole reaches gamma."""
        shape, size, k_blocks = chunk.shape, self.block_size, pooled.shape[0]
        block_of = shape.rows // size - first
        sums = torch.zeros(q_blocks, chunk.q.shape[-1]).index_add_(0, block_of, chunk.q[head].float())
        mean_q = sums / torch.bincount(block_of, minlength=q_blocks)[:, None]
        causal = torch.arange(k_blocks)[None, :] <= first + torch.arange(q_blocks)[:, None]
        scores = torch.softmax((mean_q @ pooled.T * chunk.scale).masked_fill(~causal, -torch.inf), -1)
        chunk.cost.estimated += q_blocks * k_blocks // shape.heads
        order, count = _reach(scores.flatten(), self.gamma)
        mask = torch.zeros(q_blocks * k_blocks, dtype=torch.bool)
        mask[order[:count]] = True
        mask = mask.view(q_blocks, k_blocks)
        mask[:, 0] = True
        mask[torch.arange(q_blocks), first + torch.arange(q_blocks)] = True
        least, most = self._blocks_allowed(k_blocks)
        # Forced and chosen blocks first, then by score: the first `least` are a floor, the first `most` a ceiling.
        forced = torch.zeros_like(scores)
        forced[:, 0] = 2
        forced[torch.arange(q_blocks), first + torch.arange(q_blocks)] = 2
        rank = torch.sort(forced + scores + mask.float(), dim=1, descending=True, stable=True).indices.argsort(1)
        return ((mask & (rank < most)) | (rank < least)) & causal

    def _blocks_allowed(self, k_blocks: int) -> tuple[int, int]:
        """Fewest and most blocks per query block."""
        least = min(k_blocks, -(-self.min_budget // self.block_size))
        most = k_blocks if self.max_budget is None else max(least, self.max_budget // self.block_size)
        return least, most


def _reach(mass: Tensor, gamma: float) -> tuple[Tensor, int]:
    """Indices by falling mass (ties to the lower index) and how many it takes for their share to reach gamma."""
    values, order = torch.sort(mass.double(), descending=True, stable=True)
    total = values.sum()
    if not math.isfinite(float(total)) or total <= 0:
        return order, mass.numel()
    count = int(torch.searchsorted(values.cumsum(0), gamma * total)) + 1
    return order, min(count, mass.numel())


def _root_jsd(p: Tensor, q: Tensor) -> Tensor:
    """Square root of the Jensen-Shannon divergence over the last axis, natural log, 0 log 0 = 0: within [0, sqrt(ln
    2)]."""
    middle = (p + q) / 2
    terms = torch.special.xlogy(p, p) + torch.special.xlogy(q, q) - 2 * torch.special.xlogy(middle, middle)
    return (terms.sum(-1) / 2).clamp(min=0).sqrt()
