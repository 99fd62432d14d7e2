"""Running estimates from samples, with intervals that hold at their nominal rate.

What is sampled at random is a simple random sample of all that there was, given how many were sampled: the mean of the
sample estimates the mean of all without bias, however unlike the parts of a request are. Intervals are two-sided, at
``CONFIDENCE`` each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

CONFIDENCE = 0.95
DIGITS = 6


def departures(sparse: Tensor, dense: Tensor) -> Tensor:
    """Of logits [rows, vocab] beside those of a dense run, float64 [rows, 2]: 1 where the likeliest token is the same,
    else 0, and the divergence KL(dense, sparse) in nats; NaN where logits are not finite."""
    p, q = torch.log_softmax(dense.double(), -1), torch.log_softmax(sparse.double(), -1)
    off = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q)).sum(-1)
    return torch.stack([(sparse.argmax(-1) == dense.argmax(-1)).double(), off], -1)


@dataclass
class Mean:
    """Of values from 0 to 1; larger ones count as 1. Sums are kept, not values."""

    samples: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Count one value; ValueError for NaN."""
        if math.isnan(value):
            raise ValueError("a sampled value is NaN")
        value = min(1.0, max(0.0, value))
        self.samples, self.total, self.squares = self.samples + 1, self.total + value, self.squares + value * value

    def join(self, part: Mapping[str, Any] | None) -> Mean:
        """Count the samples of another estimate too, which is plain data; returns this one."""
        if part is not None:
            count, mean = part["samples"], part["mean"]
            self.samples += count
            self.total += count * mean
            self.squares += max(0, count - 1) * part["variance"] + count * mean * mean
        return self

    def merge(self, part: Mean) -> None:
        """Count the samples of another one too."""
        self.samples, self.total = self.samples + part.samples, self.total + part.total
        self.squares += part.squares

    @property
    def mean(self) -> float:
        return self.total / self.samples if self.samples else math.nan

    @property
    def variance(self) -> float:
        """Of one value, without bias."""
        if self.samples < 2:
            return 0.25
        return max(0.0, (self.squares - self.total * self.mean) / (self.samples - 1))

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Empirical Bernstein bounds (Maurer and Pontil, arXiv:0907.3740, Theorem 4, on each side): they hold for any
        values from 0 to 1 and any number of samples, which a t interval does not where a few values are far off."""
        if self.samples < 2:
            return 0.0, 1.0
        log = math.log(4.0 / (1.0 - confidence))
        half = math.sqrt(2 * self.variance * log / self.samples) + 7 * log / (3 * (self.samples - 1))
        return max(0.0, self.mean - half), min(1.0, self.mean + half)

    def bounds(self, population: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Two-sided bounds of the mean of ``population`` values from 0 to 1, of which the samples were drawn without
        replacement: by Chernoff's bound (Hoeffding 1963, Theorem 1 and Section 6), which says much of few samples whose
        mean is far off, and no further off than values that were not sampled can be: none where all were."""
        if not self.samples:
            return 0.0, 1.0
        mean, share = min(1.0, max(0.0, self.mean)), min(1.0, self.samples / max(1, population))
        limit = math.log(2.0 / (1.0 - confidence)) / self.samples
        high = min(_chernoff(mean, limit), share * mean + (1.0 - share))
        low = max(1.0 - _chernoff(1.0 - mean, limit), share * mean)
        return low, high

    def as_dict(self) -> dict[str, Any] | None:
        """Plain data; None without a sample. ``variance`` is of one value: with it estimates can be joined."""
        return _plain(self, variance=float(f"{self.variance:.9g}"))


@dataclass
class Share:
    """How often something holds."""

    samples: int = 0
    hits: int = 0

    def add(self, holds: bool) -> None:
        self.samples, self.hits = self.samples + 1, self.hits + bool(holds)

    def join(self, part: Mapping[str, Any] | None) -> Share:
        """As for a mean."""
        if part is not None:
            self.samples, self.hits = self.samples + part["samples"], self.hits + round(part["samples"] * part["mean"])
        return self

    @property
    def mean(self) -> float:
        return self.hits / self.samples if self.samples else math.nan

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Clopper and Pearson's exact bounds (Biometrika 26, 1934)."""
        if not self.samples:
            return 0.0, 1.0
        tail, missed = (1.0 - confidence) / 2, self.samples - self.hits
        highest = 1.0 if not self.hits else _solve(lambda p: at_most(missed, self.samples, p) - tail)
        lowest = 0.0 if not missed else _solve(lambda p: tail - 1.0 + at_most(missed - 1, self.samples, p))
        return 1.0 - highest, 1.0 - lowest

    def as_dict(self) -> dict[str, Any] | None:
        """Plain data; None without a sample."""
        return _plain(self)


def _plain(estimate: Mean | Share, **more: float) -> dict[str, Any] | None:
    if not estimate.samples:
        return None
    low, high = (round(bound, DIGITS) for bound in estimate.interval())
    return {"samples": estimate.samples, "mean": round(estimate.mean, DIGITS), "low": low, "high": high, **more}


def at_most(hits: int, trials: int, chance: float) -> float:
    """The probability of at most ``hits`` in ``trials`` that each succeed with ``chance``."""
    if hits >= trials or chance <= 0.0:
        return 1.0
    if hits < 0 or chance >= 1.0:
        return 0.0
    k = np.arange(1, hits + 1, dtype=np.float64)
    steps = np.log((trials - k + 1) / k) + (math.log(chance) - math.log1p(-chance))  # from one term's log to the next
    logs = trials * math.log1p(-chance) + np.concatenate(([0.0], np.cumsum(steps)))
    top = float(logs.max())
    return min(1.0, math.exp(top) * float(np.exp(logs - top).sum()))


def _chernoff(mean: float, limit: float) -> float:
    """The greatest chance p >= ``mean`` whose divergence KL(mean, p), of Bernoulli variables, is at most ``limit``."""

    def left(p: float) -> float:
        if p <= mean:
            return limit
        off = 0.0 if mean <= 0.0 else mean * math.log(mean / p)
        return limit - off - (1.0 - mean) * (math.log1p(-mean) - math.log1p(-p)) if p < 1.0 else -math.inf

    return 1.0 if mean >= 1.0 else _solve(left)


def _solve(falling: Any) -> float:
    """Where a falling function of a chance crosses 0."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2
