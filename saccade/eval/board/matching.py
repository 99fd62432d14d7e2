"""Making methods comparable: the setting that reads as many keys as the others, and what a method would score where it
reads as many bytes, or keeps as much of the attention, as the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, log

SEARCHED = 0.04  # a setting this near its target ends the search: share of the target
MATCHED = 0.12  # a row this far from its budget still counts as of that budget
PROBES = 8
HARDLY = 0.1  # of what is left to the target: a move that took less off it


@dataclass(frozen=True)
class Found:
    """``at``: the number of the setting whose density lies nearest the target; ``density``: of all measured ones."""

    at: int
    density: Mapping[int, float] = field(default_factory=dict)


def distance(density: float, target: float) -> float:
    """How far apart two densities are: 0.1 where one is a tenth more or less than the other."""
    return exp(abs(log(max(density, 1e-9) / target))) - 1


def nearest(count: int, measure: Callable[[int], float], target: float, first: int, step: float | None = None) -> Found:
    """Search settings ``0 .. count - 1``, sparsest first, for the one whose measured density is nearest ``target``.

    At most PROBES are measured. Between two that lie on both sides the next is where a straight line through their
    logarithms says; on one side ``step`` (see Dial) says how far, or half of what is left is taken. Where that hardly
    helped the last setting is next: no other one reaches a target that it does not, as where layers read a window
    whatever the dial says. Densities need not rise strictly: equal ones only cost a probe.
    """
    low, high, at = 0, count - 1, min(max(first, 0), count - 1)
    done: dict[int, float] = {}
    below: int | None = None
    above: int | None = None
    left: float | None = None  # on one side: how far from the target the setting before was, in logarithms
    while True:
        done[at] = density = max(measure(at), 1e-9)
        now = abs(log(target / density))
        if distance(density, target) <= SEARCHED or len(done) == PROBES:
            break
        if density < target:
            low, below = at + 1, at
        else:
            high, above = at - 1, at
        if low > high:
            break
        if below is not None and above is not None:
            rise = log(done[above] / done[below])
            part = log(target / done[below]) / rise if rise > 0 else 0.5
            wanted = round(below + part * (above - below))
        elif left is not None and left - now < HARDLY * left:
            wanted = high if density < target else low
        elif step is not None:
            wanted = at + round(log(target / density) / step)
        else:
            wanted = (low + high) // 2
        left = now
        at = min(max(wanted, low), high)
    best = min(done, key=lambda one: (distance(done[one], target), one))
    return Found(best, done)


@dataclass(frozen=True)
class Point:
    """One measured setting: ``x`` is what is to be equal, ``keys`` the share of keys read, ``scores`` by sample."""

    x: float
    keys: float
    scores: Mapping[str, float]


def at_equal(points: Sequence[Point], x: float, logs: bool) -> Point | None:
    """What lies at ``x`` on the straight line between the two measured points around it (with ``logs`` in log x), a
    sample at a time. None where no two points enclose ``x``: nothing is extrapolated."""
    line = sorted(points, key=lambda point: point.x)
    for left, right in pairwise(line):
        if left.x <= x <= right.x and right.x > left.x:
            place = (log(x / left.x) / log(right.x / left.x)) if logs else (x - left.x) / (right.x - left.x)
            both = left.scores.keys() & right.scores.keys()
            mixed = {name: (1 - place) * left.scores[name] + place * right.scores[name] for name in sorted(both)}
            return Point(x, exp((1 - place) * log(left.keys) + place * log(right.keys)), mixed)
    return next((point for point in line if point.x == x), None)
