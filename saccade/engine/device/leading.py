"""What a device backend does without being asked for it, said by one process where several run the same steps.

Each of them would do the same, since they are told the same; but one that has no memory left to record a step, say,
may not launch the next one ahead, and all must launch the same sums.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from torch import Tensor


class Lead(Protocol):
    """Asked at the same places of each step."""

    def takes_ahead(self, own: bool, said: Hashable) -> bool:
        """Whether a step is the one that was launched ahead; ``own``: what this process would say. ``said``: what must
        be alike in all of them."""

    def goes_on(self, own: bool) -> bool:
        """Whether the next step is launched ahead of its turn."""

    def tokens(self, own: Tensor) -> Tensor:
        """The drawn tokens of rows, int64 [rows], with which that goes on."""


class OwnLead:
    """One process alone."""

    def takes_ahead(self, own: bool, said: Hashable) -> bool:
        """See :class:`Lead`."""
        return own

    def goes_on(self, own: bool) -> bool:
        """See :class:`Lead`."""
        return own

    def tokens(self, own: Tensor) -> Tensor:
        """See :class:`Lead`."""
        return own
