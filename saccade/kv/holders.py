"""Which sequences hold each logical block of a pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from saccade.errors import SaccadeError
from saccade.kv.keepers import Keepers


class Holders:
    """Of ``count`` blocks, none of which has a holder yet. Sequences are numbers that grow. ``keepers``: those of them
    that only keep their blocks."""

    def __init__(self, count: int) -> None:
        self._of: list[tuple[int, ...]] = [()] * count  # sequences, the owner first
        self.keepers = Keepers(self._of)
        self._newest = 0  # greatest number of a sequence that has held a block

    def count(self, block: int) -> int:
        """How many sequences hold a block."""
        return len(self._of[block])

    def owner(self, block: int) -> int | None:
        """The sequence that has held a block longest; None if there is none."""
        return self._of[block][0] if self._of[block] else None

    def begin(self, blocks: Sequence[int], owner: int) -> None:
        """Sequence ``owner`` holds ``blocks``, which had no holder."""
        self._newest = max(self._newest, owner)
        for block in blocks:
            self._of[block] = (owner,)

    def share(self, blocks: Sequence[int], holder: int) -> None:
        """See BlockManager.share."""
        newest, self._newest = self._newest, max(self._newest, holder)
        fresh = holder > newest and len(set(blocks)) == len(blocks)  # it holds nothing, however many hold these
        for block, times in () if fresh and all(map(self._of.__getitem__, blocks)) else Counter(blocks).items():
            if not self._of[block] or holder in self._of[block] or times > 1:
                raise SaccadeError(
                    f"KV block {block} cannot be shared with sequence {holder}: {self._held_by(block)}, and each "
                    "sequence holds a block once"
                )
        for block in blocks:
            self._of[block] += (holder,)
        self.keepers.shared(blocks, holder)

    def release(self, blocks: Sequence[int], holder: int) -> list[int]:
        """Sequence ``holder`` lets go of ``blocks``; returns those that have no holder any more. Raises as
        BlockManager.release."""
        for block, times in Counter(blocks).items():
            if holder not in self._of[block] or times > 1:
                raise SaccadeError(
                    f"sequence {holder} releases KV block {block}, which it does not hold: {self._held_by(block)}"
                )
        freed = []
        for block in blocks:
            held = self._of[block]
            at = held.index(holder)
            self._of[block] = held[:at] + held[at + 1 :]
            if len(held) == 1:
                freed.append(block)
        self.keepers.released(blocks, holder)
        return freed

    def _held_by(self, block: int) -> str:
        holders = self._of[block]
        return f"held by sequence {', '.join(map(str, holders))}" if holders else "it is free"
