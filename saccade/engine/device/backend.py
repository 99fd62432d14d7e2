"""The device backend: decode steps of many requests at once on a GPU, a few launches a layer, recorded in CUDA graphs.

It serves requests whose method has a device plan (selection.plan), and short chunks of dense prefills
(engine.device.prefill); all others keep to the row backend, in the same step. Requests whose plans have one form are
one group of rows, whatever their numbers. What is stored, read and counted is the same on both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from saccade.copied import Copied
from saccade.engine.attention import StepFailedError, StepShortError, Watch
from saccade.engine.device import prefill
from saccade.engine.device.ahead import Ahead, Launched, may_follow
from saccade.engine.device.attention import DeviceAttention, Group
from saccade.engine.device.audit import StepAudits
from saccade.engine.device.graphs import GraphStats, Key, StepKind, StepKinds, rounded_up
from saccade.engine.device.leading import Lead, OwnLead
from saccade.engine.device.prepare import MOST, Prepared, Preparing
from saccade.engine.device.replays import DenseReplays
from saccade.engine.device.rooms import EACH, RowRooms
from saccade.engine.device.rows import RowBuffers
from saccade.engine.device.sampling import Choice, fetch_repeated, fetch_tokens
from saccade.engine.device.serving import MOST_ROWS, DeviceServing
from saccade.engine.device.tap import Tap
from saccade.engine.device.watch import PlacedRow, StepWatch
from saccade.engine.memory.sequence_memory import SequenceMemory
from saccade.engine.steps.paths import EAGER, RECORDED, Path
from saccade.engine.steps.step import RequestResult, StepInput, StepResult
from saccade.engine.watch.phase_stats import SLIDES, ran_dense
from saccade.errors import failure
from saccade.kv.blocks import BlockManager
from saccade.kv.offers import Offers
from saccade.kv.tier import TierError
from saccade.methods.policy import Policy
from saccade.models.keeping import SlotRows
from saccade.models.runner import HFRunner
from saccade.ops.triton.common import clear_kept, pad


@dataclass(frozen=True)
class DevicePass:
    """Requests that the device runs in one recorded step (see engine.attention.PlannedStep)."""

    device: DeviceBackend
    step: StepInput
    memories: Mapping[int, SequenceMemory]
    result: StepResult
    times: int
    goes_on: bool

    def steps(self) -> Sequence[int]:
        self.result.requests |= self.device.run(self.step, self.memories, self.times, self.goes_on)
        self.result.fresh |= self.device.fresh
        return ()


class DeviceBackend(DeviceServing):
    """Serves decode rows of ``runner`` on its device. ``cuda_graphs`` says whether steps are recorded; while an
    observer looks on (``watch``) their kernels are launched one by one, and reports say so. ``covers``: a step may run
    as a larger one that is recorded, with padding for its other rows; products of other sizes round differently."""

    def __init__(
        self, runner: HFRunner, cuda_graphs: bool = True, watch: Watch | None = None, covers: bool = True
    ) -> None:
        super().__init__(runner, Watch() if watch is None else watch)
        self.covers = covers
        self.runs_ahead = runner.device.type == "cuda"  # whether steps may be launched before they are asked for
        self.kinds = StepKinds(runner.device, cuda_graphs)
        self.fresh = False  # see StepResult
        self._launched: Launched | None = None  # what ran last
        self._ahead: Ahead | None = None
        self._chosen: list[Tensor] = []  # by a step that ran several times: each time's tokens, int64 [rows]
        self._rooms = RowRooms(runner.spec, runner.device, self.kinds)
        self._replays = DenseReplays(self._plans, self.kinds, self._kind)
        self._dense: Tensor | None = None  # logits of what ran last, run densely
        self.lead: Lead = OwnLead()

    @property
    def graphs(self) -> GraphStats:
        """How many graphs are recorded, how many may be, and what they hold."""
        return self.kinds.stats

    def forget_ahead(self) -> None:
        """Something else runs in between: what was launched ahead of its turn is not asked for any more."""
        self._ahead = self._launched = None
        self._come_back()

    def _come_back(self) -> None:
        self._rooms.come_back()
        self._tiers.come_back()

    def parts(self, step: StepInput, which: Sequence[int], memories: Mapping[int, SequenceMemory]) -> list[list[int]]:
        """See AttentionBackend. What was launched ahead is forgotten where there are none."""
        found = super().parts(step, which, memories)
        if not found:
            self.forget_ahead()
        return found

    def serves(self, step: StepInput, index: int, memory: SequenceMemory) -> str | None:
        """See DeviceServing."""
        if self.watch.logits is not None and not isinstance(self.lead, OwnLead):
            return "an observer looks at the logits of decode rows, of which the other ranks know nothing"
        return super().serves(step, index, memory)

    def plan(
        self,
        step: StepInput,
        memories: Mapping[int, SequenceMemory],
        result: StepResult,
        times: int = 1,
        goes_on: bool = False,
    ) -> DevicePass:
        """See AttentionBackend; :meth:`run` says more."""
        return DevicePass(self, step, memories, result, times, goes_on)

    def run(
        self, step: StepInput, memories: Mapping[int, SequenceMemory], times: int = 1, goes_on: bool = False
    ) -> dict[int, RequestResult]:
        """Run a step of requests that are all served, at most ``MOST_ROWS``. ``memories`` by sequence id; results by
        request id: where logits are wanted, the token that is to be chosen from them if the step says how and they are
        sound, else logits fp32 [1, vocab] on the CPU. ``times``: a step that ``repeats`` runs so often, for which there
        are blocks. ``goes_on``: the next step will most likely have the same rows, each with the token that this one
        chooses; it may be launched already.

        StepFailedError if the step cannot be run. Nothing counts as stored then, and the next step is tried again.
        """
        results = {one.request_id: RequestResult.of(one) for one in step.scheduled}
        placed, key, groups = self._arranged(step, memories, results, times)
        if (reason := self.kinds.why_not(key)) is not None:
            self.forget_ahead()
            raise StepFailedError(reason)
        counted: list[tuple[int, PlacedRow]] = []
        audits: StepAudits | None = None
        ahead, self._ahead = self._ahead, None
        try:
            quiet, replays = self.watch.idle and times == 1, not self.watch.replays.isdisjoint(step.request_ids)
            known = ahead is not None and (ahead.dense is not None or not replays)
            mine = quiet and known and ahead is not None and ahead.serves(step, placed, key)
            ids = tuple(None if row is None else row.scheduled.request_id for row in placed)
            if self.lead.takes_ahead(mine, (ids, times)) and ahead is not None:
                ahead.launched.buffers.come_back(True)
                self._tiers.asked(_rows(placed))
                self._launched, self.fresh, self._dense = ahead.launched, replays, ahead.dense
                kind = ahead.launched.kind
            else:
                self._come_back()
                kind = self._run(step, placed, key, groups, times)
            if (self.watch.audits or replays) and not key.prefill:
                tap, buffers = kind.tap if key.tapped else None, self._rooms.buffers[False]
                audits = StepAudits(placed, self.watch.audits, tap, buffers, kind, self.watch.replays, self._dense)
            _rows(placed)[0].kv.pool.catch_up()  # while the device works
            for number, row in enumerate(placed):
                for turn in range(times if row is not None and row.result.error is None else 0):
                    assert row is not None
                    row = row if not turn else row.next
                    self._count(number, row)
                    counted.append((number, row))
            if times > 1:
                fetch_repeated(self._chosen, placed)
            elif self.lead.goes_on(
                goes_on and quiet and self._may_go_on(key, kind, placed) and (audits is None or audits.launches)
            ):
                self._go_on(placed, audits)
            else:
                fetch_tokens(kind, placed, None if audits is None else audits.launch)
            if (reason := self._tiers.settle(_rows(placed))) is not None:
                raise StepShortError(reason)
            self._show(kind, placed)
        except StepShortError:
            self._clean_up(counted)
            raise
        except torch.cuda.OutOfMemoryError as error:
            self._clean_up(counted)
            self.kinds.free()
            raise StepFailedError(f"{type(error).__name__}: {error}") from error
        except Exception as error:
            self._clean_up(counted)
            self.kinds.failed(key, error)
            raise StepFailedError(f"{type(error).__name__}: {error}") from error
        except BaseException:  # an interrupt
            self._clean_up(counted)
            raise
        self.kinds.succeeded(key)
        if key.prefill:
            self._learn(step, memories, results, key)
        elif audits is not None:
            audits.settle()
        for row in _rows(placed):
            if row.memory.kept is not None:
                row.memory.kept.moved(times)
        return results

    def _arranged(
        self, step: StepInput, memories: Mapping[int, SequenceMemory], results: dict[int, RequestResult], times: int
    ) -> tuple[list[PlacedRow | None], Key, tuple[Group, ...]]:
        """The rows, one form after the other and padded so that few numbers of rows occur."""
        if step.scheduled[0].phase == "prefill":
            return self._arranged_prefill(step, memories, results)
        grouped: dict[int, list[PlacedRow | None]] = {}
        each = pad(max(one.length for one in step.scheduled), 1)
        for one in step.scheduled:
            plans, policy = self._plans, one.policy
            planned = plans.of(policy, one.stop) if each == 1 else plans.verifying(policy, each, one.stop)
            assert planned.plan is not None
            memory, result = memories[one.sequence_id], results[one.request_id]
            row = PlacedRow(one, memory, planned.plan, result, planned.cones, planned.acting)
            grouped.setdefault(planned.form, []).append(row)
        sizes = tuple((form, pad(len(grouped[form]), 1)) for form in sorted(grouped))
        rows = [row for own in grouped.values() for row in own if row is not None]
        absent = self._tiers.absent(rows[0].kv.pool) and all(row.plan.listed for row in rows)
        tapped = not absent and each == times == 1 and not self.watch.audited.isdisjoint(step.request_ids)
        key = Key(sizes, rounded_up(max(step.seq_lens) + times - 1), absent, tapped)
        if self.covers and not absent and self.watch.idle and (cover := self.kinds.cover(key)) is not None:
            key = cover[0]
        forms = self._plans.forms
        placed: list[PlacedRow | None] = []
        groups = []
        for form, count in key.sizes:
            own = grouped.get(form, [])
            groups.append(Group(forms[form], len(placed), count))
            placed += own + [None] * (count - len(own))
        return placed, key, tuple(groups)

    def _arranged_prefill(
        self, step: StepInput, memories: Mapping[int, SequenceMemory], results: dict[int, RequestResult]
    ) -> tuple[list[PlacedRow | None], Key, tuple[Group, ...]]:
        """The pieces of chunks, padded likewise."""
        plan = self._plans.prefilling(EACH)
        placed: list[PlacedRow | None] = []
        for one in step.scheduled:
            memory, result = memories[one.sequence_id], results[one.request_id]
            memory.states  # noqa: B018  (back on the host, as they were before these rows)
            placed += [PlacedRow(piece, memory, plan, result) for piece in prefill.pieces(one)]
        form, learns = self._plans.forms.index(plan.form), any(map(prefill.learns, step.scheduled))
        longest = rounded_up(max(step.seq_lens))
        key = Key(((form, pad(len(placed), 1)),), longest, tapped=learns, prefill=True)
        if self.covers and (cover := self.kinds.cover(key)) is not None:
            key = cover[0]
        return placed + [None] * (key.rows - len(placed)), key, (Group(plan.form, 0, key.rows),)

    def _run(
        self, step: StepInput, placed: list[PlacedRow | None], key: Key, groups: tuple[Group, ...], times: int
    ) -> StepKind:
        pool = next(row.kv.pool for row in placed if row is not None)
        each = groups[0].each
        buffers = self._rooms.room(pool, len(placed), pool.format.blocks(key.longest), each > 1)
        self.fresh, self._chosen, self._dense = self._rooms.load(buffers, step, placed, each, times), [], None
        try:
            offers = self._tiers.prepare(pool, _rows(placed)) if key.absent else self._tiers.open(pool, _rows(placed))
        except TierError as error:
            raise StepShortError(str(error)) from error
        watch = StepWatch(self.watch, placed, self.runner.device) if self.watch.looks_within else None
        if not self.watch.replays.isdisjoint(step.request_ids) and not key.prefill and times == 1:
            self._dense, self.fresh = self._replays.run(pool, len(placed), key.longest, buffers, step.seq_lens[0]), True
        kind, forward = self._kind(pool, key, groups, buffers, offers, watch)
        for turn in range(times):
            if turn:
                buffers.advance(self._chosen[-1])
            self.kinds.launch(kind, forward, watched=watch is not None)
            self.fresh |= self.kinds.fresh
            if times > 1:
                self._chosen.append(kind.best.clone())
        if watch is not None:
            watch.settle()
        self._launched = Launched(kind, key, buffers, forward)
        return kind

    def _kind(
        self,
        pool: BlockManager,
        key: Key,
        groups: tuple[Group, ...],
        buffers: RowBuffers,
        offers: Offers | None = None,
        watch: StepWatch | None = None,
    ) -> tuple[StepKind, Callable[[], None]]:
        """The kind of step with this key, and what launches it over ``buffers``."""
        asks = key.tapped and key.prefill
        each, rows = groups[0].each, groups[-1].first + groups[-1].rows
        if asks:
            buffers.asked_for(self.runner.spec, prefill.MOST_LEARNED * EACH)
        kind = self.kinds.of(key, groups)

        def forward() -> None:
            kind.tap, asked = Tap() if key.tapped and not asks else None, buffers.asked if asks else None
            context = DeviceAttention(kind.groups, buffers, pool, kind.longest, watch, offers, kind.tap, asked)
            tokens, positions = buffers.tokens[: rows * each], buffers.positions[: rows * each]
            wanted = buffers.last_tokens(rows, each) if key.prefill else None
            states = None
            if pool.states is not None:
                states = SlotRows(pool.states.tensors, buffers.reads[:rows], buffers.writes[:rows])
            kind.logits = self._forward.run(tokens, positions, context, wanted, states)
            greatest, best = kind.logits.max(-1)
            kind.best = torch.where(greatest.abs() < torch.inf, best, -1)  # else the sampler says what is wrong
            context.finish()

        return kind, forward

    def prepare(
        self,
        pool: BlockManager,
        policy: Policy,
        requests: int,
        longest: int,
        seconds: float,
        share: int = 1,
        tell: Callable[[int], None] = lambda number: None,
    ) -> Prepared:
        """Record steps before they are asked for: see device/prepare.py. At most one ``share``-th of those that may be.
        ``tell`` is told the number of each before it is recorded."""
        most = MOST // share
        return self._preparing(pool).run(policy, min(requests, MOST_ROWS), longest, seconds, most, tell)

    def prepare_one(self, pool: BlockManager, policy: Policy, requests: int, longest: int, number: int) -> bool:
        """Record the step of that ``number`` among those of :meth:`prepare`. False where it fails."""
        return self._preparing(pool).one(policy, min(requests, MOST_ROWS), longest, number)

    def _preparing(self, pool: BlockManager) -> Preparing:
        return Preparing(pool, self._plans, self._rooms, self.kinds, self._kind)

    def _may_go_on(self, key: Key, kind: StepKind, placed: Sequence[PlacedRow | None]) -> bool:
        replayed = kind.graph is not None or self.runner.device.type != "cuda"
        if not self.runs_ahead or not replayed or key.prefill or not may_follow(placed, key):
            return False
        for row in _rows(placed):
            if not self._plans.stays(row.scheduled.policy, row.scheduled.stop, row.scheduled.stop + 1):
                return False  # another layer's window rules from then on
        if key.absent and self.runner.keeping is not None:
            return False  # a step that turns out short runs again, from states that the next one would write over
        return not key.absent or self._tiers.lets_follow(_rows(placed))

    @torch.inference_mode()
    def _go_on(self, placed: Sequence[PlacedRow | None], audits: StepAudits | None) -> None:
        """Launch the next step behind the one that runs and its audits, and write down this one's tokens meanwhile."""
        launched = self._launched
        assert launched is not None
        kind, buffers = launched.kind, launched.buffers
        for row in _rows(placed):
            if row.kv.missing_blocks(row.scheduled.stop + 1):  # for which another process has room
                row.kv.reserve(row.scheduled.stop + 1)
        choice = Choice(kind, placed)
        if choice.draws:
            choice.tokens = self.lead.tokens(choice.tokens)
        copied = Copied(choice.tokens)
        self._rooms.follow(buffers, placed)
        if audits is not None:
            audits.launch()  # before anything that they look at is written over
        buffers.advance(choice.tokens, swaps=True)
        dense: Tensor | None = None
        if self.watch.replays_next and not launched.key.absent:
            first = _rows(placed)[0]
            size, later = launched.key.longest, first.scheduled.stop + 1
            dense = self._replays.run(first.kv.pool, len(placed), size, buffers, later)
        self._tiers.go_ahead()
        for row in _rows(placed):
            if row.memory.kept is not None:
                row.memory.kept.spoilt = True
        self.kinds.launch(kind, launched.forward, watched=False)
        tokens = copied.wait()
        choice.write(tokens, self.runner.spec.vocab_size)
        self._ahead = Ahead.of(launched, placed, tokens, dense)

    def _show(self, kind: StepKind, placed: Sequence[PlacedRow | None]) -> None:
        """Show the logits of decode rows to those who look at them. What they raise fails the request alone."""
        looks = self.watch.logits
        for number, row in enumerate(placed if looks is not None else ()):
            if row is None or row.result.error is not None or row.scheduled.phase != "decode":
                continue
            assert looks is not None
            try:
                looks(row.scheduled.request_id, row.scheduled.start, kind.logits[number].clone())  # replays share it
            except Exception as error:  # one request's failure must not take the others down
                row.result.error, row.result.error_type = failure(error, "decode")

    def _count(self, number: int, row: PlacedRow, times: int = 1) -> None:
        """The row is stored; its counts are added up by the request and its plan. With ``times=-1`` it is not."""
        one, choice = row.scheduled, row.plan.summarized
        row.kv.appended(times * one.length)
        row.result.path = Path(EAGER if self.watch.looks_within else RECORDED)
        if one.phase == "prefill":
            return
        if choice is not None and one.stop // choice.size > one.start // choice.size:
            row.kv.summarized(choice.summary, choice.size)
        if one.together:
            verified = self._rooms.counts.of(one.request_id, row.plan)
            row.result.late[row.plan.name] = verified
            row.result.stay = partial(verified.add_first, one.start, "triton")
            return
        counts = self._rooms.counts.rows[number]
        if row.acting is not None and 0 not in row.acting:
            row.result.note(SLIDES)  # notes stand as the layers do
        whole = row.plan.keeps and self._rooms.stored(row, one.stop if times > 0 else one.start)
        backend = "triton (eager)" if self.watch.looks_within else "triton"
        everything = counts.add(one.stop, backend, times, one.start - one.span_start, whole)
        if everything and not one.policy.decode.means_dense:
            row.result.note(ran_dense("decode", row.plan.method))
        if row.acting is not None:
            row.result.note(SLIDES)
        if self.kinds.note is not None:
            row.result.note(self.kinds.note)
        row.result.late[row.plan.name] = counts

    @torch.inference_mode()
    def _learn(
        self, step: StepInput, memories: Mapping[int, SequenceMemory], results: dict[int, RequestResult], key: Key
    ) -> None:
        """Count what a prefill read, and let decode methods learn from it."""
        asked, first = self._rooms.buffers[True].asked if key.tapped else None, 0
        for one in step.scheduled:
            result = results[one.request_id]
            result.note_of(self.kinds.note)
            prefill.settle(one, memories[one.sequence_id], result, self.runner.spec, asked, first)
            first += EACH * len(prefill.pieces(one))

    def _clean_up(self, counted: list[tuple[int, PlacedRow]]) -> None:
        """After a step that stopped halfway: nothing of it counts, and kernels that did not run have left words of
        those before them."""
        for number, row in counted:
            self._count(number, row, -1)
        self._ahead = None  # it stands on what has failed
        with suppress(Exception):  # of a device that answers no more
            self._tiers.give_up()
        clear_kept(self.runner.device)


def _rows(placed: Sequence[PlacedRow | None]) -> list[PlacedRow]:
    """Those that are no padding."""
    return [row for row in placed if row is not None]
