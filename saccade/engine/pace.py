"""How many tokens to draft, and whether at all: expected tokens over measured time.

With a chance ``a`` that a drafted token stays, a round of k drafts gives on average (1 - a^(k+1)) / (1 - a) tokens
(Leviathan, Kalman and Matias, ICML 2023, equation 1). It takes k draft steps and one verification of k + 1 rows; a
plain step gives one token. The length drafted is the k of most tokens a second; where no k beats plain steps by
``LEAST``, nothing is drafted. ``a`` is counted with slow forgetting. Times are what steps of this engine took of late
at about this length and batch; before any was taken, bytes stand for time: a step reads the weights and the keys
and values, a draft step the weights and some of the keys. Where these promise little, nothing is tried.

A request that stops drafting stays so until its context has doubled, so it stops and begins again a few times at most.
Estimates may be wrong, and near the break-even they are slow: ledgers of each draft and of each request bound what is
lost whatever they say; where one is used up, plain steps fill it again. A request's first draft step may take long, as
it makes the summaries of all blocks: it is taken where the tokens that may still come pay for it, and of a draft that
is not known to gain where it is little beside these or the tokens of all requests so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from saccade.engine.pacing import Pacing
from saccade.engine.stakes import HORIZON, SURE, TRY, Chance, Ledger, forecast, share_of_step
from saccade.engine.step_times import PLAIN, Kind, Times, best_length, best_shared, tokens_of_round, typical
from saccade.methods.verified import MOST

LEAST = 1.03  # times the speed of plain steps: less is no gain
PROMISE = 1.15  # likewise, by bytes alone, which are all in the draft's favour
TRIAL = 1  # tokens drafted before times are known
PAYS = 4.0  # times what a request's first draft step costs more than others, that its rounds must be thought to gain
DOUBT = 1.5  # standard deviations of the chance, to the draft's favour, before it is given up
EVIDENCE = 8.0  # tests from which on the measured chance decides


class Pace:
    """One request's drafting. ``fixed``: so many tokens, always; 0: as the measurements say. ``most``: tokens of the
    answer at most. ``light``: the draft's first step takes no longer than others. ``off``: why nothing is drafted any
    more, or for a while, None while something is."""

    def __init__(self, pacing: Pacing, draft: str, fixed: int, most: float = math.inf, light: bool = False) -> None:
        self.pacing, self.draft, self.fixed, self.most, self.light = pacing, draft, fixed, most, light
        self.chance, self.found = Chance(), Chance()  # of the draft's tokens, of those looked up
        self.ledger = Ledger(most=most)
        self.opened = False  # whether its first draft step has run
        self.off: str | None = None
        self.stops = 0  # times that drafting ended
        self._began: int | None = None  # tokens before the first that it might draft
        self._horizon = float(HORIZON)
        self._until: float = 0  # tokens from which on it may begin again

    def wants(self, length: int, kind: Kind, keys: int) -> bool:
        """Whether it drafts after ``length`` tokens, in steps of ``kind`` that read ``keys`` bytes of keys and values.
        Where this says so, :meth:`length` says how many once plain steps of the kind were timed."""
        if self.fixed:
            return True
        if self.rests(length):
            return False
        times = self.pacing.times(kind)
        if not times.known:
            speed = forecast(self.pacing.weights, keys)
            if speed < PROMISE:
                self._stop(length, f"by bytes a round could be {speed:.2f} times as fast as plain steps at best")
                return False
        else:
            count, speed = best_length(self.hoped, times, MOST)
            if speed < LEAST:
                stay = (
                    f"{self.mean:.2f} of the drafted tokens stay" if self._tests >= EVIDENCE else "if all tokens stay"
                )
                self._stop(
                    length,
                    f"{stay}: with steps as measured rounds of {count} would be {speed:.2f} times as fast as plain "
                    "steps at best",
                )
                return False
        opening = 0.0 if self.opened else self.pacing.opening(kind, length, keys, self.light)
        self._began = length if self._began is None else self._began
        left = self.most - (length - self._began)
        if left * (1.0 - 1.0 / speed) < PAYS * opening:
            self._stop(
                length, f"its first draft step takes as long as {opening:.1f} plain ones, with {left:.0f} to come"
            )
            return False
        risk = self._risk(self.length(kind), times) if times.known else TRIAL * share_of_step(self.pacing.weights, keys)
        sure = self._confidence(times, keys)
        self._horizon = HORIZON * sure
        if sure < SURE and not self._may_open(length, opening + risk, left):
            return False
        for ledger in self._ledgers:
            if not ledger.allows(risk, self._horizon):
                room = ledger.room(self._horizon)
                self.off = f"rounds have lost the time of {ledger.lost:.1f} plain steps, and may lose {room:.1f}"
                self._until = length + max(1.0, ledger.until(risk))
                return False
        self.off = None
        return True

    def _may_open(self, length: int, risk: float, left: float) -> bool:
        """Whether a first draft step of unknown worth may be taken: what it may lose, ``risk`` plain steps, is to be
        little of the ``left`` tokens, or of all tokens so far that might have been drafted."""
        if self.opened:
            return True
        tokens = risk / TRY
        worth = self.pacing.ledger(self.draft).worth
        if tokens <= max(left, worth):
            return True
        most = max(left, worth)
        self.off = f"a first round may lose the time of {risk:.1f} plain steps, too much of {most:.0f} tokens"
        self._until = length + max(1.0, tokens - worth)
        return False

    def rests(self, length: int) -> bool:
        """Whether nothing will be drafted after ``length`` tokens, whatever is measured until then."""
        return not self.fixed and self.off is not None and length < self._until

    def rested(self) -> None:
        """A plain step while it :meth:`rests`."""
        self.ledger.worth += 1.0

    def end(self) -> None:
        """Draft no more: what the draft knew is gone."""
        self._until = math.inf

    def is_timed(self, kind: Kind) -> bool:
        """Whether enough plain steps of the kind were timed."""
        return bool(self.fixed) or len(self.pacing.times(kind).plain) >= PLAIN

    def length(self, kind: Kind, shared: int | None = None) -> int:
        """How many tokens to draft, in a batch whose ``shared_length`` is ``shared``: fewer than seem best as long as
        they may lose more than there is room for."""
        if self.fixed:
            return self.fixed
        times, ledgers = self.pacing.times(kind), self._ledgers
        if not times.known:
            return TRIAL
        best = best_length(self.mean, times, MOST)[0]
        if shared is not None:
            best = shared if times.padded else min(best, shared)
        best = min(
            best, 2 * math.ceil(max(count for count, _ in times.verify)) + 1
        )  # step by step beyond what is known
        if times.alike and (not times.padded or times.rounded(best) == times.verify[0][0]):
            best = best // 2 or 2  # which shows what other rows take; padded rows may do so as it is
        while best > 1 and not all(ledger.allows(self._risk(best, times), self._horizon) for ledger in ledgers):
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
        gives = tokens_of_round(max(0.0, self.mean - 1.5 * self._doubt), drafts)
        return max(0.0, times.of_round(drafts) / typical(times.plain) - gives)

    def _confidence(self, times: Times, keys: int) -> float:
        """How much may be lost at once, of what is usual: more where it gains even by the least that its tokens may
        stay, less where bytes promise less than twice the speed."""
        if times.known and best_length(max(0.0, self.mean - self._doubt), times, MOST)[1] >= LEAST:
            return SURE
        return min(1.0, forecast(self.pacing.weights, keys) - 1.0)

    @property
    def _ledgers(self) -> tuple[Ledger, Ledger]:
        return self.pacing.ledger(self.draft), self.ledger

    @property
    def hoped(self) -> float:
        """The chance that a token stays, in the draft's favour; 1 before it was tested."""
        return 1.0 if self._tests < EVIDENCE else min(1.0, self.mean + self._doubt)

    @property
    def _doubt(self) -> float:
        tests = self._tests + 2.0  # one that stayed and one that did not: few that all stayed are no certainty
        chance = (self.mean * self._tests + 1.0) / tests
        return DOUBT * math.sqrt(chance * (1.0 - chance) / tests)

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


def shared_length(paces: Sequence[Pace], others: int, kind: Kind) -> int | None:
    """How many tokens the requests of ``paces`` draft in a step in which ``others`` decode too, of one pacing; 0 where
    what others wait for is more than what these can gain, None where each says so for itself."""
    times = paces[0].pacing.times(kind)
    if len(paces) + others == 1 or any(pace.fixed for pace in paces) or not times.known:
        return None
    if others and best_shared([pace.hoped for pace in paces], others, times)[1] < LEAST:
        return 0
    return best_shared([pace.mean for pace in paces], others, times)[0]
