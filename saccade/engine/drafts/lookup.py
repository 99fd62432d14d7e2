"""Prompt lookup: what followed the last tokens when they stood earlier in the sequence (Saxena, "Prompt lookup
decoding", 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LONGEST = 16  # tokens of what followed
MIXED = 0x9E3779B1  # golden ratio: sums of tokens that are multiples of powers of it rarely meet
TRIES = 8  # places with the number that is looked for, of which all but the first may have other tokens
STRETCH = 2048  # tokens that a call takes in: a long prompt at once would hold up the round that asks first
SCANNED = 1 << 16  # places that are compared together, the last ones first


class Lookup:
    """Follows one sequence, which grows and may be cut. ``size``: tokens that must agree; 0 finds nothing.

    Runs of ``size`` tokens have a number each, of 32 bits, so that a million places are searched in less
    than a millisecond. Each call takes in some tokens, and nothing is found before all are known.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._ids: NDArray[np.int64] = np.empty(256, np.int64)
        self._numbers: NDArray[np.uint32] = np.empty(256, np.uint32)  # of the run that begins at a place
        self._known = 0
        self._powers = [np.uint32(pow(MIXED, at + 1, 1 << 32)) for at in range(size)]

    def cut(self, length: int) -> None:
        """The sequence has no more than its first ``length`` tokens in common with what it was."""
        self._known = min(self._known, length)

    def after(self, tokens: Sequence[int], most: int = LONGEST) -> list[int]:
        """What followed the last ``size`` tokens of ``tokens`` where they stood last before, at most ``most``; none
        where they did not. ``tokens`` goes on from those of the last call, unless ``cut`` was told otherwise."""
        size, length = self.size, len(tokens)
        if not size or length <= size or most < 1:
            return []
        self._follow(tokens)
        if self._known < length:
            return []
        last = length - size  # where the run begins that is looked for; places before it count
        wanted, own, tries = self._numbers[last], self._ids[last:length], 0
        for start in range((last - 1) // SCANNED * SCANNED, -1, -SCANNED):
            places = (self._numbers[start : min(last, start + SCANNED)] == wanted).nonzero()[0][::-1] + start
            for place in places[: TRIES - tries].tolist():
                if (self._ids[place : place + size] == own).all():  # equal numbers may be unlike runs
                    return list(tokens[place + size : place + size + most])
                tries += 1
            if tries == TRIES:
                break
        return []

    def _follow(self, tokens: Sequence[int]) -> None:
        size, known = self.size, self._known
        length = min(len(tokens), known + STRETCH)
        if length <= known:
            return
        if length > len(self._ids):
            room = 2 * len(tokens) - known
            self._ids = np.concatenate([self._ids[:known], np.empty(room, np.int64)])
            self._numbers = np.concatenate([self._numbers[:known], np.empty(room, np.uint32)])
        self._ids[known:length] = tokens[known:length]
        self._known = length
        first, stop = max(0, known - size + 1), length - size + 1  # runs that end among the new tokens
        if stop > first:
            self._numbers[first:stop] = 0
            for at, power in enumerate(self._powers):
                self._numbers[first:stop] += (self._ids[first + at : stop + at] + 1).astype(np.uint32) * power
