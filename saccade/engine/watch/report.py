"""What a request really did, counted from work done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from saccade.engine.messages import RequestMetrics
from saccade.engine.steps.step import RequestResult, ScheduledRequest
from saccade.engine.watch.contradiction import Contradiction
from saccade.engine.watch.layer_stats import LayerStats
from saccade.engine.watch.phase_stats import PhaseStats, holds
from saccade.kv.tier import TierCounts
from saccade.methods.policy import Policy


class Speculated(Protocol):
    """What was drafted and verified (engine.drafts.speculation)."""

    def as_dict(self) -> dict[str, Any]: ...


class Audited(Protocol):
    """What was held against dense attention (engine.watch.audit, engine.watch.bounds)."""

    def as_dict(self) -> dict[str, Any]: ...


class AuditedRule(Audited, Protocol):
    """An audit, which measures what stopping rules estimate."""

    def contradiction(self, layers: Sequence[LayerStats]) -> Contradiction | None: ...


class Report:
    """Per request: what ran in prefill and decode, when, and anything that ran otherwise than asked.

    The time from its first step to the end of its last is split between the phases without rest: what passed since the
    end of the request's last step belongs to the phase of the next, however many requests share it. So phases tell what
    a user waits for, and the rates of requests that run side by side add up to the engine's.
    """

    def __init__(self, policy: Policy, layers: int) -> None:
        self.policy = policy
        self.prefill = PhaseStats([LayerStats() for _ in range(layers)])
        self.decode = PhaseStats([LayerStats() for _ in range(layers)])
        self.asked = policy.text  # which may have been a name for what it became
        self.became: str | None = None  # why, then
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.kept_tokens = 0  # of the prompt, for later requests that begin alike
        self.places: tuple[int, ...] = ()  # among the model's layers, of those that attend; empty where all do
        self.token_bytes = 0  # of a token's keys and values
        self.output_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.recomputed_tokens = 0  # for layers that keep a state had none where the request went on
        self.preemptions = 0
        self.compiled_kernels = 0  # for which it waited
        self.compile_seconds = 0.0
        self.longest_gap = 0.0  # seconds between two tokens
        self.suspensions = 0  # stops of its prefill between two layers, for others' steps
        self.held_back = 0  # steps in which it did not run, for others needed the memory
        self.tiers: TierCounts | None = None
        self._step_bytes: int | None = None  # of keys and values that the last decode step asked for
        self.speculation: Speculated | None = None
        self.audit: AuditedRule | None = None
        self.bounds: Audited | None = None
        self.dialed: str | None = None  # the decode method, where its dial may turn
        self.notes: list[str] = []
        self._clock = time.time() - time.perf_counter()  # seconds since the epoch where the other clock says 0
        self._arrived = time.perf_counter()
        self._scheduled: float | None = None
        self._counted = self._arrived  # until when time has been given to phases
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._finished: float | None = None

    def schedule(self, now: float) -> None:
        """A step begins with this request in it: the first one ends its wait in the queue."""
        if self._scheduled is None:
            self._scheduled = self._counted = now

    def share(self, parent: Report) -> None:
        """Go on from the prompt that another request has computed: its time is this one's too."""
        self._scheduled = self._arrived if parent._scheduled is None else max(self._arrived, parent._scheduled)
        self._counted = max(self._arrived, parent._counted)
        self.prefill.seconds += self._counted - self._scheduled

    def take(self, rows: ScheduledRequest, result: RequestResult, ended: float) -> None:
        """Count what a step did for ``rows`` until ``ended`` (time.perf_counter)."""
        seconds, self._counted = ended - self._counted, ended
        stats, method = (
            (self.prefill, rows.policy.prefill) if rows.phase == "prefill" else (self.decode, rows.policy.decode)
        )
        text = method.text if self.dialed is None or rows.phase == "prefill" else self.dialed
        stats.take(result, text, rows.stop - rows.start, seconds)
        self.take_tiers([result])
        self._step_bytes = result.step_bytes(rows) or self._step_bytes
        for note in result.notes:
            self.note(note)

    def take_together(self, rows: ScheduledRequest, result: RequestResult, kept: int) -> None:
        """Count what a verification read at once for the first ``kept`` of its rows; :meth:`take` counts the rows."""
        if result.stay is not None:
            result.stay(kept)
        calls = [call.of_first(kept) for call in result.calls]
        self.decode.take(replace(result, calls=calls), rows.policy.decode.text, 0, 0.0)
        for note in result.notes:
            self.note(note)

    def take_tiers(self, results: Sequence[RequestResult]) -> None:
        """Count what moved between memory and tiers."""
        for result in results:
            if result.tiers is not None:
                self.tiers = self.tiers or TierCounts()
                self.tiers.add(result.tiers)
                result.tiers = None

    def token(self) -> None:
        """A token was chosen."""
        before, self._last_token = self._last_token, time.perf_counter()
        if before is not None:
            self.longest_gap = max(self.longest_gap, self._last_token - before)
        self._first_token = self._last_token if self._first_token is None else self._first_token

    def finish(self, output_tokens: int) -> None:
        """The request has ended with so many tokens."""
        self.output_tokens, self._finished = output_tokens, time.perf_counter()

    def note(self, text: str) -> None:
        """Add a sentence, once."""
        if text not in self.notes:
            self.notes.append(text)

    def contradicted(self) -> Contradiction | None:
        """What of the estimates of decode's stopping rules the audit contradicts, of what was counted so far."""
        if self.audit is None:
            return None
        self.decode.settle()
        return self.audit.contradiction(self.decode.layers)

    def metrics(self) -> RequestMetrics:
        """When what happened, as callers of vLLM know it."""
        places = (self._scheduled, self._first_token, self._last_token, self._finished)
        scheduled, first, last, finished = (None if place is None else place + self._clock for place in places)
        return RequestMetrics(self._arrived + self._clock, scheduled, first, last, finished, self.output_tokens)

    def as_dict(self) -> dict[str, Any]:
        started = self._scheduled if self._scheduled is not None else self._finished
        ended = self._finished if self._finished is not None else self._counted
        found = self.contradicted()
        phases = self.prefill.as_dict(), self.decode.as_dict()
        audit = None if self.audit is None else self.audit.as_dict()
        if audit is not None:
            audit["contradiction"] = None if found is None else found.as_dict()
        # A sentence about a request that runs is told anew each time: its numbers still move.
        told = [] if found is None else [found.sentence(self.policy)]
        if self.compiled_kernels:
            told.append(
                f"it waited {self.compile_seconds:.1f} s while {self.compiled_kernels} kernels were compiled, as they "
                "are at their first use; saccade serve --warm compiles them before"
            )
        return {
            "policy": self.policy.text,
            "policy_asked": self.asked,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "cached_bytes": self.cached_tokens * self.token_bytes,
            "output_tokens": self.output_tokens,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "attention_layers": list(self.places) or None,
            "recomputed_tokens": self.recomputed_tokens,
            "preemptions": self.preemptions,
            "held_back": self.held_back,
            "compiled_kernels": self.compiled_kernels,
            "compile_seconds": round(self.compile_seconds, 3),
            "suspensions": self.suspensions,
            "queue_seconds": 0.0 if started is None else round(started - self._arrived, 6),
            "first_token_seconds": None if self._first_token is None else round(self._first_token - self._arrived, 6),
            "longest_gap_seconds": round(self.longest_gap, 6),
            "total_seconds": round(ended - self._arrived, 6),
            "prefill": phases[0],
            "decode": phases[1],
            "speculation": None if self.speculation is None else self.speculation.as_dict(),
            "tiers": self._moved(),
            "audit": audit,
            "bounds": None if self.bounds is None else self.bounds.as_dict(),
            "notes": [one for one in self.notes if self._holds(one)] + told,
        }

    def _holds(self, note: str) -> bool:
        return holds(note, "prefill", self.prefill) and holds(note, "decode", self.decode)

    def _moved(self) -> dict[str, Any] | None:
        """What moved between memory and tiers, those of all processes that share the model out."""
        others: TierCounts | None = None
        moved, asked = self.tiers, self._step_bytes
        for phase in (self.prefill, self.decode):
            if phase.moved is not None:
                others = others or TierCounts()
                others.add(phase.moved)
            if phase.step_bytes is not None:
                asked = phase.step_bytes + (asked or 0)
        if others is not None:
            moved = others if moved is None else moved.beside(others)
        return None if moved is None else moved.as_dict() | {"step_bytes": asked}
