"""Which of a layer's KV heads a process has, where several share them out, and what it may ask of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

Gather = Callable[[tuple[int, ...], Tensor], list[Tensor]]  # of a tensor named by numbers: every part's, in their order
Order = tuple[int, ...]  # a layer's KV heads, by their numbers in the model, those of one part behind another's


@dataclass(frozen=True)
class HeadPart:
    """Part ``number``, from 0, of ``parts`` equal ones of a layer's KV heads, with the query heads that read them.
    ``copies``: processes that have each part, all of which choose and read alike. ``gather``: None where no other
    process has a part. ``orders``: by layer, which heads parts have; empty where they have them in the model's order.
    ``order``: that of the layer at hand (:meth:`at`)."""

    number: int = 0
    parts: int = 1
    copies: int = 1
    gather: Gather | None = None
    orders: tuple[Order, ...] = ()
    order: Order = ()

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

    def at(self, layer: int) -> HeadPart:
        """The same part of the KV heads of ``layer``, which all that follows is asked of."""
        return self._layers[layer] if self.orders else self

    @cached_property
    def _layers(self) -> list[HeadPart]:
        return [replace(self, orders=(), order=order) for order in self.orders]

    def units(self, count: int) -> Sequence[int]:
        """The numbers in the model of this part's ``count`` KV heads, query heads or other units of a KV head each."""
        if not self.order:
            return range(self.number * count, (self.number + 1) * count)
        return _units(self.order, self.parts, self.number, count)

    def global_head(self, kv_head: int, kv_heads: int) -> int:
        """The number in the model of this part's ``kv_head``, of ``kv_heads``."""
        return self.units(kv_heads)[kv_head]

    def own(self, whole: Tensor, dim: int = 0) -> Tensor:
        """This part of what is there for all heads, along ``dim``."""
        size = whole.shape[dim] // self.parts
        if not self.order:
            return whole.narrow(dim, self.number * size, size)
        return whole.index_select(dim, _places(self.order, self.parts, self.number, size, whole.device))

    def join(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        """What every part has for its heads, in the order of parts -> the same of all, in the model's order, along
        ``dim``."""
        whole = torch.cat(list(parts), dim)
        if not self.order or len(parts) != self.parts:  # others are lost
            return whole
        return whole.index_select(dim, _places(self.order, self.parts, None, parts[0].shape[dim], whole.device))

    def all_of(self, own: Tensor, name: tuple[int, ...]) -> Tensor:
        """What there is for all heads, of ``own`` for this part's, along dimension 0: every part's is of one shape and
        dtype. ``name``: numbers that say what it is, by which parts that ask for different things find out."""
        if self.gather is None:
            return own
        return self.join(self.gather(name, own)[:: self.copies])


def _units(order: Order, parts: int, number: int, count: int) -> list[int]:
    heads = len(order) // parts
    each, own = count // heads, order[number * heads : (number + 1) * heads]
    return [head * each + unit for head in own for unit in range(each)]


@lru_cache(8192)
def _places(order: Order, parts: int, number: int | None, count: int, device: torch.device) -> Tensor:
    """int64: where the ``count`` units of part ``number`` lie among those of all heads; for None, where those of all
    heads lie among the parts, one behind another. Kept: nothing may come from the host while a GPU records."""
    if number is not None:
        return torch.tensor(_units(order, parts, number, count), device=device)
    all_parts = [unit for part in range(parts) for unit in _units(order, parts, part, count)]
    return torch.tensor(all_parts, device=device).argsort()


WHOLE = HeadPart()
