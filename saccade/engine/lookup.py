"""Prompt lookup: what followed the last tokens when they stood earlier in the sequence (Saxena, "Prompt lookup
decoding", 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LONGEST = 16  # tokens of what followed
MIXED = np.uint64(0x9E3779B97F4A7C15)  # golden ratio: sums of tokens that are multiples of powers of it rarely meet
TRIES = 8  # places with the number that is looked for, of which all but the first may have other tokens
SORTED = 1024  # runs of tokens that are looked at one by one before they are sorted in


class Lookup:
    """Follows one sequence, which grows and may be cut. ``size``: tokens that must agree; 0 finds nothing.

    Runs of ``size`` tokens have a number each. Those of the first ``_sorted`` places are sorted, with their places, so
    that a search takes no time that grows with the sequence; the numbers behind them are few and searched as they are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._ids: NDArray[np.int64] = np.empty(256, np.int64)
        self._numbers: NDArray[np.uint64] = np.empty(256, np.uint64)  # of the run that begins at a place
        self._known = 0
        self._sorted = 0
        self._order: NDArray[np.int64] = np.empty(0, np.int64)  # places by their runs' numbers, then by themselves
        self._ranked: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._powers = np.array([pow(int(MIXED), at + 1, 1 << 64) for at in range(size)], np.uint64)

    def cut(self, length: int) -> None:
        """The sequence has no more than its first ``length`` tokens in common with what it was."""
        self._known = min(self._known, length)
        if self._known - self.size + 1 < self._sorted:
            self._sorted = 0

    def after(self, tokens: Sequence[int], most: int = LONGEST) -> list[int]:
        """What followed the last ``size`` tokens of ``tokens`` where they stood last before, at most ``most``; none
        where they did not. ``tokens`` goes on from those of the last call, unless ``cut`` was told otherwise."""
        size, length = self.size, len(tokens)
        if not size or length <= size or most < 1:
            return []
        self._follow(tokens)
        last = length - size  # where the run begins that is looked for; places before it count
        wanted, own = self._numbers[last], self._ids[last:length]
        recent = (self._numbers[self._sorted : last] == wanted).nonzero()[0][::-1] + self._sorted
        first, behind = np.searchsorted(self._ranked, wanted, "left"), np.searchsorted(self._ranked, wanted, "right")
        for places in (recent, self._order[first:behind][::-1]):
            for place in places[:TRIES].tolist():
                if place < last and (self._ids[place : place + size] == own).all():  # equal numbers may be unlike runs
                    return list(tokens[place + size : place + size + most])
        return []

    def _follow(self, tokens: Sequence[int]) -> None:
        size, length, known = self.size, len(tokens), self._known
        if length <= known:
            return
        if length > len(self._ids):
            self._ids = np.concatenate([self._ids[:known], np.empty(2 * length - known, np.int64)])
            self._numbers = np.concatenate([self._numbers[:known], np.empty(2 * length - known, np.uint64)])
        self._ids[known:length] = tokens[known:]
        self._known = length
        first = max(0, known - size + 1)  # runs that end among the new tokens
        runs = np.lib.stride_tricks.sliding_window_view(self._ids[first:length].view(np.uint64), size)
        self._numbers[first : length - size + 1] = ((runs + np.uint64(1)) * self._powers).sum(1, dtype=np.uint64)
        if length - size - self._sorted > SORTED:
            self._sorted = length - size - SORTED // 2  # the last ones may be cut off again
            self._order = np.argsort(self._numbers[: self._sorted], kind="stable")
            self._ranked = self._numbers[self._order]
        elif not self._sorted and len(self._ranked):
            self._order, self._ranked = self._order[:0], self._ranked[:0]
