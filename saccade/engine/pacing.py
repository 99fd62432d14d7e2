"""How many tokens to draft, and whether at all: expected tokens over measured time.

With a chance ``a`` that a drafted token stays, a round of k drafts gives on average (1 - a^(k+1)) / (1 - a) tokens
(Leviathan, Kalman and Matias, ICML 2023, equation 1). It takes k draft steps and one verification of k + 1 rows; a
plain step gives one token. The length drafted is the k of most tokens a second; where no k beats plain steps by
``LEAST``, nothing is drafted. ``a`` is counted with slow forgetting. Times are what steps of this engine took of late
at about this length and batch; before any was taken, bytes stand for time: a step reads the weights and the keys
and values, a draft step the weights and some of the keys.

A request that stops drafting stays so until its context has doubled, so it stops and begins again a few times at most.
Estimates may be wrong, and near the break-even they are slow: a ledger bounds what is lost whatever they say.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from saccade.engine.step_times import PLAIN, Kind, Times, best_length, best_shared, tokens_of_round, typical
from saccade.methods.verified import MOST

LEAST = 1.03  # times the speed of plain steps: less is no gain
TRIAL = 3  # tokens drafted before times are known
HOPE = 0.95  # the chance that a token stays, in the forecast by bytes
SHARE = 0.1  # of the keys that a draft step reads, likewise
FORGET = 0.99  # of each earlier count, by test
DOUBT = 1.5  # standard deviations of the chance, to the draft's favour, before it is given up
EVIDENCE = 8.0  # tests from which on the measured chance decides
KEPT = 256  # kinds of steps whose times are remembered
NEAR = 4  # quarters of powers of two between kinds that tell of each other
SPEND = 0.015  # of the time of plain steps that drafts may lose in all
HORIZON = 512  # tokens whose share of that may be lost at once
KEEP = 4  # times that, of what was gained before
SPIKE = 3.0  # times what a round mostly takes: more is no doing of drafts


Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass
class Chance:
    """How often tokens stayed of those that were put to the test; those behind a rejected one were not."""

    stayed: float = 0.0
    tests: float = 0.0

    def add(self, stayed: int, rejected: bool) -> None:
        for kept in [1.0] * stayed + [0.0] * rejected:
            self.stayed, self.tests = self.stayed * FORGET + kept, self.tests * FORGET + 1.0

    def mean(self, prior: float, weight: float) -> float:
        """With a prior of so many tests."""
        return (self.stayed + prior * weight) / (self.tests + weight)


def share_of_step(weights: int, keys: int) -> float:
    """What part of a plain step a draft step takes, by bytes."""
    return (weights + SHARE * keys) / max(1, weights + keys)


def forecast(weights: int, keys: int) -> float:
    """How many times the speed of plain steps the best round could have by bytes alone, ``weights`` those of the model
    and ``keys`` those of the keys and values that the step reads."""
    step = share_of_step(weights, keys)
    return max(tokens_of_round(HOPE, drafts) / (drafts * step + 1.0) for drafts in range(1, MOST + 1))


@dataclass
class Ledger:
    """What rounds of one draft have cost so far, in plain steps: ``lost`` more than what they gave was worth, of
    ``worth`` steps in all. It holds whatever estimates say: at most ``SPEND`` is lost of ``HORIZON`` tokens and more,
    and one round. Of what was gained only some is kept to lose again, for a draft that turns bad."""

    lost: float = 0.0
    worth: float = 0.0

    @property
    def room(self) -> float:
        return SPEND * max(HORIZON, self.worth)

    def add(self, took: float, gave: float) -> None:
        """A round took as long as ``took`` plain steps and gave what ``gave`` of them do."""
        self.worth += gave
        self.lost = max(-KEEP * self.room, self.lost + took - gave)

    def allows(self, risk: float) -> bool:
        """Whether ``risk`` plain steps may be lost."""
        return self.lost + risk <= self.room


class Pacing:
    """What an engine has measured: times by kind of step, and of each draft how often its tokens stayed and what its
    rounds have cost.
    ``weights``: bytes of the model. ``padded``: as of :class:`Times`."""

    def __init__(self, weights: int, padded: bool = False) -> None:
        self.weights, self.padded = weights, padded
        self._times: OrderedDict[Kind, Times] = OrderedDict()
        self._chances: OrderedDict[str, Chance] = OrderedDict()
        self._ledgers: OrderedDict[str, Ledger] = OrderedDict()

    def forget(self) -> None:
        """Begin anew."""
        self._times.clear()
        self._chances.clear()
        self._ledgers.clear()

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

    def took(self, kind: Kind, seconds: float, gave: float, drafts: float) -> None:
        """A step of ``kind`` with its drafting took ``seconds`` and gave ``gave`` tokens a request; with ``drafts`` a
        request, 0 of a plain step."""
        times, ledger = self.times(kind), self.ledger(kind.draft)
        if not drafts:
            ledger.worth += 1
        elif times.plain:
            plain, count = statistics.median(times.plain), min(MOST, math.ceil(drafts))
            usual = times.of_round(count) if times.known else plain * (count + 2)
            ledger.add(min(seconds, SPIKE * usual) / plain, gave)


def _latest(known: OrderedDict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    """The value of ``key``, made if need be; those asked for longest ago are forgotten."""
    value = known.get(key)
    if value is None:
        value = known[key] = make()
        while len(known) > KEPT:
            known.popitem(last=False)
    known.move_to_end(key)
    return value


class Pace:
    """One request's drafting. ``fixed``: so many tokens, always; 0: as the measurements say. ``off``: why nothing is
    drafted any more, None while something is."""

    def __init__(self, pacing: Pacing, draft: str, fixed: int) -> None:
        self.pacing, self.draft, self.fixed = pacing, draft, fixed
        self.chance, self.found = Chance(), Chance()  # of the draft's tokens, of those looked up
        self.off: str | None = None
        self.stops = 0  # times that drafting ended
        self._until: float = 0  # tokens from which on it may begin again

    def wants(self, length: int, kind: Kind, keys: int) -> bool:
        """Whether it drafts after ``length`` tokens, in steps of ``kind`` that read ``keys`` bytes of keys and values.
        Where this says so, :meth:`length` says how many once plain steps of the kind were timed."""
        if self.fixed:
            return True
        if self.rests(length):
            return False
        times, ledger = self.pacing.times(kind), self.pacing.ledger(self.draft)
        risk = self._risk(self.length(kind), times) if times.known else TRIAL * share_of_step(self.pacing.weights, keys)
        if not ledger.allows(risk):
            why = f"its rounds have lost the time of {ledger.lost:.1f} plain steps, and may lose {ledger.room:.1f}"
            self._stop(length, why)
            return False
        if not times.known:
            speed = forecast(self.pacing.weights, keys)
            if speed < LEAST:
                self._stop(length, f"by bytes a round could be {speed:.2f} times as fast as plain steps at best")
                return False
        elif self._tests >= EVIDENCE:
            count, speed = best_length(self.hoped, times, MOST)
            if speed < LEAST:
                self._stop(
                    length,
                    f"{self.mean:.2f} of the drafted tokens stay: with steps as measured rounds of {count} would be "
                    f"{speed:.2f} times as fast as plain steps at best",
                )
                return False
        self.off = None
        return True

    def rests(self, length: int) -> bool:
        """Whether nothing will be drafted after ``length`` tokens, whatever is measured until then."""
        return not self.fixed and self.off is not None and length < self._until

    def end(self) -> None:
        """Draft no more: what the draft knew is gone."""
        self._until = math.inf

    def is_timed(self, kind: Kind) -> bool:
        """Whether enough plain steps of the kind were timed."""
        return bool(self.fixed) or len(self.pacing.times(kind).plain) >= PLAIN

    def length(self, kind: Kind) -> int:
        """How many tokens to draft: fewer than seem best as long as they may lose more than there is room for."""
        if self.fixed:
            return self.fixed
        times, ledger = self.pacing.times(kind), self.pacing.ledger(self.draft)
        if not times.known:
            return TRIAL
        best = best_length(self.mean, times, MOST)[0]
        while best > 1 and not ledger.allows(self._risk(best, times)):
            best //= 2
        return best

    def took(self, drafted: int, found: int, stayed: int) -> None:
        """Of ``drafted`` tokens and ``found`` ones behind them, the first ``stayed`` did."""
        first = min(drafted, stayed)
        self.chance.add(first, first < drafted)
        self.pacing.chance(self.draft).add(first, first < drafted)
        if found and stayed >= drafted:
            self.found.add(stayed - drafted, stayed < drafted + found)

    def _risk(self, drafts: int, times: Times) -> float:
        """Plain steps that a round of ``drafts`` may well lose."""
        gives = tokens_of_round(max(0.0, self.mean - self._doubt), drafts)
        return max(0.0, times.of_round(drafts) / typical(times.plain) - gives)

    @property
    def hoped(self) -> float:
        """The chance that a token stays, in the draft's favour; 1 before it was tested."""
        return 1.0 if self._tests < EVIDENCE else min(1.0, self.mean + self._doubt)

    @property
    def _doubt(self) -> float:
        return DOUBT * math.sqrt(self.mean * (1.0 - self.mean) / max(1.0, self._tests))

    @property
    def mean(self) -> float:
        """The request's own count of that, with what others measured for a prior."""
        others = self.pacing.chance(self.draft)
        return self.chance.mean(others.mean(0.8, 2.0), min(EVIDENCE, others.tests + 2.0))

    @property
    def _tests(self) -> float:
        return self.chance.tests + min(EVIDENCE, self.pacing.chance(self.draft).tests)

    def _stop(self, length: int, why: str) -> None:
        if self.off is None:
            self.stops += 1
        self.off, self._until = why, 2 * length


def shared_length(paces: Sequence[Pace], others: int, kind: Kind) -> int:
    """How many tokens the requests of ``paces`` draft in a step in which ``others`` decode too, of one pacing; 0 where
    what others wait for is more than what these can gain."""
    times = paces[0].pacing.times(kind)
    if len(paces) + others == 1 or any(pace.fixed for pace in paces) or not times.known:
        return MOST
    if others and best_shared([pace.hoped for pace in paces], others, times)[1] < LEAST:
        return 0
    return best_shared([pace.mean for pace in paces], others, times)[0]
