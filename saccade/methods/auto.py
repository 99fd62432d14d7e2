"""auto: dense as long as sparse decode cannot pay, then the method that this machine runs fastest.

Whether it pays is measured, not assumed: each candidate and dense attention decode a step over synthetic keys of the
model's shape at two lengths, selection, attention and observation together, once per process and shape (a second or
two for a model of 32 heads of 128). A line through the two times says what a step costs at any length. Within a process
the choice hangs on the length of the context alone, so batches, chunks and recomputations make no difference to it; on
another day or machine it may fall otherwise, which is why the report names it and the numbers it was made from.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Method, Query
from saccade.methods.dense import DenseMethod
from saccade.methods.device_state import Opening
from saccade.methods.fitting import Fitting, Sizes
from saccade.methods.lfps import LFPS
from saccade.methods.options import require_choice, require_number, require_whole
from saccade.methods.psa import PSA
from saccade.methods.state import MethodState
from saccade.ops import Call, run
from saccade.selection import Selection, Shape

CANDIDATES: dict[str, Method] = {"dense": DenseMethod(), "psa": PSA(), "lfps": LFPS(unit="kv_head")}
LENGTHS = (4096, 16384)
REPEATS = 3
HOT_SHARE = 50  # one in so many blocks of the synthetic keys is heavy

Line = tuple[float, float]  # seconds of a step and layer: at length 0, and per key


@dataclass
class Chosen(MethodState):
    """The candidate ``name`` was chosen at ``length`` tokens; ``state`` is its own."""

    name: str
    state: MethodState | None
    length: int

    def fit(self, sizes: Sizes, fitting: Fitting) -> None:
        """See MethodState."""
        fitting.require(self.name in CANDIDATES, f"has name={self.name!r:.60}, which is no candidate")
        fitting.within("length", self.length, 0, sizes.length)

    @property
    def method(self) -> Method:
        return CANDIDATES[self.name]

    def holds(self, length: int) -> bool:
        return length >= self.length and (self.state is None or self.state.holds(length))

    def learnt(self) -> int | None:
        return None if self.state is None else self.state.learnt()

    def truncate(self, length: int) -> None:
        super().truncate(length)
        if self.state is not None:
            self.state.truncate(length)


@dataclass(frozen=True)
class Auto(Method):
    """Of dense, ``psa`` and ``lfps(unit=kv_head)`` the one whose step is predicted fastest for the length of the
    context when its prefill ends; a sparse one only if dense takes ``gain`` times as long. It stays for the turn.

    ``least`` sets the length from which decode is sparse, ``method`` the sparse method, without measuring either.
    """

    name: ClassVar[str] = "auto"
    paper: ClassVar[str] = "measured costs"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    joins_heads: ClassVar[str | None] = "it measures its costs, which each process would by itself"
    host_only: ClassVar[str | None] = "it turns from one method to another between two steps"
    tail_rows: ClassVar[int] = max(method.tail_rows for method in CANDIDATES.values())

    gain: float = 1.1
    least: int | None = None
    method: str | None = None

    @property
    def stands_in(self) -> bool:
        return any(one.stands_in for name, one in CANDIDATES.items() if self.method in (None, name))

    @property
    def extra_memory(self) -> str | None:
        taking = [one for name, one in CANDIDATES.items() if self.method in (None, name) and one.extra_memory]
        return "; ".join(f"where auto chooses {one.name}, {one.extra_memory}" for one in taking) or None

    def __post_init__(self) -> None:
        require_number("gain", self.gain, 1.0, 1000.0)
        if self.least is not None:
            require_whole("least", self.least, 1)
        require_choice("method", self.method, (None, *(name for name in CANDIDATES if name != "dense")))

    def begin(self, segment: Chunk) -> Chosen:
        name, why = self._choose(segment)
        segment.cost.notes.append(
            f"decode: auto chose '{CANDIDATES[name].text}' at {segment.shape.k_len} tokens: {why}"
        )
        method = CANDIDATES[name]
        rows = min(max(1, method.tail_rows), segment.shape.q_len)
        whole = segment.shape
        shape = Shape.suffix(whole.heads, whole.kv_heads, rows, whole.k_len, whole.device)
        begun = method.begin(replace(segment, q=segment.q[:, -rows:], shape=shape))
        return Chosen(name, begun, whole.k_len)

    def acting(self, state: Any) -> Method:
        return state.method

    def whole_upto(self, opening: Opening) -> int:
        states = opening.states
        if any(state is None or state.name != states[0].name for state in states) or states[0].method.recalled:
            return 0
        return states[0].method.whole_upto(replace(opening, states=[state.state for state in states]))

    def select_decode(self, query: Query, state: Any) -> Selection:
        return state.method.select_decode(query, state.state)

    def observe(self, query: Query, selection: Selection, weights: Tensor | None, state: Any) -> None:
        state.method.observe(query, selection, weights, state.state)

    def _choose(self, segment: Chunk) -> tuple[str, str]:
        """A candidate's name, and the reason in words."""
        length = segment.shape.k_len
        if self.least is not None and length < self.least:
            return "dense", f"shorter than least={self.least}"
        if self.least is not None and self.method is not None:
            return self.method, f"least={self.least} and method={self.method} were given"
        lines = measured_lines(
            segment.shape.heads,
            segment.shape.kv_heads,
            segment.q.shape[-1],
            segment.q.dtype,
            segment.q.device,
            torch.get_num_threads(),
        )
        times = {name: predicted(line, length, name != "dense") for name, line in lines.items()}
        said = ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in times.items())
        return self.fastest(times), f"measured here, a step and layer takes an estimated {said} ms"

    def fastest(self, times: dict[str, float]) -> str:
        """The candidate to run, from the predicted seconds of each."""
        allowed = [name for name in times if name != "dense" and self.method in (None, name)]
        best = min(allowed, key=lambda name: times[name])
        return best if self.least is not None or times["dense"] >= self.gain * times[best] else "dense"


@lru_cache(maxsize=32)
def measured_lines(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, threads: int
) -> dict[str, Line]:
    """For each candidate the line through its best times at two lengths. Raises nothing of its own."""
    times: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for length in LENGTHS:
        q, view = _synthetic(heads, kv_heads, head_dim, length, dtype, device)
        for name, method in CANDIDATES.items():
            times[name].append(min(_step_seconds(method, q, view) for _ in range(REPEATS)))
    return {name: line(*seconds) for name, seconds in times.items()}


def line(short: float, long: float) -> Line:
    """(start, slope) through the times at both lengths; flat where the longer one took no longer."""
    slope = max(0.0, (long - short) / (LENGTHS[1] - LENGTHS[0]))
    return max(short, long) - slope * LENGTHS[1] if slope else max(short, long), slope


def predicted(line: Line, length: int, chooses: bool) -> float:
    """Seconds of a step at ``length``. A line that falls below 0 knows nothing of what choosing costs however short the
    context: a step that ``chooses`` then takes no less than at the shortest length measured."""
    start, slope = line
    at = max(length, LENGTHS[0]) if chooses and start < 0 else length
    return max(0.0, start + slope * at)


def _synthetic(
    heads: int, kv_heads: int, head_dim: int, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, KVView]:
    """Queries [heads, rows, head_dim] of the last rows and keys whose weight lies on a sink and a few blocks, as a
    trained model's does: a method that stops early may do so."""
    rng = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng, device="cpu")  # the same draws wherever they go

    liked = torch.nn.functional.normalize(normal(kv_heads, 1, head_dim), dim=-1)
    unit = math.sqrt(8 * math.sqrt(head_dim))  # q and k each carry the root of a logit of 8
    k = 0.5 * normal(kv_heads, length, head_dim)
    k[:, :1] += liked * unit
    hot = torch.randperm(length // 32, generator=rng, device="cpu")[: max(1, length // 32 // HOT_SHARE)]
    k.view(kv_heads, length // 32, 32, head_dim)[:, hot] += liked[:, None] * unit
    q = (0.5 * normal(heads, Auto.tail_rows + 1, head_dim)).unflatten(0, (kv_heads, -1))
    q = (q + liked[:, None] * unit).flatten(0, 1)
    v = normal(kv_heads, length, head_dim)
    return q.to(dtype).to(device), KVView.from_tensors(k.to(dtype).to(device), v.to(dtype).to(device))


def _step_seconds(method: Method, q: Tensor, view: KVView) -> float:
    """Wall seconds of one decode step at the end of ``view``, the state begun before it."""
    state = method.begin(Chunk.of(q[:, :-1], view.upto(view.length - 1)))
    query = Query.of(q[:, -1:], view)
    _wait(q)
    began = time.perf_counter()
    selection = method.select_decode(query, state)
    done = run(Call.of(query.q, view, selection, want_weights=method.wants_weights))
    method.observe(query, done.used, done.weights, state)
    _wait(q)
    return time.perf_counter() - began


def _wait(q: Tensor) -> None:
    if q.is_cuda:
        torch.cuda.synchronize(q.device)
