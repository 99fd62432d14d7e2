"""FlexPrefill: per head and input, query-aware blocks or vertical-slash lines up to a cumulative weight gamma (ICLR
2025), with the promise of its eq. 3 restored: the published code turns a token count into a block count and may miss
gamma on the very rows it looked at, and so may Alg. 4 as printed (docs/algorithms.md 2.3). Here

* a vertical-slash head reads the columns and the distances of cumulative mass >= gamma, token by token (Alg. 3).
  ``lines="block"`` counts key blocks and groups of ``block_size`` distances instead, for a kernel that reads blocks: to
  hold gamma a few heavy blocks suffice where it takes many single tokens, so rows that were not sampled lose more
  (docs/results/claims-prefill.md). On a GPU single lines cost more than they spare (docs/performance-gpu.md), but the
  default is the paper's on every device. A group of distances straddles two block diagonals, and both are taken, so the
  blocks cover the lines;
* a query-aware head reads the block pairs of cumulative pooled mass >= gamma (Alg. 4), which promises nothing to a
  single row; in the query blocks of the rows looked at their true block weights count instead of the pooled ones;
* the budget holds for the union of both directions, in tokens of every row or query block;
* any appended chunk works: representative rows are the chunk's last ones and the block grid is anchored at position 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from saccade.errors import PolicyError
from saccade.methods.base import Chunk
from saccade.methods.flexprefill.cpu import select_blocks as select_on_cpu
from saccade.methods.flexprefill.device import select_blocks, select_lines
from saccade.methods.options import require_choice, require_number, require_whole
from saccade.methods.tails import BlockMethod
from saccade.ops import cpu, triton
from saccade.ops.scores import among_least, block_sums, line_sums, mean_keys, mean_queries, needed_shares, root_jsd
from saccade.selection import Blocks, Dense, Lines, Mixed, Selection, Shape


@dataclass(frozen=True)
class FlexPrefill(BlockMethod):
    """``gamma`` of the attention weight of the chunk's last ``block_size`` rows is kept; a head is query-aware when the
    square root of the Jensen-Shannon divergence between pooled and true block weights is below ``tau``; at least
    ``min_budget`` and, if given, at most ``max_budget`` tokens are kept per query block. ``gamma=1`` is dense.

    ``flatten`` chooses a query-aware head's blocks over all query blocks at once, as the paper does, so that single
    query blocks may fall far below gamma; without it every query block reaches gamma by itself."""

    name: ClassVar[str] = "flexprefill"
    paper: ClassVar[str] = "FlexPrefill, arXiv:2502.20766"
    phases: ClassVar[tuple[str, ...]] = ("prefill",)

    gamma: float = 0.95
    tau: float = 0.1
    block_size: int = 128
    min_budget: int = 1024
    max_budget: int | None = None
    mode: str = "fixed"
    lines: str = "token"
    flatten: bool = True

    def __post_init__(self) -> None:
        require_number("gamma", self.gamma, 0.0, 1.0)
        require_number("tau", self.tau, 0.0, 1.0)
        require_choice("block_size", self.block_size, (64, 128))
        require_whole("min_budget", self.min_budget, 0)
        if self.max_budget is not None:
            require_whole("max_budget", self.max_budget, self.block_size)
            if self.max_budget < self.min_budget:
                raise PolicyError(f"max_budget={self.max_budget} is below min_budget={self.min_budget}")
        if isinstance(self.mode, str) and self.mode in ("paper", "reference"):
            raise PolicyError(
                f"mode={self.mode} is no longer served: Alg. 4 as printed and the published code miss gamma on the "
                "rows that they look at. Leave mode out: mode=fixed is the only one"
            )
        require_choice("mode", self.mode, ("fixed",))
        require_choice("flatten", self.flatten, (True, False))
        require_choice("lines", self.lines, ("token", "block"))
        self.check_tail()
        if self.stands_in and self.lines != "block":
            raise PolicyError(
                f"tail={self.tail} stands for unread blocks and lines={self.lines} reads lines; give lines=block, or "
                "leave tail out"
            )

    @property
    def budget_blocks(self) -> tuple[int, int | None]:
        """Least and most blocks of a query block."""
        least = -(-self.min_budget // self.block_size)
        return least, None if self.max_budget is None else max(least, self.max_budget // self.block_size)

    def hidden_by(self, keys: int) -> str | None:
        whole = self.budget_blocks[0] * self.block_size
        return f"min_budget={self.min_budget}" if 0 < keys <= whole else None

    def select_prefill(self, chunk: Chunk) -> Selection:
        return self.with_tail(chunk, self._select(chunk), self.block_size)

    def _select(self, chunk: Chunk) -> Selection:
        shape, size = chunk.shape, self.block_size
        if shape.k_len <= max(2 * size, -(-self.min_budget // size) * size):
            return Dense(shape)
        if self.gamma >= 1.0:
            return Dense(shape)
        by_block = self.lines == "block"
        if chunk.q.is_cuda and triton.serves_scores(chunk.q, chunk.kv) is None:
            return (select_blocks if by_block else select_lines)(self, chunk)
        if by_block and cpu.serves(chunk.q, chunk.kv) is None:
            return select_on_cpu(self, chunk)
        pooled = mean_keys(chunk.kv, size)
        columns, slashes = self._sums(chunk)
        query_aware = self._divergence(chunk, pooled, columns) < self.tau
        by_blocks = torch.ones_like(query_aware) if by_block else query_aware
        first = shape.q_start // size
        q_blocks = (shape.q_start + shape.q_len - 1) // size - first + 1
        masks = torch.zeros(shape.heads, q_blocks, pooled.shape[1], dtype=torch.bool, device=columns.device)
        chunk.cost.estimated += round(int(query_aware.sum()) * masks[0].numel() / shape.heads)
        for head in by_blocks.nonzero()[:, 0].tolist():
            if query_aware[head]:
                needed = self._query_aware(chunk, head, pooled[head // shape.group], columns[head], first, q_blocks)
            else:
                needed = self._vertical_slash(
                    block_sums(columns[head], size), block_sums(slashes[head], size), first, q_blocks
                )
            masks[head] = self._keep(needed, first)
        blocks = Blocks.from_block_mask(shape, size, masks)
        if bool(by_blocks.all()):
            return blocks
        by_line = ~by_blocks[:, None]
        vertical, slash = token_lines(
            needed_shares(columns), needed_shares(slashes), self.gamma, size, self.min_budget, self.max_budget
        )
        lines = Lines.from_masks(shape, vertical & by_line, slash & by_line)
        return Mixed(shape, (lines, blocks), by_blocks.long()) if bool(by_blocks.any()) else lines

    def head_kinds(self, chunk: Chunk) -> Tensor:
        """bool [heads]: which heads count as query-aware for this chunk."""
        return self.distances(chunk) < self.tau

    def distances(self, chunk: Chunk) -> Tensor:
        """fp32 [heads]: each head's Jensen-Shannon distance between pooled and true block weights (Alg. 2)."""
        return self._divergence(chunk, mean_keys(chunk.kv, self.block_size), self._sums(chunk)[0])

    def sample(self, chunk: Chunk) -> Tensor:
        """The rows of the chunk that are looked at, sorted, int64: its last ones."""
        rows = chunk.shape.q_len
        return torch.arange(max(0, rows - self.block_size), rows, device=chunk.q.device)

    def _sums(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Attention weights of the representative rows by key and by distance: two [heads, n]."""
        rows = min(self.block_size, chunk.shape.q_len)
        chunk.cost.scored += rows * chunk.shape.k_len
        return line_sums(chunk.q, chunk.kv, chunk.shape, rows, chunk.scale, chunk.softcap)

    def _divergence(self, chunk: Chunk, pooled: Tensor, columns: Tensor) -> Tensor:
        """Square root of the JSD between pooled and true block weights of the representative rows (Alg. 2): [heads].
        ``pooled`` [kv_heads, k_blocks, d]; ``columns`` [heads, n]: the true weights, summed over rows."""
        rows = min(self.block_size, chunk.shape.q_len)
        mean_q = chunk.q[:, -rows:].float().mean(1).unflatten(0, (-1, chunk.shape.group))
        estimate = torch.softmax(mean_q @ pooled.transpose(1, 2) * chunk.scale, -1).flatten(0, 1)
        return root_jsd(estimate, block_sums(columns, self.block_size) / rows)

    def _vertical_slash(self, columns: Tensor, slash: Tensor, first: int, q_blocks: int) -> Tensor:
        """Alg. 3 on blocks: the gamma from which on a vertical block or a slash group wants each block pair.
        ``columns``, ``slash`` [k_blocks]: weight by key block and by group of distances."""
        vertical, groups = needed_shares(columns), needed_shares(slash)
        diagonals = torch.minimum(groups, torch.cat([groups[:1], groups[:-1]]))  # diagonal d lies in groups d and d - 1
        distance = _block_distance(first, q_blocks, vertical.numel(), columns.device)
        return torch.minimum(vertical[None, :], diagonals[distance.clamp(min=0)])

    def _query_aware(
        self, chunk: Chunk, head: int, pooled: Tensor, columns: Tensor, first: int, q_blocks: int
    ) -> Tensor:
        """Alg. 4: the gamma from which on each block pair belongs to the heaviest pairs by pooled attention; but by
        true weights where they are known. ``pooled`` [k_blocks, d]; ``columns`` [n]: the weight of the representative
        rows by key."""
        shape, size, k_blocks = chunk.shape, self.block_size, pooled.shape[0]
        mean_q = mean_queries(chunk.q[head : head + 1], shape, size)[0]
        acausal = _block_distance(first, q_blocks, k_blocks, columns.device) < 0
        shares = torch.softmax((mean_q @ pooled.T * chunk.scale).masked_fill(acausal, -torch.inf), -1)
        needed = needed_shares(shares.flatten()).view_as(shares) if self.flatten else needed_shares(shares)
        needed[-self.known_blocks(shape) :] = needed_shares(block_sums(columns, size))
        return needed

    def known_blocks(self, shape: Shape) -> int:
        """How many of the last query blocks the representative rows lie in."""
        end = shape.q_start + shape.q_len
        return (end - 1) // self.block_size - (end - min(self.block_size, shape.q_len)) // self.block_size + 1

    def _keep(self, needed: Tensor, first: int) -> Tensor:
        """What gamma wants, in each query block no fewer and no more blocks than the budget allows, and always the
        first block and the diagonal. Both bounds follow the order in which a growing gamma would add blocks, so that
        more of either never drops one. ``needed`` [q_blocks, k_blocks] -> bool."""
        q_blocks, k_blocks = needed.shape
        least, most = self.budget_blocks
        most = k_blocks if most is None else most
        distance = _block_distance(first, q_blocks, k_blocks, needed.device)
        forced = distance == 0
        forced[:, 0] = True
        order = needed.masked_fill(forced, -1.0).masked_fill(distance < 0, torch.inf)
        wanted = needed < max(self.gamma, 1e-9)  # the heaviest of all is wanted even by gamma=0
        return (forced | (wanted & among_least(order, most)) | among_least(order, least)) & (distance >= 0)


def _block_distance(first: int, q_blocks: int, k_blocks: int, device: torch.device) -> Tensor:
    """Query block minus key block, int64 [q_blocks, k_blocks] on ``device``."""
    return (first + torch.arange(q_blocks, device=device))[:, None] - torch.arange(k_blocks, device=device)[None, :]


def token_lines(
    vertical: Tensor, slash: Tensor, gamma: float, block_size: int, least: int, most: int | None
) -> tuple[Tensor, Tensor]:
    """Alg. 3, token by token: (columns, distances), bool [heads, n] each.

    ``vertical``, ``slash`` [heads, n]: the gamma from which on a column or a distance is wanted. The first
    ``block_size`` columns and distances stand for the first and the diagonal block, which are always read. A row reads
    a key a line at most, so at least ``least`` and at most ``most`` lines hold the budget of its tokens, both
    directions together; they come and go in the order in which a growing gamma would add them.
    """
    n = vertical.shape[1]
    needed = torch.cat([vertical, slash], 1)
    forced = torch.arange(n, device=needed.device).repeat(2) < block_size
    wanted = needed < max(gamma, 1e-9)  # the heaviest of all is wanted even by gamma=0
    keep = forced | wanted
    if most is not None or least > 0:
        order = needed.masked_fill(forced, -1.0)
        keep = forced | (wanted & among_least(order, 2 * n if most is None else most)) | among_least(order, least)
    return keep[:, :n], keep[:, n:]
