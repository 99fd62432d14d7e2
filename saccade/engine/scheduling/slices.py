"""Chunks that run apart from steps: each has a slice of time between two steps, and is settled once it is complete.

The scheduler says which request's chunk is suspended, the worker which layers of it run, and the token gap for how long
(engine/scheduling/token_gap.py).
"""

from __future__ import annotations

import logging
import time

from saccade.engine.attention import Watch
from saccade.engine.messages import StepOutput
from saccade.engine.scheduling.compile_waits import CompileWaits
from saccade.engine.scheduling.scheduler import Scheduler
from saccade.engine.scheduling.settling import Settling
from saccade.engine.scheduling.step_rows import step_input
from saccade.engine.scheduling.token_gap import Suspended, TokenGap
from saccade.engine.worker import Worker

logger = logging.getLogger(__name__)


class Slices:
    """Runs what ``scheduler`` has suspended. ``due``: a step has run since, and they come next."""

    def __init__(
        self, scheduler: Scheduler, worker: Worker, settling: Settling, watch: Watch, compile_waits: CompileWaits
    ) -> None:
        self.scheduler, self.worker, self.settling, self.watch = scheduler, worker, settling, watch
        self.compile_waits = compile_waits
        self.due = False

    def run(self) -> list[StepOutput]:
        """Give every suspended chunk its seconds, and return what became of those that are over. The first of them
        runs a layer at least; another that has less than a layer takes waits for the next round."""
        self.due = False
        gap, suspended = self.scheduler.control.gap, self.scheduler.suspended
        if gap is None or not suspended:
            return []
        self.watch.begin({one.request.id: one.request.maps for one in suspended.values() if one.request.maps})
        order = [suspended[number] for number in gap.given if number in suspended]  # the others may have ended
        outputs: list[StepOutput] = []
        for held in [*order[1:], *order[:1]]:
            seconds = gap.given[held.request.id]
            each = held.seconds / held.layers if held.layers else 0.0
            if held is order[0] or seconds > each:
                outputs += self._advance(held, seconds, gap)
        return outputs

    def _advance(self, held: Suspended, seconds: float, gap: TokenGap) -> list[StepOutput]:
        request, rows = held.request, held.rows
        try:
            if not held.begun:
                request.report.schedule(time.perf_counter())
                self.worker.begin(step_input([(request, rows)]))
                held.begun = True
            told = self.worker.advance(request.id, seconds)
            self.compile_waits.settle()
        except BaseException as error:  # some layers hold the rows and others do not
            self.scheduler.give_up(request)
            request.sequence.undo(rows)
            if not isinstance(error, Exception):
                raise
            logger.debug("a suspended chunk failed", exc_info=True)
            return [self.settling.failed(request, error)]
        if gap.ran(held, told.layers, told.seconds):
            request.report.note(
                f"max_token_gap={gap.seconds:g}: a layer takes longer for the {rows.length} rows of a chunk; lower "
                "prefill_chunk"
            )
        if told.result is None:
            request.report.suspensions += 1
            return []
        self.scheduler.give_up(request)
        own = told.result.requests[request.id]
        if own.error is None:
            gap.prefilled(rows, told.seconds)
        try:
            return self.settling.settle(request, rows, own, time.perf_counter())
        except Exception as error:
            logger.debug("settling a chunk failed", exc_info=True)
            return [self.settling.failed(request, error)]
