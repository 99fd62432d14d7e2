"""What ran in one phase of a request: counts by layer, from work done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from saccade.engine.device_counts import DeviceCounts, LayerCounts
from saccade.engine.step import CallCount, ReadPairs, RequestResult
from saccade.ops.pairs import pairs as pairs_of
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
    units: int = 0  # rules in a call, at most
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
        if coverage is not None:
            self.units = max(self.units, len(coverage))
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
            extra = counts.extra.cpu()
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
        self.units = max(self.units, counts.units)
        self.least_covered = min(self.least_covered, counts.least)

    def _attend(self, used: Selection | ReadPairs) -> None:
        pairs = used.pairs if isinstance(used, ReadPairs) else pairs_of(used)
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

    def settle(self) -> None:
        """Take over what was counted elsewhere since the last time."""
        for late in self.late.values():
            self._add_late(late.take())
        for layer in self.layers:
            layer.settle()

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Densities are attended over causal pairs, in ``density`` of all layers together; keys
        are per query head and row."""
        self.settle()
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
            "coverage_estimated": sum(layer.covered for layer in active) / estimates if estimates else None,
            "coverage_estimated_least": min(layer.least_covered for layer in active) if estimates else None,
            "certified": self._certified(),
            "density_per_layer": [round(mean / layer.causal, 6) for layer, (mean, _) in zip(active, shares)],
            "density_per_head": [heads for _, heads in shares],
            "selections": dict(self.kinds),
            "backends": dict(self.backends),
        }


def ran_dense(phase: str, method: str) -> str:
    """The note of a method that chose nothing."""
    return f"{phase}: '{method}' ran dense where its settings or a short context leave nothing to skip"


def selection_kind(selection: Selection | ReadPairs) -> str:
    kind = selection.kind if isinstance(selection, ReadPairs) else type(selection)
    return kind.__name__.lower()
