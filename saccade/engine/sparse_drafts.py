"""Drafting for ``lossless``: before a step, the draft's own decode steps guess tokens for the rows that the step then
verifies.

A round is whole within one step of the engine. Draft steps are decode steps under the draft, of all requests that draft
together; so a device records them. What they leave, tokens, keys and what the draft learned, is taken back before the
verification, which computes the rows anew under ``lossless``: between two steps a sequence holds nothing that was only
drafted. Settling then takes row after row as with any drafter (``drafting``).
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from saccade.engine.acceptance import Proposal
from saccade.engine.drafting import has_one_row, room
from saccade.engine.lookup import LONGEST
from saccade.engine.pacing import Kind, Pacing
from saccade.engine.request import Request
from saccade.engine.scheduler import Scheduler, step_input
from saccade.engine.speculation import Drafts, Speculation
from saccade.engine.step import RequestResult, ScheduledRequest
from saccade.engine.worker import Worker
from saccade.methods.state import snapshot
from saccade.methods.verified import MOST, UNLEARNT, Verified, bare

if TYPE_CHECKING:
    from saccade.models.loader import LoadedModel

logger = logging.getLogger(__name__)
Batch = list[tuple[Request, ScheduledRequest]]
AGREEING = 2  # drafted tokens that a look-up must have foretold before it goes on for the draft


class SparseDrafts:
    """Drafts for the requests under ``lossless`` that a step is to serve. ``pacing``: what was measured so far."""

    def __init__(self, scheduler: Scheduler, worker: Worker, model: LoadedModel) -> None:
        self.scheduler, self.worker, self.model = scheduler, worker, model
        self.pacing = Pacing(model.weight_bytes, padded=worker.device is not None)
        self._kind: Kind | None = None  # of the step under way, if it is timed
        self._warm: set[int] = set()  # numbers of rows of verifications that there have been
        self._keys = 0  # bytes of keys and values that it reads
        self._drafted = self._learns = False

    def added(self, batch: Batch) -> Batch:
        """``batch`` as scheduled, with drafted rows where that pays. Their blocks are reserved."""
        self._kind, self._keys, self._drafted = None, 0, False
        able = [number for number, (request, rows) in enumerate(batch) if self._serves(request, rows)]
        if not able:
            return batch
        decoding = [(request, rows) for request, rows in batch if rows.phase == "decode"]
        first = batch[able[0]][0].policy.decode
        assert isinstance(first, Verified)
        kind = Kind.of(first.draft.text, [rows.stop for _, rows in decoding])
        if len(decoding) == len(batch):
            self._kind = kind
        keys = self._keys = sum(rows.stop * request.sequence.memory.kv.token_bytes for request, rows in decoding)
        wanting = []
        for number in able:
            request, rows = batch[number]
            pace, memory = _of(request).pace, request.sequence.memory
            if pace.wants(rows.stop, kind, keys):
                wanting.append(number)
                if memory.has_state:
                    self.pacing.guess_plain(kind)
            elif memory.has_state:  # rows that teach a draft cost more than plain ones
                memory.states = [None] * self.model.spec.layers
                pace.end()
        self._learns = any(
            request.sequence.memory.has_state and rows.start - rows.span_start >= UNLEARNT for request, rows in decoding
        )
        if not wanting or not all(_of(batch[number][0]).pace.is_timed(kind) for number in wanting):
            return batch
        rounds: dict[int, Round] = {}  # by number in the batch
        try:
            self._begin(rounds, batch, wanting, kind)
            self._draft(rounds)
        finally:
            for one in rounds.values():
                one.end()
        self._drafted = any(one.drafts.tokens for one in rounds.values())
        return [
            (request, self._with(rounds[at], rows) if at in rounds else rows)
            for at, (request, rows) in enumerate(batch)
        ]

    def timed(self, batch: Batch, seconds: float, fresh: bool = False) -> None:
        """The step took so long, drafting aside; ``fresh``: because it was compiled or recorded."""
        drafts = [len(rows.drafts) for request, rows in batch if request.speculation is not None]
        for request, rows in batch:
            if request.speculation is not None and rows.phase == "decode":
                stats = request.speculation.stats
                if rows.drafts:
                    stats.verify_seconds += seconds
                else:
                    stats.plain_steps, stats.plain_seconds = stats.plain_steps + 1, stats.plain_seconds + seconds
        if self._kind is None or fresh:
            return
        times = self.pacing.times(self._kind)
        packed = sum(rows.length for _, rows in batch)
        if self._drafted and packed not in self._warm:  # the first product of so many rows is prepared meanwhile
            self._warm.add(packed)
        elif self._drafted:
            count = max(drafts) if times.padded else sum(drafts) / len(drafts)
            times.verify.append((times.rounded(count), seconds))
        elif not self._learns:
            times.plain.append(seconds)
            times.bytes = self._keys

    def _serves(self, request: Request, rows: ScheduledRequest) -> bool:
        """Whether the row may be the first of a verification."""
        method = rows.policy.decode
        if not isinstance(method, Verified) or rows.phase != "decode" or not rows.wants_logits or rows.drafts:
            return False
        if request.speculation is None:
            layers = len(request.report.decode.layers)
            request.speculation = Speculation(method, request.sampler, self.pacing, layers)
            request.report.speculation = request.speculation
        return not has_one_row(request)

    def _begin(self, rounds: dict[int, Round], batch: Batch, wanting: list[int], kind: Kind) -> None:
        """Begin a round for each of ``wanting`` for which there are rows and blocks."""
        spare = self.scheduler.max_batch_rows - sum(rows.length for _, rows in batch)
        for number in wanting:
            request, rows = batch[number]
            most = room(request, rows, self.scheduler, min(spare, MOST))
            steps = min(most, _of(request).pace.length(kind))
            if steps < 1:
                continue
            try:
                request.sequence.memory.kv.reserve(rows.stop + most)
            except Exception:  # drafts take what is left: the step goes without
                logger.debug("no blocks for drafts", exc_info=True)
                continue
            rounds[number] = Round(request, rows, steps, most)
            spare -= most

    def _draft(self, rounds: dict[int, Round]) -> None:
        while drafting := [one for one in rounds.values() if one.open]:
            began = time.perf_counter()
            try:
                step = step_input([(one.request, one.row()) for one in drafting])
                times = min(one.sure for one in drafting)
                if times > 1 and not self.worker.repeats(step):
                    times = 1
                result = self.worker.run(step, times)
            except Exception as error:
                logger.debug("a draft step of %d requests failed", len(drafting), exc_info=True)
                for one in drafting:
                    one.failed(f"{type(error).__name__}: {error}")
                return
            seconds = time.perf_counter() - began
            for one in drafting:
                one.take(result.requests[one.request.id], seconds, self.model.eos_token_ids)
            if self._kind is not None and not result.fresh:
                took = (time.perf_counter() - began) / times
                self.pacing.times(self._kind).draft.extend([took] * min(times, 3))

    def _with(self, one: Round, rows: ScheduledRequest) -> ScheduledRequest:
        """``rows`` with what was drafted, blocks for them reserved again."""
        drafts = one.drafts.tokens
        stop = rows.stop + len(drafts)
        one.request.sequence.memory.kv.reserve(stop)
        if not drafts:
            return rows
        return rows._replace(stop=stop, all_logits=True, drafts=tuple(drafts), together=self._together(one, stop))

    def _together(self, one: Round, stop: int) -> bool:
        """Whether all rows are attended at once: where nobody learns from single ones, or looks on, and the last bit
        may hang on how many there are."""
        memory, regime = one.request.sequence.memory, self.model.runner.rope_regime
        if self.worker.exact or memory.has_state or memory.kv.pool.tiers is not None:
            return False
        return self.worker.setting.watch.idle and regime(one.rows.stop) == regime(stop)


class Round:
    """One request's drafts, while they are made: at most ``steps`` of the draft's own, ``most`` with those looked up.
    Until its :meth:`end` the sequence's tokens, keys and states are the draft's."""

    def __init__(self, request: Request, rows: ScheduledRequest, steps: int, most: int) -> None:
        self.request, self.rows, self.steps, self.most = request, rows, steps, most
        self.speculation = _of(request)
        self.drafts = Drafts()
        self.open = True
        self.policy = replace(rows.policy, decode=self.speculation.method.draft)
        self._agreed = 0
        memory = request.sequence.memory
        self._length = len(request.sequence.tokens)
        self._states = memory.states
        if any(state is not None for state in self._states):
            memory.states = [snapshot(bare(state)) for state in self._states]

    def row(self) -> ScheduledRequest:
        """The next row to compute."""
        start = self.rows.start + len(self.drafts.tokens)
        likeliest = self.request.sampler.takes_likeliest
        return self.rows._replace(
            start=start, stop=start + 1, policy=self.policy, greedy=likeliest, sampling=None, scored=()
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
        sequence.memory.states = self._states
        sequence.memory.kv.truncate(self.rows.start, holds=sequence.memory.kv.pool.roomy)
        if not self.drafts.tokens:
            self.speculation.proposals.clear()
        self.speculation.found = self.drafts.found


def _of(request: Request) -> Speculation:
    assert request.speculation is not None
    return request.speculation
