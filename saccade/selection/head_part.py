"""Which of a layer's KV heads a process has, where several share them out, and what it may ask of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Gather = Callable[[tuple[int, ...], Tensor], list[Tensor]]  # of a tensor named by numbers: every part's, in their order


@dataclass(frozen=True)
class HeadPart:
    """Part ``number``, from 0, of ``parts`` equal ones of a layer's KV heads, with the query heads that read them.
    ``copies``: processes that have each part, all of which choose and read alike. ``gather``: None where no other
    process has a part."""

    number: int = 0
    parts: int = 1
    copies: int = 1
    gather: Gather | None = None

    @classmethod
    def of(cls, kv_heads: int, rank: int, ranks: int, gather: Gather | None = None) -> HeadPart:
        """That of ``rank``, from 0, of ``ranks`` that share out ``kv_heads`` heads: one head for several ranks where
        there are more of these."""
        copies = max(1, ranks // kv_heads)
        return cls(rank // copies, ranks // copies, copies, gather)

    @property
    def is_whole(self) -> bool:
        """Whether it is all there is."""
        return self.parts == 1

    @property
    def is_alone(self) -> bool:
        """Whether no other process has a part, or the same."""
        return self.parts * self.copies == 1

    def global_head(self, kv_head: int, kv_heads: int) -> int:
        """The number in the model of this part's ``kv_head``, of ``kv_heads``."""
        return self.number * kv_heads + kv_head

    def own(self, whole: Tensor) -> Tensor:
        """This part of what is there for all heads, along dimension 0."""
        size = len(whole) // self.parts
        return whole[self.number * size : (self.number + 1) * size]

    def all_of(self, own: Tensor, name: tuple[int, ...]) -> Tensor:
        """What there is for all heads, of ``own`` for this part's, along dimension 0: every part's is of one shape and
        dtype. ``name``: numbers that say what it is, by which parts that ask for different things find out."""
        if self.gather is None:
            return own
        return torch.cat(self.gather(name, own)[:: self.copies])


WHOLE = HeadPart()
