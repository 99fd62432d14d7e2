"""What stands for blocks that a block method leaves unread (``tail``): nothing, or their means.

``tail="mean"`` is FlashPrefill V2's mean correction (arXiv:2608.19758), for any method that reads blocks: an unread
block counts as so many keys like its mean key, with its mean value. docs/algorithms.md 6.17.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from saccade.methods.base import Chunk, Method
from saccade.methods.options import require
from saccade.selection import Corrected, Dense, Selection

NOTE = "blocks that were not read count by their means (tail=mean)"


@dataclass(frozen=True)
class BlockMethod(Method):
    """Base of methods that read blocks. ``tail``: see the module. Recorded steps have no kernel for tails: such a
    request is served by the row path."""

    tail: str | None = field(default=None, kw_only=True)

    def check_tail(self) -> None:
        """PolicyError for a ``tail`` that there is not."""
        require(
            self.tail is None or (isinstance(self.tail, str) and self.tail == "mean"), "tail", self.tail, "none or mean"
        )

    @property
    def stands_in(self) -> bool:
        return self.tail is not None

    def with_tail(self, chunk: Chunk, selection: Selection, block_size: int) -> Selection:
        """``selection``, on a grid of ``block_size``, with its tail: one more score for every block and row."""
        if self.tail is None or isinstance(selection, Dense):
            return selection
        chunk.cost.estimated += chunk.shape.q_len * (chunk.shape.k_len // block_size)
        if NOTE not in chunk.cost.notes:
            chunk.cost.notes.append(NOTE)
        return Corrected(selection, block_size)
