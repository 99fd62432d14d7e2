"""After a step: results become tokens, reports, outputs and ends. Nothing else writes them."""

from __future__ import annotations

from saccade.engine.memory.sequence_memory import Cut
from saccade.engine.messages import StepOutput
from saccade.engine.request import Request
from saccade.engine.scheduling.answers import Answers
from saccade.engine.scheduling.prefixes import PrefixCache
from saccade.engine.scheduling.scheduler import Scheduler
from saccade.engine.steps.step import RequestResult, ScheduledRequest
from saccade.errors import failure
from saccade.machine import trim_memory

TRIM_TOKENS = 2048  # of ended requests, after which freed memory goes back to the system
MOST_LOSSES = 4  # of a request's keys, after which it ends with the error


class Settling:
    """Takes over what steps did for the requests of ``scheduler``, and ends them."""

    def __init__(self, answers: Answers, scheduler: Scheduler, prefixes: PrefixCache | None) -> None:
        self.answers, self.scheduler, self.prefixes = answers, scheduler, prefixes
        self._ended = 0  # tokens of requests that ended since memory was trimmed

    def failed(self, request: Request, error: Exception) -> StepOutput:
        """End a request with an error that is none of its attention's or its sampling's."""
        if not request.finished:
            request.error, request.error_type = failure(error)
            self.finish(request, "error")
        return self._last(request, StepOutput(request.id))

    def cancel(self, request: Request) -> None:
        """End a request now. A session goes back to where it stood before the turn; other requests are unaffected."""
        if not request.finished:
            self.finish(request, "cancelled")

    def starved(self, request: Request) -> StepOutput:
        """A request that the scheduler ended because the pool is full, when what it has is its answer, or because its
        blocks could not be had."""
        assert request.finish_reason is not None
        reason, request.finish_reason = request.finish_reason, None
        self.finish(request, reason)
        return self._last(request, StepOutput(request.id, new_text=request.stopper.release(final=True)))

    def settle(self, request: Request, rows: ScheduledRequest, result: RequestResult, ended: float) -> list[StepOutput]:
        """Take over what a step did for ``request``: the one place that writes its report, tokens and end."""
        output, sequence, report = request.progress(rows.stop), request.sequence, request.report
        if result.undone or (rows.together and result.error is not None):  # which row it was, single rows will tell
            sequence.undo(rows)
            if rows.drafts:
                request.undrafted = True
                report.note("drafts: a step with them broke; all after it were done without")
            return [output]
        if (result.lost or any(row.lost for row in result.rows)) and request.losses < MOST_LOSSES:
            request.losses += 1
            report.note("KV that was lost in a tier was computed again")
            report.take_tiers([result, *result.rows])
            self.scheduler.preempt(request)
            return [output]
        request.prompt_scores |= result.prompt_scores
        outputs: list[StepOutput] = []
        reason: str | None = None
        stop, stayed = rows.start, 0
        each = zip(rows.apart(), result.rows) if rows.drafts else ((rows, result),)
        matcher = request.sampler.steering.matcher
        for row, done in each:  # one after the other, as if none were drafted
            if stayed and matcher is not None and not matcher.comes():
                break  # what may come there is not known yet: the row is computed again
            report.take(row, done, ended)
            stop = row.stop
            if done.error is not None:
                request.error, request.error_type, reason = done.error, done.error_type, "error"
                break
            sequence.advance(stop)
            if row.wants_logits:
                outputs += self._fork(request, done)
                reason = self.answers.take_token(request, done, output)
            accepted = reason != "error" and rows.drafts[stop - 1 - rows.start :][:1] == (sequence.tokens[-1],)
            report.accepted_tokens += accepted
            stayed += accepted
            if reason is not None or not accepted or sequence.computed < stop:  # ended, rejected, or begun anew
                break
        if rows.drafts:
            report.drafted_tokens += len(rows.drafts)
            if rows.together:
                report.take_together(rows, result, stop - rows.start)
            if request.speculation is not None:
                request.speculation.took(len(rows.drafts), stayed)
            sequence.keep(stop, rows)
        if reason is not None:
            self.finish(request, reason)
        return [self._last(request, output), *outputs]

    def finish(self, request: Request, reason: str) -> None:
        self.answers.end(request, reason)
        self.scheduler.remove(request)
        if request.sampler.steering.matcher is not None:
            request.sampler.steering.matcher.end()
        if request.parent is not None:
            request.parent.forks.remove(request)
        for fork in request.forks:  # their prompt was never finished: they compute it themselves
            fork.parent = None
            self.scheduler.add(fork)
        request.forks = []
        sequence = request.sequence
        sequence.turn = None
        if not request.keep_kv:
            if self.prefixes is not None:
                self.prefixes.leave(sequence, keep=reason != "error")
            sequence.close()
            self._trim(len(sequence.tokens))
            return
        if reason in ("cancelled", "error"):
            sequence.truncate(*request.rollback)
            if request.before is not None:
                sequence.bring_back(request.before, self.scheduler.chunk)
        else:
            sequence.memories.truncate(sequence.id, sequence.kv.length, Cut.BLOCKS)  # those for drafts
            sequence.note = None
        self.scheduler.park(sequence)

    def _trim(self, tokens: int) -> None:
        """A sequence of so many tokens is gone, and what its method knew: the C library would keep that memory, in
        pieces that fit no later request."""
        self._ended += tokens
        if self._ended >= TRIM_TOKENS:
            self._ended = 0
            trim_memory()

    def _fork(self, request: Request, result: RequestResult) -> list[StepOutput]:
        """Let the samples that wait for the prompt of ``request`` go on from it: they share its blocks, and choose
        their first token from the same logits. Where no block is left for their own part, they compute it all."""
        outputs = []
        for fork in request.forks:
            fork.parent = None
            sequence = fork.sequence
            try:
                sequence.take_over(request.sequence)
            except Exception:  # no block left, mostly
                self.scheduler.add(fork)
                continue
            fork.report.cached_tokens = sequence.computed
            fork.report.share(request.report)
            output = fork.progress(sequence.computed)
            self.scheduler.adopt(fork)
            reason = self.answers.take_token(fork, result, output)
            if reason is not None:
                self.finish(fork, reason)
            outputs.append(self._last(fork, output))
        request.forks = []
        return outputs

    def _last(self, request: Request, output: StepOutput) -> StepOutput:
        """``output`` with the outcome, if the request has ended."""
        if request.finished:
            output.outcome = self.answers.outcome(request)
        return output

    def abandon(self, error: str, error_type: str | None = None) -> list[StepOutput]:
        """End all requests that run with ``error``; where none runs, those that wait, or it would fail for ever."""
        outputs = []
        for request in list(self.scheduler.running) or list(self.scheduler.waiting):
            request.error, request.error_type = error, error_type
            self.finish(request, "error")
            outputs.append(self._last(request, StepOutput(request.id)))
        return outputs
