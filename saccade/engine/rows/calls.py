"""One request's attention at one layer on the row path: choose what its rows read, read it, learn from it, count."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saccade.engine.attention import Watch
from saccade.engine.memory.sequence_memory import SequenceMemory
from saccade.engine.rows.states import follow_prefill, gone_before
from saccade.engine.steps.carried import Weighed
from saccade.engine.steps.step import CallCount, RequestResult, ScheduledRequest
from saccade.engine.watch.clock import timed
from saccade.engine.watch.device_counts import selection_kind
from saccade.engine.watch.observe import AttentionCall
from saccade.engine.watch.phase_stats import SLIDES, ran_dense
from saccade.errors import failure
from saccade.kv.tier import LostKV
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Evicting, Method, Query
from saccade.methods.policy import Policy
from saccade.models.calibration import Calibrations
from saccade.models.interface import LayerAttention, ModelSpec
from saccade.ops import Call, Result, merge_state
from saccade.ops import run as run_call
from saccade.ops.backends import FA4
from saccade.ops.few_rows import run as run_few
from saccade.selection import Band, Dense, Selection, Shape, cut, without
from saccade.selection.head_part import WHOLE, HeadPart


@dataclass(frozen=True)
class Setting:
    """What all calls of a worker share: where and how attention runs, who looks on, and which ``part`` of the heads it
    has."""

    spec: ModelSpec
    calibrations: Calibrations
    watch: Watch
    backend: str = "auto"
    threads: int | None = None
    fa4: bool = False  # FlashAttention-4's kernels where they serve a call
    part: HeadPart = WHOLE

    def timed(self, name: str) -> AbstractContextManager[None]:
        """A stretch of the clock, if there is one."""
        return timed(self.watch.clock, name)


DENSE = Policy().decode


@dataclass(eq=False)
class RequestRows:
    """One request's rows in a planned step, a decode step's one by one: ``first`` of the packed rows on. What holds for
    all layers is looked up once. ``results``: where to write down what they did, and behind it the results of the
    drafted rows after them. ``ahead``: by layer, the queries that a layer will ask, for methods that look ahead.
    ``taken_in`` [channels]: the hidden state that the layer at hand is given, for those that look at it."""

    scheduled: ScheduledRequest
    memory: SequenceMemory
    results: list[RequestResult]
    first: int
    ahead: dict[int, Tensor] = field(default_factory=dict)
    taken_in: Tensor | None = None

    def __post_init__(self) -> None:
        policy = self.scheduled.policy
        self.result = self.results[0]
        self.drafted = self.scheduled.row is not None
        self.together = self.scheduled.together
        self.decodes = self.scheduled.phase == "decode" and not self.together
        self.method: Method = policy.decode if self.decodes else DENSE if self.together else policy.prefill
        asking = () if self.together else (policy.decode,) if self.decodes else (policy.prefill, policy.decode)
        self.calibrations = tuple(kind for one in asking if (kind := one.calibration) is not None)
        self._shape: Shape | None = None

    def shape(self, heads: int, kv_heads: int, rows: int, stop: int, device: torch.device) -> Shape:
        """The shape of a call of ``rows`` rows before ``stop``, which most layers share."""
        shape = self._shape
        asked = stop, rows, heads, kv_heads
        if shape is None or (shape.k_len, shape.q_len, shape.heads, shape.kv_heads) != asked:
            self._shape = shape = Shape.suffix(heads, kv_heads, rows, stop, device)
        return shape

    def weighed(self) -> Weighed:
        """Where rows of a verification write down what they see; it goes with their result."""
        kv, one = self.memory.kv, self.scheduled
        held = self.memory.weighed
        made = Weighed.for_rows(held, one.start, kv.readers, one.length, kv.pool.format.kv_heads)
        self.memory.weighed = self.result.weighed = made
        return made

    def states_seen(self, layer: int) -> list[Any]:
        """The decode states that a drafted row sees: what it has left in the layers before ``layer``, where later rows
        have run since, and this layer's; the layers behind have not come to it yet."""
        memory = self.memory
        seen = memory.history.at(self.scheduled.stop, len(memory.states))
        seen[layer] = memory.states[layer]
        return seen

    def failed(self, layer: int, error: Exception) -> None:
        """Pass over these rows of the request, and those after them, from now on."""
        for result in self.results:
            result.error, result.error_type = failure(error, f"layer {layer}, {self.scheduled.phase}")
            result.lost = isinstance(error, LostKV)


@dataclass(eq=False)
class Chosen:
    """Attention of one request's rows at one layer, what they read being chosen."""

    rows: RequestRows
    chunk: Chunk
    selection: Selection
    slides: bool  # the layer's own window rules, not the policy
    want_weights: bool


def chunk_of(
    setting: Setting,
    rows: RequestRows,
    layer: int,
    q: Tensor,
    stop: int,
    spec: LayerAttention,
    view: KVView | None = None,
    heads: slice | None = None,
) -> Chunk:
    """The rows ``q`` [heads, rows, head_dim] before position ``stop``, as a method sees them; their keys are stored, or
    lie in ``view``. ``heads``: which of the layer's they are of, where they are not all."""
    scheduled, memory, layers = rows.scheduled, rows.memory, setting.spec.layers
    window = scheduled.policy.window
    gone = memory.gone[layer] if rows.decodes else gone_before(scheduled, memory, layer)
    if heads is not None and gone is not None and len(gone) > 1:  # units are KV heads, of which latents have one
        gone = gone[heads]
    view = memory.kv.view(layer) if view is None else view
    if view.length > stop:  # rows of one sequence that end before its last key
        view = view.upto(stop)
    common: dict[str, Any] = {
        "q": q,
        "kv": view,
        "shape": rows.shape(q.shape[0], view.kv_heads, q.shape[1], stop, q.device),
        "scale": spec.scale,
        "softcap": spec.softcap,
        "layer": layer,
        "layers": layers,
        "window": None if window is None else window.at(layer, layers),
        "gone": gone,
        "past": memory.watched[layer],
        "states": rows.states_seen(layer) if rows.drafted else memory.states,
        "part": setting.part.at(layer),
        "offline": setting.calibrations.layer(rows.calibrations, layer) if rows.calibrations else None,
    }
    if not rows.decodes:
        return Chunk(**common)
    step = stop - 1 - scheduled.span_start
    return Query(**common, step=step, ahead=rows.ahead.get(layer), taken_in=rows.taken_in)


def choose(
    setting: Setting,
    rows: RequestRows,
    layer: int,
    q: Tensor,
    stop: int,
    spec: LayerAttention,
    view: KVView | None = None,
    heads: slice | None = None,
) -> Chosen:
    """Choose what rows read: see :func:`chunk_of`."""
    chunk = chunk_of(setting, rows, layer, q, stop, spec, view, heads)
    scheduled, state, gone = rows.scheduled, rows.memory.states[layer], chunk.gone
    method, slides = rows.method, spec.window is not None and spec.window < stop
    with setting.timed("selection"):
        selection: Selection
        if slides:
            assert spec.window is not None
            selection = Band(chunk.shape, window=spec.window)
        elif isinstance(chunk, Query):
            selection = method.select_decode(chunk, state)
        else:
            selection = method.select_prefill(chunk)
        if slides and not method.means_dense:
            rows.result.note(SLIDES)
        if type(selection) is Dense and not method.means_dense:
            rows.result.note(ran_dense(scheduled.phase, method.name))
        if chunk.window is not None:
            selection = cut(selection, chunk.window)
        if gone is not None and not (rows.decodes and isinstance(state, Evicting)):
            rows.result.note("an earlier turn evicted keys: they stay unread")
            selection = without(selection, gone)
    wants = rows.decodes and not slides and method.wants_weights
    return Chosen(rows, chunk, selection, slides, wants)


def read(setting: Setting, chosen: Chosen) -> Result:
    """Attention over what was chosen."""
    call = call_of(setting, chosen)
    run = run_few if chosen.rows.together and setting.watch.clock is None else run_call
    with setting.timed("attention"):
        return run(call, backend_of(setting, call))


def call_of(setting: Setting, chosen: Chosen) -> Call:
    """The call that reads what was chosen."""
    chunk = chosen.chunk
    return Call(chunk.q, chunk.kv, chosen.selection, chunk.scale, chunk.softcap, setting.threads, chosen.want_weights)


def backend_of(setting: Setting, call: Call) -> str:
    """Whose kernels serve a call: FlashAttention-4's where they are wanted and can, else as the setting says."""
    return FA4.name if setting.fa4 and FA4.serves(call) is None else setting.backend


def finish(setting: Setting, chosen: Chosen, spec: LayerAttention, ran: Result) -> Tensor:
    """What follows attention: a layer's sinks, learning from what was read, and counting."""
    rows, chunk, out, watch = chosen.rows, chosen.chunk, ran.out, setting.watch
    scheduled, result = rows.scheduled, rows.result
    if spec.sinks is not None:  # extra logits without values: merge an empty-valued state
        out, _ = merge_state(
            out, ran.lse, torch.zeros_like(out), spec.sinks.to(ran.lse.dtype)[:, None].expand_as(ran.lse)
        )
    if watch.sees_calls:
        watch.see(
            AttentionCall(scheduled.request_id, chunk.layer, scheduled.phase, chunk.q, chunk.kv, ran.used, spec, out)
        )
    if (audit := watch.audits.get(scheduled.request_id)) is not None and rows.decodes and not rows.drafted:
        result.note_of(
            audit.take(chunk.layer, chunk.q[:, 0], out[:, 0], ran.lse[:, 0], chunk.kv, spec, setting.threads)
        )
    bounds = watch.bounds.get(scheduled.request_id)
    if bounds is not None and isinstance(chunk, Query) and not rows.drafted and not chosen.slides:
        result.note_of(bounds.take(chunk, ran.used, out, spec, rows.method, rows.memory.kv))
    if not rows.together:
        with setting.timed("selection"):
            if not isinstance(chunk, Query):
                follow_prefill(scheduled, rows.memory, chunk, chosen.slides)
            elif not chosen.slides:
                rows.method.observe(chunk, ran.used, ran.weights, rows.memory.states[chunk.layer])
    if rows.drafted:
        rows.memory.history.mark_layer(scheduled.stop, chunk.layer, rows.memory.states[chunk.layer])
    for note in chunk.cost.notes:
        result.note(note)
    result.calls.append(CallCount.of(chunk.layer, ran.used, chunk.cost, ran.backend, ran.coverage))
    if chunk.q.is_cuda and ran.backend == "reference":
        result.note(f"{scheduled.phase}: no GPU kernel serves {selection_kind(chosen.selection)} here; torch did")
    return out
