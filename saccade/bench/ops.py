"""``saccade bench ops``: attention kernels and methods, one row per measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from saccade.bench import baselines
from saccade.bench.inputs import Problem, make, random_blocks
from saccade.bench.measured import Measured
from saccade.bench.timing import median_ms
from saccade.methods import Chunk, Method, Query, parse_method
from saccade.ops import Call, Result
from saccade.ops import run as run_call
from saccade.selection import Blocks, Dense, Selection

DECODE_BLOCK = 32


@dataclass
class Row(Measured):
    """One measurement. Times are medians in milliseconds. ``ms`` is the whole method, ``selection_ms`` the deciding
    part of it; ``limit_ms`` is the time of its FLOPs at the measured matrix rate (prefill) or of its bytes of keys and
    values at the measured read bandwidth (decode), whichever is larger. ``torch_sdpa_ms`` is
    scaled_dot_product_attention in the row's dtype, 0 where it was not measured (decode). ``percent_of_limit`` counts
    the whole method, ``percent_of_gemm`` the attention alone against the matrix rate."""

    op: str
    method: str
    backend: str
    dtype: str
    threads: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    density: float
    ms: float
    selection_ms: float
    own_dense_ms: float
    best_torch_ms: float
    limit_ms: float
    best_torch: str
    speedup_own_dense: float
    speedup_best_torch: float
    percent_of_limit: float
    torch_sdpa_ms: float
    speedup_torch_sdpa: float
    selection_percent_of_dense: float  # selection time against own dense
    percent_of_gemm: float
    time_over_density: float  # attention time / (density x own dense): what sparsity costs per unit of work left


@dataclass(frozen=True)
class Settings:
    """What is measured. ``densities`` below 1 are random block lists, ``methods`` are policy texts."""

    suite: str
    contexts: Sequence[int]
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    threads: int
    densities: Sequence[float]
    methods: Sequence[str]
    block_size: int
    repeats: int
    backend: str
    clock: str = "wall"


def run(settings: Settings, limits: dict[str, float]) -> Iterator[Row]:
    """Measure context by context, dense first; rows come as they are done."""
    from saccade.bench import decode  # which builds on this module

    for context in settings.contexts:
        q_len = context if settings.suite == "prefill" else 1
        problem = make(settings.heads, settings.kv_heads, settings.head_dim, context, q_len, settings.dtype)
        with torch.inference_mode():
            yield from (_context if settings.suite == "prefill" else decode.context)(settings, limits, problem)


def _context(settings: Settings, limits: dict[str, float], problem: Problem) -> Iterator[Row]:
    baseline = baselines.prefill_ms if settings.suite == "prefill" else baselines.decode_ms
    torch_ms = baseline(problem, min(settings.repeats, 3), settings.clock)
    best = min(torch_ms, key=torch_ms.__getitem__)
    dtype = str(settings.dtype).removeprefix("torch.")
    sdpa_ms = torch_ms.get(f"sdpa/{dtype}", 0.0)
    dense_ms: float | None = None
    for name, method, selection in _cases(settings, problem):
        chosen = [selection] if selection is not None else []
        selection_ms = 0.0
        if method is not None:
            deciders = [_decider(settings.suite, method, problem, i) for i in range(len(problem.views))]
            chosen = [decide() for decide in deciders]
            selection_ms = median_ms(deciders, settings.repeats, settings.clock)
        calls = [_attention(settings, problem, i, chosen[i % len(chosen)]) for i in range(len(problem.views))]
        attention_ms = median_ms(calls, settings.repeats, settings.clock)
        dense_ms = attention_ms if dense_ms is None else dense_ms
        ran = calls[-1]()
        used = ran.used
        density = used.density()
        limit = _limit_ms(settings, limits, problem, used)
        total = attention_ms + selection_ms
        shape = problem.shape
        yield Row(
            op=settings.suite,
            method=name,
            backend=ran.backend,
            dtype=dtype,
            threads=settings.threads,
            context=shape.k_len,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=problem.q.shape[-1],
            density=density,
            ms=total,
            selection_ms=selection_ms,
            own_dense_ms=dense_ms,
            best_torch_ms=torch_ms[best],
            limit_ms=limit,
            best_torch=best,
            speedup_own_dense=dense_ms / total,
            speedup_best_torch=torch_ms[best] / total,
            percent_of_limit=100 * limit / total,
            torch_sdpa_ms=sdpa_ms,
            speedup_torch_sdpa=sdpa_ms / total,
            selection_percent_of_dense=100 * selection_ms / dense_ms,
            percent_of_gemm=100 * _flops(problem, used) / limits["gemm_gflops"] / 1e6 / attention_ms,
            time_over_density=attention_ms / (density * dense_ms),
        )


def _cases(settings: Settings, problem: Problem) -> Iterator[tuple[str, Method | None, Selection | None]]:
    yield "dense", None, Dense(problem.shape)
    size = settings.block_size if settings.suite == "prefill" else DECODE_BLOCK
    units = settings.heads if settings.suite == "prefill" else settings.kv_heads
    for density in settings.densities:
        if density < 1:
            yield f"random_blocks({density:g})", None, random_blocks(problem.shape, size, density, units)
    for text in settings.methods:
        yield text, parse_method(text), None


def _decider(suite: str, method: Method, problem: Problem, copy: int) -> Callable[[], Selection]:
    view = problem.views[copy]
    if suite == "prefill":
        return lambda: method.select_prefill(Chunk.of(problem.q, view))
    state = method.begin(Chunk.of(problem.q, view))
    return lambda: method.select_decode(Query.of(problem.q, view), state)


def _attention(settings: Settings, problem: Problem, copy: int, selection: Selection) -> Callable[[], Result]:
    view = problem.views[copy]
    return lambda: run_call(Call.of(problem.q, view, selection, threads=settings.threads), settings.backend)


def _limit_ms(settings: Settings, limits: dict[str, float], problem: Problem, used: Selection) -> float:
    """The larger of FLOPs at the matrix rate and bytes of keys and values, each read once per KV head, at the read
    rate."""
    shape, dim, width = problem.shape, problem.q.shape[-1], problem.q.element_size()
    if shape.q_len == 1:
        keys = _union_keys(used)
    else:
        keys = shape.k_len * shape.kv_heads
    moved = 2 * keys * dim * width
    compute = _flops(problem, used) / limits["gemm_gflops"] / 1e6 if shape.q_len > 1 else 0.0
    return max(compute, moved / limits["read_gbps"] / 1e6)


def _flops(problem: Problem, used: Selection) -> float:
    """Of the two products, over all heads."""
    return 4 * problem.q.shape[-1] * float(used.pairs().double().sum())


def _union_keys(used: Selection) -> int:
    """Keys one decode step must read: per KV head the union over its query heads."""
    if isinstance(used, Blocks) or used.units <= used.shape.kv_heads:
        mask_units = used.units
        if mask_units <= used.shape.kv_heads:
            return int(used.unit_pairs().sum()) * used.shape.kv_heads // mask_units
    return int(used.mask().unflatten(0, (used.shape.kv_heads, -1)).any(1).sum())
