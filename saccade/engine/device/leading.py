"""Decisions that a device backend takes by itself (record a step, launch the next one ahead), taken by one process
where several ranks run the same steps.

All ranks are told the same and would mostly decide the same. But a rank without memory to record a step, say, may not
launch the next one ahead, and all ranks must launch the same sums.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from torch import Tensor


class Lead(Protocol):
    """The decisions; every rank asks for them at the same places of each step."""

    def takes_ahead(self, own: bool, said: Hashable) -> bool:
        """Whether a step is the one that was launched ahead; ``own``: what this process would say. ``said``: what must
        be alike in all of them."""

    def goes_on(self, own: bool) -> bool:
        """Whether the next step is launched ahead of its turn."""

    def tokens(self, own: Tensor) -> Tensor:
        """The drawn tokens of rows, int64 [rows], with which the next step runs."""


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
