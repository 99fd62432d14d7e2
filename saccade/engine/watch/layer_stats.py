"""What ran in one phase of a request at one layer: counts from work done."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from saccade.engine.steps.step import CallCount, ReadPairs
from saccade.methods.base import Cost
from saccade.ops.pairs import pairs as pairs_of

_SUMS = (
    "calls",
    "causal",
    "even",
    "scored",
    "estimated",
    "retrievals",
    "searches",
    "searchable",
    "covered",
    "estimates",
)


@dataclass
class LayerStats:
    """Counts of one phase at one layer. Pairs are (query row, key) pairs."""

    calls: int = 0
    causal: int = 0  # pairs the causal mask allows, per query head, those of frozen rows among them
    frozen: int = 0  # rows that skipped the layer by their policy
    unread: int = 0  # rows that skipped it (the last one) because their output there is not read
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
    certified: dict[str, int] = field(default_factory=dict)  # see Cost.certified
    rounding: float | None = None  # see Cost.rounding: the greatest
    late_coverage: tuple[Tensor, Tensor] | None = None  # sum and least of what a device estimated

    def add(self, call: CallCount) -> None:
        """Count one call."""
        used, cost, coverage = call.used, call.cost, call.coverage
        self.heads, even = used.shape.heads, used.even_pairs()
        if even is None:
            pairs = used.pairs if isinstance(used, ReadPairs) else pairs_of(used)
            if pairs.numel() == 1:
                pairs = pairs.expand(self.heads)
            sums = self.attended
            if sums is not None and sums.is_cuda:
                pairs = pairs.to(sums.device, non_blocking=True)
            self.attended = pairs.clone() if sums is None else sums.to(pairs.device) + pairs
        self.even += even or 0
        self.calls += 1
        self.causal += used.shape.causal_pairs
        self.scored += cost.scored
        self.estimated += cost.estimated
        self.retrievals += cost.scored > 0 or cost.estimated > 0
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
        self._certify(cost)

    def plus(self, other: LayerStats) -> None:
        """Count the calls that ``other`` has counted."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.heads, self.units = other.heads, max(self.units, other.units)
        self.least_covered = min(self.least_covered, other.least_covered)
        self._certify(other)
        if other.attended is not None:
            have, more = self.attended, other.attended
            self.attended = more if have is None else have + more.to(have.device)

    def _certify(self, more: Cost | LayerStats) -> None:
        for name, heads in more.certified.items():
            self.certified[name] = self.certified.get(name, 0) + heads
        if more.rounding is not None:
            self.rounding = more.rounding if self.rounding is None else max(self.rounding, more.rounding)

    def pairs(self) -> Tensor | None:
        """int64 [heads]: pairs that each query head attended to; None before the first call."""
        if self.attended is not None:
            return self.attended + self.even
        return torch.full((self.heads,), self.even) if self.calls else None

    def shares(self) -> tuple[float, list[float]]:
        """Pairs that a query head attended to on average, and each head's part of the causal ones, to six digits."""
        if self.attended is None:  # all alike: a request that ends should not hold the others up
            return float(self.even), [round(self.even / self.causal, 6)] * self.heads
        pairs = (self.attended + self.even).tolist()
        return sum(pairs) / len(pairs), [round(one / self.causal, 6) for one in pairs]

    def settle(self) -> None:
        """Take over what a device has counted since the last time."""
        if self.late_coverage is not None:
            total, least = map(float, self.late_coverage)
            self.covered, self.least_covered = self.covered + total, min(self.least_covered, least)
            self.late_coverage = None

    def rest(self) -> None:
        """Hold nothing on a device: what another process is to read."""
        self.settle()
        if self.attended is not None:
            self.attended = self.attended.cpu()

    def skip(self, rows: int, pairs: int, unread: int = 0) -> None:
        """Count ``rows`` that skipped the layer by their policy, to whom the causal mask allows ``pairs``, and
        ``unread`` ones whose output is not read: those leave densities alone."""
        self.frozen += rows
        self.causal += pairs
        self.unread += unread
