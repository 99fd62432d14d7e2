"""The queries whose keys later ones may take over (CIS; docs/algorithms.md 5.2): a state, saved and copied as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.methods.fitting import Fitting, Sizes
from saccade.methods.state import MethodState

CPU = torch.device("cpu")
NONE = torch.iinfo(torch.int32).max  # behind every position
PARTS = "directions", "has", "counts", "keys", "positions", "moving"


@dataclass
class Anchors(MethodState):
    """The queries of one block of steps that later ones may take keys over from, ``count`` of them, oldest first.

    ``directions`` fp32 [room, units, channels], of length 1; ``has`` bool [room, units]: which units may be taken over
    from; ``counts`` int32 [room, units]; ``keys`` int32 [room, units, capacity], rising, of which the first ``counts``
    are shared. A unit that shared and passes on what it had (``anchors=any``) has no list of its own: its count is
    -1 - a, where a is the number of the anchor that retrieved. ``positions`` int64 [room]: where the queries stand, the
    first of them at ``first``. ``moving`` int32 [room, units, most], rising: the best of the keys each retrieved, the
    rest behind every position; ``most`` is 0 where none are to move along with the steps. The place behind the last
    anchor holds the query at hand.
    """

    directions: Tensor
    has: Tensor
    counts: Tensor
    keys: Tensor
    positions: Tensor
    moving: Tensor
    count: int = 0
    first: int = 0

    def fit(self, sizes: Sizes, fitting: Fitting) -> None:
        """See MethodState."""
        directions = fitting.tensor("directions", self.directions, torch.float32, None, sizes.units, None)
        room, units, channels = directions.shape
        fitting.require(channels > 0, "has directions of no channels")  # how many is the method's: see of()
        fitting.tensor("has", self.has, torch.bool, room, units)
        keys = fitting.tensor("keys", self.keys, torch.int32, room, units, None)
        counts = fitting.tensor("counts", self.counts, torch.int32, room, units)
        fitting.within("counts", counts, -room, keys.shape[2])
        shared = torch.arange(keys.shape[2], device=keys.device) < counts[..., None]
        fitting.within("keys", keys[shared], 0, sizes.length - 1)
        positions = fitting.tensor("positions", self.positions, torch.int64, room)
        fitting.within("positions", positions, 0, sizes.length)
        fitting.within("moving", fitting.tensor("moving", self.moving, torch.int32, room, units, None), 0, 2**31 - 1)
        fitting.within("count", self.count, 0, room)
        earlier = torch.arange(self.count, device=counts.device)[:, None]
        passing = self.has[: self.count] & (counts[: self.count] < 0)
        own = self.retrieving(earlier)
        fitting.require(bool((own[passing] < earlier.expand_as(own)[passing]).all()), "passes on what came later")
        lists = counts.gather(0, own)
        fitting.require(bool((lists[passing] >= 0).all()), "passes on what was not retrieved")
        fitting.within("first", self.first, 0, sizes.length)

    @classmethod
    def empty(cls, units: int, channels: int, capacity: int = 0, most: int = 0, device: torch.device = CPU) -> Anchors:
        """Room for one, on ``device``; lists hold at most ``capacity`` keys, and ``most`` keys are remembered as the
        best."""
        return cls(
            torch.zeros(1, units, channels, device=device),
            torch.zeros(1, units, dtype=torch.bool, device=device),
            torch.zeros(1, units, dtype=torch.int32, device=device),
            torch.zeros(1, units, capacity, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.full((1, units, most), NONE, dtype=torch.int32, device=device),
        )

    def of(self, units: int, channels: int) -> bool:
        """Whether it holds directions of so many units and channels: a saved one may be of another method's options."""
        return self.directions.shape[1:] == (units, channels)

    @property
    def units(self) -> int:
        return self.has.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    def most(self) -> int:
        return self.moving.shape[2]

    def retrieving(self, whose: Tensor) -> Tensor:
        """Which anchors retrieved what the units have from anchors ``whose``, int64 [..., units] each, from 0 on; one
        number may stand for all units."""
        counts = self.counts[whose, torch.arange(self.units, device=self.counts.device)].long()
        return torch.where(counts < 0, -1 - counts, whose)

    def passes_on(self) -> bool:
        """Whether there are units without lists of their own."""
        return bool((self.counts[: self.count] < 0).any())

    def check(self) -> None:
        """SaccadeError unless the parts are contiguous, as kernels take them to be."""
        if not all(getattr(self, name).is_contiguous() for name in PARTS):
            raise SaccadeError("anchors are written in place and must be contiguous: clone a slice of them first")

    def widen(self, capacity: int, most: int) -> None:
        """Make room for lists of ``capacity`` keys and ``most`` best ones, where there is less."""
        pad = torch.nn.functional.pad
        self.keys = pad(self.keys, (0, max(0, capacity - self.capacity)))
        self.moving = pad(self.moving, (0, max(0, most - self.most)), value=NONE)

    def add(self, position: int) -> None:
        """Make the query at hand, at ``position``, the latest anchor, of which all else is written."""
        self.positions[self.count] = position
        self.first = position if self.count == 0 else self.first
        self.count += 1

    def reserve(self, least: int = 0) -> None:
        """Make room behind the last anchor, and for ``least`` of them."""
        room = len(self.positions)
        if room >= max(self.count + 1, least):
            return
        more = max(room, least - room)
        for name in PARTS:
            part = getattr(self, name)
            setattr(self, name, torch.cat([part, part.new_zeros(more, *part.shape[1:])]))
