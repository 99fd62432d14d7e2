"""``saccade bench generate``: tokens per second of decode, end to end, and where a step's time goes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from saccade.bench.generate_kv import TAIL, SyntheticKV, synthesize
from saccade.bench.measured import Measured
from saccade.bench.timing import CLOCKS
from saccade.bench.ttft import PARTS, TRANSFORMERS, linear_timed, prompt
from saccade.engine.clock import Clock, timing
from saccade.engine.params import SamplingParams
from saccade.engine.request import Request
from saccade.errors import SaccadeError
from saccade.llm import LLM
from saccade.methods import Policy

WARM = 2  # decode steps before the first that counts


@dataclass
class Row(Measured):
    """One measurement of ``tokens`` decode steps after a context of ``context`` tokens. ``tokens_per_s`` is over all of
    them (methods that search in some steps and reuse in others have unlike steps), ``ms_per_token`` the median step.
    ``*_ms`` is where the mean step spent its time: attention over selected keys, choosing them, products with weight
    matrices (where a step is fused, with the norms, rotations and activations around them), and the rest (storing
    keys, counting, sampling, Python). transformers' attention counts as rest. ``floor_ms`` is the time of a step's
    weights and attended keys and values, each read once, at the machine's read bandwidth."""

    method: str
    policy: str
    model: str
    dtype: str
    threads: int
    context: int
    synthetic: bool
    tokens: int
    ms_per_token: float
    tokens_per_s: float
    density: float
    attention_ms: float
    selection_ms: float
    linear_ms: float
    rest_ms: float
    floor_ms: float
    x_dense: float | None = None
    x_transformers: float | None = None
    backends: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    output: list[int] = field(default_factory=list)  # the tokens, the one that the prefill ended with first


@dataclass(frozen=True)
class Settings:
    """``methods`` are policy texts or ``"transformers"``. With ``synthetic`` the context's keys and values are made up,
    the same for every row (see ``generate_kv``); else every row computes its prompt. No measurement begins ``limit``
    seconds after the first. ``read_gbps`` is the machine's read bandwidth."""

    path: Path
    name: str
    contexts: Sequence[int]
    methods: Sequence[str]
    dtype: torch.dtype
    threads: int
    tokens: int
    limit: float
    synthetic: bool
    read_gbps: float
    chunk: int = 4096
    clock: str = "wall"  # see bench.timing.CLOCKS

    @property
    def steps(self) -> int:
        """Tokens of an answer: the prefill's, those that warm up and those that count."""
        return 1 + WARM + self.tokens


def run(settings: Settings) -> Iterator[Row]:
    """Measure context by context; rows come as they are done, without their ratios (see ``compare``)."""
    if settings.synthetic and min(settings.contexts) <= TAIL:
        raise SaccadeError(f"--synthetic-kv needs contexts above {TAIL} tokens, got {min(settings.contexts)}")
    stop = time.perf_counter() + settings.limit
    llm = LLM(
        settings.path,
        dtype=settings.dtype,
        max_model_len=max(settings.contexts) + settings.steps,
        max_requests=1,
        prefill_chunk=settings.chunk,
        threads=settings.threads,
        exact=False,
    )
    for context in settings.contexts:
        ids = prompt(context, llm.model.spec.vocab_size)
        made: SyntheticKV | None = None
        for method in settings.methods:
            if time.perf_counter() > stop:
                return
            if settings.synthetic and made is None:
                made = synthesize(llm, ids)
            measure = _transformers if method == TRANSFORMERS else _saccade
            yield measure(settings, llm, ids, made, method)


def compare(rows: Sequence[Row]) -> None:
    """Fill in every row's speedup over dense and over transformers at its context."""
    for row in rows:
        same = {other.method: other.tokens_per_s for other in rows if other.context == row.context}
        row.x_dense = row.tokens_per_s / same["dense"] if "dense" in same else None
        row.x_transformers = row.tokens_per_s / same[TRANSFORMERS] if TRANSFORMERS in same else None


def _saccade(settings: Settings, llm: LLM, ids: list[int], made: SyntheticKV | None, method: str) -> Row:
    policy, engine = Policy.parse(method), llm.engine
    params = SamplingParams(temperature=0, max_tokens=settings.steps, ignore_eos=True)
    request = engine.add(ids, params, policy)
    if made is not None:
        made.fill(request.sequence)
    while not request.finished and len(request.output_ids) <= WARM:
        engine.step()
    clock = Clock(CLOCKS[settings.clock])
    clock.seconds = dict.fromkeys(PARTS, 0.0)
    times: list[float] = []
    with timing(engine, clock), linear_timed(llm.model.runner.model, clock):
        while not request.finished:
            began = clock.now()
            engine.step()
            times.append(clock.now() - began)
    _check(settings, request, method)
    decode = request.report.as_dict()["decode"]
    return _row(
        settings,
        llm,
        len(ids),
        times,
        clock,
        method=method,
        policy=policy.text,
        density=decode["density"],
        backends=sorted(decode["backends"]),
        notes=request.report.notes,
        output=request.final_ids,
    )


def _check(settings: Settings, request: Request, method: str) -> None:
    if request.error is not None or len(request.final_ids) != settings.steps:
        why = request.error or f"it ended after {len(request.final_ids)} of {settings.steps} tokens"
        raise SaccadeError(f"{method} at {len(request.prompt)} tokens: {why}")


def _transformers(settings: Settings, llm: LLM, ids: list[int], made: SyntheticKV | None, method: str) -> Row:
    from saccade.models.baseline import TransformersModel

    theirs, clock = TransformersModel(settings.path, settings.dtype), Clock(CLOCKS[settings.clock])
    marks: list[float] = []

    def tick() -> None:
        marks.append(clock.now())
        if len(marks) == 1 + WARM:
            clock.seconds = dict.fromkeys(PARTS, 0.0)

    with linear_timed(theirs.model, clock):
        output = theirs.generate(ids, settings.steps, past=None if made is None else made.layers, each=tick)
    row = _row(
        settings,
        llm,
        len(ids),
        [after - before for before, after in itertools.pairwise(marks[WARM:])],
        clock,
        method=method,
        policy=method,
        density=1.0,
        backends=[theirs.attention],
        output=output,
    )
    theirs.close()
    return row


def _row(settings: Settings, llm: LLM, context: int, times: list[float], clock: Clock, **rest: Any) -> Row:
    mean = 1000 * statistics.fmean(times)
    parts = {name: 1000 * seconds / len(times) for name, seconds in clock.seconds.items()}
    read = weight_bytes(llm.model.runner.model) + rest["density"] * kv_bytes(llm, context)
    return Row(
        model=settings.name,
        dtype=str(settings.dtype).removeprefix("torch."),
        threads=settings.threads,
        context=context,
        synthetic=settings.synthetic,
        tokens=len(times),
        ms_per_token=1000 * statistics.median(times),
        tokens_per_s=1000 / mean,
        attention_ms=parts["attention"],
        selection_ms=parts["selection"],
        linear_ms=parts["linear"],
        rest_ms=mean - sum(parts.values()),
        floor_ms=read / settings.read_gbps / 1e6,
        **rest,
    )


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weight matrices that one token passes: of every linear layer, the head among them."""
    weights = (module.weight for module in model.modules() if isinstance(module, nn.Linear))
    return sum(weight.numel() * weight.element_size() for weight in weights)


def kv_bytes(llm: LLM, context: int) -> int:
    """Bytes of the keys and values of ``context`` tokens in all layers."""
    spec = llm.model.spec
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * context * spec.dtype.itemsize
