"""The attention of one packed pass: rows of many requests, each attending as its own policy says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saccade.engine.clock import timed
from saccade.engine.freezing import frozen_at, interleaved, runs
from saccade.engine.observe import AttentionCall
from saccade.engine.report import ran_dense, selection_kind
from saccade.engine.request import Work
from saccade.engine.states import follow_prefill, gone_before
from saccade.methods.base import Chunk, Cost, Evicting, Query
from saccade.methods.dense import DenseMethod
from saccade.models.interface import AheadRows, FrozenRows, LayerAttention, Segment
from saccade.ops import Trace, attend, cpu, cpu_rows, indices_on, merge_state
from saccade.selection import Band, Dense, Selection, cut, without

if TYPE_CHECKING:
    from saccade.engine.executor import Executor


@dataclass
class _Call:
    """The attention of one request's rows at one layer, what they read being chosen."""

    work: Work
    chunk: Chunk
    selection: Selection
    observes: bool  # the decode method is to learn from it
    trace: Trace


@dataclass
class PassAttention:
    """The attention context of one pass (see models.interface.AttentionContext)."""

    batch: list[Work]
    segments: list[Segment]
    executor: Executor
    frozen: FrozenRows | None = None
    held: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # frozen rows' keys and values by request

    ahead: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # by layer and request: queries a layer early

    def ahead_rows(self) -> AheadRows | None:
        """The decode rows whose method looks ahead; None where there are none."""
        looking = [
            (work.request.id, segment.start)
            for work, segment in zip(self.batch, self.segments)
            if work.phase == "decode" and work.policy.decode.looks_ahead
        ]

        def visit(layer: int, q: Tensor) -> None:
            queries = {request: q[:, at : at + 1] for at, (request, _) in enumerate(looking)}
            self.ahead = {layer - 1: self.ahead.get(layer - 1, {}), layer: queries}

        return AheadRows(torch.tensor([row for _, row in looking]), visit) if looking else None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> Tensor:
        if len(self.batch) == 1 and self._skipped(self.segments[0], layer) is None:  # nothing to put together
            return self._attend_whole(self.batch[0], layer, q, k, v, spec)
        out = q.new_zeros(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1)
        joined = self._attend_joined(layer, q, k, v, spec, out) if self.frozen is None else set()
        start = 0
        for work, segment in zip(self.batch, self.segments):
            skipped = self._skipped(segment, layer)
            rows = slice(start, start + segment.length - (0 if skipped is None else int(skipped.sum())))
            start = rows.stop
            if work.request.error is not None or rows.start == rows.stop or work.request.id in joined:
                continue
            try:
                with indices_on(q.device):
                    out[:, rows] = self._attend_rows(work, layer, q[:, rows], k[:, rows], v[:, rows], spec, skipped)
            except Exception as error:  # one request's failure must not take the others down
                _failed(work, layer, error)
        return out

    def _attend_joined(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention, out: Tensor
    ) -> set[int]:
        """Store and attend for all decode rows, in one call of the kernels for those whose selections allow it; returns
        the requests that are done with. On a GPU, and where kernels do not read these tensors, those are none."""
        rows = [(work, segment.start) for work, segment in zip(self.batch, self.segments) if work.phase == "decode"]
        rows = [(work, row) for work, row in rows if work.request.error is None and work.length == 1]
        executor = self.executor
        if len(rows) < 2 or spec.sinks is not None or q.is_cuda or k.stride() != v.stride() or k.stride(-1) != 1:
            return set()
        if not cpu_rows.reads(q, rows[0][0].request.sequence.kv.view(layer), executor.backend):
            return set()
        places, placed = [], []
        for work, row in rows:
            try:
                places.append((row, *work.request.sequence.kv.place(layer)))
                placed.append((work, row))
            except Exception as error:
                _failed(work, layer, error)
        pool = rows[0][0].request.sequence.kv.pool
        cpu_rows.store(k, v, pool.k, pool.v, places)
        calls: list[tuple[int, _Call]] = []
        for work, row in placed:
            try:
                call = self._prepare(work, layer, q[:, row : row + 1], work.stop, spec)
                if cpu_rows.joins(call.chunk.kv, call.selection) and not call.trace.want_weights:
                    calls.append((row, call))
                else:
                    out[:, row : row + 1] = self._finish(call, spec, *self._run(call, spec))
            except Exception as error:
                _failed(work, layer, error)
        if calls:
            with timed(executor.clock, "attention"):
                cpu_rows.attend(
                    q,
                    [row for row, _ in calls],
                    [call.chunk.kv for _, call in calls],
                    [call.selection for _, call in calls],
                    out.transpose(0, 1),
                    scale=spec.scale,
                    softcap=spec.softcap,
                    threads=executor.threads,
                )
        backend = f"cpu/{cpu.isa()}"
        for row, call in calls:
            try:
                call.trace.backend, call.trace.used = backend, call.selection
                self._finish(call, spec, out[:, row : row + 1], None)
            except Exception as error:
                _failed(call.work, layer, error)
        return {work.request.id for work, _ in rows}

    def _attend_whole(self, work: Work, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> Tensor:
        """The attention of a pass that holds nothing but one request's rows."""
        if work.request.error is None:
            try:
                with indices_on(q.device):
                    return self._attend_rows(work, layer, q, k, v, spec, None)
            except Exception as error:
                _failed(work, layer, error)
        return torch.zeros_like(q)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        start = 0
        for work, segment in zip(self.batch, self.segments):
            skipped, freeze = self._skipped(segment, layer), work.policy.freeze
            if skipped is None:
                continue
            count, copies = int(skipped.sum()), freeze is not None and freeze.copies
            rows = slice(start, start + (0 if copies else count))
            start = rows.stop
            if work.request.error is not None:
                continue
            try:
                kv = work.request.sequence.kv
                new = k[:, rows], v[:, rows]
                if copies:
                    before, here = kv.view(layer - 1), skipped.to(k.device)
                    new = before.keys(work.start, work.stop)[:, here], before.values(work.start, work.stop)[:, here]
                if count < segment.length:
                    self.held[work.request.id] = new
                else:
                    kv.append(layer, *new)
                positions = skipped.nonzero()[:, 0] + work.start
                frozen = positions[frozen_at(work, positions, layer)]
                stats = work.request.report.phase(work.phase).layers[layer]
                stats.skip(frozen.numel(), int((frozen + 1).sum()), unread=count - frozen.numel())
            except Exception as error:
                _failed(work, layer, error)

    def _skipped(self, segment: Segment, layer: int) -> Tensor | None:
        """bool [rows of the segment]: who skips ``layer``; None where nobody does."""
        if self.frozen is None:
            return None
        skipped = self.frozen.skip(layer)[segment.start : segment.start + segment.length]
        return skipped if bool(skipped.any()) else None

    def _attend_rows(
        self, work: Work, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention, skipped: Tensor | None
    ) -> Tensor:
        """Store and attend for the rows of one request; q, k, v leave out those that are ``skipped`` (bool [rows])."""
        kv = work.request.sequence.kv
        if skipped is None:
            kv.append(layer, k, v)
            return self._attend_one(work, layer, q, work.stop, spec)
        kv.append(layer, *interleaved(skipped.to(k.device), self.held.pop(work.request.id), k, v))
        parts, done = [], 0
        for first, last in runs(~skipped):
            rows = q[:, done : done + last - first]
            parts.append(self._attend_one(work, layer, rows, work.start + last, spec))
            done += last - first
        return torch.cat(parts, 1)

    def _attend_one(self, work: Work, layer: int, q: Tensor, stop: int, spec: LayerAttention) -> Tensor:
        """Attention of ``q`` [heads, rows, head_dim], the rows before position ``stop``, whose keys are stored."""
        call = self._prepare(work, layer, q, stop, spec)
        return self._finish(call, spec, *self._run(call, spec))

    def _prepare(self, work: Work, layer: int, q: Tensor, stop: int, spec: LayerAttention) -> _Call:
        """Choose what the rows before ``stop`` read."""
        sequence = work.request.sequence
        common: dict[str, Any] = {
            "scale": spec.scale,
            "softcap": spec.softcap,
            "layer": layer,
            "layers": sequence.kv.layers,
            "cost": Cost(),
            "window": None if work.policy.window is None else work.policy.window.at(layer, sequence.kv.layers),
            "gone": gone_before(work, layer),
            "past": sequence.watched[layer],
            "states": sequence.states,
            "offline": self.executor.calibrations.layer(work.policy.decode.calibration, layer),
        }
        view = sequence.kv.view(layer).upto(stop)
        if work.phase == "prefill":
            chunk = Chunk.of(q, view, **common)
        else:
            ahead = self.ahead.get(layer, {}).get(work.request.id)
            chunk = Query.of(q, view, step=work.start - work.span_start, ahead=ahead, **common)
        with timed(self.executor.clock, "selection"):
            selection = self._select(work, chunk, spec)
        observes = isinstance(chunk, Query) and not _slides(spec, view.length)
        wants = observes and work.policy.decode.acting(sequence.states[layer]).wants_weights
        return _Call(work, chunk, selection, observes, Trace(want_weights=wants))

    def _run(self, call: _Call, spec: LayerAttention) -> tuple[Tensor, Tensor]:
        with timed(self.executor.clock, "attention"):
            return attend(
                call.chunk.q,
                call.chunk.kv,
                call.selection,
                scale=spec.scale,
                softcap=spec.softcap,
                backend=self.executor.backend,
                threads=self.executor.threads,
                trace=call.trace,
            )

    def _finish(self, call: _Call, spec: LayerAttention, out: Tensor, lse: Tensor | None) -> Tensor:
        """What follows attention: a layer's sinks (only with ``lse``), learning from what was read, and counting."""
        work, chunk, trace = call.work, call.chunk, call.trace
        request, sequence, q, layer = work.request, work.request.sequence, chunk.q, chunk.layer
        if spec.sinks is not None and lse is not None:  # extra logits without values: merge an empty-valued state
            out, _ = merge_state(out, lse, torch.zeros_like(out), spec.sinks.to(lse.dtype)[:, None].expand_as(lse))
        used = trace.used if trace.used is not None else call.selection
        if self.executor.observer is not None:
            self.executor.observer(AttentionCall(request.id, layer, work.phase, q, chunk.kv, used, spec, out))
        with timed(self.executor.clock, "selection"):
            if isinstance(chunk, Query) and call.observes:
                work.policy.decode.observe(chunk, used, trace.weights, sequence.states[layer])
            elif work.phase == "prefill":
                follow_prefill(work, chunk, _slides(spec, chunk.kv.length))
        for note in chunk.cost.notes:
            request.report.note(note)
        stats = request.report.phase(work.phase)
        stats.layers[layer].add(used, chunk.cost, trace.coverage)
        stats.kinds[selection_kind(used)] = stats.kinds.get(selection_kind(used), 0) + 1
        stats.backends[trace.backend] = stats.backends.get(trace.backend, 0) + 1
        if q.is_cuda and trace.backend == "reference":
            request.report.note(f"{work.phase}: no GPU kernel serves {selection_kind(call.selection)} here; torch did")
        return out

    def _select(self, work: Work, chunk: Chunk, spec: LayerAttention) -> Selection:
        request = work.request
        method = work.policy.prefill if work.phase == "prefill" else work.policy.decode
        selection: Selection
        if _slides(spec, chunk.shape.k_len):
            assert spec.window is not None
            selection = Band(chunk.shape, window=spec.window)
            if not isinstance(method, DenseMethod):
                request.report.note("sliding-window layers ran their own window instead of the policy")
        elif isinstance(chunk, Query):
            selection = method.select_decode(chunk, request.sequence.states[chunk.layer])
        else:
            selection = method.select_prefill(chunk)
        if isinstance(selection, Dense) and not isinstance(method, DenseMethod):
            request.report.note(ran_dense(work.phase, method.name))
        if chunk.window is not None:
            selection = cut(selection, chunk.window)
        if chunk.gone is None or (isinstance(chunk, Query) and isinstance(chunk.states[chunk.layer], Evicting)):
            return selection
        request.report.note("an earlier turn evicted keys: they stay unread")
        return without(selection, chunk.gone)


def _failed(work: Work, layer: int, error: Exception) -> None:
    work.request.error = f"layer {layer}, {work.phase}: {type(error).__name__}: {error}"


def _slides(spec: LayerAttention, length: int) -> bool:
    """Whether a layer's own sliding window leaves out keys of a context of ``length`` tokens."""
    return spec.window is not None and spec.window < length
