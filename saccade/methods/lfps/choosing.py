"""LFPS's candidates for a decode row, and what stands for the other keys (docs/algorithms.md 1.4). That is the meaning,
of all options; the C++ kernels and those of recorded steps do the same for the usual ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from saccade.methods.base import Query
from saccade.methods.lfps.stand_ins import sampled_rest, sink_share
from saccade.methods.lfps.tables import ScoreTables
from saccade.ops.block_scores import top_blocks
from saccade.selection.csr import offsets_of_lists

if TYPE_CHECKING:
    from saccade.methods.lfps.method import LFPS
    from saccade.methods.lfps.state import LFPSState


class Choice(NamedTuple):
    """Candidates as lists: ``offsets`` int64 [units + 1], ``indices`` int32; ``idle`` bool [heads], who is bypassed;
    ``rest`` float32 [heads], the log-sum-exp of what stands for the keys that a head leaves out, -inf where nothing
    does. None: no head, and nothing."""

    offsets: Tensor
    indices: Tensor
    idle: Tensor | None
    rest: Tensor | None


def choose(method: LFPS, query: Query, state: LFPSState, length: int, local: int) -> Choice:
    """Of ``length`` keys that are no sinks, the last ``local`` of which are forced."""
    shape, tables = query.shape, state.tables
    idle, instead = bypassed(method, query, state)
    if method.every_key:
        none = torch.zeros(tables.units + 1, dtype=torch.int64, device=shape.device)
        return Choice(none, torch.empty(0, dtype=torch.int32, device=shape.device), idle, instead)
    skip = None if idle is None else idle.view(tables.units, -1).all(1)
    spread, base = (method.before, method.after), tables.row - tables.first
    offsets, indices = candidates(tables, length, length - local, method.a, method.gate, spread, base, skip)
    stop, full = shape.k_len - local, shape.k_len // method.block_size
    if method.blocks and full:
        summary = query.kv.summary("stored_mean", method.block_size)
        best = top_blocks(query.q[:, 0], summary, tables.units, min(method.blocks, full), 0, full)
        offsets, indices = join_blocks(offsets, indices, best, method.block_size, tables.first, stop)
    if not method.probes_at(query):
        return Choice(offsets, indices, idle, instead)
    places = offsets, indices, tables.first, stop, method.probes
    rest = sampled_rest(query.q, query.kv, *places, query.scale, query.softcap)
    if idle is not None:
        rest = torch.where(idle, -torch.inf if instead is None else instead, rest)
    return Choice(offsets, indices, idle, rest)


def bypassed(method: LFPS, query: Query, state: LFPSState) -> tuple[Tensor | None, Tensor | None]:
    """Who is bypassed, and the log-sum-exp of what stands then for the keys that are left out, as in ``Choice``."""
    shape, first = query.shape, state.tables.first
    if method.epsilon >= 1 or first == 0:
        return None, None
    log_count = math.log(max(1, shape.q_start + 1 - first))
    known = first, method.local, state.mean_key, state.spread, log_count
    lse = sink_share(query.q, query.kv, shape, *known, query.scale, query.softcap)
    idle = torch.exp(lse[:, 0] - torch.logsumexp(lse, 1)) > method.epsilon
    if not bool(idle.any()):
        return None, None
    return idle, None if method.bypass == "sink" else torch.where(idle, lse[:, 1], -torch.inf)


def threshold(sums: Tensor, n: int, a: float) -> tuple[float, float]:
    """(mean, tau) of a table with power sums ``sums`` [4] over ``n`` entries: tau = ``a`` times the mean over kappa =
    sum (x - mean)^4 / (sum (x - mean)^2)^2 (eq. 8), which is the kurtosis over n; +inf where all entries are equal."""
    s1, s2, s3, s4 = sums.tolist()
    mean = s1 / n if n else 0.0
    m2 = s2 - n * mean**2
    m4 = s4 - 4 * mean * s3 + 6 * mean**2 * s2 - 3 * n * mean**4
    if n <= 1 or not m2 > 1e-12 * s2 or not m4 > 0:
        return mean, float("inf")
    return mean, a * mean * m2 * m2 / m4


def candidates(
    tables: ScoreTables,
    length: int,
    stop: int,
    a: float | None,
    gate: str,
    offsets: tuple[int, int],
    base: Tensor,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Candidates of every unit (LFPS Alg. 1, C1) as lists: (offsets int64 [units + 1], positions int32).

    C0 holds the entries above their table's ``threshold`` (every one where ``a`` is None); C1 those within ``offsets``
    (before, after) of C0, less those that exceed the mean of neither table (``gate="paper"``; ``"off_for_c0"`` spares
    C0, ``"off"`` everything). ``length`` counts the tables' positions, of which those below ``stop`` may be candidates;
    ``base`` int64 [units] is the table position at distance 0. Units with ``skip`` get empty lists.
    """
    lists = [
        torch.arange(0, device=base.device)
        if skip is not None and bool(skip[unit])
        else _unit_candidates(tables, unit, length, stop, a, gate, offsets, int(base[unit]))
        for unit in range(tables.units)
    ]
    return offsets_of_lists(lists, base.device), (torch.cat(lists) + tables.first).to(torch.int32)


def join_blocks(
    offsets: Tensor, indices: Tensor, blocks: Tensor, size: int, first: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Lists of keys (``offsets`` int64 [units + 1], ``indices`` int32, rising) with the keys ``first .. stop - 1`` of
    ``blocks`` (int32 [units, m], rising, of ``size`` keys) in them: (offsets, indices) likewise, without repeats."""
    keys = (blocks.long()[..., None] * size + torch.arange(size, device=blocks.device)).flatten(1)
    bounds = offsets.tolist()
    lists = [
        torch.unique(torch.cat([indices[start:end].long(), own[(own >= first) & (own < stop)]]))
        for own, start, end in zip(keys, bounds, bounds[1:])
    ]
    return offsets_of_lists(lists, blocks.device), torch.cat(lists).to(torch.int32)


def _unit_candidates(
    tables: ScoreTables,
    unit: int,
    length: int,
    stop: int,
    a: float | None,
    gate: str,
    offsets: tuple[int, int],
    base: int,
) -> Tensor:
    device = tables.vertical.device
    distance = base - torch.arange(length, device=device)
    known = (distance >= 0) & (distance < tables.capacity)
    slash = torch.where(known, tables.slash[unit][distance.clamp(0, tables.capacity - 1)], 0.0)
    above, high = torch.zeros(2, length, dtype=torch.bool, device=device)
    for values, sums in zip((tables.vertical[unit, :length], slash), tables.sums[unit]):
        mean, tau = threshold(sums, length, 0.0 if a is None else a)
        above |= torch.ones_like(above) if a is None else values > torch.tensor(tau, dtype=torch.float32, device=device)
        high |= values > torch.tensor(mean, dtype=torch.float32, device=device)
    near = torch.zeros_like(above)
    for offset in range(-offsets[0], offsets[1] + 1):
        moved = above.nonzero()[:, 0] + offset
        near[moved[(moved >= 0) & (moved < length)]] = True
    chosen = near if gate == "off" else near & high
    if gate == "off_for_c0":
        chosen |= above
    return chosen[:stop].nonzero()[:, 0]
