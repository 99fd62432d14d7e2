"""Which rows of a step are audited (see engine.watch.audit), and steps that are replayed densely.

Before a step that is replayed the same rows run with dense attention over the keys that there are, and what that leaves
is taken back. Dense means what ``lossless`` means by it: the same prefill and the same earlier steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from saccade.engine.request import Request
from saccade.engine.rows.calls import DENSE
from saccade.engine.sampling.params import SamplingParams
from saccade.engine.scheduling.step_rows import step_input
from saccade.engine.steps.step import ScheduledRequest, StepResult
from saccade.engine.watch.audit import Audit, AuditOptions, RowAudit
from saccade.engine.watch.bounds import Bounds
from saccade.engine.watch.control import Controls, TargetControl
from saccade.engine.worker import Worker
from saccade.methods.policy import Policy

logger = logging.getLogger(__name__)
Batch = list[tuple[Request, ScheduledRequest]]


class Auditing:
    """The audits of one engine's steps. ``longest``: most tokens of a sequence.

    Of the step under way: ``logits`` fp32 [vocab], by request, of replays that have run; ``beside``: requests whose
    replays the device runs with it; ``soon``: whether the step after it will have any, should its rows go on."""

    def __init__(self, worker: Worker, default: AuditOptions, longest: int) -> None:
        self.worker, self.default = worker, default
        self.controls = Controls(longest)
        self.logits: dict[int, Tensor] = {}
        self.beside: frozenset[int] = frozenset()
        self.soon = False

    def control(self, params: SamplingParams, policy: Policy) -> TargetControl | None:
        """What holds the target that a request asks for, or the engine does. RequestError where nothing can."""
        options = AuditOptions.of(params, self.default)
        if options is None or options.target is None or (params.target is None and policy.decode.dial is None):
            return None
        return self.controls.of(policy.decode, options.target)

    def begin(self, request: Request, control: TargetControl | None) -> None:
        """A request begins."""
        default = self.default if control is not None else replace(self.default, target=None)  # it replays no steps
        options = AuditOptions.of(request.params, default)
        if request.params.bounds:
            request.bounds = request.report.bounds = Bounds(
                request.params.bounds,
                request.sampler.seed,
                request.params.sample,
                self.worker.setting.spec.layers,
                request.policy.freeze,
                request.output_start,
            )
        if options is None:
            return
        request.audit = Audit(options, request.sampler.seed, request.params.sample, controlled=control)
        request.control, request.report.audit = control, request.audit
        if control is not None:
            request.report.dialed = request.policy.decode.text

    def rows(self, batch: Batch) -> tuple[dict[int, RowAudit], frozenset[int]]:
        """What is audited of the step of ``batch``, by request; and whose steps are now and then."""
        spec, part, found, now_and_then = self.worker.setting.spec, self.worker.setting.part, {}, set()
        for request, rows in batch:
            audit = request.audit
            if audit is None or not audit.options.rate or not _first_time(request, rows):
                continue
            now_and_then.add(request.id)
            if drawn := audit.draw(rows.start, spec.layers, spec.kv_heads * part.parts):
                found[request.id] = RowAudit(audit, drawn, not rows.policy.decode.stands_in, part)
        return found, frozenset(now_and_then)

    def bounds(self, batch: Batch) -> dict[int, Bounds]:
        """The certificates of the step of ``batch``, by request."""
        return {
            request.id: request.bounds
            for request, rows in batch
            if request.bounds is not None and _first_time(request, rows) and request.bounds.draws_step(rows.start)
        }

    def replayed(self, batch: Batch) -> Batch:
        """``batch``, whose audited rows give their logits now, since their dense replays have run; or as it is, where
        the device runs them beside it (``beside``)."""
        self.logits, self.beside = {}, frozenset()
        asked: dict[int, tuple[Audit, int]] = {}
        for number, (request, rows) in enumerate(batch):
            audit = request.audit
            if audit is None or not audit.options.steps or not rows.wants_logits or not _first_time(request, rows):
                continue
            audit.steps += 1
            asked[number] = audit, rows.start
        chosen = _drawn(asked, 0)
        self.soon = bool(_drawn(asked, 1))
        if not chosen:
            return batch
        if self.worker.replays(step_input(batch)):
            self.beside = frozenset(batch[number][0].id for number in chosen)
            return batch
        self._run([batch[number] for number in chosen])
        told = list(batch)
        for number in chosen:
            request, rows = batch[number]
            if request.id in self.logits:
                told[number] = request, rows._replace(greedy=False, sampling=None)
        return told

    def settle(self, batch: Batch, result: StepResult) -> None:
        """The step has run: compare its logits."""
        for request, _ in batch:
            dense, own = self.logits.pop(request.id, None), result.requests[request.id]
            if own.error is not None or own.undone or request.audit is None:
                continue
            if own.replayed is not None and math.isfinite(own.replayed[1]):
                agrees = request.audit.replayed(*own.replayed)
            elif dense is not None and own.logits is not None:
                agrees = request.audit.compare(own.logits[-1], dense)
            else:
                if request.id in self.beside:
                    request.report.note("audit: a dense replay was left out with the batched step that it ran beside")
                continue
            if request.control is not None:
                request.control.observe(agrees)

    def _run(self, batch: Batch) -> None:
        dense = [(request, _dense(rows)) for request, rows in batch]
        try:
            result = self.worker.replay(step_input(dense))
        except Exception as error:  # the step itself will say what is wrong
            logger.debug("a dense replay of %d rows failed", len(batch), exc_info=True)
            for request, _ in batch:
                request.report.note(f"audit: a dense replay failed: {type(error).__name__}: {error}")
            return
        for request, _ in batch:
            own = result.requests[-request.id]
            request.report.take_tiers([own])
            if own.logits is not None and own.error is None and not own.undone:
                self.logits[request.id] = own.logits[-1]


def _drawn(asked: Mapping[int, tuple[Audit, int]], ahead: int) -> list[int]:
    """Which rows are replayed ``ahead`` steps from now, of those that may be: audits, and where they stand. The draw
    is the first one's and all follow it, each as its own rate says: a dense step of many costs little more than of
    one."""
    if not asked:
        return []
    first, start = next(iter(asked.values()))
    chance = first.chance(start + ahead)
    return [number for number, (audit, _) in asked.items() if chance < audit.options.steps]


def _first_time(request: Request, rows: ScheduledRequest) -> bool:
    """Whether the rows are a decode step, without drafts, that was not computed before."""
    return rows.phase == "decode" and rows.length == 1 and rows.start >= request.sequence.reached


def _dense(rows: ScheduledRequest) -> ScheduledRequest:
    policy = replace(rows.policy, decode=DENSE, window=None)
    # Another id than any request's: what replays count is none of the request's counts.
    return rows._replace(request_id=-rows.request_id, policy=policy, greedy=False, sampling=None, scored=())
