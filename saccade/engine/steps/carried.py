"""What verified rows saw, for the draft that comes next: where dense attention has just looked, the draft reads too.

A verification leaves for each of its rows, layer, KV head and region of ``REGION`` keys the softmax weight of the
region's heaviest key. Of the last row that stayed the heaviest regions are carried over: a draft that chooses blocks
for a budget reads them in place of its own last choices, so that it reads no more than before; one that reads ranked
blocks until a rule is content reads them first. Rows that were rejected carry nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from saccade.selection.plan import DevicePlan
from saccade.selection.readings import Choice

REGION = 32  # keys
RULED = 512  # keys, of which a share are carried for a draft that has a rule and no budget


def carries(plan: DevicePlan | None, share: float) -> bool:
    """Whether a draft under ``plan`` can read carried blocks, ``share`` of what it chooses."""
    choice = None if plan is None else plan.choice
    return choice is not None and _regions(choice, share) > 0


@dataclass(frozen=True, eq=False)
class Weighed:
    """What the rows of one verification saw, the first of which stands at ``start``: ``peaks`` fp32 [layers, rows,
    kv_heads, regions], summed over the query heads of a KV head."""

    start: int
    peaks: Tensor
    memory: Tensor  # that they lie in

    @classmethod
    def for_rows(cls, held: Weighed | None, start: int, layers: int, rows: int, kv_heads: int) -> Weighed:
        """Room for rows from ``start`` on, that of ``held`` where it is enough: fresh memory costs more than what is
        written to it."""
        regions = -(-(start + rows) // REGION)
        count = layers * rows * kv_heads * regions
        flat = torch.empty(0, device="cpu") if held is None else held.memory
        if len(flat) < count:
            flat = torch.empty(count + count // 8, dtype=torch.float32, device="cpu")
        return cls(start, flat[:count].view(layers, rows, kv_heads, regions), flat)

    def carried(self, position: int, share: float) -> Carried | None:
        """What the row at ``position`` leaves to the draft, ``share`` of what that chooses; None where it is not among
        these."""
        row = position - self.start
        return Carried(self.peaks[:, row], share) if 0 <= row < self.peaks.shape[1] else None


@dataclass(eq=False)
class Carried:
    """``peaks`` fp32 [layers, kv_heads, regions] of one row."""

    peaks: Tensor
    share: float
    _blocks: dict[Choice, Tensor | None] = field(default_factory=dict)

    def blocks(self, choice: Choice) -> Tensor | None:
        """The blocks that ``choice`` is to read besides: int32 [layers, units, n], -1 for none; None where there is
        nothing to carry."""
        if choice not in self._blocks:
            self._blocks[choice] = self._heaviest(choice)
        return self._blocks[choice]

    def _heaviest(self, choice: Choice) -> Tensor | None:
        layers, kv_heads, regions = self.peaks.shape
        wide = max(1, choice.size // REGION)  # regions of a block
        count = min(_regions(choice, self.share), regions // wide)
        if not count:
            return None
        peaks = self.peaks
        if choice.units < kv_heads:
            peaks = peaks.view(layers, choice.units, -1, regions).mean(2)
        if wide > 1:
            peaks = peaks[..., : regions // wide * wide].unflatten(-1, (-1, wide)).amax(-1)
        weights, found = peaks.topk(count, sorted=False)
        found = torch.where(weights > 0, found, -1).to(torch.int32)
        each = max(1, REGION // choice.size)  # blocks of a region
        if each > 1:
            parts = found[..., None] * each + torch.arange(each, dtype=torch.int32, device="cpu")
            found = torch.where(found[..., None] >= 0, parts, -1).flatten(-2)
        if choice.units > kv_heads:
            found = found.repeat_interleave(choice.units // kv_heads, 1)
        return found.contiguous()


def _regions(choice: Choice, share: float) -> int:
    """Regions, or blocks where these are wider, that make up ``share`` of what is chosen."""
    keys = RULED if choice.take is None else choice.take * choice.size
    return int(keys * share) // max(REGION, choice.size)
