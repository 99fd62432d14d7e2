"""Decode methods as they run in a step: selection, attention and what they learn from it, with their state warm."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saccade.bench import baselines
from saccade.bench.inputs import Problem
from saccade.bench.ops import DECODE_BLOCK, Row, Settings, _flops, _limit_ms, random_blocks
from saccade.bench.timing import CLOCKS
from saccade.methods import Chunk, Method, Policy, Query
from saccade.methods.lfps import LFPS
from saccade.methods.lfps.tables import ScoreTables
from saccade.ops import Call, Result, run
from saccade.selection import Cone, Tokens, cut

if TYPE_CHECKING:
    from saccade.kv.view import KVView

TAIL = 64  # rows of the prompt that methods may look at
WARM = 6  # steps before the first that counts
RUN = 4  # neighbouring keys of a planted line
LAYERS = 32  # a window is that of the last of so many layers, where it hides most
FLAT = 0.02  # queries of planted rows, so that what tables hold stays there


@dataclass
class DecodeRow(Row):
    """``keys_scored`` is exact logits per query head and step, ``search_ratio`` the share of (query head, step) pairs
    that looked for keys anew, None for methods that always do, ``observe_ms`` the learning part of ``ms``, ``topk_ms``
    a step of own exact top-k of the method's unit and k = 0.02; ``gather_limit_ms`` the time of the bytes read: scored
    keys and attended values, listed ones at the rate of gathering rows, others at that of reading in order."""

    keys_scored: float
    search_ratio: float | None
    observe_ms: float
    topk_ms: float
    speedup_topk: float
    gather_limit_ms: float
    percent_of_gather_limit: float


@dataclass
class _Measured:
    total: float
    selection: float
    attention: float
    observe: float
    scored: float
    searches: float | None
    ran: Result


def context(settings: Settings, limits: dict[str, float], problem: Problem) -> Iterator[DecodeRow]:
    """Dense, random blocks, then the methods. ``lfps(...)@0.02`` has its tables filled by hand, so that 2 % of the keys
    are candidates in every step, with threshold and queries that leave it so."""
    torch_ms = baselines.decode_ms(problem, min(settings.repeats, 3), settings.clock)
    best = min(torch_ms, key=torch_ms.__getitem__)
    names = ["dense", *(f"random_blocks({share:g})" for share in settings.densities if share < 1)]
    own = {unit: f"topk(k=0.02, unit={unit})" for unit in ("q_head", "kv_head")} if settings.methods else {}
    names += [
        *own.values(),
        *(text for text in settings.methods if Policy.parse(_plain(text)).text not in own.values()),
    ]
    dense_ms, topk_ms = 0.0, dict.fromkeys(own, 0.0)
    for name in names:
        measured = _measure(settings, problem, name)
        dense_ms = dense_ms or measured.total
        unit = next((unit for unit, text in own.items() if text == name), None)
        if unit is not None:
            topk_ms[unit] = measured.total
        row = _row(settings, limits, problem, name, measured, dense_ms, best, torch_ms[best])
        row.topk_ms = topk_ms.get(getattr(decoding(name)[0], "unit", "kv_head"), 0.0)
        row.speedup_topk = row.topk_ms / measured.total
        yield row


def _row(
    settings: Settings,
    limits: dict[str, float],
    problem: Problem,
    name: str,
    measured: _Measured,
    dense_ms: float,
    best: str,
    best_ms: float,
) -> DecodeRow:
    shape, total, used = problem.shape, measured.total, measured.ran.used
    density = used.density()
    limit = _limit_ms(settings, limits, problem, used)
    dim, width = problem.q.shape[-1], problem.q.element_size()
    lists = max(used.units, shape.kv_heads)  # keys are gathered once a list
    listed = isinstance(used, Tokens)
    attended = float(used.unit_pairs().double().mean()) * lists
    scored = min(measured.scored * lists, shape.k_len * shape.kv_heads)
    some = listed and measured.scored < shape.k_len  # else all keys are scored, in order
    gather = attended * dim * width / limits["gather_gbps" if listed else "read_gbps"] / 1e6
    gather += max(scored, attended) * dim * width / limits["gather_gbps" if some else "read_gbps"] / 1e6
    return DecodeRow(
        op="decode",
        method=name,
        backend=measured.ran.backend,
        dtype=str(settings.dtype).removeprefix("torch."),
        threads=settings.threads,
        context=shape.k_len,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=dim,
        density=density,
        ms=total,
        selection_ms=measured.selection,
        own_dense_ms=dense_ms,
        best_torch_ms=best_ms,
        limit_ms=limit,
        best_torch=best,
        speedup_own_dense=dense_ms / total,
        speedup_best_torch=best_ms / total,
        percent_of_limit=100 * limit / total,
        torch_sdpa_ms=0.0,
        speedup_torch_sdpa=0.0,
        selection_percent_of_dense=100 * measured.selection / dense_ms,
        percent_of_gemm=100 * _flops(problem, used) / limits["gemm_gflops"] / 1e6 / measured.attention,
        time_over_density=measured.attention / (density * dense_ms),
        keys_scored=measured.scored,
        search_ratio=measured.searches,
        observe_ms=measured.observe,
        topk_ms=0.0,
        speedup_topk=0.0,
        gather_limit_ms=gather,
        percent_of_gather_limit=100 * gather / total,
    )


def _measure(settings: Settings, problem: Problem, name: str) -> _Measured:
    """Steps over copies of the keys in turn, so that caches are cold. Medians of their parts; means for a method that
    searches in some steps and reuses in others, whose steps are unlike each other."""
    now, views, shape = CLOCKS[settings.clock], problem.views, problem.shape
    fixed = random_blocks(shape, DECODE_BLOCK, float(name[14:-1]), settings.kv_heads) if name[:6] == "random" else None
    method, cone = decoding(name)
    planted = float(name.partition("@")[2] or 0)
    rows = query_rows(problem, FLAT if planted else 1.0)
    states = [opened(method, problem, view, rows, planted, copy) for copy, view in enumerate(views)]
    count = max(3, settings.repeats)
    parts: list[tuple[float, float, float]] = []
    reuses, scored, searches, ran = False, [], [], None
    for step in range(WARM + 16 * max(count, len(views))):
        view, state = views[step % len(views)], states[step % len(views)]
        q = rows[:, TAIL // 2 + step % (TAIL // 2)][:, None]
        began = now()
        query = Query.of(q, view, step=step // len(views))
        selection = fixed if fixed is not None else method.select_decode(query, state)
        selection = selection if cone is None else cut(selection, cone)
        chosen = now()
        call = Call.of(q, view, selection, threads=settings.threads, want_weights=method.wants_weights)
        ran = run(call, settings.backend)
        attended = now()
        method.observe(query, ran.used, ran.weights, state)
        ended = now()
        if step >= WARM:
            parts.append((chosen - began, attended - chosen, ended - attended))
            scored.append(query.cost.scored)
            reuses |= query.cost.searches is not None
            searches.append((query.cost.searches or 0) / shape.heads)
        if len(parts) >= (16 * len(views) if reuses else count) and step >= len(views):
            break
    take = statistics.fmean if reuses else statistics.median
    selection_ms, attention_ms, observe_ms = (1000 * take(part) for part in zip(*parts))
    total = 1000 * take([sum(part) for part in parts])
    assert ran is not None
    ratio = statistics.fmean(searches) if reuses else None
    return _Measured(total, selection_ms, attention_ms, observe_ms, statistics.fmean(scored), ratio, ran)


def _plain(name: str) -> str:
    return name.partition("@")[0]


def decoding(name: str) -> tuple[Method, Cone | None]:
    """The method that decodes, and what its policy's window shows it in the last layer."""
    policy = Policy.parse("dense" if name.startswith("random_blocks") else _plain(name))
    return policy.decode, None if policy.window is None else policy.window.at(LAYERS - 1, LAYERS)


def query_rows(problem: Problem, size: float) -> Tensor:
    """Queries around the problem's own: [heads, TAIL, head_dim]."""
    rng = torch.Generator(problem.q.device).manual_seed(1)
    noise = torch.randn(problem.q.shape[0], TAIL, problem.q.shape[2], generator=rng) * problem.q.float().std()
    return (size * (problem.q.float() + 0.25 * noise)).to(problem.q.dtype)


def opened(method: Method, problem: Problem, view: KVView, rows: Tensor, planted: float, seed: int) -> Any:
    """The method's state over ``view`` after the first of ``rows``, with ``planted`` tables if that is not 0."""
    state = method.begin(Chunk.of(rows[:, : TAIL // 2], view))
    if planted:
        assert isinstance(method, LFPS)
        state.tables = planted_tables(state.tables, problem.shape.k_len - method.sinks, planted, seed)
    return state


def planted_tables(tables: ScoreTables, n: int, share: float, seed: int) -> ScoreTables:
    """Tables of lines, half vertical and half slash, ``RUN`` keys wide, at random places: ``share`` of ``n`` keys."""
    rng = torch.Generator().manual_seed(seed)
    filled = torch.zeros(2, tables.units, n)
    for table in filled.flatten(0, 1):
        starts = torch.randperm(n // RUN, generator=rng)[: max(1, int(share * n / RUN / 2))] * RUN
        places = (starts[:, None] + torch.arange(RUN)).flatten()
        table[places] = 0.3 + torch.rand(places.numel(), generator=rng)
    filled *= 10.0 / filled.sum(-1, keepdim=True)
    return ScoreTables.of(filled[0], filled[1], tables.first, int(tables.row[0]))
