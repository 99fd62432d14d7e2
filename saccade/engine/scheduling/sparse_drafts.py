"""Drafting for ``lossless``: before a step, the draft's own decode steps guess tokens for the rows that the step then
verifies.

A round is whole within one step of the engine. Draft steps are decode steps under the draft, of all requests that draft
together; so a device records them. What they leave, tokens, keys and what the draft learned, is taken back before the
verification, which computes the rows anew under ``lossless``: between two steps a sequence holds nothing that was only
drafted. Settling then takes row after row (``drafting``).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from saccade.engine.drafts.pacing import Pacing, shared_length
from saccade.engine.drafts.speculation import Speculation
from saccade.engine.drafts.step_times import Kind
from saccade.engine.request import Request
from saccade.engine.scheduling.draft_rounds import Round, speculation_of
from saccade.engine.scheduling.drafting import has_one_row, reserved, room
from saccade.engine.scheduling.scheduler import Scheduler
from saccade.engine.scheduling.step_rows import step_input
from saccade.engine.steps.step import ScheduledRequest, StepResult
from saccade.engine.worker import Worker
from saccade.methods.verified import MOST, UNLEARNT, Verified

if TYPE_CHECKING:
    from saccade.models.loader import LoadedModel

AHEAD = 8  # blocks that are reserved beyond a round's, where many are free
logger = logging.getLogger(__name__)
Batch = list[tuple[Request, ScheduledRequest]]


@dataclass
class Timed:
    """The step under way: its ``kind``, and the bytes of ``keys`` and values that it reads. ``alone``: it decodes and
    does nothing else. ``learns``: plain rows teach a draft, which costs time. ``drafted``: it verifies."""

    kind: Kind
    keys: int
    alone: bool
    learns: bool = False
    drafted: bool = False
    fixed: bool = False  # some draft as many as they were told to
    fresh: bool = False  # draft steps compiled or recorded something
    drafting: float = 0.0  # seconds of its draft steps
    opening: float = 0.0  # of these, what first ones took beyond others
    seconds: float | None = None  # of the step itself
    drafts: float = 0.0  # a request
    made: list[tuple[Request, int]] = field(default_factory=list)  # who decodes, and its tokens before


class SparseDrafts:
    """Drafts for the requests under ``lossless`` that a step is to serve. ``pacing``: what was measured so far."""

    def __init__(self, scheduler: Scheduler, worker: Worker, model: LoadedModel) -> None:
        self.scheduler, self.worker, self.model = scheduler, worker, model
        self.pacing = Pacing(model.weight_bytes, padded=worker.device is not None)
        self._step: Timed | None = None  # None where no request of it could draft
        self._warm: set[int] = set()  # numbers of rows of verifications that there have been

    def added(self, batch: Batch) -> Batch:
        """``batch`` as scheduled, with drafted rows where that pays. Their blocks are reserved."""
        if self._all_rest(batch):
            return batch
        able = [number for number, (request, rows) in enumerate(batch) if self._serves(request, rows)]
        if not able:
            return batch
        step = self._step = self._seen(batch, able[0])
        wanting = [number for number in able if self._wants(*batch[number], step)]
        step.learns = any(
            rows.phase == "decode" and _has_state(request) and rows.start - rows.span_start >= UNLEARNT
            for request, rows in batch
        )
        paces = [speculation_of(batch[number][0]).pace for number in wanting]
        step.fixed = any(pace.fixed for pace in paces)
        if not wanting or not all(pace.is_timed(step.kind) for pace in paces):
            return batch
        most = shared_length(paces, len(step.made) - len(wanting), step.kind)
        if most == 0:
            return batch
        rounds: dict[int, Round] = {}  # by number in the batch
        try:
            self._begin(rounds, batch, wanting, step.kind, most)
            self._draft(rounds, step)
        finally:
            for one in rounds.values():
                one.end()
        step.drafted = any(one.drafts.tokens for one in rounds.values())
        return [
            (request, self._with(rounds[at], rows) if at in rounds else rows)
            for at, (request, rows) in enumerate(batch)
        ]

    def _all_rest(self, batch: Batch) -> bool:
        """Whether no request will draft for a while yet: then a step is a plain one in what the host does for it, too.
        Only the ledgers hear of it, which such steps fill again."""
        resting: list[Speculation] = []
        for request, rows in batch:
            speculation = request.speculation
            if speculation is None:
                if rows.phase == "decode" and isinstance(rows.policy.decode, Verified):
                    return False
            elif not speculation.pace.rests(rows.stop) or _has_state(request):
                return False
            elif rows.phase == "decode":
                resting.append(speculation)
        for speculation in resting:
            speculation.pace.ledger.worth += 1.0
        for draft in {speculation.pace.draft for speculation in resting}:
            self.pacing.ledger(draft).worth += 1.0
        return True

    def _seen(self, batch: Batch, first: int) -> Timed:
        """The step as far as it is known before anything is drafted; ``first`` in it is verified."""
        decoding = [(request, rows) for request, rows in batch if rows.phase == "decode"]
        method = batch[first][1].policy.decode
        assert isinstance(method, Verified)
        kind = Kind.of(method.draft.text, [rows.stop for _, rows in decoding])
        keys = sum(rows.stop * request.sequence.kv.token_bytes for request, rows in decoding)
        made = [(request, len(request.sequence.tokens)) for request, _ in decoding]
        return Timed(kind, keys, alone=len(decoding) == len(batch), made=made)

    def _wants(self, request: Request, rows: ScheduledRequest, step: Timed) -> bool:
        """Whether the request drafts in this step. One that ends drafting forgets what its draft knew."""
        pace, learnt = speculation_of(request).pace, _has_state(request)
        if pace.wants(rows.stop, step.kind, step.keys):
            if learnt:
                self.pacing.guess_plain(step.kind)
            return True
        if learnt:  # rows that teach a draft cost more than plain ones
            request.sequence.memories.forget_states(request.sequence.id)
            pace.end()
        return False

    def timed(self, batch: Batch, seconds: float, result: StepResult) -> None:
        """The step took so long, drafting aside; its ``result`` says whether it was compiled or recorded meanwhile, and
        what its rows saw."""
        for request, rows in batch:
            speculation = request.speculation
            if speculation is not None and rows.phase == "decode":
                speculation.weighed = result.requests[request.id].weighed
                stats = speculation.stats
                if rows.drafts:
                    stats.verify_seconds += seconds
                else:
                    stats.plain_steps += 1
                    stats.plain_seconds += seconds
        step = self._step
        if step is None or not step.alone or result.fresh:
            return
        drafts = [len(rows.drafts) for request, rows in batch if request.speculation is not None]
        step.seconds, step.drafts = seconds, sum(drafts) / max(1, len(drafts))
        times = self.pacing.times(step.kind)
        packed = sum(rows.length for _, rows in batch)
        if step.drafted and packed not in self._warm:  # the first product of so many rows is prepared meanwhile
            self._warm.add(packed)
        elif step.drafted:
            count = max(drafts) if times.padded else sum(drafts) / len(drafts)
            times.verify.append((times.rounded(count), seconds))
        elif not step.learns:
            times.plain.append(seconds)
            times.bytes = step.keys

    def settled(self) -> None:
        """The step is settled, or broke: put down what it gave. Its requests may go, whether another follows or not."""
        step, self._step = self._step, None
        if step is None or step.seconds is None or step.learns or step.fixed or step.fresh:
            return
        gave = sum(len(request.sequence.tokens) - before for request, before in step.made) / len(step.made)
        seconds = step.drafting - step.opening + step.seconds
        took = self.pacing.took(step.kind, seconds, gave, step.drafts if step.drafted else 0.0)
        for request, _ in step.made:  # they all wait for the round
            if request.speculation is not None:
                request.speculation.pace.ledger.add(took, gave)

    def _serves(self, request: Request, rows: ScheduledRequest) -> bool:
        """Whether the row may be the first of a verification."""
        method = rows.policy.decode
        if not isinstance(method, Verified) or rows.phase != "decode" or not rows.wants_logits or rows.drafts:
            return False
        if request.speculation is None:
            layers = len(request.report.decode.layers)
            request.speculation = Speculation(
                method, request.sampler, self.pacing, layers, self.worker.device is not None, request.max_tokens
            )
            request.report.speculation = request.speculation
        return not has_one_row(request)

    def _begin(
        self, rounds: dict[int, Round], batch: Batch, wanting: list[int], kind: Kind, shared: int | None
    ) -> None:
        """Begin a round for each of ``wanting`` for which there are rows and blocks. ``shared``: ``shared_length``."""
        spare = self.scheduler.max_batch_rows - sum(rows.length for _, rows in batch)
        for number in wanting:
            request, rows = batch[number]
            most = room(request, rows, self.scheduler, min(spare, MOST))
            steps = min(most, speculation_of(request).pace.length(kind, shared))
            if steps < 1:
                continue
            kv, ends = request.sequence.kv, request.output_start + request.max_tokens
            ahead = min(rows.stop + most + AHEAD * kv.pool.format.block_size, ends)
            # New blocks change tables that a device has to be told of: some at a time, not one in every other round.
            more = kv.missing_blocks(rows.stop + most) > 0 and kv.missing_blocks(ahead) <= kv.pool.spare_blocks
            if not reserved(request, max(rows.stop + most, ahead) if more else rows.stop + most):
                continue
            rounds[number] = Round(request, rows, steps, most)
            spare -= most

    def _draft(self, rounds: dict[int, Round], timed: Timed) -> None:
        while drafting := [one for one in rounds.values() if one.open]:
            began = time.perf_counter()
            opening = [one for one in drafting if not one.speculation.pace.opened]
            try:
                step = step_input([(one.request, one.row()) for one in drafting])
                times = min(one.sure for one in drafting)
                if times > 1 and not self.worker.repeats(step, times):
                    times = 1
                result = self.worker.run(step, times)
            except Exception as error:
                logger.debug("a draft step of %d requests failed", len(drafting), exc_info=True)
                for one in drafting:
                    one.failed(f"{type(error).__name__}: {error}")
                return
            seconds = time.perf_counter() - began
            timed.drafting, timed.fresh = timed.drafting + seconds, timed.fresh or result.fresh
            for one in drafting:
                one.speculation.pace.opened = True
                one.take(result.requests[one.request.id], seconds, self.model.eos_token_ids)
            if timed.alone and not result.fresh:
                self._time_draft(timed, opening, time.perf_counter() - began, times)

    def _time_draft(self, timed: Timed, opening: list[Round], seconds: float, times: int) -> None:
        """Draft steps took so long, ``times`` of them; the first of those of ``opening``."""
        if not opening:
            self.pacing.times(timed.kind).draft.extend([seconds / times] * min(times, 3))
        elif times == 1:  # on a device, whose summaries take no time to speak of, it is one of several
            tokens = sum(one.rows.stop for one in opening)
            self.pacing.opened(timed.kind.draft, tokens, seconds)
            timed.opening += min(seconds, self.pacing.opening_seconds(timed.kind, tokens))

    def _with(self, one: Round, rows: ScheduledRequest) -> ScheduledRequest:
        """``rows`` with what was drafted, blocks for them reserved again."""
        drafts = one.drafts.tokens
        stop = rows.stop + len(drafts)
        if not drafts or not reserved(one.request, stop):
            one.speculation.proposals.clear()
            one.request.sequence.kv.reserve(rows.stop)
            return rows
        sampling = rows.sampling if one.request.sampler.chooses_alike else None
        together = self._together(one, stop)
        return rows._replace(stop=stop, all_logits=True, drafts=tuple(drafts), together=together, sampling=sampling)

    def _together(self, one: Round, stop: int) -> bool:
        """Whether all rows are attended at once: where no method learns from single ones, no observer looks on, and the
        last bit may hang on how many there are."""
        regime = self.model.runner.rope_regime
        if not self.worker.setting.part.is_alone:  # which rows stay is told to one process alone
            return False
        if self.worker.exact or _has_state(one.request) or self.scheduler.pool.tiers is not None:
            return False
        return self.worker.setting.watch.idle and regime(one.rows.stop) == regime(stop)


def _has_state(request: Request) -> bool:
    """Whether the request's decode method knows anything."""
    return request.sequence.memories.has_state(request.sequence.id)
