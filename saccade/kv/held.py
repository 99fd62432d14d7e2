"""What an engine knows of a sequence's keys and values: how many there are, and which blocks they take."""

from __future__ import annotations

from typing import Protocol

from saccade.kv.blocks import BlockManager


class HeldBlocks(Protocol):
    """The lengths and the block table of one sequence, without its storage. `SequenceKV` is one; see there.

    ``pool``: whose blocks they are. ``id``: the holder's number in it. ``stood``: by mark, the tokens stored then that
    were never cut off since.
    """

    pool: BlockManager
    id: int
    stood: dict[int, int]

    @property
    def layers(self) -> int: ...

    @property
    def length(self) -> int:
        """Tokens stored in every layer."""
        ...

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        ...

    @property
    def blocks(self) -> int:
        """Slots that its blocks take when resident, all layers together."""
        ...

    @property
    def damaged(self) -> bool:
        """Whether a tier has lost a part of it: it must be computed again."""
        ...

    def missing_blocks(self, tokens: int) -> int:
        """Slots that must still be allocated before ``tokens`` tokens fit."""
        ...

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens in every layer. CapacityError, taking nothing, when the pool is short."""
        ...

    def keep(self) -> None:
        """Nothing runs on it from now on: it keeps its blocks for others, until it is freed."""
        ...

    def mark(self, number: int) -> None:
        """Note from now on in ``stood[number]`` how much of what is stored stays as it is."""
        ...
