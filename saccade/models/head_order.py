"""Which KV heads each of several ranks has, so that in every layer the busiest rank reads as little as can be.

A layer of several ranks waits for the one that reads most. What heads read under a sparse policy differs, by what the
model does in each of them; ``saccade tune`` measures it, and ranks that load the same checkpoint share heads out by it.
Every rank has as many heads as before: answers are the same, but for what rounding does to sums in another order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from saccade.selection.head_part import Order

EXACT = 1000  # ways to share a layer's heads out, of which all are tried
Loads = Sequence[tuple[float, ...]]  # by KV head: what it reads in each phase


@dataclass(frozen=True)
class HeadDensities:
    """Keys that KV heads read of those that they may, under ``policy`` over a ``text``: ``prefill`` and ``decode`` by
    layer and KV head, empty of a phase in which all read alike. ``made``: the day."""

    policy: str
    text: str
    made: str
    prefill: tuple[tuple[float, ...], ...] = ()
    decode: tuple[tuple[float, ...], ...] = ()

    @property
    def phases(self) -> list[tuple[tuple[float, ...], ...]]:
        """Those of which something is known."""
        return [one for one in (self.prefill, self.decode) if one]

    def loads(self, layer: int) -> Loads:
        """What each KV head of ``layer`` reads in each phase, over the mean of all."""
        means = [sum(one[layer]) / len(one[layer]) or 1.0 for one in self.phases]
        return list(zip(*([of / mean for of in one[layer]] for one, mean in zip(self.phases, means))))


def orders_of(densities: HeadDensities | None, layers: int, kv_heads: int, parts: int) -> tuple[Order, ...]:
    """By layer, the KV heads that each of ``parts`` ranks has, so that the busiest reads least; empty where nothing is
    gained: nothing is known of such a model, or a rank has one head, or all."""
    if densities is None or not densities.phases or parts == 1 or parts >= kv_heads:
        return ()
    if any([len(row) for row in one] != [kv_heads] * layers for one in densities.phases):
        return ()
    orders = tuple(shared_out(densities.loads(layer), parts) for layer in range(layers))
    return orders if any(one != tuple(range(kv_heads)) for one in orders) else ()


def gains(densities: HeadDensities) -> dict[int, tuple[float, float]]:
    """By numbers of ranks of which each has several heads, but not all: what the busiest reads over the mean of all,
    meaned over layers, in the model's order, and shared out by what heads read."""
    layers = [densities.loads(layer) for layer in range(len(densities.phases[0]))] if densities.phases else []
    heads = len(layers[0]) if layers else 0
    found = {}
    for parts in (ranks for ranks in range(2, heads) if heads % ranks == 0):
        plain = [busiest(loads, tuple(range(heads)), parts) for loads in layers]
        best = [busiest(loads, shared_out(loads, parts), parts) for loads in layers]
        found[parts] = sum(plain) / len(plain), sum(best) / len(best)
    return found


def busiest(loads: Loads, order: Order, parts: int) -> float:
    """What the busiest of ``parts`` ranks reads over what it would if all read alike, meaned over phases."""
    size = len(order) // parts
    ranks = [[loads[head] for head in order[first : first + size]] for first in range(0, len(order), size)]
    sums = [[sum(phase) for phase in zip(*rank)] for rank in ranks]
    return sum(max(phase) for phase in zip(*sums)) / (size * len(loads[0]))


def shared_out(loads: Loads, parts: int) -> Order:
    """Heads in ``parts`` of as many each, those of the busiest part reading least: the best of all ways where there are
    few, else the longest first and then swaps (Graham, 1969). The model's own order where no other is better."""
    count = len(loads)
    size = count // parts
    ways = math.factorial(count) // (math.factorial(size) ** parts * math.factorial(parts))
    own = tuple(range(count))
    tried = _every(own, size) if ways <= EXACT else [_swapped(loads, _longest_first(loads, parts), parts)]
    best = min(tried, key=lambda order: busiest(loads, order, parts))
    return best if busiest(loads, best, parts) < busiest(loads, own, parts) - 1e-9 else own


def _every(heads: Order, size: int) -> Iterator[Order]:
    """All ways to put ``heads`` into parts of ``size``, whose order says nothing."""
    if not heads:
        yield ()
        return
    first, *rest = heads
    for more in combinations(rest, size - 1):
        for others in _every(tuple(one for one in rest if one not in more), size):
            yield (first, *more, *others)


def _longest_first(loads: Loads, parts: int) -> list[list[int]]:
    size, found = len(loads) // parts, list[list[int]]([] for _ in range(parts))
    for head in sorted(range(len(loads)), key=lambda one: -sum(loads[one])):
        room = [one for one in found if len(one) < size]
        min(room, key=lambda one: sum(sum(loads[held]) for held in one)).append(head)
    return found


def _swapped(loads: Loads, found: list[list[int]], parts: int) -> Order:
    """``found`` after swaps of two heads, the best first, until none is better."""
    now, size = _flat(found), len(loads) // parts
    while True:
        swaps = []
        for one in range(len(now)):
            for other in range((one // size + 1) * size, len(now)):
                moved = list(now)
                moved[one], moved[other] = moved[other], moved[one]
                swaps.append(_flat([moved[at : at + size] for at in range(0, len(moved), size)]))
        best = min(swaps, key=lambda order: busiest(loads, order, parts))
        if busiest(loads, best, parts) >= busiest(loads, now, parts) - 1e-9:
            return now
        now = best


def _flat(parts: Sequence[Sequence[int]]) -> Order:
    return tuple(head for one in sorted(map(sorted, parts)) for head in one)
