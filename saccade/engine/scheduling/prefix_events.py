"""Events of shared prefixes: which blocks are stored and removed, for a listener that keeps track of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class PrefixListener(Protocol):
    """Is told what others can go on from once the request that computed it has ended. It runs on the engine's thread.
    Blocks are known by the hashes of all tokens up to their end, and of what else decides on keys and values."""

    def stored(self, hashes: list[int], parent: int | None, tokens: list[int], block_size: int) -> None:
        """Blocks of ``tokens``, in order, are kept from now on; the one before them is ``parent``, None for none."""
        ...

    def removed(self, hashes: list[int]) -> None:
        """Blocks that are kept no more."""
        ...

    def cleared(self) -> None:
        """No block is kept."""
        ...


class KeptBlocks:
    """How many kept prefixes hold each block, known by its hash, of ``size`` tokens. ``listener`` is told of what comes
    and goes."""

    def __init__(self, size: int) -> None:
        self.listener: PrefixListener | None = None
        self._size = size
        self._holders: dict[int, int] = {}

    def hold(self, hashes: Sequence[int], tokens: list[int]) -> None:
        """Count a prefix of ``tokens`` that is kept from now on, and tell of the blocks that no other one has: its last
        ones."""
        new = [place for place in hashes if place not in self._holders]
        for place in hashes:
            self._holders[place] = self._holders.get(place, 0) + 1
        if new and self.listener is not None:
            known = len(hashes) - len(new)
            parent = hashes[known - 1] if known else None
            self.listener.stored(new, parent, tokens[known * self._size :], self._size)

    def release(self, hashes: Sequence[int]) -> None:
        """A kept prefix has these blocks, its last ones, no more."""
        gone = []
        for place in hashes:
            self._holders[place] -= 1
            if not self._holders[place]:
                del self._holders[place]
                gone.append(place)
        if self.listener is not None and not self._holders:
            self.listener.cleared()
        elif gone and self.listener is not None:
            self.listener.removed(gone[::-1])  # a block goes before the one that it follows
