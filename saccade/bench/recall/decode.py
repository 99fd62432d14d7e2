"""Decode steps as the host path takes them: choosing, attention, and what the method learns from it."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from saccade.bench.inputs import Problem
from saccade.bench.recall.measure import Done, Layer, Settings, relative, sync
from saccade.bench.timing import CLOCKS
from saccade.methods import Chunk, Method, Query
from saccade.ops import Call, run


def steps(settings: Settings, layer: Layer, method: Method) -> Done:
    """One step for each sampled row, which are the last ones, after a prompt of all rows before. Times are medians over
    the steps; the learning part counts as choosing."""
    problem, rows, now = layer.problem, layer.truth.rows, CLOCKS[settings.clock]
    view = problem.views[0]
    state = opened(method, problem, int(rows[0]))
    kept, errors, densities, choosing, attention = [], [], [], [], []
    backend = "-"
    for step, row in enumerate(rows.tolist()):
        seen = view.upto(row + 1)
        q = problem.q[:, row : row + 1]
        sync(problem)
        began = now()
        query = Query.of(q, seen, step=step)
        selection = method.select_decode(query, state)
        sync(problem)
        chosen = now()
        ran = run(Call.of(q, seen, selection, threads=settings.threads, want_weights=method.wants_weights))
        sync(problem)
        attended = now()
        method.observe(query, ran.used, ran.weights, state)
        sync(problem)
        ended = now()
        choosing.append(1000 * (chosen - began + ended - attended))
        attention.append(1000 * (attended - chosen))
        one = layer.truth.row(step, row + 1)
        kept.append(one.kept(ran.used))
        errors.append(relative(ran.out, layer.out[:, step : step + 1]))
        densities.append(ran.used.density())
        backend = ran.backend
    times = (statistics.median(choosing), statistics.median(attention)) if settings.times else (0.0, 0.0)
    return Done(torch.cat(kept, 1), statistics.fmean(densities), torch.cat(errors, 1), *times, backend)


def opened(method: Method, problem: Problem, length: int) -> Any:
    """The method's state after a prompt of the first ``length`` rows."""
    view = problem.views[0].upto(length)
    past = method.watch(Chunk.of(problem.q[:, :length], view)) if method.watches else None
    tail = min(length, max(1, method.tail_rows))
    return method.begin(Chunk.of(problem.q[:, length - tail : length], view, past=past))
