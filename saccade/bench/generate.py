"""``saccade bench generate``: tokens per second of decode, end to end, and where a step's time goes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from saccade.bench.generate_kv import TAIL, SyntheticKV, synthesize
from saccade.bench.measured import Measured
from saccade.bench.timing import CLOCKS
from saccade.bench.ttft import TRANSFORMERS, linear_timed, no_parts, parts_timed, prompt
from saccade.bench.ttft import Settings as TtftSettings
from saccade.engine.request import Request
from saccade.engine.sampling.params import SamplingParams
from saccade.engine.watch.clock import Clock
from saccade.errors import SaccadeError
from saccade.llm import LLM
from saccade.methods import Policy

WARM = 2  # decode steps before the first that counts
WARM_GPU = 16  # the first ones compile kernels, and are recorded

COLUMNS = (
    "context",
    "method",
    "ms/token",
    "tokens/s",
    "x dense",
    "x transformers",
    "density",
    "attention ms",
    "selection ms",
    "linear ms",
    "rest ms",
    "floor ms",
)

WIDTH = 180


@dataclass
class Row(Measured):
    """One measurement of ``tokens`` decode steps after a context of ``context`` tokens. ``tokens_per_s`` is over all of
    them (methods that search in some steps and reuse in others have unlike steps), ``ms_per_token`` the median step.
    ``*_ms`` is where the mean step spent its time: attention over selected keys, choosing them, products with weight
    matrices (where a step is fused, with the norms, rotations and activations around them), and the rest (storing
    keys, counting, sampling, Python); None on a GPU, whose steps then run as they do for users, recorded and launched
    ahead. transformers' attention counts as rest. ``floor_ms`` is the time of a step's weights and attended keys and
    values, each read once, at the machine's read bandwidth."""

    method: str
    policy: str
    model: str
    dtype: str
    device: str
    threads: int
    context: int
    synthetic: bool
    tokens: int
    ms_per_token: float
    tokens_per_s: float
    density: float
    attention_ms: float | None
    selection_ms: float | None
    linear_ms: float | None
    rest_ms: float | None
    floor_ms: float
    x_dense: float | None = None
    x_transformers: float | None = None
    backends: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    output: list[int] = field(default_factory=list)  # the tokens, the one that the prefill ended with first


@dataclass(frozen=True)
class Settings(TtftSettings):
    """As in ``bench.ttft``, with ``tokens`` that count after each prompt. With ``synthetic`` the context's keys and
    values are made up, the same for every row (see ``generate_kv``); else every row computes its prompt. ``read_gbps``
    is the machine's read bandwidth."""

    tokens: int = 32
    synthetic: bool = False
    read_gbps: float = 1.0

    @property
    def warm(self) -> int:
        """Decode steps before the first that counts."""
        return WARM_GPU if self.device.type == "cuda" else WARM

    @property
    def steps(self) -> int:
        """Tokens of an answer: the prefill's, those that warm up and those that count."""
        return 1 + self.warm + self.tokens


def run(settings: Settings) -> Iterator[Row]:
    """Measure context by context; rows come as they are done, without their ratios (see ``compare``)."""
    if settings.synthetic and min(settings.contexts) <= TAIL:
        raise SaccadeError(f"--synthetic-kv needs contexts above {TAIL} tokens, got {min(settings.contexts)}")
    stop = time.perf_counter() + settings.limit
    own = {"enable_prefix_caching": False, **settings.engine}  # what is measured must be computed
    llm = LLM(settings.path, max_model_len=max(settings.contexts) + settings.steps, **own)
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


def cells(row: Row) -> list[str]:
    """One row's cells in the order of ``COLUMNS``."""
    ratios = ["-" if ratio is None else f"{ratio:.2f}" for ratio in (row.x_dense, row.x_transformers)]
    timed = (row.attention_ms, row.selection_ms, row.linear_ms, row.rest_ms)
    parts = ["-" if part is None else f"{part:.2f}" for part in timed]
    if row.method == TRANSFORMERS:
        parts[:2] = ["-", "-"]  # they are in its rest
    return [
        str(row.context),
        row.method,
        f"{row.ms_per_token:.2f}",
        f"{row.tokens_per_s:.2f}",
        *ratios,
        f"{row.density:.3f}",
        *parts,
        f"{row.floor_ms:.2f}",
    ]


def _saccade(settings: Settings, llm: LLM, ids: list[int], made: SyntheticKV | None, method: str) -> Row:
    policy, engine = Policy.parse(method), llm.engine
    params = SamplingParams(temperature=0, max_tokens=settings.steps, ignore_eos=True)
    request = engine.add(ids, params, policy)
    if made is not None:
        made.fill(request.sequence)
    while not request.finished and len(request.output_ids) <= settings.warm:
        engine.step()
    clock = Clock(CLOCKS[settings.clock])
    clock.seconds = no_parts(settings.device)
    times: list[float] = []  # of a token each
    with parts_timed(llm, clock):
        began = clock.now()
        while not request.finished:
            known = len(request.output_ids)
            engine.step()
            if made_now := len(request.final_ids if request.finished else request.output_ids) - known:
                ended = clock.now()
                times += [(ended - began) / made_now] * made_now
                began = ended
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

    theirs = TransformersModel(settings.path, settings.dtype, settings.device)
    clock = Clock(CLOCKS[settings.clock])
    marks: list[float] = []

    def tick() -> None:
        marks.append(clock.now())
        if len(marks) == 1 + settings.warm:
            clock.seconds = no_parts(settings.device)

    with linear_timed(theirs.model, clock):
        output = theirs.generate(ids, settings.steps, past=None if made is None else made.layers, each=tick)
    row = _row(
        settings,
        llm,
        len(ids),
        [after - before for before, after in itertools.pairwise(marks[settings.warm :])],
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
    read = llm.model.matrix_bytes + rest["density"] * kv_bytes(llm, context)
    return Row(
        model=settings.name,
        dtype=str(settings.dtype).removeprefix("torch."),
        device=str(settings.device),
        threads=settings.threads,
        context=context,
        synthetic=settings.synthetic,
        tokens=len(times),
        ms_per_token=1000 * statistics.median(times),
        tokens_per_s=1000 / mean,
        attention_ms=parts.get("attention"),
        selection_ms=parts.get("selection"),
        linear_ms=parts.get("linear"),
        rest_ms=mean - sum(parts.values()) if parts else None,
        floor_ms=read / settings.read_gbps / 1e6,
        **rest,
    )


def kv_bytes(llm: LLM, context: int) -> int:
    """Bytes of the keys and values of ``context`` tokens in all layers."""
    spec = llm.model.spec
    rows = 2 if spec.value_dim is None else 1
    return rows * spec.layers * spec.kv_heads * spec.head_dim * context * spec.dtype.itemsize
