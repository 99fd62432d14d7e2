"""How many tokens to draft under ``lossless``, and whether at all: one rule over measured times.

**The rule.** A round of k drafts takes k draft steps and one verification of k + 1 rows. With a chance ``a`` that a
drafted token stays, it gives (1 - a^(k+1)) / (1 - a) tokens on average (Leviathan, Kalman and Matias, ICML 2023,
equation 1); a plain step gives one. The k of most tokens a second is drafted, if it beats plain steps by ``LEAST`` and
the ledgers have room for what the round may lose.

*Times* are the last ones of this engine at about this length and batch. Before a round was timed, bytes stand for time,
all in the draft's favour; where they promise less than ``PROMISE``, nothing is tried. *Ledgers*, one of each draft and
one of each request, count in plain steps what rounds took beyond what they gave. At most ``SPEND`` of all tokens is
lost, whatever estimates say; plain steps make new room. A request whose drafts cannot gain rests until its context has
doubled. Its first draft step makes summaries of all blocks: the tokens to come must pay for it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from saccade.engine.drafts.step_times import PLAIN, Kind, Times, forecast, share_of_step, tokens_of_round, typical
from saccade.methods.verified import MOST

LEAST = 1.03  # times the speed of plain steps that a round must have
PROMISE = 1.15  # the same by bytes alone
SPEND = 0.015  # part of the plain steps' time that drafts may lose
LOSS_WINDOW = 86  # tokens of which that part may be lost at once
KEEP = 4  # windows of past gains that count as room to lose again
TRY = 0.02  # part of a request's tokens, or of all so far, that a first round of unknown worth may lose
PAYS = 4.0  # times a first draft step's extra time that its rounds must be expected to gain
OPENING = 4.0, 8.0  # that time before any was seen, in readings of a step's keys: on a host, on a device
EVIDENCE = 8.0  # tests from which on the measured chance decides
DOUBT = 1.5  # standard deviations of the chance
FORGET = 0.99  # weight of each earlier test
SPIKE = 3.0  # times a round's usual time; what is beyond is not the draft's doing
KEPT, NEAR = 256, 4  # kinds of steps remembered; quarters of powers of two between kinds that lend each other times

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass
class Chance:
    """How often tokens stayed of those that were tested; those behind a rejected one were not."""

    stayed: float = 0.0
    tests: float = 0.0

    def add(self, stayed: int, rejected: bool) -> None:
        for kept in [1.0] * stayed + [0.0] * rejected:
            self.stayed, self.tests = self.stayed * FORGET + kept, self.tests * FORGET + 1.0

    def mean(self, prior: float, weight: float) -> float:
        """With a prior of ``weight`` tests."""
        return (self.stayed + prior * weight) / (self.tests + weight)


@dataclass
class Ledger:
    """What rounds cost, in plain steps: ``lost`` beyond what they gave, of ``worth`` steps in all, for one draft or for
    one request of at most ``most`` tokens."""

    lost: float = 0.0
    worth: float = 0.0
    most: float = math.inf

    @property
    def room(self) -> float:
        """Plain steps that may be lost in all."""
        return SPEND * max(min(LOSS_WINDOW, self.most), self.worth)

    def add(self, took: float, gave: float) -> None:
        """A step or round took as long as ``took`` plain steps and gave ``gave`` tokens."""
        self.worth += gave
        self.lost = max(-KEEP * self.room, self.lost + took - gave)


class Pacing:
    """What an engine has measured: times by kind of step; by draft, how often its tokens stayed, its ledger, and its
    first steps. ``weights``: bytes of the model. ``padded``: as of :class:`Times`."""

    def __init__(self, weights: int, padded: bool = False) -> None:
        self.weights, self.padded = weights, padded
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._times: dict[Kind, Times] = {}
        self._chances: dict[str, Chance] = {}
        self._ledgers: dict[str, Ledger] = {}
        self._openings: dict[str, deque[float]] = {}  # seconds a token of context

    def times(self, kind: Kind) -> Times:
        """Times of ``kind``; at first its nearest neighbour's, scaled by bytes."""
        return _latest(self._times, kind, partial(self._borrowed, kind))

    def _borrowed(self, kind: Kind) -> Times:
        made = Times(self.padded)
        near = [
            (distance, one)
            for one, times in self._times.items()
            if one.draft == kind.draft and times.known and abs(one.keys - kind.keys) <= NEAR
            if (distance := abs(one.keys - kind.keys) + abs(one.rows - kind.rows)) <= 2 * NEAR
        ]
        if near:
            known = self._times[min(near)[1]]
            factor = self._lend_plain(made, kind, min(near)[1])
            made.draft.append(typical(known.draft))
            made.verify.extend((count, seconds * factor) for count, seconds in list(known.verify)[-6:])
        return made

    def guess_plain(self, kind: Kind) -> None:
        """Where no plain step of ``kind`` was timed, put down what bytes make of the nearest kind's."""
        times = self.times(kind)
        alike = [one for one in self._times if one[::2] == kind[::2] and len(self._times[one].plain) >= PLAIN]
        if len(times.plain) < PLAIN and alike:
            self._lend_plain(times, kind, min(alike, key=lambda one: abs(one.keys - kind.keys)))

    def _lend_plain(self, times: Times, kind: Kind, lender: Kind) -> float:
        """Returns how many times as long as its lender's these plain steps take, by bytes."""
        known = self._times[lender]
        times.bytes = known.bytes * 2.0 ** ((kind.keys - lender.keys) / 4)
        factor = (self.weights + times.bytes) / max(1.0, self.weights + known.bytes)
        times.plain.extend([typical(known.plain) * factor] * PLAIN)
        return factor

    def chance(self, draft: str) -> Chance:
        return _latest(self._chances, draft, Chance)

    def ledger(self, draft: str) -> Ledger:
        return _latest(self._ledgers, draft, Ledger)

    def opened(self, draft: str, tokens: int, seconds: float) -> None:
        """The first draft step of requests of ``tokens`` tokens together took ``seconds``."""
        _latest(self._openings, draft, partial(deque, maxlen=3)).append(seconds / max(1, tokens))

    def opening(self, kind: Kind, tokens: int, keys: int, light: bool = False) -> float:
        """Plain steps that a request's first draft step takes beyond another, after ``tokens`` tokens; before any was
        seen by the ``keys`` bytes that a step reads, and none for a ``light`` draft."""
        times = self.times(kind)
        if kind.draft not in self._openings or not times.plain:
            return 0.0 if light else OPENING[self.padded] * keys / max(1, self.weights + keys)
        return self.opening_seconds(kind, tokens) / typical(times.plain)

    def opening_seconds(self, kind: Kind, tokens: int) -> float:
        """The same in seconds, where some were seen."""
        times = self.times(kind)
        usual = typical(times.draft or times.plain or [0.0])
        return max(0.0, typical(self._openings[kind.draft]) * tokens - usual)

    def took(self, kind: Kind, seconds: float, gave: float, drafts: float) -> float:
        """A step of ``kind`` took ``seconds`` with its drafting and gave ``gave`` tokens a request, of ``drafts``
        drafts each, 0 of a plain step. Returns its plain steps of time."""
        times, steps = self.times(kind), gave
        if drafts and times.plain:
            plain, count = statistics.median(times.plain), min(MOST, math.ceil(drafts))
            usual = times.rounds()[count - 1] if times.known else plain * (count + 2)
            steps = min(seconds, SPIKE * usual) / plain
        self.ledger(kind.draft).add(steps, gave)
        return steps


class Pace:
    """One request's drafting. ``fixed``: tokens of every round; 0: by the rule. ``most``: tokens of the answer at most.
    ``light``: the first draft step takes no longer than others. ``off``: why nothing is drafted now, else None."""

    def __init__(self, pacing: Pacing, draft: str, fixed: int, most: float = math.inf, light: bool = False) -> None:
        self.pacing, self.draft, self.fixed, self.most, self.light = pacing, draft, fixed, most, light
        self.chance, self.found = Chance(), Chance()  # of the draft's tokens, of those looked up
        self.ledger = Ledger(most=most)
        self.opened = False  # whether its first draft step has run
        self.off: str | None = None
        self.stops = 0  # times that drafting ended
        self._began: int | None = None  # tokens before the first that it might draft
        self._until: float = 0  # tokens from which on it may begin again

    def wants(self, length: int, kind: Kind, keys: int) -> bool:
        """Whether it drafts after ``length`` tokens, in steps of ``kind`` that read ``keys`` bytes of keys and values,
        once plain steps of the kind were timed; :meth:`length` then says how many."""
        if self.fixed or self.rests(length):
            return bool(self.fixed)
        times, weights = self.pacing.times(kind), self.pacing.weights
        promised = forecast(weights, keys)
        count, speed = times.best([self.hoped]) if times.known else (1, promised)
        if not times.known and speed < PROMISE:
            return self._rest(2 * length, f"by bytes a round could be {speed:.2f} times as fast as plain steps at best")
        if times.known and speed < LEAST:
            stay = f"{self.mean:.2f} of the drafted tokens stay" if self._tests >= EVIDENCE else "if all tokens stay"
            at_best = f"rounds of {count} would be {speed:.2f} times as fast as plain steps at best"
            return self._rest(2 * length, f"{stay}: with steps as measured {at_best}")
        self._began = length if self._began is None else self._began
        left = self.most - (length - self._began)
        opening = 0.0 if self.opened else self.pacing.opening(kind, length, keys, self.light)
        if left * (1.0 - 1.0 / speed) < PAYS * opening:
            why = f"its first draft step takes as long as {opening:.1f} plain ones, with {left:.0f} to come"
            return self._rest(2 * length, why)
        risk = self._risk(self.length(kind), times) if times.known else share_of_step(weights, keys)
        sure = times.known and times.best([max(0.0, self.mean - self._doubt)])[1] >= LEAST
        bears = max(left, worth := self.pacing.ledger(self.draft).worth)
        if not sure and not self.opened and opening + risk > TRY * bears:
            why = f"a first round may lose the time of {opening + risk:.1f} plain steps, too much of {bears:.0f} tokens"
            return self._rest(length + max(1.0, (opening + risk) / TRY - worth), why, stops=False)
        for ledger in (self.pacing.ledger(self.draft), self.ledger):
            if ledger.lost + risk > (room := ledger.room):
                why = f"rounds have lost the time of {ledger.lost:.1f} plain steps, and may lose {room:.1f}"
                more = (ledger.lost + risk) / SPEND - ledger.worth  # plain steps until there is room
                return self._rest(length + max(1.0, more), why, stops=False)
        self.off = None
        return True

    def _rest(self, until: float, why: str, stops: bool = True) -> bool:
        self.stops += stops and self.off is None
        self.off, self._until = why, until
        return False

    def rests(self, length: int) -> bool:
        """Whether nothing will be drafted after ``length`` tokens, whatever is measured until then."""
        return not self.fixed and self.off is not None and length < self._until

    def end(self) -> None:
        """Draft no more: what the draft knew is gone."""
        self._until = math.inf

    def is_timed(self, kind: Kind) -> bool:
        """Whether enough plain steps of the kind were timed."""
        return bool(self.fixed) or len(self.pacing.times(kind).plain) >= PLAIN

    def length(self, kind: Kind, shared: int | None = None) -> int:
        """How many tokens to draft, in a batch whose ``shared_length`` is ``shared``: fewer than seem best as long as
        they may lose more than there is room for."""
        times = self.pacing.times(kind)
        if self.fixed or not times.known:
            return self.fixed or 1
        best = times.best([self.mean])[0]
        if shared is not None:
            best = shared if times.padded else min(best, shared)
        best = min(best, 2 * math.ceil(max(count for count, _ in times.verify)) + 1)  # at most twice what is known
        if times.alike and (not times.padded or times.rounded(best) == times.verify[0][0]):
            best = best // 2 or 2  # which shows what other rows take; padded rows may do so as it is
        room = min(one.room - one.lost for one in (self.pacing.ledger(self.draft), self.ledger))
        while best > 1 and self._risk(best, times) > room:
            best //= 2
        return best

    def took(self, drafted: int, found: int, stayed: int) -> None:
        """Of ``drafted`` tokens and ``found`` ones behind them, the first ``stayed`` did."""
        first = min(drafted, stayed)
        for chance in (self.chance, self.pacing.chance(self.draft)):
            chance.add(first, first < drafted)
        if found and stayed >= drafted:
            self.found.add(stayed - drafted, stayed < drafted + found)

    def _risk(self, drafts: int, times: Times) -> float:
        """Plain steps that a round of ``drafts`` may well lose."""
        gives = tokens_of_round(max(0.0, self.mean - 1.5 * self._doubt), drafts)
        return max(0.0, times.rounds()[drafts - 1] / typical(times.plain) - gives)

    @property
    def hoped(self) -> float:
        """The chance that a token stays, in the draft's favour; 1 before it was tested."""
        return 1.0 if self._tests < EVIDENCE else min(1.0, self.mean + self._doubt)

    @property
    def mean(self) -> float:
        """The request's own chance, with what others measured for a prior."""
        others = self.pacing.chance(self.draft)
        return self.chance.mean(others.mean(0.8, 2.0), min(EVIDENCE, others.tests + 2.0))

    @property
    def _doubt(self) -> float:
        tests = self._tests + 2.0  # one that stayed and one that did not: few that all stayed are no certainty
        chance = (self.mean * self._tests + 1.0) / tests
        return DOUBT * math.sqrt(chance * (1.0 - chance) / tests)

    @property
    def _tests(self) -> float:
        return self.chance.tests + min(EVIDENCE, self.pacing.chance(self.draft).tests)


def shared_length(paces: Sequence[Pace], others: int, kind: Kind) -> int | None:
    """How many tokens the requests of ``paces`` draft in a step in which ``others`` decode too; 0 where what others
    wait for is more than these can gain, None where each says so for itself."""
    times = paces[0].pacing.times(kind)
    if len(paces) + others == 1 or any(pace.fixed for pace in paces) or not times.known:
        return None
    if others and times.best([pace.hoped for pace in paces], others)[1] < LEAST:
        return 0
    return times.best([pace.mean for pace in paces], others)[0]


def _latest(known: dict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    """The value of ``key``, made if need be; those asked for longest ago are forgotten."""
    value = known.pop(key) if key in known else make()
    known[key] = value
    if len(known) > KEPT:
        del known[next(iter(known))]
    return value
