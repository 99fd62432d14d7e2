"""``saccade bench ttft``: time to first token, end to end, and where it goes."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from saccade.bench.measured import Measured
from saccade.bench.timing import CLOCKS, ENOUGH_SECONDS
from saccade.engine.observing import timing
from saccade.engine.sampling.params import SamplingParams
from saccade.engine.watch.clock import Clock
from saccade.errors import SaccadeError
from saccade.llm import LLM
from saccade.methods import Policy
from saccade.models.matrix_modules import MatrixProduct
from saccade.outputs import RequestOutput

TRANSFORMERS = "transformers"  # the row of transformers' default attention
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
WARM_TOKENS = 512
CPU = torch.device("cpu")
PARTS = ("attention", "selection", "linear")  # timed apart; "linear": every product with weights, the head included

COLUMNS = (
    "context",
    "method",
    "seconds",
    "x dense",
    "x transformers",
    "density",
    "frozen",
    "attention",
    "selection",
    "linear",
    "rest",
)

WIDTH = 164


@dataclass
class Row(Measured):
    """One measurement; ``seconds`` is the median of ``repeats`` runs from token ids to the first token. ``*_s`` is
    where the median run spent them: attention over selected keys, choosing them, products with weight matrices, and
    the rest (norms, rotations, activations, storing keys, Python); None on a GPU. transformers' attention counts as
    rest."""

    method: str
    policy: str
    model: str
    dtype: str
    device: str
    threads: int
    context: int
    repeats: int
    seconds: float
    density: float
    frozen: float  # share of (row, layer) pairs that were skipped
    attention_s: float | None
    selection_s: float | None
    linear_s: float | None
    rest_s: float | None
    x_own_dense: float | None = None
    x_transformers: float | None = None
    backends: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """``methods`` are policy texts in which ``name@0.1`` stands for a method with budgets for that density (see
    ``at_density``), or ``"transformers"``. No measurement begins ``limit`` seconds after the first."""

    path: Path
    name: str
    contexts: Sequence[int]
    methods: Sequence[str]
    dtype: torch.dtype
    threads: int
    repeats: int
    limit: float
    chunk: int | None = None  # None for the engine's own
    clock: str = "wall"  # see bench.timing.CLOCKS
    device: torch.device = CPU

    @property
    def engine(self) -> dict[str, Any]:
        """What an engine for one request at a time is made with."""
        chunk = {} if self.chunk is None else {"prefill_chunk": self.chunk}
        return {
            "dtype": self.dtype,
            "device": str(self.device),
            "threads": self.threads,
            "max_requests": 1,
            "exact": False,
            "enable_prefix_caching": False,  # what is measured must be computed
            **chunk,
        }


def at_density(name: str, density: float, context: int) -> str:
    """A method with budgets that read about ``density`` of the causal pairs of a prompt of ``context`` tokens; for
    xattention, whose only budget is a share of the weight, where attention is flat."""
    keys = max(1, round(density * context / 2))  # a row has context / 2 keys on average
    settings = {
        "a_shape": f"sinks=64, window={max(1, keys - 64)}",
        "tri_shape": f"sinks=64, window={max(1, keys - 64)}, last=128",
        "flexprefill": f"gamma=0.0, min_budget={keys}, lines=block",
        "xattention": f"threshold={density}",
        "minference": f"vertical={keys}, slash={keys}",
    }
    if name not in settings:
        raise SaccadeError(f"'{name}@{density:g}': only {', '.join(settings)} have budgets for a density")
    return f"{name}({settings[name]})"


def policy_at(text: str, context: int) -> Policy:
    """The policy of a method text at a context: every ``name@density`` spelt out."""

    def spell(match: re.Match[str]) -> str:
        density = float(match[2])
        if not 0 < density < 1:
            raise SaccadeError(f"'{match[0]}': a density lies between 0 and 1")
        return at_density(match[1], density, context)

    return Policy.parse(re.sub(r"(\w+)@(\d*\.?\d+)", spell, text))


def prompt(context: int, vocab: int, seed: int = 0) -> list[int]:
    """Random tokens in phrases of 64, about half of which have been said before: models that look back find
    something."""
    rng = torch.Generator().manual_seed(seed)
    phrases = -(-context // 64)
    said = torch.randint(0, min(vocab, 256), (phrases, 64), generator=rng)
    for at in range(1, phrases):
        if int(torch.randint(0, 2, (), generator=rng)):
            said[at] = said[int(torch.randint(0, at, (), generator=rng))]
    return said.flatten()[:context].tolist()


def run(settings: Settings) -> Iterator[Row]:
    """Measure transformers at every context, then the rest, context by context; rows come as they are done, without
    their ratios (see ``compare``). Only one of the two models is in memory at a time."""
    stop = time.perf_counter() + settings.limit
    if TRANSFORMERS in settings.methods:
        yield from _transformers(settings, stop)
    if methods := [method for method in settings.methods if method != TRANSFORMERS]:
        yield from _saccade(settings, methods, stop)


def compare(rows: Sequence[Row]) -> None:
    """Fill in every row's speedup over dense and over transformers at its context."""
    for row in rows:
        same = {other.method: other.seconds for other in rows if other.context == row.context}
        row.x_own_dense = same["dense"] / row.seconds if "dense" in same else None
        row.x_transformers = same[TRANSFORMERS] / row.seconds if TRANSFORMERS in same else None


def cells(row: Row) -> list[str]:
    """One row's cells in the order of ``COLUMNS``; the last four are shares of its seconds."""
    parts = (row.attention_s, row.selection_s, row.linear_s, row.rest_s)
    shares = ["-" if part is None else f"{100 * part / row.seconds:.0f} %" for part in parts]
    ratios = ["-" if ratio is None else f"{ratio:.2f}" for ratio in (row.x_own_dense, row.x_transformers)]
    if row.method == TRANSFORMERS:
        shares[:2] = ["-", "-"]  # they are in its rest
    return [
        str(row.context),
        row.method,
        f"{row.seconds:.2f}",
        *ratios,
        f"{row.density:.3f}",
        f"{row.frozen:.3f}",
        *shares,
    ]


def _saccade(settings: Settings, methods: Sequence[str], stop: float) -> Iterator[Row]:
    llm = LLM(settings.path, max_model_len=max(settings.contexts) + 1, **settings.engine)
    for context, method in itertools.product(settings.contexts, methods):
        if time.perf_counter() > stop:
            return
        policy, ids = policy_at(method, context), prompt(context, llm.model.spec.vocab_size)
        outputs: list[RequestOutput] = []
        clock = Clock(CLOCKS[settings.clock])
        llm.generate(_warming(settings, ids), FIRST, policy=policy)
        with parts_timed(llm, clock):
            runs = _runs(settings, clock, lambda: outputs.extend(llm.generate(ids, FIRST, policy=policy)))  # noqa: B023
        report, error = outputs[-1].report, outputs[-1].error
        if error is not None:
            raise SaccadeError(f"{method} at {context} tokens: {error}")
        yield _row(
            settings,
            context,
            runs,
            method=method,
            policy=policy.text,
            density=report["prefill"]["density"],
            frozen=report["prefill"]["rows_frozen"] / (context * llm.model.spec.layers),
            backends=sorted(report["prefill"]["backends"]),
            notes=report["notes"],
        )


def _transformers(settings: Settings, stop: float) -> Iterator[Row]:
    from saccade.models.baseline import TransformersModel

    theirs = TransformersModel(settings.path, settings.dtype, settings.device)
    fixed = {"method": TRANSFORMERS, "policy": TRANSFORMERS, "density": 1.0, "frozen": 0.0}
    for context in settings.contexts:
        if time.perf_counter() > stop:
            return
        ids, clock = prompt(context, theirs.model.config.vocab_size), Clock(CLOCKS[settings.clock])
        theirs.first_token(_warming(settings, ids))
        with linear_timed(theirs.model, clock):
            runs = _runs(settings, clock, lambda: theirs.first_token(ids))  # noqa: B023
        yield _row(settings, context, runs, backends=[theirs.attention], **fixed)
    theirs.close()


def _warming(settings: Settings, ids: list[int]) -> list[int]:
    """What a measurement warms up with: on a GPU all of it, for which kernels are then compiled."""
    return ids if settings.device.type == "cuda" else ids[:WARM_TOKENS]


def _runs(settings: Settings, clock: Clock, call: Callable[[], object]) -> list[tuple[float, dict[str, float]]]:
    """(seconds, seconds of each part) of every repeat; long ones stop before the last."""
    runs: list[tuple[float, dict[str, float]]] = []
    while len(runs) < settings.repeats and (len(runs) < 3 or sum(total for total, _ in runs) < ENOUGH_SECONDS):
        clock.seconds = no_parts(settings.device)
        began = clock.now()
        call()
        runs.append((clock.now() - began, clock.seconds))
    return runs


def _row(settings: Settings, context: int, runs: list[tuple[float, dict[str, float]]], **rest: Any) -> Row:
    middle = statistics.median_low(total for total, _ in runs)
    parts = next(parts for total, parts in runs if total == middle)
    return Row(
        model=settings.name,
        dtype=str(settings.dtype).removeprefix("torch."),
        device=str(settings.device),
        threads=settings.threads,
        context=context,
        repeats=len(runs),
        seconds=middle,
        rest_s=middle - sum(parts.values()) if parts else None,
        attention_s=parts.get("attention"),
        selection_s=parts.get("selection"),
        linear_s=parts.get("linear"),
        **rest,
    )


def no_parts(device: torch.device) -> dict[str, float]:
    """A clock's seconds at first. None of a GPU: its work runs apart from what launches it, so only a whole call can be
    timed from here."""
    return {} if device.type == "cuda" else dict.fromkeys(PARTS, 0.0)


@contextmanager
def parts_timed(llm: LLM, clock: Clock) -> Iterator[None]:
    """Time the parts of all that ``llm`` runs, unless it is on a GPU: a step that is timed is not a recorded
    one."""
    if llm.model.device.type == "cuda":
        yield
        return
    with timing(llm.engine, clock), linear_timed(llm.model.runner.model, clock):
        yield


@contextmanager
def linear_timed(model: nn.Module, clock: Clock) -> Iterator[None]:
    """Time every product with a weight matrix on a CPU: two readings of the clock a call, against milliseconds of
    work."""
    handles = []
    for module in model.modules():
        if isinstance(module, (nn.Linear, MatrixProduct)) and module.weight.device.type == "cpu":
            handles.append(module.register_forward_pre_hook(lambda *_: clock.begin("linear")))
            handles.append(module.register_forward_hook(lambda *_: clock.end()))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
