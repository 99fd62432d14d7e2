"""Blocks of kept prefixes, which no running sequence holds: later sequences that begin with the same tokens continue
from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Keepers:
    """Sequences that only keep their blocks, and the blocks that none but they hold (``alone``). It is told of every
    change, since each step asks how many there are, and a GPU has tens of thousands of blocks. ``holders``: the
    sequences of each block, the pool's own list."""

    def __init__(self, holders: Sequence[tuple[int, ...]]) -> None:
        self._holders = holders
        self._keepers: set[int] = set()
        self.alone: set[int] = set()

    def begin(self, holder: int, blocks: Iterable[int]) -> None:
        """Sequence ``holder`` only keeps its ``blocks`` from now on."""
        self._keepers.add(holder)
        self.alone.update(block for block in blocks if self._keepers.issuperset(self._holders[block]))

    def end(self, holder: int) -> None:
        """Sequence ``holder`` has released all its blocks."""
        self._keepers.discard(holder)

    def shared(self, blocks: Iterable[int], holder: int) -> None:
        """``holder`` holds ``blocks`` too."""
        if self.alone and holder not in self._keepers:
            self.alone.difference_update(blocks)

    def released(self, blocks: Iterable[int], holder: int) -> None:
        """``holder`` has released ``blocks``."""
        if not self._keepers:
            return
        keeps = holder in self._keepers
        for block in blocks:
            held = self._holders[block]
            if not held:
                self.alone.discard(block)
            elif not keeps and self._keepers.issuperset(held):
                self.alone.add(block)
