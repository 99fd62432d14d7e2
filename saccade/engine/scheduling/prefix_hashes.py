"""Hashes by which prefixes are found: of all tokens up to a block's end, and of everything else that keys and values
depend on."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from typing import NamedTuple

import numpy as np

LAST = 4  # prefixes that hashes are taken over from


class Origin(NamedTuple):
    """What decides on stored keys and values beside the tokens: the prefill method and window (their texts), the regime
    of the rotary factors, and ``salt``: requests with unequal ones share nothing."""

    prefill: str
    window: str
    regime: int
    salt: str


class PrefixHashes:
    """Hashes of prefixes, by blocks of ``size`` tokens. What a prefix has in common with one of the last few is not
    hashed again: questions about one long document differ at its end alone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._last: deque[tuple[Origin, np.ndarray, list[int]]] = deque(maxlen=LAST)

    def of(self, origin: Origin, tokens: list[int], length: int) -> list[int]:
        """For each whole block of the first ``length`` tokens a hash of all up to its end, and of the origin: 64 bits,
        the same in every process."""
        content = np.frombuffer(array("q", tokens[:length]), np.int64)
        most, like = 0, None
        for one in self._last:
            if one[0] == origin and (same := _common(one[1], content)) > most:
                most, like = same, one
        hashes = [] if like is None else like[2][: most // self.size]
        if hashes:
            place = hashes[-1].to_bytes(8, "little")
        else:
            place = hashlib.blake2b(repr(tuple(origin)).encode("utf-8", "backslashreplace"), digest_size=8).digest()
        raw, width = content.tobytes(), 8 * self.size
        for start in range(width * len(hashes), len(raw) - width + 1, width):
            place = hashlib.blake2b(raw[start : start + width], digest_size=8, key=place).digest()
            hashes.append(int.from_bytes(place, "little"))
        if like is not None and most == len(like[1]):  # this one has it whole
            self._last = deque((one for one in self._last if one is not like), LAST)
        self._last.append((origin, content, hashes.copy()))
        return hashes


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many first elements are equal."""
    most = min(len(one), len(other))
    differ = np.flatnonzero(one[:most] != other[:most])
    return int(differ[0]) if len(differ) else most
