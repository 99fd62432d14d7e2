"""What an engine has measured of its drafts: on this its requests' paces are set (``pace.py``)."""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from saccade.engine.stakes import Chance, Ledger
from saccade.engine.step_times import PLAIN, Kind, Times, typical
from saccade.methods.verified import MOST

OPENING = 4.0, 8.0  # times a plain step's reading of its keys that a first draft step may take, on a host and a device
KEPT = 256  # kinds of steps whose times are remembered
NEAR = 4  # quarters of powers of two between kinds that tell of each other
SPIKE = 3.0  # times what a round mostly takes: more is no doing of drafts

Key = TypeVar("Key")
Value = TypeVar("Value")


class Pacing:
    """What an engine has measured: times by kind of step, and of each draft how often its tokens stayed and what its
    rounds have cost.
    ``weights``: bytes of the model. ``padded``: as of :class:`Times`."""

    def __init__(self, weights: int, padded: bool = False) -> None:
        self.weights, self.padded = weights, padded
        self._times: OrderedDict[Kind, Times] = OrderedDict()
        self._chances: OrderedDict[str, Chance] = OrderedDict()
        self._ledgers: OrderedDict[str, Ledger] = OrderedDict()
        self._openings: OrderedDict[str, deque[float]] = OrderedDict()  # seconds of a first draft step, a token

    def forget(self) -> None:
        """Begin anew."""
        self._times.clear()
        self._chances.clear()
        self._ledgers.clear()
        self._openings.clear()

    def times(self, kind: Kind) -> Times:
        """What is known of steps of ``kind``; at first what neighbours of it took, scaled by bytes, so that a request
        more or less, or a longer context, does not mean to begin anew."""
        return _latest(self._times, kind, partial(self._guessed, kind))

    def _guessed(self, kind: Kind) -> Times:
        made = Times(self.padded)
        alike = [
            (abs(one.keys - kind.keys) + abs(one.rows - kind.rows), one)
            for one, times in self._times.items()
            if one.draft == kind.draft and times.known and abs(one.keys - kind.keys) <= NEAR
        ]
        if not alike:
            return made
        distance, nearest = min(alike)
        if distance > 2 * NEAR:
            return made
        known, factor = self._times[nearest], self._grown(kind, nearest)
        made.plain.extend([typical(known.plain) * factor] * PLAIN)
        made.draft.append(typical(known.draft))
        made.verify.extend((count, seconds * factor) for count, seconds in list(known.verify)[-6:])
        made.bytes = known.bytes * 2.0 ** ((kind.keys - nearest.keys) / 4)
        return made

    def _grown(self, kind: Kind, nearest: Kind) -> float:
        """How many times as long plain steps of ``kind`` take as those of ``nearest``, by bytes."""
        known = self._times[nearest].bytes
        grown = known * 2.0 ** ((kind.keys - nearest.keys) / 4)
        return (self.weights + grown) / max(1.0, self.weights + known)

    def guess_plain(self, kind: Kind) -> None:
        """Where no plain step of ``kind`` was timed, put down what bytes make of the nearest kind's."""
        times = self.times(kind)
        alike = [one for one in self._times if one[::2] == kind[::2] and len(self._times[one].plain) >= PLAIN]
        if len(times.plain) >= PLAIN or not alike:
            return
        nearest = min(alike, key=lambda one: abs(one.keys - kind.keys))
        known = self._times[nearest]
        times.plain.extend([typical(known.plain) * self._grown(kind, nearest)] * PLAIN)
        times.bytes = known.bytes * 2.0 ** ((kind.keys - nearest.keys) / 4)

    def chance(self, draft: str) -> Chance:
        return _latest(self._chances, draft, Chance)

    def ledger(self, draft: str) -> Ledger:
        return _latest(self._ledgers, draft, Ledger)

    def opened(self, draft: str, tokens: int, seconds: float) -> None:
        """A draft step took so long, the first of requests of ``tokens`` tokens together."""
        _latest(self._openings, draft, partial(deque, maxlen=3)).append(seconds / max(1, tokens))

    def opening(self, kind: Kind, tokens: int, keys: int, light: bool = False) -> float:
        """How many plain steps a request's first draft step takes beyond another, after ``tokens`` tokens; ``keys``
        bytes are read by a plain step. Before any was seen: ``OPENING`` times what it takes to read them, for their
        summaries and, on a device, steps to be recorded; nothing of that for a ``light`` draft."""
        times = self.times(kind)
        if kind.draft not in self._openings or not times.plain:
            return 0.0 if light else OPENING[self.padded] * keys / max(1, self.weights + keys)
        return self.opening_seconds(kind, tokens) / typical(times.plain)

    def opening_seconds(self, kind: Kind, tokens: int) -> float:
        """Likewise in seconds, where some were seen."""
        times, seen = self.times(kind), self._openings[kind.draft]
        usual = typical(times.draft) if times.draft else typical(times.plain) if times.plain else 0.0
        return max(0.0, typical(seen) * tokens - usual)

    def took(self, kind: Kind, seconds: float, gave: float, drafts: float) -> float:
        """A step of ``kind`` with its drafting took ``seconds`` and gave ``gave`` tokens a request; with ``drafts`` a
        request, 0 of a plain step. Returns how many plain steps' time that is thought to be."""
        times, ledger = self.times(kind), self.ledger(kind.draft)
        if not drafts or not times.plain:
            ledger.worth += gave
            return gave
        plain, count = statistics.median(times.plain), min(MOST, math.ceil(drafts))
        usual = times.of_round(count) if times.known else plain * (count + 2)
        steps = min(seconds, SPIKE * usual) / plain
        ledger.add(steps, gave)
        return steps


def _latest(known: OrderedDict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    """The value of ``key``, made if need be; those asked for longest ago are forgotten."""
    value = known.get(key)
    if value is None:
        value = known[key] = make()
        while len(known) > KEPT:
            known.popitem(last=False)
    known.move_to_end(key)
    return value
