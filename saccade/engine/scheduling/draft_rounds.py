"""One request's drafts for one step, while they are made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from saccade.engine.drafts.lookup import LONGEST
from saccade.engine.drafts.speculation import Drafts, Speculation
from saccade.engine.memory.sequence_memory import Cut
from saccade.engine.request import Request
from saccade.engine.sampling.acceptance import Proposal
from saccade.engine.steps.step import RequestResult, ScheduledRequest

AGREEING = 2  # drafted tokens that a look-up must have foretold before it goes on for the draft


class Round:
    """One request's drafts, while they are made: at most ``steps`` of the draft's own, ``most`` with those looked up.
    Until its :meth:`end` the sequence's tokens, keys and states are the draft's."""

    def __init__(self, request: Request, rows: ScheduledRequest, steps: int, most: int) -> None:
        self.request, self.rows, self.steps, self.most = request, rows, steps, most
        self.speculation = speculation_of(request)
        self.drafts = Drafts()
        self.open = True
        self.policy = replace(rows.policy, decode=self.speculation.method.draft)
        self._agreed = 0
        sequence, weighed = request.sequence, self.speculation.weighed
        self._length = len(sequence.tokens)
        carried = None if weighed is None else weighed.carried(rows.start - 1, self.speculation.method.carried)
        sequence.memories.begin_drafts(sequence.id, carried)

    def row(self) -> ScheduledRequest:
        """The next row to compute."""
        start = self.rows.start + len(self.drafts.tokens)
        speculation, likeliest = self.speculation, self.request.sampler.takes_likeliest
        sampling = None
        if speculation.on_device and not likeliest:
            sampling = speculation.sampler.row(self.request.sequence.tokens)
        return self.rows._replace(
            start=start, stop=start + 1, policy=self.policy, greedy=likeliest, sampling=sampling, scored=()
        )

    @property
    def sure(self) -> int:
        """How many steps are left; where a look-up may take the place of some, as many as show whether it does."""
        left = self.steps - len(self.drafts.tokens)
        if not self.speculation.lookup.after(self.request.sequence.tokens, 1):
            return left
        return min(left, max(1, AGREEING - self._agreed))

    def take(self, result: RequestResult, seconds: float, ends: Any) -> None:
        """The row was computed, and perhaps some after it."""
        speculation, tokens = self.speculation, self.request.sequence.tokens
        if result.error is not None or result.undone or result.lost:
            self.failed(result.error or "a pass broke")
            return
        rows = 1 if result.tokens is None else len(result.tokens)
        speculation.stats.draft.take(result, self.policy.decode.text, rows, seconds)
        self.request.report.take_tiers([result])
        for note in () if self.policy.decode.evicts else result.notes:  # nothing is gone for good
            self.request.report.note(f"draft: {note}")
        try:
            made = result.tokens
            if made is None:
                assert result.logits is not None
                proposal = speculation.guess(tokens, result.logits[-1])
                made = [proposal.token]
                if speculation.by_rule:
                    speculation.proposals[len(tokens)] = proposal
        except Exception as error:  # the verification says what is wrong with the logits
            self.failed(f"{type(error).__name__}: {error}")
            return
        params, ended = self.request.params, False
        for token in made:
            foretold = speculation.lookup.after(tokens, 1)
            self._agreed = self._agreed + 1 if foretold == [token] else 0
            tokens.append(token)
            self.drafts.tokens.append(token)
            ended = token in params.stop_token_ids or (not params.ignore_eos and token in ends)
            if ended:
                break
        self.open = not ended and len(self.drafts.tokens) < self.steps
        if not ended and self._agreed >= min(AGREEING, self.steps):
            self._look_up()

    def _look_up(self) -> None:
        """Go on with what followed before, instead of more steps."""
        speculation, drafts, tokens = self.speculation, self.drafts, self.request.sequence.tokens
        if speculation.pace.found.mean(0.7, 4.0) < 0.4:
            return
        found = speculation.lookup.after(tokens, min(LONGEST, self.most - len(drafts.tokens)))
        for token in found:
            if speculation.by_rule:
                speculation.proposals[len(tokens)] = Proposal(token)
            tokens.append(token)
            drafts.tokens.append(token)
        drafts.found = len(found)
        self.open = self.open and not found

    def failed(self, why: str) -> None:
        """Draft no more for this request: it goes on with plain steps, whose errors are its own."""
        self.open = False
        self.drafts.tokens.clear()
        self.request.undrafted = True
        self.request.report.note(f"drafts: a step of '{self.policy.decode.text}' failed: {why}; it went on without")

    def end(self) -> None:
        """Take back what the draft left."""
        sequence = self.request.sequence
        del sequence.tokens[self._length :]
        self.speculation.lookup.cut(self._length - 1)
        sequence.memories.truncate(sequence.id, self.rows.start, Cut.DRAFTED, holds=sequence.kv.pool.roomy)
        if not self.drafts.tokens:
            self.speculation.proposals.clear()
        self.speculation.found = self.drafts.found


def speculation_of(request: Request) -> Speculation:
    assert request.speculation is not None
    return request.speculation
