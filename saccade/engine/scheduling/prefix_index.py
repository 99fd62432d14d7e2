"""Which sequences begin with the same tokens, computed alike: found by hashes of their blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from saccade.engine.scheduling.prefix_hashes import Origin, PrefixHashes
from saccade.kv.held import HeldBlocks

if TYPE_CHECKING:
    from saccade.engine.memory.sequence import Sequence


class Donor:
    """A sequence that lends, or what is kept of one that ended: all of ``tokens``, in the memory ``id``."""

    def __init__(
        self, origin: Origin, tokens: list[int], id: int, sequence: Sequence | None, kept: HeldBlocks | None = None
    ) -> None:
        self.origin, self.tokens, self.id, self.sequence, self.kept = origin, tokens, id, sequence, kept
        self.hashes: list[int] = []
        self.counted = False  # among the queries
        self.step = 1  # tokens of which others take whole multiples

    @property
    def kv(self) -> HeldBlocks:
        if self.kept is not None:
            return self.kept
        assert self.sequence is not None
        return self.sequence.kv


class PrefixIndex:
    """Donors by what they begin with, in blocks of ``size`` tokens."""

    def __init__(self, size: int) -> None:
        self._size, self._hashes = size, PrefixHashes(size)
        # In order, by the hash of all tokens up to a block's end: hundreds of questions may hold one document.
        self._places: dict[int, dict[Donor, None]] = {}

    def __len__(self) -> int:
        """Blocks that donors hold."""
        return len(self._places)

    def add(self, donor: Donor, length: int) -> None:
        """A donor is found by its first ``length`` tokens from now on."""
        donor.hashes = self._hashes.of(donor.origin, donor.tokens, length)
        for place in donor.hashes:
            if (holders := self._places.get(place)) is None:
                self._places[place] = {donor: None}
            else:
                holders[donor] = None

    def remove(self, donor: Donor, length: int = 0) -> None:
        """No sequence finds a donor beyond its first ``length`` tokens."""
        for place in donor.hashes[length // self._size :]:
            holders = self._places[place]
            del holders[donor]
            if not holders:
                del self._places[place]
        donor.hashes = donor.hashes[: length // self._size]

    def depth(self, hashes: list[int], count: int) -> int:
        """How many of these blocks, of a donor that is found by them, more than ``count`` donors hold. A donor that
        holds a block holds all before it, so a few looks find the last one."""
        return bisect_left(hashes, True, key=partial(self._held_by_few, count))

    def holders(self, place: int) -> Iterator[Donor]:
        """The donors that hold a block, the last one first."""
        return reversed(self._places[place])

    def _held_by_few(self, count: int, place: int) -> bool:
        return len(self._places[place]) <= count
