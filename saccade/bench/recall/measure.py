"""One row for every method and threshold: what it kept, how much it read and how long that took."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.bench.inputs import Problem
from saccade.bench.measured import Measured
from saccade.bench.recall.ladders import Ladder
from saccade.bench.recall.truth import Oracle, Truth, sampled_rows, spread_blocks, true_weights
from saccade.bench.timing import CLOCKS, median_ms
from saccade.errors import SaccadeError
from saccade.methods import Chunk, Method, Query, parse_method
from saccade.ops import Call, Result, run
from saccade.selection import Corrected, Selection

ORACLE_ROWS = 8  # blocks of rows that the oracle of a prefill looks at
PREFILL_BLOCK, DECODE_BLOCK = 128, 32
WHOLE = 0.99999  # recall from which on nothing is left out


@dataclass
class RecallRow(Measured):
    """``recall``: the mean over sampled rows and heads of the share of the true weight that was read; ``worst``: the
    least of the heads' means; ``p1``: the 1st percentile of all rows and heads. ``error``: mean relative L2 error of
    the sampled rows' outputs against true attention, None where it did not run. ``oracle``: density of the fewest
    blocks with which every block of rows (in decode: every row) of every head keeps ``recall``; ``oracle_mean``: of
    those with which the mean over all of them is ``recall``; ``oracle_wanted``: as ``oracle``, at the recall that the
    run compares at. ``hidden_by``: the option, with its value, that exceeds what the others ask for at this length, so
    that the thresholds of a ladder change nothing. Times are medians in milliseconds, over all layers of
    the input together and 0 where they were not taken; ``dense_ms`` is our dense kernel's in the same run, ``sdpa_ms``
    that of torch's scaled_dot_product_attention (prefill on a GPU)."""

    phase: str
    family: str
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    ladder: str
    method: str
    density: float
    recall: float
    worst: float
    p1: float
    error: float | None
    oracle: float
    oracle_mean: float
    oracle_wanted: float
    choosing_ms: float
    attention_ms: float
    ms: float
    dense_ms: float
    sdpa_ms: float
    speedup: float
    backend: str
    hidden_by: str | None = None


@dataclass(frozen=True)
class Settings:
    """``rows``: sampled rows of a prefill, or steps of a decode; ``mean``: the recall that methods are compared at.
    Without ``times`` no call is timed, and a prefill's attention does not run."""

    phase: str
    rows: int
    repeats: int
    threads: int
    times: bool = True
    mean: float = 0.9
    clock: str = "wall"


@dataclass(frozen=True)
class Layer:
    """One attention layer of an input: queries of all rows, the stored keys, and the truth about sampled rows."""

    problem: Problem
    truth: Truth
    out: Tensor  # fp32 [heads, r, head_dim]: true attention of the sampled rows


@dataclass(frozen=True)
class Done:
    """What a method did on one layer. ``kept`` fp32 [heads, r]; ``error`` [heads, r] or None; times in milliseconds."""

    kept: Tensor
    density: float
    error: Tensor | None
    choosing: float
    attention: float
    backend: str


Runner = Callable[["Settings", "Layer", "Method"], Done]


def layer_of(settings: Settings, problem: Problem) -> Layer:
    """A layer with its truth. Decode steps are the last rows."""
    n = problem.shape.k_len
    rows = torch.arange(n - settings.rows, n) if settings.phase == "decode" else sampled_rows(n, settings.rows)
    truth = Truth(rows, true_weights(problem.q, problem.k, rows, problem.scale))
    group = problem.shape.group
    out = torch.stack([w @ problem.v[head // group].float() for head, w in enumerate(truth.weights)])
    return Layer(problem, truth, out)


def measure(
    settings: Settings, family: str, problems: Sequence[Problem], wanted: Sequence[Ladder], say: Callable[[str], None]
) -> Iterator[RecallRow]:
    """Dense, then every ladder's methods over all layers of an input. A method that refuses the input is said to
    ``say`` and left out."""
    runner: Runner = prefill if settings.phase == "prefill" else steps
    layers = [layer_of(settings, problem) for problem in problems]
    oracle = Oracle.together([_oracle(settings, layer) for layer in layers])
    shape = problems[0].shape
    sdpa_ms = sum(_sdpa_ms(settings, layer) for layer in layers)
    wanted_density, dense_ms = oracle.each(settings.mean), 0.0
    for ladder in (Ladder("dense", (("dense", parse_method("dense")),)), *wanted):
        for text, method in ladder.steps:
            try:
                done = [runner(settings, layer, method) for layer in layers]
            except SaccadeError as error:
                say(f"{text} is left out: {error}")
                continue
            kept = torch.cat([one.kept for one in done]).clamp(max=1.0)
            errors = [one.error for one in done if one.error is not None]
            recall = float(kept.double().mean())
            choosing, attention = sum(one.choosing for one in done), sum(one.attention for one in done)
            dense_ms = dense_ms or attention
            yield RecallRow(
                phase=settings.phase,
                family=family,
                context=shape.k_len,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=problems[0].q.shape[-1],
                layers=len(layers),
                ladder=ladder.text,
                method=text,
                density=statistics.fmean(one.density for one in done),
                recall=recall,
                worst=float(kept.double().mean(1).min()),
                p1=float(torch.quantile(kept.flatten().float().cpu(), 0.01)),
                error=float(torch.cat(errors).double().mean()) if errors else None,
                oracle=oracle.each(recall),
                oracle_mean=oracle.mean(recall),
                oracle_wanted=wanted_density,
                choosing_ms=choosing,
                attention_ms=attention,
                ms=choosing + attention,
                dense_ms=dense_ms,
                sdpa_ms=sdpa_ms,
                speedup=dense_ms / (choosing + attention) if attention else 0.0,
                backend=done[0].backend,
                hidden_by=method.hidden_by(shape.k_len),
            )
            if recall > WHOLE:
                break  # the ladder's other steps read no less


def prefill(settings: Settings, layer: Layer, method: Method) -> Done:
    """The whole prompt as one chunk."""
    problem, rows = layer.problem, layer.truth.rows
    view = problem.views[0]
    chosen: list[Selection] = []

    def choose() -> None:
        chosen[:] = [method.select_prefill(Chunk.of(problem.q, view))]

    choosing = timed(settings, problem, choose)
    selection = chosen[0]
    if not settings.times:
        read = selection.inner if isinstance(selection, Corrected) else selection
        return Done(layer.truth.kept(read), read.density(), None, 0.0, 0.0, "-")
    results: list[Result] = []

    def attend() -> None:
        results[:] = [run(Call.of(problem.q, view, selection, threads=settings.threads))]

    attention = timed(settings, problem, attend)
    ran = results[0]
    error = relative(ran.out[:, rows.to(ran.out.device)], layer.out)
    return Done(layer.truth.kept(ran.used), ran.used.density(), error, choosing, attention, ran.backend)


def steps(settings: Settings, layer: Layer, method: Method) -> Done:
    """Decode steps as the row path takes them: one for each sampled row, which are the last ones, after a prompt of
    all rows before. Times are medians over the steps; choosing counts what the method learns, too."""
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


def relative(out: Tensor, true: Tensor) -> Tensor:
    """Relative L2 error of every row: [heads, r, head_dim] twice -> [heads, r]."""
    return (out.float() - true).norm(dim=-1) / true.norm(dim=-1).clamp(min=1e-9)


def timed(settings: Settings, problem: Problem, call: Callable[[], None]) -> float:
    """Runs ``call`` at least once; its median milliseconds, 0 where times are not wanted."""
    if not settings.times:
        call()
        return 0.0
    return median_ms([lambda: _synced(problem, call)], settings.repeats, settings.clock)


def _synced(problem: Problem, call: Callable[[], None]) -> None:
    call()
    sync(problem)


def sync(problem: Problem) -> None:
    if problem.q.is_cuda:
        torch.cuda.synchronize(problem.q.device)


def _oracle(settings: Settings, layer: Layer) -> Oracle:
    problem = layer.problem
    if settings.phase == "decode":
        return Oracle.of_truth(layer.truth, DECODE_BLOCK)
    blocks = -(-problem.shape.k_len // PREFILL_BLOCK)
    return Oracle.of_rows(problem.q, problem.k, spread_blocks(blocks, ORACLE_ROWS), PREFILL_BLOCK, problem.scale)


def _sdpa_ms(settings: Settings, layer: Layer) -> float:
    problem = layer.problem
    if settings.phase == "decode" or not settings.times or not problem.q.is_cuda:
        return 0.0
    q, k, v = (part[None] for part in (problem.q, problem.k, problem.v))

    def call() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return timed(settings, problem, call)
