"""LFPS's decode step on a GPU: bypass, candidates and the estimate of the rest are decided there, and no number of them
is read back to the host.

It decides as on a CPU, but that candidates of a head that rests are none at all.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saccade.methods.base import Query
from saccade.methods.lfps.stand_ins import GOLDEN
from saccade.methods.lfps.tables import GATES
from saccade.ops import triton
from saccade.selection import Candidates

if TYPE_CHECKING:
    from saccade.methods.lfps.method import LFPS, LFPSState

MOST_PROBES = 128


def serves(method: LFPS, query: Query, state: LFPSState) -> str | None:
    """Why :func:`select_candidates` cannot decide this step; None where it can: keys and tables on a GPU, none
    hidden."""
    if not query.q.is_cuda or not state.tables.vertical.is_cuda:
        return f"q lies on {query.q.device} and the tables on {state.tables.vertical.device}, not on a GPU"
    if query.window is not None or query.gone is not None:
        return "a window or an eviction hides keys"
    if method.a is None and method.gate == "off":
        return "every key is a candidate: there is nothing to decide"
    if method.probes > MOST_PROBES:
        return f"it takes up to {MOST_PROBES} probes; got {method.probes}"
    return triton.serves_scores(query.q, query.kv)


def select_candidates(method: LFPS, query: Query, state: LFPSState, length: int) -> Candidates:
    """What ``LFPS.select_decode`` selects when ``length`` keys that are no sinks exceed the budget; ``tables.row`` is
    that of the step."""
    from saccade.methods.lfps import triton_stand_ins, triton_tables

    shape, tables, q, kv = query.shape, state.tables, query.q, query.kv
    local = min(method.local if method.read_local else 1, length)
    stop, first = length - local, tables.first
    instead: Tensor | None = None  # what stands for everything that a bypassed head leaves out, fp32 [heads]
    if method.epsilon < 1 and first > 0:
        log_count = math.log(max(1, shape.q_start + 1 - first))
        query.cost.scored += first + method.local
        query.cost.estimated += 1
        parts, state.idle = triton_stand_ins.sink_share(
            q, kv, shape, first, method.local, state.mean_key, state.spread, log_count, query.scale, query.softcap,
            method.epsilon,
        )  # fmt: skip
        instead = parts[:, 1] if method.bypass != "sink" else torch.full_like(parts[:, 1], -torch.inf)
    offsets, indices, marks = triton_tables.candidates(
        tables,
        length,
        stop,
        method.a,
        GATES.index(method.gate),
        (method.before, method.after),
        state.idle,
        _best_blocks(method, query, tables.units),
        method.block_size,
    )
    query.cost.scored += local + first
    query.cost.add_late(scored=offsets[-1] / tables.units)
    rest = _rest(method, query, state, offsets, marks, instead)
    budget = method.best(length)
    return Candidates(
        shape,
        offsets,
        indices,
        torch.full((tables.units,), budget, device=q.device),
        first,
        local,
        None,
        state.idle,
        0 if method.bypass == "mean" else first,
        rest,
        most=budget + first + local,
    )


def _best_blocks(method: LFPS, query: Query, units: int) -> Tensor | None:
    """int8 [units, blocks]: 1 for those whose summaries promise most."""
    from saccade.methods.lfps import triton_stand_ins

    full = query.shape.k_len // method.block_size
    if method.blocks == 0 or full == 0:
        return None
    query.cost.estimated += full
    summary = query.kv.summary("stored_mean", method.block_size)
    scores = triton_stand_ins.mean_scores(query.q[:, 0], summary[:, 0], units)
    best = torch.topk(scores, min(method.blocks, full), dim=1, sorted=False).indices
    return torch.zeros(units, full, dtype=torch.int8, device=scores.device).scatter_(1, best, 1)


def _rest(
    method: LFPS, query: Query, state: LFPSState, offsets: Tensor, marks: Tensor, instead: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """What stands for the keys that are no candidates, or for all that a bypassed head leaves out."""
    from saccade.methods.lfps import triton_stand_ins

    if method.rest is None and (instead is None or method.bypass == "sink"):
        return None
    value = state.mean_value.repeat_interleave(query.shape.group, 0)
    if method.rest is None:
        assert instead is not None
        assert state.idle is not None
        return torch.where(state.idle, instead, -torch.inf), value
    query.cost.scored += min(method.probes, marks.shape[1])
    probes = triton_stand_ins.probe_places(method.probes, GOLDEN, query.q.device)
    bypassed = None if instead is None or state.idle is None else (state.idle, instead)
    first = state.tables.first
    lse = triton_stand_ins.sampled_rest(
        query.q, query.kv, offsets, marks, first, probes, bypassed, query.scale, query.softcap
    )
    return lse, value
