"""Prompt lookup: what followed the last tokens when they stood earlier in the sequence (Saxena, "Prompt lookup
decoding", 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LONGEST = 16  # tokens of what followed


class Lookup:
    """Follows one sequence, which grows and may be cut. ``size``: tokens that must agree; 0 finds nothing."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ids = np.empty(256, np.int64)
        self._known = 0

    def cut(self, length: int) -> None:
        """The sequence has no more than its first ``length`` tokens in common with what it was."""
        self._known = min(self._known, length)

    def after(self, tokens: Sequence[int], most: int = LONGEST) -> list[int]:
        """What followed the last ``size`` tokens of ``tokens`` where they stood last before, at most ``most``; none
        where they did not. ``tokens`` goes on from those of the last call, unless ``cut`` was told otherwise."""
        size, length = self.size, len(tokens)
        if not size or length <= size or most < 1:
            return []
        if length > len(self._ids):
            self._ids = np.concatenate([self._ids[: self._known], np.empty(2 * length - self._known, np.int64)])
        self._ids[self._known : length] = tokens[self._known :]
        self._known = length
        ids, first = self._ids, length - size
        alike = ids[:first] == ids[first]  # runs that begin before the last one
        for at in range(1, size):
            alike &= ids[at : first + at] == ids[first + at]
        places = alike.nonzero()[0]
        if not len(places):
            return []
        behind = int(places[-1]) + size
        return list(tokens[behind : behind + most])
