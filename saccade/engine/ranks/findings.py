"""Audits of a request over several ranks: each looks at the heads that it has, and keeps what it found until a report
asks for it."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, MutableSequence, Sequence
from functools import partial
from weakref import WeakValueDictionary

from saccade.engine.attention import Watch
from saccade.engine.ranks.counts import exchange
from saccade.engine.ranks.link import RankLink, RanksLost
from saccade.engine.ranks.messages import Audits, TakeFindings
from saccade.engine.watch.audit import Audit, Findings
from saccade.selection.head_part import HeadPart

AUDIT = "audit"


class AuditsOfRanks:
    """The first rank's audits, of which the others have their own of their heads."""

    def __init__(self, link: RankLink, part: HeadPart) -> None:
        self._link, self._part = link, part
        self._told: WeakValueDictionary[int, Audit] = WeakValueDictionary()

    def tell(self, watch: Watch, forgotten: MutableSequence[tuple[int, Hashable]]) -> None:
        """Have the others audit what ``watch`` audits of the next step. What is asked for no more is ``forgotten``."""
        audits = watch.audits
        if not (audits or watch.audited or watch.replays or watch.replays_next):
            return
        drawn = {number: (one.drawn, one.whole) for number, one in audits.items()}
        self._link.tell(Audits(drawn, watch.audited, watch.replays, watch.replays_next))
        for number, row in audits.items():
            row.audit.elsewhere = partial(self._found, number)
            if self._told.get(number) is not row.audit:
                self._told[number] = row.audit
                weakref.finalize(row.audit, forgotten.append, (number, AUDIT))

    def _found(self, number: int) -> Sequence[Findings]:
        """What the others found since the last time; nothing where they are lost."""
        nothing = Findings([], 0)  # which of this one is counted
        try:
            self._link.tell(TakeFindings(number))
            return exchange(self._link.group, nothing)[:: self._part.copies][1:]
        except RanksLost:
            pass
        except RuntimeError as error:
            self._link.lose(error)
        return []
