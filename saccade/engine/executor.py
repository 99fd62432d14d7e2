"""One packed forward pass: rows of many requests through the layers, each attending as its own policy says."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from saccade.engine.clock import Clock, timed
from saccade.engine.freezing import frozen_at, frozen_rows, interleaved, runs
from saccade.engine.observe import AttentionCall, Observer
from saccade.engine.report import ran_dense, selection_kind
from saccade.engine.request import Request, Work
from saccade.engine.sampler import row_logprobs
from saccade.engine.states import follow_prefill, gone_before
from saccade.methods.base import Chunk, Cost, Evicting, Query
from saccade.methods.dense import DenseMethod
from saccade.models.calibration import Calibrations
from saccade.models.interface import AheadRows, FrozenRows, LayerAttention, Runner, ScoredRows, Segment
from saccade.ops import Trace, attend, indices_on, merge_state, triton
from saccade.selection import Band, Dense, Selection, cut, without

if TYPE_CHECKING:
    from saccade.engine.batched import BatchedDecode


class Executor:
    """Runs steps on a model. ``backend`` and ``threads`` go to ``ops.attend``; ``folder`` is the model's, with its
    calibrations.

    ``exact`` runs the rows of each request by themselves. Matrix products round differently for different numbers of
    rows, so only then is a result the same to the last bit whatever else is in the batch; packed, all rows share
    one pass over the weights.
    """

    def __init__(
        self,
        runner: Runner,
        backend: str = "auto",
        threads: int | None = None,
        exact: bool = False,
        folder: Path | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        self.runner = runner
        self.exact = exact
        self.backend = backend
        self.threads = threads
        self.observer: Observer | None = None  # see engine.observe
        self.clock: Clock | None = None  # see engine.clock
        self.calibrations = Calibrations(runner.spec, folder)
        self.batched = batched_decode(runner, backend, cuda_graphs)

    def run(self, batch: list[Work]) -> dict[int, Tensor | int]:
        """Compute the rows of ``batch``; by request id where a work item ends its sequence, logits fp32 [vocab] on the
        CPU, or the next token where the request takes the likeliest and the device has found it.

        A request whose own attention fails gets ``error`` set and no logits; the others are unaffected.
        """
        logits: dict[int, Tensor | int] = {}
        try:
            for part in [[work] for work in batch] if self.exact else [batch]:
                rest, done = self._run_batched(part)
                logits |= done
                if rest:
                    logits |= self._run_packed(rest)
        except BaseException:  # an interrupt, say: some layers hold the new rows and others do not
            for work in batch:
                work.request.sequence.undo(work)
            raise
        return logits

    def _run_batched(self, batch: list[Work]) -> tuple[list[Work], dict[int, Tensor | int]]:
        """Run the decode rows that one batched step can serve: the others, and the results."""
        batched = self.batched
        if batched is None or self.observer is not None or self.clock is not None:
            return batch, {}
        rest: list[Work] = []
        rows: list[Work] = []
        for work in batch:
            (rows if batched.serves(work) else rest).append(work)
        done: dict[int, Tensor | int] = {}
        for part in batched.parts(rows):
            try:
                done |= batched.run(part)
            except batched.Failed as error:
                for work in part:
                    work.request.report.note(
                        f"decode: the batched step failed and torch served rows one by one: {error}"
                    )
                rest += part
        return rest, done

    def _run_packed(self, batch: list[Work]) -> dict[int, Tensor]:
        token_ids: list[int] = []
        positions: list[Tensor] = []
        segments: list[Segment] = []
        wanted: list[int] = []
        owners: list[Request] = []
        scored: list[tuple[int, Request, int]] = []  # packed row, request, place of the token that it predicts
        for work in batch:
            sequence = work.request.sequence
            # Length-dependent rotary factors follow the whole prefill, as an unchunked run would have it.
            end = work.stop if work.phase == "decode" else _span_stop(work)
            segments.append(Segment(len(token_ids), work.length, end))
            base = len(token_ids) - work.start
            scored += [(base + row, work.request, row + 1) for row in work.request.to_score(work.start, work.stop)]
            token_ids += sequence.tokens[work.start : work.stop]
            positions.append(torch.arange(work.start, work.stop))
            if work.stop == len(sequence.tokens):
                wanted.append(len(token_ids) - 1)
                owners.append(work.request)
        frozen = frozen_rows(batch, self.runner.spec.layers, all_read=self.observer is not None)
        context = _BatchContext(batch, segments, self, frozen)
        logits = self.runner.run(
            torch.frombuffer(array("q", token_ids), dtype=torch.int64),  # a tensor of a list looks at every element
            torch.cat(positions),
            context,
            segments=segments,
            logit_rows=torch.tensor(wanted, dtype=torch.long),
            scored=_prompt_scores(scored) if scored else None,
            frozen=frozen,
            ahead=context.ahead_rows(),
        ).cpu()  # sampling draws from generators on the CPU
        for work in batch:
            if work.request.error is None:
                work.request.sequence.advance(work.stop)
        return {owner.id: row for owner, row in zip(owners, logits) if owner.error is None}


def batched_decode(runner: Runner, backend: str, cuda_graphs: bool) -> BatchedDecode | None:
    """Whoever serves batched decode steps; None where the model is on no GPU or the Triton kernels are not to
    run."""
    device = getattr(runner, "device", None)
    if device is None or device.type != "cuda" or backend not in ("auto", "triton") or not triton.available():
        return None
    if runner.spec.head_dim % 16 or runner.spec.head_dim > 256:
        return None  # as for every kernel: see ops.triton.dispatch.supports
    from saccade.engine.batched import BatchedDecode  # needs Triton

    return BatchedDecode(cast(Any, runner), cuda_graphs)


def _prompt_scores(scored: list[tuple[int, Request, int]]) -> ScoredRows:
    def visit(first: int, logits: Tensor) -> None:
        part = scored[first : first + len(logits)]
        count = max(request.params.prompt_logprobs or 0 for _, request, _ in part)
        tokens = [request.sequence.tokens[place] for _, request, place in part]
        for (_, request, place), entries in zip(part, row_logprobs(logits, tokens, count)):
            top = request.params.prompt_logprobs or 0
            chosen = request.sequence.tokens[place]
            request.prompt_scores[place] = {
                token: entry for token, entry in entries.items() if entry[1] <= top or token == chosen
            }

    return ScoredRows(torch.tensor([row for row, _, _ in scored]), visit)


def _span_stop(work: Work) -> int:
    return next(span.stop for span in work.request.sequence.spans if span.start == work.span_start)


@dataclass
class _BatchContext:
    """The attention of one pass (see models.interface.AttentionContext)."""

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
        out = torch.zeros_like(q)
        start = 0
        for work, segment in zip(self.batch, self.segments):
            skipped = self._skipped(segment, layer)
            rows = slice(start, start + segment.length - (0 if skipped is None else int(skipped.sum())))
            start = rows.stop
            if work.request.error is not None or rows.start == rows.stop:
                continue
            try:
                with indices_on(q.device):
                    out[:, rows] = self._attend_rows(work, layer, q[:, rows], k[:, rows], v[:, rows], spec, skipped)
            except Exception as error:  # one request's failure must not take the others down
                work.request.error = f"layer {layer}, {work.phase}: {type(error).__name__}: {error}"
        return out

    def _attend_whole(self, work: Work, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> Tensor:
        """The attention of a pass that holds nothing but one request's rows."""
        if work.request.error is None:
            try:
                with indices_on(q.device):
                    return self._attend_rows(work, layer, q, k, v, spec, None)
            except Exception as error:
                work.request.error = f"layer {layer}, {work.phase}: {type(error).__name__}: {error}"
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
                work.request.error = f"layer {layer}, {work.phase}: {type(error).__name__}: {error}"

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
        request, sequence, clock = work.request, work.request.sequence, self.executor.clock
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
            ahead = self.ahead.get(layer, {}).get(request.id)
            chunk = Query.of(q, view, step=work.start - work.span_start, ahead=ahead, **common)
        with timed(clock, "selection"):
            selection = self._select(work, chunk, spec)
        observes = isinstance(chunk, Query) and not _slides(spec, view.length)
        wants = observes and work.policy.decode.acting(sequence.states[layer]).wants_weights
        trace = Trace(want_weights=wants)
        with timed(clock, "attention"):
            out, lse = attend(
                q,
                view,
                selection,
                scale=spec.scale,
                softcap=spec.softcap,
                backend=self.executor.backend,
                threads=self.executor.threads,
                trace=trace,
            )
        if spec.sinks is not None:  # extra logits without values: a merge with an empty-valued state
            out, _ = merge_state(out, lse, torch.zeros_like(out), spec.sinks.to(lse.dtype)[:, None].expand_as(lse))
        used = trace.used if trace.used is not None else selection
        if self.executor.observer is not None:
            self.executor.observer(AttentionCall(request.id, layer, work.phase, q, view, used, spec, out))
        with timed(clock, "selection"):
            if isinstance(chunk, Query) and observes:
                work.policy.decode.observe(chunk, used, trace.weights, sequence.states[layer])
            elif work.phase == "prefill":
                follow_prefill(work, chunk, _slides(spec, view.length))
        for note in chunk.cost.notes:
            request.report.note(note)
        stats = request.report.phase(work.phase)
        stats.layers[layer].add(used, chunk.cost)
        stats.kinds[selection_kind(used)] = stats.kinds.get(selection_kind(used), 0) + 1
        stats.backends[trace.backend] = stats.backends.get(trace.backend, 0) + 1
        if q.is_cuda and trace.backend == "reference":
            request.report.note(f"{work.phase}: no GPU kernel serves {selection_kind(selection)} here; torch did")
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


def _slides(spec: LayerAttention, length: int) -> bool:
    """Whether a layer's own sliding window leaves out keys of a context of ``length`` tokens."""
    return spec.window is not None and spec.window < length
