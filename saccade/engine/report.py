"""What a request really did, counted from work done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from saccade.engine.device_counts import DeviceCounts, LayerCounts
from saccade.engine.messages import RequestMetrics
from saccade.engine.step import CallCount, RequestResult, ScheduledRequest
from saccade.kv.tier import TierCounts
from saccade.selection import Selection


@dataclass
class LayerStats:
    """Counts of one phase at one layer. Pairs are (query row, key) pairs."""

    calls: int = 0
    causal: int = 0  # pairs the causal mask allows, per query head, those of frozen rows among them
    frozen: int = 0  # rows that skipped the layer by their policy
    unread: int = 0  # rows that skipped it (the last one) because nobody reads what they would become there
    attended: Tensor | None = None  # int64 [heads], of calls whose heads may differ
    even: int = 0  # pairs per head of the other calls
    heads: int = 1
    scored: int = 0
    estimated: int = 0
    retrievals: int = 0  # calls that scored keys or summaries to choose
    searches: int = 0  # query heads that looked for keys anew, out of `searchable` in calls of methods that reuse
    searchable: int = 0
    covered: float = 0.0  # sum of `estimates` stopping rules' estimates of what they had covered
    estimates: int = 0
    least_covered: float = 1.0
    late: dict[str, Tensor] = field(default_factory=dict)  # see Cost.late
    certified: dict[str, int] = field(default_factory=dict)  # see Cost.certified
    late_coverage: tuple[Tensor, Tensor] | None = None  # sum and least of what a device estimated

    def add(self, call: CallCount) -> None:
        """Count one call."""
        used, cost, coverage = call.used, call.cost, call.coverage
        self.heads, even = used.shape.heads, used.even_pairs()
        if even is None:
            self._attend(used)
        else:
            self.even += even
        self.calls += 1
        self.causal += used.shape.causal_pairs
        self.scored += cost.scored
        self.estimated += cost.estimated
        self.retrievals += cost.scored > 0 or cost.estimated > 0 or bool(cost.late)
        if cost.searches is not None:
            self.searches += cost.searches
            self.searchable += used.shape.heads
        if coverage is not None and coverage.is_cuda:  # asking for it now would wait for the device
            self.estimates += len(coverage)
            fresh = coverage.double().sum(), coverage.double().min()
            have = self.late_coverage
            self.late_coverage = fresh if have is None else (have[0] + fresh[0], torch.minimum(have[1], fresh[1]))
        elif coverage is not None:
            estimates = coverage.tolist()
            self.covered += sum(estimates)
            self.estimates += len(estimates)
            self.least_covered = min(self.least_covered, *estimates)
        for name, heads in cost.certified.items():
            self.certified[name] = self.certified.get(name, 0) + heads
        for name, count in cost.late.items():
            self.late[name] = self.late[name] + count if name in self.late else count

    def add_many(self, counts: LayerCounts, heads: int) -> None:
        """Count decode rows that were counted elsewhere."""
        self.heads = heads
        self.even += counts.keys
        if counts.extra is not None:
            extra = counts.extra.cpu().repeat_interleave(heads // len(counts.extra))
            self.attended = extra if self.attended is None else self.attended + extra.to(self.attended.device)
        self.calls += counts.calls
        self.causal += counts.causal
        self.scored += counts.scored
        self.estimated += counts.estimated
        self.searches += counts.searches
        self.searchable += counts.searchable
        self.retrievals += counts.retrievals
        self.covered += counts.covered
        self.estimates += counts.estimates
        self.least_covered = min(self.least_covered, counts.least)

    def _attend(self, used: Selection) -> None:
        pairs = used.pairs()
        if pairs.numel() == 1:
            pairs = pairs.expand(used.shape.heads)
        if self.attended is not None and self.attended.is_cuda:
            pairs = pairs.to(self.attended.device, non_blocking=True)
        self.attended = pairs.clone() if self.attended is None else self.attended.to(pairs.device) + pairs

    def pairs(self) -> Tensor | None:
        """int64 [heads]: pairs that each query head attended to; None before the first call."""
        if self.attended is not None:
            return self.attended + self.even
        return torch.full((self.heads,), self.even) if self.calls else None

    def shares(self) -> tuple[float, list[float]]:
        """Pairs that a query head attended to on average, and each head's part of the causal ones, to six digits."""
        if self.attended is None:  # all alike: whoever ends should not hold the others up
            return float(self.even), [round(self.even / self.causal, 6)] * self.heads
        pairs = (self.attended + self.even).tolist()
        return sum(pairs) / len(pairs), [round(one / self.causal, 6) for one in pairs]

    def settle(self) -> None:
        """Take over what a device has counted since the last time."""
        for name, count in self.late.items():
            setattr(self, name, getattr(self, name) + round(float(count)))
        self.late = {}
        if self.late_coverage is not None:
            total, least = map(float, self.late_coverage)
            self.covered, self.least_covered = self.covered + total, min(self.least_covered, least)
            self.late_coverage = None

    def skip(self, rows: int, pairs: int, unread: int = 0) -> None:
        """Count ``rows`` that skipped the layer by their policy, to whom the causal mask allows ``pairs``, and
        ``unread`` ones whose output nobody reads: those leave densities alone."""
        self.frozen += rows
        self.causal += pairs
        self.unread += unread


class Late(Protocol):
    """Counts that are kept elsewhere while a request runs."""

    def take(self) -> DeviceCounts:
        """What was counted since the last time."""
        ...


@dataclass
class PhaseStats:
    """One phase (prefill or decode) of one request."""

    layers: list[LayerStats]
    policies: list[str] = field(default_factory=list)  # method texts that were asked for, in order of first use
    kinds: dict[str, int] = field(default_factory=dict)  # selection kind -> calls
    backends: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0
    late: dict[Any, Late] = field(default_factory=dict)  # what is counted elsewhere until it is asked for

    def take(self, result: RequestResult, method: str, tokens: int, seconds: float) -> None:
        """Count what a step did in ``seconds`` under ``method`` (its text) for ``tokens`` rows."""
        if method not in self.policies:
            self.policies.append(method)
        self.tokens += tokens
        self.seconds += seconds
        for call in result.calls:
            self.layers[call.layer].add(call)
            kind = selection_kind(call.used)
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
            self.backends[call.backend] = self.backends.get(call.backend, 0) + 1
        for skip in result.skips:
            self.layers[skip.layer].skip(skip.frozen, skip.pairs, skip.unread)
        self.late.update(result.late)

    def _add_late(self, counts: DeviceCounts) -> None:
        for layer in counts.layers:
            self.layers[layer.layer].add_many(layer, counts.heads)
        for have, more in ((self.kinds, counts.kinds), (self.backends, counts.backends)):
            for name, calls in more.items():
                have[name] = have.get(name, 0) + calls

    def _certified(self) -> dict[str, int] | None:
        """(Query head, step) pairs that were certified, by what gave the bound; None where nothing asked for it."""
        layers = [layer.certified for layer in self.layers if layer.certified]
        if not layers:
            return None
        counts = {name: sum(layer.get(name, 0) for layer in layers) for name in ("bounds", "sample", "exact")}
        return {"heads": sum(counts.values()), **counts}

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Densities are attended over causal pairs, in ``density`` of all layers together; keys
        are per query head and row."""
        for late in self.late.values():
            self._add_late(late.take())
        for layer in self.layers:
            layer.settle()
        active = [layer for layer in self.layers if layer.causal]
        heads = max((layer.heads for layer in active if layer.calls), default=1)
        for layer in active:
            layer.heads = layer.heads if layer.calls else heads  # a freeze skipped every row
        shares = [layer.shares() for layer in active]
        rows = max(1, self.tokens) * max(1, len(active))
        searches, searchable = (sum(getattr(one, name) for one in active) for name in ("searches", "searchable"))
        estimates = sum(layer.estimates for layer in active)
        attended = sum(mean for mean, _ in shares)
        causal = sum(layer.causal for layer in active)
        rate = self.tokens and self.seconds > 0
        return {
            "policy": "+".join(self.policies) if self.policies else None,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 6),
            "tokens_per_second": round(self.tokens / self.seconds, 3) if rate else None,
            "density": attended / causal if causal else None,
            "keys_attended": round(attended),
            "keys_causal": causal,
            "keys_scored": sum(layer.scored for layer in active),
            "keys_estimated": sum(layer.estimated for layer in active),
            "keys_attended_per_row": round(attended / rows, 2),
            "rows_frozen": sum(layer.frozen for layer in self.layers),
            "rows_frozen_per_layer": [layer.frozen for layer in self.layers],
            "rows_unread": sum(layer.unread for layer in self.layers),
            "retrievals": sum(layer.retrievals for layer in active),
            "searches": searches,
            "searchable": searchable,
            "search_ratio": searches / searchable if searchable else None,
            "coverage": sum(layer.covered for layer in active) / estimates if estimates else None,
            "coverage_least": min(layer.least_covered for layer in active) if estimates else None,
            "certified": self._certified(),
            "density_per_layer": [round(mean / layer.causal, 6) for layer, (mean, _) in zip(active, shares)],
            "density_per_head": [heads for _, heads in shares],
            "selections": dict(self.kinds),
            "backends": dict(self.backends),
        }


class Speculated(Protocol):
    """What was drafted and verified (engine.speculation)."""

    def as_dict(self) -> dict[str, Any]: ...


class Audited(Protocol):
    """What was held against dense attention (engine.audit, engine.bounds)."""

    def as_dict(self) -> dict[str, Any]: ...


class Report:
    """Per request: what ran in prefill and decode, when, and anything that ran otherwise than asked.

    The time from its first step to the end of its last is split between the phases without rest: what passed since the
    end of the request's last step belongs to the phase of the next, however many requests share it. So phases tell what
    a user waits for, and the rates of requests that run side by side add up to the engine's.
    """

    def __init__(self, policy: str, layers: int) -> None:
        self.policy = policy
        self.prefill = PhaseStats([LayerStats() for _ in range(layers)])
        self.decode = PhaseStats([LayerStats() for _ in range(layers)])
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.token_bytes = 0  # of a token's keys and values
        self.output_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.preemptions = 0
        self.longest_gap = 0.0  # seconds between two tokens
        self.held_back = 0  # steps in which it did not run, for others needed the memory
        self.tiers: TierCounts | None = None
        self._step_bytes: int | None = None  # of keys and values that the last decode step asked for
        self.speculation: Speculated | None = None
        self.audit: Audited | None = None
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
        if rows.phase == "decode" and result.asked_bytes and not result.whole:
            self._step_bytes = result.asked_bytes
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

    def metrics(self) -> RequestMetrics:
        """When what happened, as callers of vLLM know it."""
        places = (self._scheduled, self._first_token, self._last_token, self._finished)
        scheduled, first, last, finished = (None if place is None else place + self._clock for place in places)
        return RequestMetrics(self._arrived + self._clock, scheduled, first, last, finished, self.output_tokens)

    def as_dict(self) -> dict[str, Any]:
        started = self._scheduled if self._scheduled is not None else self._finished
        ended = self._finished if self._finished is not None else self._counted
        return {
            "policy": self.policy,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "cached_bytes": self.cached_tokens * self.token_bytes,
            "output_tokens": self.output_tokens,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "preemptions": self.preemptions,
            "held_back": self.held_back,
            "queue_seconds": 0.0 if started is None else round(started - self._arrived, 6),
            "first_token_seconds": None if self._first_token is None else round(self._first_token - self._arrived, 6),
            "longest_gap_seconds": round(self.longest_gap, 6),
            "total_seconds": round(ended - self._arrived, 6),
            "prefill": self.prefill.as_dict(),
            "decode": self.decode.as_dict(),
            "speculation": None if self.speculation is None else self.speculation.as_dict(),
            "tiers": None if self.tiers is None else self.tiers.as_dict() | {"step_bytes": self._step_bytes},
            "audit": None if self.audit is None else self.audit.as_dict(),
            "bounds": None if self.bounds is None else self.bounds.as_dict(),
            "notes": list(self.notes),
        }


def ran_dense(phase: str, method: str) -> str:
    """The note of a method that chose nothing."""
    return f"{phase}: '{method}' ran dense where its settings or a short context leave nothing to skip"


def selection_kind(selection: Selection) -> str:
    return type(selection).__name__.lower()
