"""Random numbers that are the same on every platform and with every library version."""

from __future__ import annotations

import hashlib
from collections.abc import MutableSequence, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class Rng:
    """Draws from the raw stream of PCG64, which numpy promises not to change; everything else is arithmetic here.

    ``key``: anything whose parts are spelled out, such as version, task, length, seed and index.
    """

    def __init__(self, *key: Any) -> None:
        digest = hashlib.blake2b("|".join(map(str, key)).encode(), digest_size=16).digest()
        self._bits = np.random.PCG64(int.from_bytes(digest, "little"))
        self._buffer: list[float] = []

    def random(self) -> float:
        """Uniform in [0, 1)."""
        if not self._buffer:
            self._buffer = self.randoms(256).tolist()
        return self._buffer.pop()

    def randoms(self, count: int) -> np.ndarray:
        """float64 [count], uniform in [0, 1)."""
        return (self._bits.random_raw(count) >> np.uint64(11)) * 2.0**-53

    def below(self, bound: int) -> int:
        """Uniform in 0 .. bound - 1."""
        return int(self.random() * bound)

    def between(self, low: int, high: int) -> int:
        """Uniform in low .. high, both included."""
        return low + int(self.random() * (high - low + 1))

    def choice(self, items: Sequence[T]) -> T:
        return items[int(self.random() * len(items))]

    def shuffle(self, items: MutableSequence[Any]) -> None:
        for last in range(len(items) - 1, 0, -1):
            other = int(self.random() * (last + 1))
            items[last], items[other] = items[other], items[last]

    def distinct(self, bound: int, count: int) -> list[int]:
        """``count`` distinct numbers of 0 .. bound - 1, in random order (Floyd's algorithm)."""
        chosen: dict[int, None] = {}
        for top in range(bound - count, bound):
            number = int(self.random() * (top + 1))
            chosen[top if number in chosen else number] = None
        numbers = list(chosen)
        self.shuffle(numbers)
        return numbers
