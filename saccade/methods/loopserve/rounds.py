"""The greedy cover in rounds: many lines at once, each nearly as good as the best one.

One line after another is a chain of as many steps as there are lines, which no device can shorten. A round takes every
line whose new weight per new cell is at least half of the best line's, as threshold greedy for covers does,
but no more than the goal may still ask for: in the order of ``LADDER`` shares of the best, and within such a share by
number, columns first. What a round recovers is counted cell by cell, so that the share of the sampled rows is kept as
surely as line by line. Weights are whole numbers of 2**-40: sums do not hang on their order, and every device chooses
the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

UNIT = 2.0**40
LADDER, STEPS = 8, 16  # the first steps of so many from the best to 0, among which the goal may end a round

Array = np.ndarray[Any, np.dtype[Any]]


def cover_rounds(weights: Array, positions: Array, first: int, share: float, near: int = 1) -> tuple[Array, Array]:
    """``line_cover.cover_lines`` with exact overlaps, in rounds: (columns, distances), int64, rising. ``weights`` fp32
    [m, n], finite, rows at ``positions`` (int64 [m], rising). Distances below ``near``, at most n, are taken first."""
    units = (weights.astype(np.float64) * UNIT).astype(np.int64)
    n = units.shape[1]
    apart = positions[:, None] - np.arange(n)[None, :]
    gains = np.zeros((2, n), np.int64)
    gains[0] = units.sum(0)
    np.add.at(gains[1], apart.clip(0), np.where(apart >= 0, units, 0))
    goal, recovered = share * float(gains[0].sum()), 0
    marks = np.zeros((2, n), bool)
    length = np.minimum(n - first, n - np.arange(n))
    fresh = [np.zeros(1, np.int64), np.arange(near)]  # distance 0 and column 0, so that no row is left without keys
    while True:
        for kind in (0, 1):
            recovered += _take(units, positions, gains, kind, fresh[kind])
            marks[kind, fresh[kind]] = True
        if recovered >= goal or bool(marks.all()):
            return marks[0].nonzero()[0], marks[1].nonzero()[0]
        upto = np.pad(marks.cumsum(1), ((0, 0), (1, 0)))
        number = np.arange(n)
        crossed = upto[::-1, n - number] - upto[::-1, np.maximum(first - number, 0)]
        worth = np.where(marks, -1.0, gains / np.maximum(length - crossed, 1))
        fresh = _round(worth, gains, goal - recovered)


def _round(worth: Array, gains: Array, lacking: float) -> list[Array]:
    """The lines of one round: numbers of columns, numbers of distances."""
    best = worth.max()
    step, before = 0, 0
    for step in range(LADDER):
        before, upto = (int(gains[worth >= _floor(best, at)].sum()) for at in (step, step + 1))
        if upto >= lacking:
            break
    near = (worth >= _floor(best, step + 1)) & (worth < _floor(best, step))
    ahead = before + np.where(near, gains, 0).ravel().cumsum().reshape(gains.shape) - np.where(near, gains, 0)
    taken = (worth >= _floor(best, step)) | (near & (ahead < lacking))
    return [line.nonzero()[0] for line in taken]


def _floor(best: float, step: int) -> float:
    """What a line's worth must reach at a step of the ladder; at step 0 none does."""
    return np.inf if step == 0 else float(best * (1.0 - step / STEPS))


def _take(units: Array, positions: Array, gains: Array, kind: int, lines: Array) -> int:
    """Recover ``lines`` of a kind: their weight, which they and the lines that cross them lose."""
    across = positions[:, None] - lines[None, :]  # a column and a distance that share a cell add up to its row
    row = np.arange(positions.size)[:, None]
    there = across >= 0
    at = (row, across.clip(0) if kind else np.broadcast_to(lines, across.shape))
    found = np.where(there, units[at], 0)
    units[np.broadcast_to(row, across.shape)[there], at[1][there]] = 0
    np.subtract.at(gains[1 - kind], across.clip(0), found)
    return int(found.sum())
