"""What units pass on (CIS's ``anchors=any``), in decode steps of many rows on a CPU. csrc/sharing_row.h takes keys over
from whoever has a list: who has shared is given a copy of the list that it shared, as it stands after the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.methods.cis.anchors import NONE, PARTS, Anchors


class Passing:
    """Of the anchors of all layers, as many in each; they lie in tensors ``whole`` [layers, room, ...] from now on.
    ``whose`` int64 [layers, room, units]: the anchor whose list a unit's is a copy of, or its own number."""

    def __init__(self, anchors: Sequence[Anchors], local: int, cover_gap: bool) -> None:
        self._anchors, self._local, self._cover_gap = anchors, local, cover_gap
        most = max(one.count for one in anchors)
        for one in anchors:
            one.reserve(most)
            one.has[one.count : most] = False
            one.counts[one.count : most] = 0
            one.positions[one.count : most] = one.first
            one.count = most
        self._whose = torch.arange(0, dtype=torch.int64, device="cpu").expand(len(anchors), anchors[0].units, 0)
        self._whose = self._whose.transpose(1, 2)
        self.stack()
        for at in range(most):
            whose = torch.stack([one.retrieving(torch.tensor([at], device="cpu")) for one in anchors])
            self._copy(at, whose, self.whole["counts"][:, at] < 0)

    def stack(self) -> None:
        """Lay the anchors out anew, after room was made."""
        room = max(len(one.positions) for one in self._anchors)
        for one in self._anchors:
            one.reserve(room)
            one.widen(max(other.capacity for other in self._anchors), max(other.most for other in self._anchors))
        self.whole = {name: torch.stack([getattr(one, name) for one in self._anchors]) for name in PARTS}
        for layer, one in enumerate(self._anchors):
            for name in PARTS:
                setattr(one, name, self.whole[name][layer])
        layers, known, units = self._whose.shape
        more = torch.arange(known, room, device="cpu")[:, None].expand(layers, room - known, units)
        self._whose = torch.cat([self._whose, more], 1).contiguous()

    def add(self, at: int, position: int, tau: float, searched: Tensor) -> None:
        """Make the units of a step, at ``position``, anchors ``at``; bool [layers]: where some ``searched`` the kernels
        have noted which."""
        directions, has = self.whole["directions"], self.whole["has"]
        shared = ~(has[:, at] & searched[:, None])
        if at and bool(shared.any()):
            cosines = (directions[:, :at] * directions[:, at : at + 1]).sum(-1)
            alike = has[:, :at] & (cosines > tau)
            numbers = torch.arange(at, device="cpu")[:, None]
            whose = torch.where(alike, numbers, -1).amax(1)
            # The kernels' sums round otherwise than these: who shared has shared with someone.
            nearest = cosines.masked_fill(~has[:, :at], -torch.inf).argmax(1)
            self.whole["positions"][:, at] = position
            self._copy(at, torch.where(whose < 0, nearest, whose), shared)
        else:
            self._whose[:, at] = at
        self.whole["positions"][:, at] = position
        has[:, at] = True

    def forget(self) -> None:
        """A block of steps begins, of which there are no copies."""
        self._whose.copy_(torch.arange(self._whose.shape[1], device="cpu")[:, None].expand_as(self._whose))

    def settle(self) -> None:
        """Name who retrieved instead of the copies, as Anchors have it."""
        own = torch.arange(self._whose.shape[1], device="cpu")[:, None]
        copies = self._whose != own
        counts = self.whole["counts"]
        counts.copy_(torch.where(copies, (-1 - self._whose).to(torch.int32), counts))

    def _copy(self, at: int, whose: Tensor, units: Tensor) -> None:
        """Give the ``units`` bool [layers, units] of anchors ``at`` the lists of anchors ``whose`` int64 [layers,
        units], with what has left the window since, and the best keys where they have moved to."""
        whole = self.whole
        layers, number = torch.arange(len(whose), device="cpu")[:, None], torch.arange(whose.shape[1], device="cpu")
        place = layers, whose, number
        then = whole["positions"][layers, whose]
        since = whole["positions"][:, at, None] - then
        sizes, moving = whole["counts"][place], whole["moving"][place]
        column = torch.arange(whole["keys"].shape[-1], device="cpu")
        left = (then + 1 - self._local - sizes)[..., None] + column
        keys = torch.where(column < sizes[..., None], whole["keys"][place], left.to(torch.int32))
        moved = torch.where(moving == NONE, moving, moving + since[..., None].to(torch.int32))
        counts = sizes + since.to(torch.int32) if self._cover_gap else sizes
        for name, part in (("keys", keys), ("moving", moved), ("counts", counts)):
            taken = units if part.dim() == 2 else units[..., None]
            whole[name][:, at] = torch.where(taken, part, whole[name][:, at])
        self._whose[:, at] = torch.where(units, self._whose[place], at)
