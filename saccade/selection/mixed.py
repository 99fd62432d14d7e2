"""Heads of different kinds in one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.selection.base import Selection, Shape
from saccade.selection.blocks import Ranking


@dataclass(frozen=True, eq=False)
class Mixed(Selection):
    """Query head ``h`` reads what ``parts[choice[h]]`` gives it: one selection for some heads, another for the rest.

    All parts have this shape; their lists for heads that chose otherwise are ignored and best left empty. ``choice``
    int64 [heads].
    """

    shape: Shape
    parts: tuple[Selection, ...]
    choice: Tensor

    @property
    def units(self) -> int:
        return self.shape.heads

    def _of(self, head: int) -> tuple[Selection, int]:
        part = self.parts[int(self.choice[head])]
        return part, head // (self.shape.heads // part.units)

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        part, part_unit = self._of(unit)
        return part.row_mask(part_unit, start, stop)

    def unit_pairs(self) -> Tensor:
        pairs = torch.stack([part.pairs() for part in self.parts])
        return pairs.gather(0, self.choice[None])[0]

    def _merge_same(self, other: Selection) -> Selection | None:
        if isinstance(other, (Mixed, Ranking)):
            return None
        return Mixed(self.shape, tuple(part.merge(other) for part in self.parts), self.choice)

    def check(self) -> None:
        if tuple(self.choice.shape) != (self.shape.heads,) or not self.parts:
            raise SaccadeError(f"{self.shape.heads} heads need as many choices, got {tuple(self.choice.shape)}")
        if bool((self.choice < 0).any()) or int(self.choice.max()) >= len(self.parts):
            raise SaccadeError(f"a choice lies outside the {len(self.parts)} parts")
        for part in self.parts:
            if part.shape != self.shape or isinstance(part, (Ranking, Mixed)):
                raise SaccadeError(f"{type(part).__name__} of shape {part.shape} is no part of a mixed selection")
            part.check()
