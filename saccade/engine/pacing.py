"""How many tokens to draft, and whether at all: expected tokens over measured time.

With a chance ``a`` that a drafted token stays, a round of k drafts gives on average (1 - a^(k+1)) / (1 - a) tokens
(Leviathan, Kalman and Matias, ICML 2023, equation 1). It takes k draft steps and one verification of k + 1 rows; a
plain step gives one token. The length drafted is the k of most tokens a second; where no k beats plain steps by
``LEAST``, nothing is drafted. ``a`` is counted with slow forgetting. Times are what steps of this engine took of late
at about this length and batch; before any was taken, bytes stand for time: a step reads the weights and the keys
and values, a draft step the weights and some of the keys.

A request that stops drafting stays so until its context has doubled, so it stops and begins again a few times at most.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from saccade.methods.verified import MOST

LEAST = 1.03  # times the speed of plain steps: less is no gain
TRIAL = 3  # tokens drafted before times are known
PLAIN = 2  # plain steps that are timed first; the first of all warms caches
HOPE = 0.95  # the chance that a token stays, in the forecast by bytes
SHARE = 0.1  # of the keys that a draft step reads, likewise
FORGET = 0.99  # of each earlier count, by test
DOUBT = 1.5  # standard deviations of the chance, to the draft's favour, before it is given up
EVIDENCE = 8.0  # tests from which on the measured chance decides
FIRST = 8.0  # rows that the fixed cost of a verification is worth, before it is known
KEPT = 256  # kinds of steps whose times are remembered
NEAR = 4  # quarters of powers of two between kinds that tell of each other


Key = TypeVar("Key")
Value = TypeVar("Value")


class Kind(NamedTuple):
    """Steps that take about the same time: ``draft`` the draft's text, ``keys`` and ``rows`` of the decoding requests
    together, in quarters of powers of two."""

    draft: str
    keys: int
    rows: int

    @classmethod
    def of(cls, draft: str, lengths: Iterable[int]) -> Kind:
        lengths = list(lengths)
        return cls(draft, round(4 * math.log2(max(1, sum(lengths)))), round(4 * math.log2(max(1, len(lengths)))))


@dataclass
class Times:
    """Seconds of the last plain steps, of draft steps, and of verifications, each with its drafts a request. With
    ``padded`` a verification takes as many rows as the next power of two, and is put down so."""

    padded: bool = False
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    draft: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    verify: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=15))
    bytes: float = 0.0  # of keys and values that plain steps read
    _made: tuple[Any, list[float]] | None = None  # rounds(), and the times that they were made of

    @property
    def known(self) -> bool:
        return len(self.plain) >= PLAIN and bool(self.draft) and len(self.verify) >= 2

    def of_round(self, drafts: int) -> float:
        """Of drafting and verifying so many tokens, at most ``MOST``."""
        return self.rounds()[drafts - 1]

    def rounds(self) -> list[float]:
        """Of rounds of 1 to ``MOST`` drafts. Every request asks in every step: made anew where times have changed."""
        known = tuple(self.plain), tuple(self.draft), tuple(self.verify)
        if self._made is not None and self._made[0] == known:
            return self._made[1]
        level, had, row = self._verification
        plain, draft = typical(self.plain), typical(self.draft)
        made = []
        for drafts in range(1, MOST + 1):
            verified = self.rounded(drafts)
            took = level + row * (verified - had)
            if self.padded:
                took = typical([seconds for count, seconds in self.verify if count == verified] or [took])
            made.append(drafts * draft + max(plain, took))
        self._made = known, made
        return made

    def rounded(self, drafts: float) -> float:
        """The drafts that a verification of ``drafts`` has room for."""
        return 2.0 ** math.ceil(math.log2(drafts + 1)) - 1 if self.padded else drafts

    @property
    def _verification(self) -> tuple[float, float, float]:
        """Seconds of a verification, of how many drafts, and of one draft more: a line through the times. Before there
        were unlike numbers, what it takes beyond a plain step is thought of as eight rows' worth that come first, and
        the rows that it had."""
        counts, times = zip(*self.verify)
        had, middle = sum(counts) / len(counts), sum(times) / len(times)
        guess = max(0.0, typical(times) - typical(self.plain)) / (had + FIRST)
        spread = sum((count - had) ** 2 for count in counts) + FIRST
        row = sum((count - had) * (took - middle) for count, took in zip(counts, times)) + FIRST * guess
        row = max(0.0, row / spread)
        return typical([took - row * (count - had) for count, took in zip(counts, times)]), had, row


def typical(seconds: Collection[float]) -> float:
    """The lower quartile: what others do on the machine makes steps longer, never shorter."""
    return sorted(seconds)[len(seconds) // 4]


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


def tokens_of_round(chance: float, drafts: int) -> float:
    """Expected tokens of a round with so many drafts, the one that verification adds among them."""
    return drafts + 1.0 if chance >= 1.0 else (1.0 - chance ** (drafts + 1)) / (1.0 - chance)


def best_length(chance: float, times: Times, most: int) -> tuple[int, float]:
    """The number of drafts, from 1 to ``most``, of most tokens a second, and how many times the speed of plain steps
    that is."""
    plain, rounds = typical(times.plain), times.rounds()
    best, speed, tokens, stays = 1, 0.0, 1.0, 1.0
    for drafts in range(1, most + 1):
        stays *= chance  # that all drafts up to here do
        tokens += stays  # tokens_of_round
        if tokens * plain > speed * rounds[drafts - 1]:
            best, speed = drafts, tokens * plain / rounds[drafts - 1]
    return best, speed


def forecast(weights: int, keys: int) -> float:
    """How many times the speed of plain steps the best round could have by bytes alone, ``weights`` those of the model
    and ``keys`` those of the keys and values that the step reads."""
    step = (weights + SHARE * keys) / max(1, weights + keys)
    return max(tokens_of_round(HOPE, drafts) / (drafts * step + 1.0) for drafts in range(1, MOST + 1))


class Pacing:
    """What an engine has measured: times by kind of step, and of each draft how often its tokens stayed.
    ``weights``: bytes of the model. ``padded``: as of :class:`Times`."""

    def __init__(self, weights: int, padded: bool = False) -> None:
        self.weights, self.padded = weights, padded
        self._times: OrderedDict[Kind, Times] = OrderedDict()
        self._chances: OrderedDict[str, Chance] = OrderedDict()

    def forget(self) -> None:
        """Begin anew."""
        self._times.clear()
        self._chances.clear()

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
        if self.off is not None and length < self._until:
            return False
        times = self.pacing.times(kind)
        if not times.known:
            speed = forecast(self.pacing.weights, keys)
            if speed < LEAST:
                self._stop(length, f"by bytes a round could be {speed:.2f} times as fast as plain steps at best")
                return False
        elif self._tests >= EVIDENCE:
            doubt = DOUBT * math.sqrt(self._mean * (1.0 - self._mean) / self._tests)
            count, speed = best_length(min(1.0, self._mean + doubt), times, MOST)
            if speed < LEAST:
                self._stop(
                    length,
                    f"{self._mean:.2f} of the drafted tokens stay: with steps as measured rounds of {count} would be "
                    f"{speed:.2f} times as fast as plain steps at best",
                )
                return False
        self.off = None
        return True

    def end(self) -> None:
        """Draft no more: what the draft knew is gone."""
        self._until = math.inf

    def is_timed(self, kind: Kind) -> bool:
        """Whether enough plain steps of the kind were timed."""
        return bool(self.fixed) or len(self.pacing.times(kind).plain) >= PLAIN

    def length(self, kind: Kind) -> int:
        """How many tokens to draft."""
        if self.fixed:
            return self.fixed
        times = self.pacing.times(kind)
        return best_length(self._mean, times, MOST)[0] if times.known else TRIAL

    def took(self, drafted: int, found: int, stayed: int) -> None:
        """Of ``drafted`` tokens and ``found`` ones behind them, the first ``stayed`` did."""
        first = min(drafted, stayed)
        self.chance.add(first, first < drafted)
        self.pacing.chance(self.draft).add(first, first < drafted)
        if found and stayed >= drafted:
            self.found.add(stayed - drafted, stayed < drafted + found)

    @property
    def _mean(self) -> float:
        """The request's own count, with what others measured for a prior."""
        others = self.pacing.chance(self.draft)
        return self.chance.mean(others.mean(0.8, 2.0), min(EVIDENCE, others.tests + 2.0))

    @property
    def _tests(self) -> float:
        return self.chance.tests + min(EVIDENCE, self.pacing.chance(self.draft).tests)

    def _stop(self, length: int, why: str) -> None:
        if self.off is None:
            self.stops += 1
        self.off, self._until = why, 2 * length
