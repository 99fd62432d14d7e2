"""Blocks of keys: chosen sets, and rankings that the op reads until it may stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.selection.base import Selection, Shape
from saccade.selection.csr import check_below, check_csr, list_ids, offsets_of, offsets_of_lists


@dataclass(frozen=True, eq=False)
class Blocks(Selection):
    """Key blocks per query block, both on one grid of ``block_size`` positions anchored at position 0.

    ``offsets`` int64 [units * q_blocks + 1], ``indices`` int32 [nnz]: key-block ids of list ``u * q_blocks + j``, where
    ``j`` counts query blocks from ``first_q_block``. The causal mask cuts the diagonal block. Entries of ``indices``
    from ``offsets[-1]`` on mean nothing: a GPU makes room for all there could be, as the host does not know how many
    there are.
    """

    shape: Shape
    block_size: int
    offsets: Tensor
    indices: Tensor

    @property
    def first_q_block(self) -> int:
        return self.shape.q_start // self.block_size

    @property
    def q_blocks(self) -> int:
        last = (self.shape.q_start + self.shape.q_len - 1) // self.block_size
        return last - self.first_q_block + 1

    @property
    def units(self) -> int:
        return (self.offsets.numel() - 1) // self.q_blocks

    @classmethod
    def from_block_mask(cls, shape: Shape, block_size: int, block_mask: Tensor) -> Blocks:
        """From bool [units, q_blocks, k_blocks]; blocks after the query block are dropped."""
        q_blocks, k_blocks = block_mask.shape[1:]
        first = shape.q_start // block_size
        device = block_mask.device
        causal = torch.arange(k_blocks, device=device) <= first + torch.arange(q_blocks, device=device)[:, None]
        lists = (block_mask & causal).flatten(0, 1)
        return cls(shape, block_size, offsets_of(lists.sum(1)), lists.nonzero()[:, 1].to(torch.int32))

    @classmethod
    def from_lists(cls, shape: Shape, block_size: int, lists: Sequence[Tensor]) -> Blocks:
        """From ``units * q_blocks`` lists of key-block ids, sorted and made unique here."""
        parts = [torch.unique(part.to(torch.int32)) for part in lists]
        indices = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32, device=shape.device)
        return cls(shape, block_size, offsets_of_lists(parts, indices.device), indices)

    def block_mask(self) -> Tensor:
        """bool [units, q_blocks, k_blocks]."""
        k_blocks = -(-self.shape.k_len // self.block_size)
        which = list_ids(self.offsets)
        mask = torch.zeros(self.offsets.numel() - 1, k_blocks, dtype=torch.bool, device=which.device)
        mask[which, self.indices[: which.numel()].long()] = True
        return mask.view(self.units, self.q_blocks, k_blocks)

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        k_blocks = -(-self.shape.k_len // self.block_size)
        shape = self.shape.to(self.offsets.device)
        q_block = shape.rows[start:stop] // self.block_size - self.first_q_block
        chosen = torch.zeros(self.q_blocks, k_blocks, dtype=torch.bool, device=shape.device)
        for j in range(int(q_block[0]), int(q_block[-1]) + 1):
            at = unit * self.q_blocks + j
            chosen[j, self.indices[self.offsets[at] : self.offsets[at + 1]].long()] = True
        tokens = chosen[q_block].repeat_interleave(self.block_size, 1)[:, : shape.k_len]
        return tokens & shape.causal_mask(start, stop)

    def unit_pairs(self) -> Tensor:
        size, shape = self.block_size, self.shape
        if shape.q_len == 1 and self.indices.numel():  # counted at every decode step: few calls, as a GPU needs
            last = self.indices[(self.offsets[1:] - 1).clamp(min=0)]
            beyond = size - 1 - shape.q_start % size  # keys of the diagonal block after the row's own
            counts = self.offsets.diff()
            return counts * size - beyond * ((counts > 0) & (last == self.first_q_block))
        q_block = self.first_q_block + torch.arange(self.q_blocks, device=self.offsets.device)
        start = (q_block * size).clamp(min=shape.q_start)
        stop = ((q_block + 1) * size).clamp(max=shape.q_start + shape.q_len)
        below = (stop - start) * size  # pairs in a block left of the diagonal
        head = start - q_block * size  # rows before `start` in the diagonal block
        tail = stop - q_block * size
        diagonal = (tail * (tail + 1) - head * (head + 1)) // 2
        counts = self.offsets.diff().view(self.units, self.q_blocks)
        if self.indices.numel() == 0:
            return counts.sum(1)
        last = self.indices[(self.offsets[1:] - 1).clamp(min=0)].view_as(counts)  # lists are sorted
        on_diagonal = ((counts > 0) & (last == q_block)).long()
        return ((counts - on_diagonal) * below + on_diagonal * diagonal).sum(1)

    def seen_pairs(self, starts: Tensor, sinks: int) -> Tensor:
        """As of :class:`Lines`."""
        return torch.stack([self._seen(unit, starts, sinks)[1].sum() for unit in range(self.units)])

    def emptied(self, unit: int, starts: Tensor, sinks: int) -> Tensor:
        """As of :class:`Lines`."""
        chosen, seen = self._seen(unit, starts, sinks)
        return ((chosen > 0) & (seen == 0)).nonzero()[:, 0]

    def _seen(self, unit: int, starts: Tensor, sinks: int) -> tuple[Tensor, Tensor]:
        """How many keys each row of a unit reads, and how many of them are not at ``sinks`` .. start - 1."""
        size, device = self.block_size, self.offsets.device
        rows = self.shape.rows.to(device)
        offsets = self.offsets[unit * self.q_blocks : (unit + 1) * self.q_blocks + 1]
        span = -(-max(self.shape.k_len, sinks) // size) + 1  # a list's blocks, and one that none has
        flat = list_ids(offsets - offsets[0]) * span + self.indices[offsets[0] : offsets[-1]]
        flat = torch.nn.functional.pad(flat, (0, 1), value=span * self.q_blocks)
        own = rows // size - self.first_q_block

        def below(keys: Tensor) -> Tensor:
            before = torch.searchsorted(flat, own * span + keys // size)
            partial = (flat[before] == own * span + keys // size) * (keys % size)
            return (before - (offsets - offsets[0])[own]) * size + partial

        chosen, first = below(rows + 1), torch.full_like(rows, sinks)
        return chosen, chosen - below(starts.to(device).clamp(min=sinks)) + below(first)

    def _merge_same(self, other: Selection) -> Selection | None:
        if not isinstance(other, Blocks) or other.block_size != self.block_size:
            return None
        units = math.lcm(self.units, other.units)
        left = self.block_mask().repeat_interleave(units // self.units, 0)
        right = other.block_mask().repeat_interleave(units // other.units, 0)
        return Blocks.from_block_mask(self.shape, self.block_size, left | right)

    def check(self) -> None:
        listed = self.indices[: int(self.offsets[-1])]
        check_csr(self.offsets, listed, self.shape.heads * self.q_blocks, self.q_blocks)
        limit = (self.first_q_block + torch.arange(self.q_blocks, device=listed.device)).repeat(self.units)
        check_below(self.offsets, listed, limit + 1, "block")


@dataclass(frozen=True, eq=False)
class Ranking(Selection):
    """Blocks in order of criticality with a stopping rule; the op decides how many it reads (PSA, Alg. 1). Decode only.

    ``always`` int32 [units, a] and ``order`` int32 [units, m] are disjoint block ids; ``order`` is descending in
    criticality. The op attends to ``always``, then to ``order`` in microbatches of ``microbatch`` blocks, and stops
    once ``1 / (1 + left * exp(rest - acc)) > epsilon`` (strict) for the query heads of a unit, where ``acc`` is the
    log-sum-exp so far and ``rest`` the least block log-sum-exp met (``rest="min"``, the paper) or the greatest of the
    last microbatch (``"last_max"``).

    With ``rest="estimate"`` the weight left is ``exp(mean + margin * sd)`` times the sum of ``exp(estimates)`` over the
    unread blocks instead: ``estimates`` fp32 [heads, m] are block log-sum-exps guessed before reading, in the order of
    each head's unit; mean and sd (of the population) say how far those of the ranked blocks read so far lay above their
    guesses. One block has no sd: reading goes on.

    With ``complete`` the ranking is begun: ``order`` names the first ones of ``ranked`` blocks, and ``complete()`` the
    order of all. A reader that has read all that are named without covering enough needs :meth:`whole`.

    ``stop`` says whether ``"all"`` heads of a unit must agree or their ``"mean"`` suffices. ``always`` blocks never
    enter ``rest``. As a selection it stands for everything it may read.
    """

    shape: Shape
    block_size: int
    always: Tensor
    order: Tensor
    epsilon: float
    microbatch: int = 4
    rest: str = "min"
    stop: str = "all"
    estimates: Tensor | None = None
    margin: float = 0.0
    ranked: int | None = None
    complete: Callable[[], Tensor] | None = None

    @property
    def units(self) -> int:
        return self.order.shape[0]

    @property
    def total(self) -> int:
        """Ranked blocks, those that a begun ranking does not name among them."""
        return self.order.shape[1] if self.ranked is None else self.ranked

    def whole(self) -> Ranking:
        """The ranking of all blocks."""
        return self if self.complete is None else replace(self, order=self.complete(), ranked=None, complete=None)

    def as_blocks(self) -> Blocks:
        """Everything the ranking may read."""
        return self.whole().prefix([self.total] * self.units)

    def prefix(self, used: Sequence[int]) -> Blocks:
        """``always`` and the first ``used[u]`` blocks of each unit's order: what the op has read once it stopped."""
        lists = [torch.cat([self.always[u], self.order[u, : used[u]]]) for u in range(self.units)]
        return Blocks.from_lists(self.shape, self.block_size, lists)

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        return self.as_blocks().row_mask(unit, start, stop)

    def unit_pairs(self) -> Tensor:
        return self.as_blocks().unit_pairs()

    def check(self) -> None:
        if self.shape.q_len != 1:
            raise SaccadeError(f"a ranking serves one query row, got q_len={self.shape.q_len}")
        both = torch.cat([self.always, self.whole().order], 1)
        for row in both:
            if torch.unique(row).numel() != row.numel():
                raise SaccadeError("a ranking's always and order blocks must be disjoint and unique")
        if (self.rest == "estimate") != (self.estimates is not None):
            raise SaccadeError(f"rest='estimate' needs estimates, and no other rest takes them; got rest={self.rest!r}")
        if self.estimates is not None and self.estimates.shape != (self.shape.heads, self.order.shape[1]):
            raise SaccadeError(f"estimates must be [heads, ranked blocks], got {tuple(self.estimates.shape)}")
        self.as_blocks().check()
