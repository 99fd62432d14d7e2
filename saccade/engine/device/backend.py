"""The device backend: decode steps of many requests at once on a GPU, a few launches a layer, recorded in CUDA graphs.

It serves requests whose method has a device plan (selection.plan), and short chunks of dense prefills
(engine.device.prefill); all others keep to the row backend, in the same step. Requests whose plans have one form are
one group of rows, whatever their numbers. What is stored, read and counted is the same on both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.copied import Copied
from saccade.engine.attention import StepFailedError, StepShortError, Watch
from saccade.engine.device import prefill
from saccade.engine.device.ahead import Ahead, Launched, Lead, OwnLead, may_follow
from saccade.engine.device.attention import DeviceAttention, Group
from saccade.engine.device.audit import StepAudits
from saccade.engine.device.graphs import GraphStats, Key, StepKind, StepKinds
from saccade.engine.device.placed import Arranging, Counting
from saccade.engine.device.prepare import MOST, Prepared, Preparing
from saccade.engine.device.replays import DenseReplays
from saccade.engine.device.rooms import EACH, RowRooms
from saccade.engine.device.rows import RowBuffers
from saccade.engine.device.sampling import Choice, fetch_repeated, fetch_tokens
from saccade.engine.device.serving import MOST_ROWS, DeviceServing
from saccade.engine.device.tap import Tap
from saccade.engine.device.watch import PlacedRow, StepWatch
from saccade.engine.memory.sequence_memory import SequenceMemory
from saccade.engine.steps.step import RequestResult, StepInput, StepResult
from saccade.kv.blocks import BlockManager
from saccade.kv.offers import Offers
from saccade.kv.tier import TierError
from saccade.methods.policy import Policy
from saccade.models.keeping import SlotRows
from saccade.models.runner import HFRunner
from saccade.ops.triton.common import clear_kept


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
        self.runs_ahead = runner.device.type == "cuda"  # whether steps may be launched before they are asked for
        self.kinds = StepKinds(runner.device, cuda_graphs)
        self.fresh = False  # see StepResult
        self._launched: Launched | None = None  # what ran last
        self._ahead: Ahead | None = None
        self._chosen: list[Tensor] = []  # by a step that ran several times: each time's tokens, int64 [rows]
        self._rooms = RowRooms(runner.spec, runner.device, self.kinds)
        self._arranging = Arranging(self._plans, self._tiers, self.kinds, self.watch, covers)
        self._counting = Counting(self._rooms, self.kinds, self.watch, runner.spec)
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
        placed, key, groups = self._arranging.step(step, memories, results, times)
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
                    self._counting.row(number, row)
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
            self._counting.show(kind, placed)
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
            self._counting.learn(step, memories, results, key)
        elif audits is not None:
            audits.settle()
        for row in _rows(placed):
            if row.memory.kept is not None:
                row.memory.kept.moved(times)
        return results

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

    def _clean_up(self, counted: list[tuple[int, PlacedRow]]) -> None:
        """After a step that stopped halfway: nothing of it counts, and kernels that did not run have left words of
        those before them."""
        for number, row in counted:
            self._counting.row(number, row, -1)
        self._ahead = None  # it stands on what has failed
        with suppress(Exception):  # of a device that answers no more
            self._tiers.give_up()
        clear_kept(self.runner.device)


def _rows(placed: Sequence[PlacedRow | None]) -> list[PlacedRow]:
    """Those that are no padding."""
    return [row for row in placed if row is not None]
