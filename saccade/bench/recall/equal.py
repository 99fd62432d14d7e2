"""Methods at equal recall: where the line through a ladder's steps meets a mean and a worst head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from saccade.bench.measured import Measured
from saccade.bench.recall.measure import RecallRow

MEAN, WORST = 0.90, 0.80


@dataclass
class EqualRow(Measured):
    """``density`` and times where mean recall is at least ``mean`` and the worst head's at least ``worst``, by linear
    interpolation between two neighbours of the ladder; None where no step gets there: ``best_recall`` and
    ``best_worst`` then say how far it came. ``below``: the sparsest step is there already, so that less would do,
    unless ``hidden_by`` names the option that keeps it from reading less.
    ``oracle``: the density of the fewest blocks with which every block of rows of every head keeps ``mean``."""

    phase: str
    family: str
    context: int
    ladder: str
    density: float | None
    ms: float | None
    choosing_ms: float | None
    speedup: float | None
    oracle: float
    below: bool
    best_recall: float
    best_worst: float
    hidden_by: str | None = None


def at_equal_recall(rows: Sequence[RecallRow], mean: float = MEAN, worst: float = WORST) -> list[EqualRow]:
    """One row for every phase, family, context and ladder of ``rows``, in their order; dense is left out."""
    groups: dict[tuple[str, str, int, str], list[RecallRow]] = {}
    for row in rows:
        if row.ladder != "dense":
            groups.setdefault((row.phase, row.family, row.context, row.ladder), []).append(row)
    return [_equal(key, sorted(found, key=lambda row: row.density), mean, worst) for key, found in groups.items()]


def _equal(key: tuple[str, str, int, str], rows: Sequence[RecallRow], mean: float, worst: float) -> EqualRow:
    best = max(rows, key=lambda row: (row.recall, row.worst))
    oracle, ends = best.oracle_wanted, (best.recall, best.worst)
    if rows[0].recall >= mean and rows[0].worst >= worst:
        first = rows[0]
        found = first.density, first.ms, first.choosing_ms, first.speedup or None
        return EqualRow(*key, *found, oracle, True, *ends, hidden_by=first.hidden_by)
    for left, right in pairwise(rows):
        if right.recall >= mean and right.worst >= worst:
            way = max(_way(left.recall, right.recall, mean), _way(left.worst, right.worst, worst))
            density, ms, choosing = (
                _between(way, getattr(left, name), getattr(right, name)) for name in ("density", "ms", "choosing_ms")
            )
            return EqualRow(*key, density, ms, choosing, right.dense_ms / ms if ms else None, oracle, False, *ends)
    return EqualRow(*key, None, None, None, None, oracle, False, *ends)


def _way(left: float, right: float, wanted: float) -> float:
    """How far from ``left`` to ``right``, which is at least ``wanted``, it is to ``wanted``: 0 to 1."""
    return 0.0 if left >= wanted else (wanted - left) / (right - left)


def _between(way: float, left: float, right: float) -> float:
    return left + way * (right - left)
