"""Maps and certificates of a request over several ranks: each rank makes them for the heads that it has."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, MutableSequence, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from saccade.engine.attention import Watch
from saccade.engine.ranks.counts import exchange
from saccade.engine.ranks.link import RankLink, RanksLost
from saccade.engine.ranks.messages import Look, TakeSeen
from saccade.engine.watch.bounds import Bounds
from saccade.engine.watch.maps import Maps
from saccade.selection.head_part import HeadPart

MAP, BOUNDS = "map", "bounds"


class Looks:
    """The first rank's maps and certificates, of which the others have their own of their heads."""

    def __init__(self, link: RankLink, part: HeadPart) -> None:
        self._link, self._part = link, part
        self._shown: WeakValueDictionary[tuple[int, Hashable], Maps | Bounds] = WeakValueDictionary()

    def tell(self, watch: Watch, forgotten: MutableSequence[tuple[int, Hashable]]) -> None:
        """Have the others look at the rows of the next step that ``watch`` looks at. What is no longer asked for is
        ``forgotten``."""
        seen: dict[tuple[int, Hashable], Any] = {(number, MAP): one for number, one in watch.maps.items()}
        seen |= {(number, BOUNDS): one for number, one in watch.bounds.items()}
        if not seen:
            return
        fresh = {key: one for key, one in seen.items() if key not in self._shown}
        self._link.tell(Look(tuple(seen), fresh))
        for key, one in fresh.items():
            self._shown[key] = one
            one.joined, one.part = partial(self._joined, key), self._part
            weakref.finalize(one, forgotten.append, key)

    def _joined(self, key: tuple[int, Hashable], own: Any) -> Sequence[Any]:
        """What all ranks saw; what this one did where the others are lost."""
        try:
            self._link.tell(TakeSeen(key))
            return exchange(self._link.group, own)[:: self._part.copies]
        except RanksLost:
            pass
        except RuntimeError as error:
            self._link.lose(error)
        return [own]


def looking(
    at: Sequence[tuple[int, Hashable]], seen: Mapping[tuple[int, Hashable], Maps | Bounds]
) -> tuple[dict[int, Maps], dict[int, Bounds]]:
    """The maps and the certificates ``at`` whose rows they look in the next step, by request."""
    found = [(key[0], seen[key]) for key in at]
    maps = {number: one for number, one in found if isinstance(one, Maps)}
    return maps, {number: one for number, one in found if isinstance(one, Bounds)}


def seen_by(one: Maps | Bounds) -> Any:
    """What was seen, as the first rank joins it."""
    return one.seen if isinstance(one, Maps) else one.found
