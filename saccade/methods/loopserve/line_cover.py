"""Greedy covers of attention by lines: columns and diagonals, one by one until a share of the weight is recovered.

Lengths and new cells count the whole call, rows ``first .. n - 1``; weights are known for a sample of its rows. A
column and a diagonal meet in one cell.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.errors import ModelError
from saccade.kv.view import KVView
from saccade.methods.loopserve import cpu as kernels
from saccade.methods.loopserve.rounds import cover_rounds
from saccade.ops import cpu
from saccade.ops.scores import NOT_FINITE, row_weights
from saccade.selection import Shape

Array = np.ndarray[Any, np.dtype[Any]]


class LineCover(NamedTuple):
    """Lines in the order they were added, int64, on the CPU; ``recovered`` is the sampled weight they are known to
    hold."""

    columns: Tensor
    distances: Tensor
    recovered: float


def cover_lines(weights: Tensor, positions: Tensor, first: int, share: float, overlap: str = "exact") -> LineCover:
    """Lines that recover ``share`` of ``weights`` fp32 [m, n], the causal softmax rows at ``positions`` (int64 [m],
    within ``first .. n - 1``).

    ``overlap="exact"`` takes diagonal 0 and column 0, so that no row is left without keys, and then, each time, the
    line of greatest new weight per new cell; it counts shared cells once. ``"paper"`` is LoopServe's Alg. 2, which
    forces no line: lines in order of their whole weight, the heaviest of both kinds compared by weight per cell after
    subtracting the greatest entry of every line of the other kind, as if each crossing lay in the sample. What it
    counts as recovered is a lower bound that may fall below 0, and then it ends with every line. Diagonal 0 joins it,
    at the end, only where the first row would be left without keys. ModelError where weights are NaN.
    """
    weights, positions = weights.cpu(), positions.cpu()
    if not bool(weights.sum().isfinite()):
        raise ModelError(NOT_FINITE)
    if overlap == "exact" and cpu.available():
        return LineCover(*kernels.cover(weights, positions, first, share))
    rows = weights.numpy()
    if overlap == "exact":
        columns, distances, recovered = exact_cover(rows.copy(), positions.numpy(), first, share)
    else:
        columns, distances, recovered = _paper(rows, positions.numpy(), first, share)
    return LineCover(torch.tensor(columns, device="cpu"), torch.tensor(distances, device="cpu"), recovered)


def cover_rows(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    rows: Tensor,
    share: float,
    scale: float,
    softcap: float | None = None,
    overlap: str = "exact",
    rounds: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """(columns, distances) for every query head of ``q`` [heads, q_len, head_dim]: ``cover_lines`` of the softmax
    weights of ``rows`` (int64, rising numbers within the call), or ``rounds.cover_rounds``. The call's rows are the
    last positions. While a head is worked on, its weights take 4 bytes per row and key."""
    if overlap == "exact" and not rounds and cpu.serves(q, kv) is None:
        return kernels.cover_rows(q, kv, shape, rows, scale, softcap, share)
    lines = []
    for kv_head in range(shape.kv_heads):
        for weights in row_weights(q, kv, shape, kv_head, rows, scale, softcap):
            if rounds:
                lines.append(_in_rounds(weights.cpu(), shape.q_start + rows.cpu(), shape.q_start, share))
                continue
            cover = cover_lines(weights, shape.q_start + rows, shape.q_start, share, overlap)
            lines.append((cover.columns, cover.distances))
    return lines


def _in_rounds(weights: Tensor, positions: Tensor, first: int, share: float) -> tuple[Tensor, Tensor]:
    if not bool(weights.sum().isfinite()):
        raise ModelError(NOT_FINITE)
    columns, distances = cover_rounds(weights.numpy(), positions.numpy(), first, share)
    return torch.from_numpy(columns), torch.from_numpy(distances)


def by_distance(rows: Array, positions: Array) -> Array:
    """``rows`` [m, n] with entry ``[j, o]`` the weight at distance ``o`` from row ``positions[j]``."""
    out = np.zeros_like(rows)
    for j, position in enumerate(positions.tolist()):
        out[j, : position + 1] = rows[j, position::-1]
    return out


def exact_cover(rows: Array, positions: Array, first: int, share: float) -> tuple[list[int], list[int], float]:
    """``cover_lines`` with exact overlaps in numpy, line by line; ``rows`` is overwritten. csrc/line_cover.h gives the
    same to the last bit without looking at every line each time."""
    vertical = _Lines(rows.sum(0, dtype=np.float64), first)
    slash = _Lines(by_distance(rows, positions).sum(0, dtype=np.float64), first)
    n, goal, recovered = rows.shape[1], share * vertical.gain.sum(), 0.0
    sample = np.arange(positions.size)

    def take(lines: _Lines, line: int) -> float:
        """Add a line: the weight it brings, which it and the lines that cross it lose."""
        reach = sample[np.searchsorted(positions, line) :]
        across = positions[reach] - line  # a column and a distance that share a cell add up to its row
        index = (reach, across if lines is slash else line)
        entries = rows[index]
        rows[index] = 0.0
        lines.remove(line)
        (vertical if lines is slash else slash).cross(line, across, entries)
        return float(entries.sum(dtype=np.float64))

    recovered += take(slash, 0)
    recovered += take(vertical, 0)
    while recovered < goal and len(slash.chosen) + len(vertical.chosen) < 2 * n:
        by_slash, by_column = slash.best(), vertical.best()
        lines = slash if slash.worth[by_slash] >= vertical.worth[by_column] else vertical
        recovered += take(lines, by_slash if lines is slash else by_column)
    return vertical.chosen, slash.chosen, recovered


class _Lines:
    """The lines of one kind: sampled weight not yet recovered and cells not yet read, of those not chosen."""

    def __init__(self, gain: Array, first: int) -> None:
        n = gain.size
        self.n, self.first, self.gain = n, first, gain
        self.cells = np.minimum(n - first, n - np.arange(n)).astype(np.float64)
        self.worth = gain / self.cells
        self.chosen: list[int] = []
        self.stale = False

    def best(self) -> int:
        """The line of greatest gain per new cell, the lower one of equals."""
        if self.stale:
            np.maximum(self.cells, 1.0, out=self.worth)
            np.divide(self.gain, self.worth, out=self.worth)
            self.stale = False
        return int(self.worth.argmax())

    def remove(self, line: int) -> None:
        self.chosen.append(line)
        self.gain[line] = self.worth[line] = -np.inf

    def cross(self, line: int, met: Array, entries: Array) -> None:
        """``line`` of the other kind was chosen: it recovered ``entries`` of lines ``met`` and reads a cell of every
        line that it crosses within the call."""
        self.gain[met] -= entries
        self.cells[max(0, self.first - line) : self.n - line] -= 1.0
        self.stale = True


def _paper(rows: Array, positions: Array, first: int, share: float) -> tuple[list[int], list[int], float]:
    n = rows.shape[1]
    skewed = by_distance(rows, positions)
    v_sum, s_sum = (part.sum(0, dtype=np.float64) for part in (rows, skewed))
    v_weight, v_most = v_sum.tolist(), rows.max(0).tolist()
    s_weight, s_most = s_sum.tolist(), skewed.max(0).tolist()
    length = np.minimum(n - first, n - np.arange(n)).tolist()
    slashes, verticals = (np.argsort(-part, kind="stable").tolist() for part in (s_sum, v_sum))
    goal, recovered = share * float(v_sum.sum()), 0.0
    s_overlap = v_overlap = 0.0  # sums of the greatest entries of the chosen lines
    s = v = 0  # lines taken of each kind
    while recovered < goal and s + v < 2 * n:
        s_new = s_weight[slashes[s]] - v_overlap if s < n else -np.inf
        v_new = v_weight[verticals[v]] - s_overlap if v < n else -np.inf
        if _per_cell(s_new, length, slashes, s, v) >= _per_cell(v_new, length, verticals, v, s):
            recovered += s_new
            s_overlap += s_most[slashes[s]]
            s += 1
        else:
            recovered += v_new
            v_overlap += v_most[verticals[v]]
            v += 1
    if min([*verticals[:v], *slashes[:s]], default=n) > first:
        return verticals[:v], [*slashes[:s], 0], recovered
    return verticals[:v], slashes[:s], recovered


def _per_cell(gain: float, length: list[int], lines: list[int], at: int, crossings: int) -> float:
    return gain / max(1, length[lines[at]] - crossings) if at < len(lines) else -np.inf
