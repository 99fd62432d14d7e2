"""Decisions of the first rank within a device's step (device/ahead.py), sent to the other ranks by messages of their
own."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from torch import Tensor

from saccade.engine.ranks.link import RankLink
from saccade.engine.ranks.meeting import RankGroup
from saccade.engine.ranks.messages import Decision
from saccade.errors import SaccadeError


class FirstLead:
    """The first rank does as it would alone, and says so."""

    def __init__(self, link: RankLink) -> None:
        self._link = link

    def takes_ahead(self, own: bool, said: Hashable) -> bool:
        """See Lead."""
        self._link.decide(Decision(own, said))
        return own

    def goes_on(self, own: bool) -> bool:
        """See Lead."""
        self._link.decide(Decision(own, None))
        return own

    def tokens(self, own: Tensor) -> Tensor:
        """See Lead."""
        return self._link.group.first(own)


class OtherLead:
    """Another rank follows. SaccadeError where it cannot."""

    def __init__(self, group: RankGroup, messages: Iterator[Any]) -> None:
        self._group, self._messages = group, messages

    def takes_ahead(self, own: bool, said: Hashable) -> bool:
        """See Lead."""
        told = self._told()
        if told.said != said or (told.taken and not own):
            raise SaccadeError(
                f"ranks disagree on the next step: this one has {said}, the first one {told.said} (launched ahead: "
                f"{told.taken})"
            )
        return told.taken

    def goes_on(self, own: bool) -> bool:
        """See Lead: also where it would not."""
        return self._told().taken

    def tokens(self, own: Tensor) -> Tensor:
        """See Lead."""
        return self._group.first(own)

    def _told(self) -> Decision:
        with self._group.counts.within(self._group.rank):  # the first rank may not have come here yet
            told = next(self._messages, None)
        if not isinstance(told, Decision):
            raise SaccadeError(f"the first rank sent {type(told).__name__} within a step, where a Decision was due")
        return told
