"""How sure a score is: bootstrap intervals, paired against dense, and McNemar's exact test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from saccade.errors import RequestError

RESAMPLES = 10_000
STRETCH = 16  # forced tokens that are drawn together: neighbours drift alike
_CELLS = 4_000_000  # indices drawn at once: bounds the memory of one step to 32 MB


@dataclass(frozen=True)
class Interval:
    """A mean over ``n`` values with its percentile bootstrap interval ``low`` .. ``high``."""

    mean: float
    low: float
    high: float
    n: int


def mean_interval(
    values: Sequence[float], confidence: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Mean of ``values`` and its bootstrap interval (Efron's percentile method; same seed, same interval).

    Raises RequestError for no values, a confidence outside 0..1 or fewer than one resample.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or data.size == 0:
        raise RequestError(f"values of shape {data.shape} must be a list of at least one number")
    if not 0 < confidence < 1 or resamples < 1:
        raise RequestError(f"confidence={confidence} must be between 0 and 1, resamples={resamples} at least 1")
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    step = max(1, _CELLS // data.size)
    for start in range(0, resamples, step):
        count = min(step, resamples - start)
        means[start : start + count] = data[rng.integers(0, data.size, (count, data.size))].mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(data.mean()), float(low), float(high), int(data.size))


def paired_difference(
    values: Sequence[float],
    dense: Sequence[float],
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """Mean of ``values[i] - dense[i]`` over samples i, with its bootstrap interval.

    Samples are drawn as pairs, so what makes a sample hard for both cancels. Raises RequestError for lists of different
    lengths, and as ``mean_interval``.
    """
    if len(values) != len(dense):
        raise RequestError(f"{len(values)} values cannot be paired with {len(dense)} of dense: score the same samples")
    difference = np.asarray(values, dtype=np.float64) - np.asarray(dense, dtype=np.float64)
    return mean_interval(difference.tolist(), confidence, seed, resamples)


def stretch_interval(
    values: Sequence[float], stretch: int, confidence: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Mean of a series whose neighbours are alike, and its interval by the circular block bootstrap (Politis and
    Romano, 1992): stretches of ``stretch`` neighbours are drawn, the series' end going on at its beginning. Of two
    series over the same tokens, give the differences: they are paired then.

    Raises RequestError for no values, a stretch that is not from 1 to their number, and as ``mean_interval``.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or data.size == 0:
        raise RequestError(f"values of shape {data.shape} must be a list of at least one number")
    if not 1 <= stretch <= data.size:
        raise RequestError(f"stretch={stretch} must be from 1 to {data.size}, the number of values")
    if not 0 < confidence < 1 or resamples < 1:
        raise RequestError(f"confidence={confidence} must be between 0 and 1, resamples={resamples} at least 1")
    count, rest = divmod(data.size, stretch)  # the last stretch of a draw is cut to the series' length
    sums = np.concatenate(([0.0], np.cumsum(np.concatenate((data, data)))))
    starts = np.arange(data.size)
    whole, cut = sums[starts + stretch] - sums[starts], sums[starts + rest] - sums[starts]
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    step = max(1, _CELLS // (count + 1))
    for start in range(0, resamples, step):
        drawn = rng.integers(0, data.size, (min(step, resamples - start), count + 1))
        totals = whole[drawn[:, :count]].sum(axis=1) + cut[drawn[:, count]]
        means[start : start + len(drawn)] = totals / data.size
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(data.mean()), float(low), float(high), int(data.size))


def mcnemar(values: Sequence[float], dense: Sequence[float]) -> float:
    """Two-sided exact p of McNemar's test: could as many one-sided changes come from a fair coin?

    Both lists hold 0 or 1, one per sample. Only the samples where they differ count; p is 1 if there are none. Raises
    RequestError for other values and for lists of different lengths.
    """
    if len(values) != len(dense):
        raise RequestError(f"{len(values)} values cannot be paired with {len(dense)} of dense: score the same samples")
    odd = sorted({value for value in (*values, *dense) if value not in (0, 1)})
    if odd:
        raise RequestError(f"McNemar's test is for scores of 0 and 1, not {odd[0]}; use the bootstrap interval")
    better = sum(new > old for new, old in zip(values, dense))
    worse = sum(new < old for new, old in zip(values, dense))
    changes = better + worse
    tail = sum(math.comb(changes, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**changes)
