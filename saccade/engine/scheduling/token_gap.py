"""The gap between tokens: what prefills may take of a step's seconds, so that no answer waits long for its next one.

A round is a step of decode rows and short prompts, and what long prefills get behind it. It lasts as long as the gap
allows, by what earlier steps took, and its seconds are shared out (:func:`shared_out`): the prefill that came first has
a share that is never taken from it, the rest goes to the others by when they are due: ``STRETCH`` times as long after
they came as they take. So short ones are soon done, and a request that has waited that long goes before all that come
later.

A chunk that fits into its request's seconds runs in the step, beside the decode rows. One that does not is

* cut, where its borders change nothing but the rounding (a dense prefill that is not ``exact``) and others decode: rows
  that share a pass share the reading of its weights. At least 16 rows, so that it always goes on.
* a pass of its own that stops between layers, everywhere else: what a sparse prefill selects, where states begin and
  the last bit hang on a chunk's borders, and stay as they are. Between two stretches of it others have their steps.

Where one layer of such a chunk takes longer than the gap, the report says so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from saccade.engine.request import Request
from saccade.engine.scheduling.row_costs import FORGET, RowCosts
from saccade.engine.steps.step import ScheduledRequest
from saccade.methods.policy import Policy

LEAST_ROWS = 16  # of a prefill that is cut; so many never run apart
FIRST_ROWS = 64  # of one that is cut, before it is known what rows take
POLICIES = 64  # whose costs are known
MARGIN = 0.8  # of the gap, that is planned for
SHARE = 0.5  # of what prefills get, that belongs to the first of them; of the gap, where decode rows leave less
STRETCH = 2.0  # times what it takes, until a prefill that is not the first is due
UNKNOWN_ROW, UNKNOWN_ROW_ON_GPU = 1e-3, 2e-5  # seconds of a row before any was measured


@dataclass
class Suspended:
    """A chunk that runs apart: ``rows`` of ``request``, of which ``layers`` have run, in ``seconds``."""

    request: Request
    rows: ScheduledRequest
    begun: bool = False
    layers: int = 0
    seconds: float = 0.0


class Turn(NamedTuple):
    """What a prefill may do in a step: at most so many rows, none for 0, in it or ``apart`` from it."""

    rows: int
    apart: bool = False


class Need(NamedTuple):
    """Seconds that the prefill of ``request`` still takes, and when it is ``due``."""

    request: int
    seconds: float
    due: float


def shared_out(needs: Sequence[Need], seconds: float) -> dict[int, float]:
    """The ``seconds`` of a round, by request. ``needs`` are in order of arrival.

    The first has ``SHARE`` of them, and what others leave. The others have the rest, by when they are due.
    """
    if not needs:
        return {}
    first, others = needs[0], sorted(needs[1:], key=lambda one: one.due)
    given, left = dict.fromkeys((one.request for one in needs), 0.0), (1 - SHARE) * seconds
    for one in others:
        given[one.request] = min(one.seconds, left)
        left -= given[one.request]
    left += SHARE * seconds
    given[first.request] = min(first.seconds, left)
    left -= given[first.request]
    for one in others:
        more = min(one.seconds - given[one.request], left)
        given[one.request] += more
        left -= more
    given[first.request] += left
    return given


class TokenGap:
    """Shares out rounds of at most ``seconds``. ``exact`` as in EngineConfig, decided; ``layers`` of the model."""

    def __init__(self, seconds: float, exact: bool = True, layers: int = 1, on_gpu: bool = False) -> None:
        self.seconds, self.exact, self.layers = seconds, exact, layers
        self.unknown = UNKNOWN_ROW_ON_GPU if on_gpu else UNKNOWN_ROW  # seconds of a row, before any was measured
        self.decode_seconds = 0.0  # of a step without prefill rows
        self.beside = False  # whether requests decode in the step at hand
        self._needs: dict[int, Need] = {}  # of who prefills, in order of arrival
        self.given: dict[int, float] = {}  # seconds of the round by request, in order of arrival
        self._costs: dict[str, RowCosts] = {}  # by policy

    @property
    def round(self) -> float:
        """Seconds of a round that are left to prefills."""
        return max(MARGIN * self.seconds - self.decode_seconds, SHARE * self.seconds)

    def begin(self, prefilling: Sequence[Request], suspended: Mapping[int, Suspended], beside: bool) -> None:
        """A step is put together: ``prefilling`` in order of arrival, of whom some are ``suspended``."""
        before, self.beside, self._needs = self._needs, beside, {}
        for one in prefilling:
            self._enter(one, self._need(one, suspended.get(one.id)), before.get(one.id))
        self.given = shared_out(list(self._needs.values()), self.round)

    def look_again(self, request: Request) -> None:
        """What a request needs that waited until now."""
        known, seconds = self._needs.get(request.id), self._need(request, None)
        if known is None or known.seconds != seconds:  # it goes on from what another has computed
            self._enter(request, seconds, None)
            self.given = shared_out(list(self._needs.values()), self.round)

    def _enter(self, request: Request, seconds: float, known: Need | None) -> None:
        due = time.perf_counter() + STRETCH * seconds if known is None else known.due
        self._needs[request.id] = Need(request.id, seconds, due)

    def slice_out(self, rows: Sequence[ScheduledRequest], suspended: Mapping[int, Suspended]) -> None:
        """A step is put together, with prefill ``rows`` in it: what is left of the round belongs to those who are
        ``suspended``. Who had seconds and no room to use them, or waits for another, has none."""
        left = self.round - sum(self.costs(one.policy, one.start, one.stop) for one in rows)
        needs = [need for number, need in self._needs.items() if number in suspended]
        self.given = shared_out(needs, max(0.0, left))

    def is_first(self, request: Request) -> bool:
        """Whether a request is the first of those that prefill."""
        return next(iter(self._needs), None) == request.id

    def turn(self, request: Request, chunk: int) -> Turn:
        """What a request may do in the step, where it prefills in chunks of at most ``chunk`` rows."""
        if request.id not in self._needs:
            return Turn(chunk)  # it decodes
        rows = request.sequence.next_rows(chunk)
        assert rows is not None
        start, stop, span = rows
        count, given, first = stop - start, self.given.get(request.id, 0.0), self.is_first(request)
        if self.costs(span.policy, start, stop) <= given:
            return Turn(count)
        if not self.beside or not self.may_cut(span.policy):
            return Turn(count, apart=count > LEAST_ROWS) if count > LEAST_ROWS or first else Turn(0)
        if span.policy.text not in self._costs:
            count = min(count, FIRST_ROWS)
        while count > LEAST_ROWS and self.costs(span.policy, start, start + count) > given:
            count = max(LEAST_ROWS, count // 2)
        return Turn(count if first or self.costs(span.policy, start, start + count) <= given else 0)

    def may_cut(self, policy: Policy) -> bool:
        """Whether the chunks of a prefill may end anywhere."""
        return not self.exact and not policy.selects_by_chunk

    def costs(self, policy: Policy, start: int, stop: int) -> float:
        """Seconds that the rows ``start .. stop - 1`` of a prefill are taken to take."""
        known = self._costs.get(policy.text)
        seconds = None if known is None else known.seconds(stop - start, (start + stop) / 2)
        return self.unknown * (stop - start) if seconds is None else seconds

    def decoded(self, seconds: float) -> None:
        """A step without prefill rows took so long."""
        self.decode_seconds = FORGET * (self.decode_seconds or seconds) + (1 - FORGET) * seconds

    def prefilled(self, rows: ScheduledRequest, seconds: float) -> None:
        """The rows of a prefill took so long, whatever ran beside them left out."""
        costs = self._costs.pop(rows.policy.text, None) or RowCosts()
        self._costs[rows.policy.text] = costs  # the last one used is the last
        if len(self._costs) > POLICIES:
            del self._costs[next(iter(self._costs))]
        costs.learn(rows.length, (rows.start + rows.stop) / 2, max(0.0, seconds))

    def ran(self, one: Suspended, layers: int, seconds: float) -> bool:
        """A chunk that runs apart has come so far. Returns whether a layer of it takes longer than the gap."""
        each = (seconds - one.seconds) / max(1, layers - one.layers)
        one.layers, one.seconds = layers, seconds
        return each > self.seconds

    def _need(self, request: Request, suspended: Suspended | None) -> float:
        """Seconds until the prompt of a request is computed."""
        start, stop, policy = prefill_left(request)
        if suspended is None:
            return self.costs(policy, start, stop)
        rows = suspended.rows
        own = self.costs(rows.policy, rows.start, rows.stop)
        if suspended.layers:
            own = suspended.seconds * self.layers / suspended.layers
        rest = self.costs(policy, rows.stop, stop) if rows.stop < stop else 0.0
        return max(0.0, own - suspended.seconds) + rest


def prefill_left(request: Request) -> tuple[int, int, Policy]:
    """The tokens ``start .. stop - 1`` that are left of the prefill under way, and its policy."""
    rows = request.sequence.next_rows(1)
    assert rows is not None
    start, _, span = rows
    return start, span.stop, span.policy
