"""Replacement policies, which say the part that leaves its slot next: second chance (clock), least recently used, first
in first out, random, or ``cycle``.

The first three keep nothing useful where steps read more than there are slots, again and again in the same order: each
part leaves just before it is read again. ``random`` keeps some. ``cycle`` uses the order, since layers come in turn: of
the parts used since a layer's last turn the most recent is needed last and leaves first; parts used before that leave
earlier still, the oldest first (docs/tiers.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

POLICIES = ("clock", "lru", "fifo", "random", "cycle")
Array = np.ndarray[Any, Any]


class Replacement:
    """Over ``slots`` slots. What a slot holds is a number of the caller's; -1 is nothing."""

    def __init__(self, slots: int, policy: str = "clock") -> None:
        self.policy = policy
        self._held = np.full(slots, -1, dtype=np.int64)
        self._seen = np.zeros(slots, dtype=np.int64)  # clock: 1 is a second chance; else when it was used, or came
        self._now = 0
        self._hands: dict[int, int] = {}  # of the clock, by group
        self.sees_turns = True  # not where a device takes slots by itself: cycle is lru then
        self._layer, self._turns = -1, dict[int, int]()  # cycle: whose turn it is, and when each layer's last one began
        self._cycle = 0  # when that layer's turn before began
        self._rng = np.random.default_rng(0)

    def turn(self, layer: int) -> None:
        """What is wanted from here on is ``layer``'s."""
        if layer != self._layer:
            self._layer, self._cycle = layer, self._turns.get(layer, 0)
            self._turns[layer] = self._now

    def place(self, slots: Array, held: Array) -> None:
        """``slots`` hold ``held`` from now on."""
        self._held[slots] = held
        self._now += 1
        self._seen[slots] = 0 if self.policy == "clock" else self._now

    def touch(self, slots: Array, in_turn: bool = False) -> None:
        """What lies in ``slots`` was used, all at once or one after the other."""
        if self.policy == "clock":
            self._seen[slots] = 1
        elif self.policy in ("lru", "cycle"):
            self._seen[slots] = self._now + 1 + (np.arange(len(slots)) if in_turn else 0)
            self._now += len(slots) if in_turn else 1

    def victims(
        self,
        count: int,
        allowed: Callable[[Array, Array], Array],
        group: int = 0,
        member: Callable[[Array], Array] | None = None,
    ) -> Array:
        """What ``count`` slots hold, those that leave next first. ``allowed(slots, held)`` says which may; there are
        enough of them. Where groups take turns of their own, ``member(held)`` says what belongs to ``group``, and all
        that is allowed does."""
        if self.policy != "clock":
            slots = np.nonzero(allowed(np.arange(len(self._held)), self._held))[0]
            if self.policy == "random":
                return self._held[self._rng.choice(slots, count, replace=False)]
            order = seen = self._seen[slots]
            if self.policy == "cycle" and self.sees_turns:
                order = np.where(seen > self._cycle, self._now - seen, seen - self._now - 1)
            return self._held[slots[np.argsort(order, kind="stable")[:count]]]
        found: list[Array] = []
        size = len(self._held)
        taken = np.zeros(size, dtype=bool)
        while count > 0:
            first = self._hands.get(group, 0)
            last = min(size, first + max(64, 2 * count))
            may = allowed(np.arange(first, last), self._held[first:last]) & ~taken[first:last]
            old = first + np.nonzero(may & (self._seen[first:last] == 0))[0][:count]
            if len(old) == count:
                last = int(old[-1]) + 1
            own = slice(None) if member is None else member(self._held[first:last])
            self._seen[first:last][own] = 0
            found.append(self._held[old])
            taken[old] = True
            count -= len(old)
            self._hands[group] = last % size
        return np.concatenate(found) if found else self._held[:0]
