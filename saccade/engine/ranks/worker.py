"""One engine over several ranks, each with a part of the model's KV heads (models/shards.py).

The first rank has the engine. Before it runs a step it sends the same plain data to the others, and so it does with
what becomes of sequences. Each rank keeps block tables of its own for the keys and values of its heads: those of the
others are never longer than the engine's, so its pool, of as many blocks, speaks for theirs.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from saccade.engine.attention import AttentionBackend, StepFailedError
from saccade.engine.memory.memories import Memories
from saccade.engine.ranks.counts import (
    DENSE,
    LateOfAll,
    LateOfRanks,
    RankCounts,
    exchange,
    fold_counts,
    join_counts,
    share_counts,
)
from saccade.engine.ranks.leads import FirstLead, OtherLead
from saccade.engine.ranks.link import Group, RankGroup, RankLink, RanksLost, others_fail
from saccade.engine.ranks.looks import Looks, looking, seen_by
from saccade.engine.ranks.memories import SharedMemories, gathered
from saccade.engine.ranks.messages import (
    Audits,
    BeginDrafts,
    BeginTurn,
    Decision,
    ForgetStates,
    Fork,
    Load,
    LoadRows,
    Look,
    Message,
    Pin,
    RecordStep,
    Replay,
    Rest,
    Run,
    Save,
    SaveRows,
    Settled,
    TakeCounts,
    TakeSeen,
    Truncate,
)
from saccade.engine.ranks.watch import SumCounts
from saccade.engine.rows.calls import Setting
from saccade.engine.steps.step import StepInput, StepResult, results_of
from saccade.engine.watch.audit import AuditOptions, Findings, HeadsAudit, RowAudit
from saccade.engine.watch.bounds import Bounds
from saccade.engine.watch.device_counts import DeviceCounts
from saccade.engine.watch.maps import Maps
from saccade.engine.watch.phase_stats import Late
from saccade.engine.worker import Worker
from saccade.errors import SaccadeError
from saccade.kv.blocks import BlockManager
from saccade.methods.policy import Policy
from saccade.models.runner import HFRunner

if TYPE_CHECKING:
    from saccade.engine.device.prepare import Prepared


class RankWorker(Worker):
    """What the workers of all ranks do alike."""

    def group_of(self) -> Group:
        """What joins the ranks."""
        raise NotImplementedError

    def _served(
        self, backend: AttentionBackend, step: StepInput, which: Sequence[int], result: StepResult
    ) -> tuple[list[int], list[int]]:
        """Over tiers each rank's memory holds other blocks: a device serves requests for which it can on all ranks, and
        all of whose blocks are resident there."""
        served, left = super()._served(backend, step, which, result)
        if backend is not self.device or not which or not any(_tiered(step, self.memories)):
            return served, left
        pools = [self.memories[step.scheduled[number].sequence_id].kv.pool for number in which]
        own = [number in left or pool.absent > 0 for number, pool in zip(which, pools)]
        count = self.group_of().sum(torch.tensor(own, dtype=torch.float32, device="cpu")).tolist()
        for number, ranks in zip(which, count):
            if ranks and number in served:
                results_of(result.requests, step.scheduled[number])[
                    0
                ].passed_on = "a rank's KV blocks are not all resident"
        return [n for n, ranks in zip(which, count) if not ranks], [n for n, ranks in zip(which, count) if ranks]

    def _note_failed(self, step: StepInput, result: StepResult, error: StepFailedError) -> None:
        """Another rank's device has not failed: nothing can go on in its stead."""
        raise error


class FirstRank(RankWorker):
    """The worker of the rank that has the engine. A step is the others', too; once one of them is gone every step
    raises RanksLost."""

    def __init__(
        self, link: RankLink, runner: HFRunner, setting: Setting, exact: bool, cuda_graphs: bool = False
    ) -> None:
        records = cuda_graphs and link.group.records
        super().__init__(runner, setting, exact, records, memories=SharedMemories(link, setting.part))
        self._link = link
        self._folded: WeakValueDictionary[tuple[int, Hashable], LateOfAll] = WeakValueDictionary()
        self._late: WeakValueDictionary[tuple[int, Hashable], LateOfRanks] = WeakValueDictionary()
        self._forgotten: deque[tuple[int, Hashable]] = deque()  # what no report asks for any more
        self._replays = False  # whether a step is a replay
        self._looks = Looks(link, setting.part)
        self.lead()

    def lead(self) -> None:
        """Say what all devices do."""
        if self.device is not None:
            self.device.lead = FirstLead(self._link)

    def group_of(self) -> Group:
        """See RankWorker."""
        return self._link.group

    def prepare(
        self, pool: BlockManager, policy: Policy, requests: int, longest: int, seconds: float, share: int
    ) -> Prepared | None:
        """See Worker."""
        if self.device is None:
            return None
        told: list[int] = []

        def tell(number: int) -> None:
            told.append(number)
            self._link.tell(RecordStep(policy, requests, longest, number))

        try:
            with self._link.in_step():
                done = self.device.prepare(pool, policy, requests, longest, seconds, share, tell)
        except BaseException as error:
            raise self._link.lose(error) from error
        if done.recorded < len(told):
            raise self._link.lose(SaccadeError("a step could not be recorded, of which the log says more"))
        return done

    def run(self, step: StepInput, times: int = 1, goes_on: bool = False) -> StepResult:
        forget = tuple(self._forgotten.popleft() for _ in range(len(self._forgotten)))
        goes_on = goes_on and not any(_tiered(step, self.memories))
        audits = self.setting.watch.audits
        self._looks.tell(self.setting.watch, self._forgotten)
        if audits:
            self._link.tell(Audits({number: (one.drawn, one.whole) for number, one in audits.items()}))
        self._link.tell(Replay(step) if self._replays else Run(step, times, goes_on, forget))
        try:
            with self._link.in_step():
                result = super().run(step, times, goes_on)
            if self._link.lost is None or not all(_failed(step, result)):  # a rank may be lost behind the last sum
                fold_counts(step, result, _tiered(step, self.memories))
                group, own = self._link.group, _failed(step, result)
                failed = others_fail(group, own)
                for one in (one for one, bad in zip(step.scheduled, failed) if bad):
                    result.requests[one.request_id].error = f"{one.phase}: it failed in another rank"
                good = [not (bad or other) for bad, other in zip(own, failed)]
                heads = self.setting.part
                told = share_counts(group, step, result, good)[:: heads.copies]
                join_counts(heads.parts, step, result, good, told)
                self._count_late(step, result, told)
                if audits:
                    self._take_audits(audits)
        except BaseException as error:  # an interrupt, too: the others are within the step
            lost = self._link.lose(error)
            if not isinstance(error, Exception):
                raise
            raise lost from error
        return result

    def replay(self, step: StepInput) -> StepResult:
        """See Worker."""
        self._replays = True
        try:
            return super().replay(step)
        finally:
            self._replays = False

    def _take_audits(self, audits: Mapping[int, RowAudit]) -> None:
        """Count what the others found of their heads."""
        own: dict[int, Findings] = {}  # which have been counted
        for findings in exchange(self._link.group, own)[:: self.setting.part.copies][1:]:
            for number, one in findings.items():
                audits[number].audit.left_out += one.left_out
                for found in one.found:
                    audits[number].audit.found(*found)

    def _count_late(self, step: StepInput, result: StepResult, told: list[RankCounts]) -> None:
        """Have counted what kernels did beside the calls, of the heads of all ranks."""
        dense = {one.request_id: one.policy == DENSE for one in step.scheduled}
        for number, found in result.requests.items():
            for name, own in found.late.items():
                if isinstance(own, LateOfAll):
                    folded = self._folded.setdefault((number, name), LateOfAll())
                    folded.add([rank.late[number, name] for rank in told] or [own.take()] * self.setting.part.parts)
                    found.late[name] = folded
                    continue
                late = self._late.get((number, name))
                if late is None:
                    late = LateOfRanks(partial(self._counted, number, name, dense[number]))
                    self._late[number, name] = late
                    weakref.finalize(late, self._forgotten.append, (number, name))
                late.note(own)
                found.late[name] = late

    def _counted(self, request: int, name: Hashable, dense: bool, own: DeviceCounts) -> Sequence[DeviceCounts]:
        """What all ranks have counted; as much as the first where they read alike, or the others are lost."""
        if not dense and self._link.lost is None:
            try:
                self._link.tell(TakeCounts(request, name))
                return exchange(self._link.group, own)[:: self.setting.part.copies]
            except RuntimeError as error:
                self._link.lose(error)
            except RanksLost:
                pass
        return [own] * self.setting.part.parts

    def _broke(self, step: StepInput, result: StepResult, error: Exception) -> None:
        super()._broke(step, result, self._link.lose(error))


class OtherRank(RankWorker):
    """The worker of a rank without an engine, whose sequences have their blocks in ``pool``."""

    def __init__(
        self,
        group: RankGroup,
        pool: BlockManager,
        runner: HFRunner,
        setting: Setting,
        exact: bool,
        cuda_graphs: bool = False,
        steps: SumCounts | None = None,
    ) -> None:
        super().__init__(runner, setting, exact, cuda_graphs and group.records)
        self._group, self._pool, self._steps = group, pool, steps
        self._late: dict[tuple[int, Hashable], Late] = {}  # counts that the first rank may ask for
        self._seen: dict[tuple[int, Hashable], Maps | Bounds] = {}  # likewise what was seen

    def group_of(self) -> Group:
        """See RankWorker."""
        return self._group

    def follow(self, messages: Iterator[Message]) -> None:
        """Do what the first rank says until it says no more. Raises what breaks a pass."""
        memories = self.memories
        if self.device is not None:
            self.device.lead = OtherLead(self._group, messages)
        for message in messages:
            if isinstance(message, Run):
                self._follow_step(*message)
            elif isinstance(message, Replay):
                with self.replaying(message.step):
                    self._follow_step(message.step, 1, False, ())
            elif isinstance(message, Look):
                self._seen |= message.fresh
                self.setting.watch.maps, self.setting.watch.bounds = looking(message.at, self._seen)
            elif isinstance(message, TakeSeen):
                exchange(self._group, seen_by(self._seen[message.at]))
            elif isinstance(message, Audits):
                first = self.setting.part.global_head(0, self.setting.spec.kv_heads)
                self.setting.watch.audits = {
                    number: RowAudit(HeadsAudit(AuditOptions(), 0), drawn, whole, first)
                    for number, (drawn, whole) in message.drawn.items()
                }
            elif isinstance(message, TakeCounts):
                late = self._late.get((message.request, message.name))
                exchange(self._group, DeviceCounts() if late is None else late.take())
            elif isinstance(message, RecordStep):
                with self._in_step():
                    if self.device is None or not self.device.prepare_one(self._pool, *message):
                        raise SaccadeError("a step could not be recorded, of which the log says more")
            elif isinstance(message, Decision):
                raise SaccadeError("a decision beside a step")
            elif isinstance(message, Fork):
                memories.fork(*message)
            elif isinstance(message, Save):
                gathered(self._group, memories.save(*message).tensors, 1)
            elif isinstance(message, SaveRows):
                gathered(self._group, memories.save_rows(*message), 1)
            elif isinstance(message, (Load, LoadRows)):
                self._open(message.sequence)
                if isinstance(message, Load):
                    memories.load(*message)
                else:
                    memories.load_rows(*message)
                memories.filled(message.sequence, memories[message.sequence].kv.length)
            elif isinstance(message, BeginTurn):
                self._open(message.sequence)
                memories.begin_turn(*message)
            elif message.sequence not in memories:  # one that has not run a step
                continue
            elif isinstance(message, BeginDrafts):
                memories.begin_drafts(message.sequence, None)
            elif isinstance(message, Settled):
                memories.settled(*message)
            elif isinstance(message, ForgetStates):
                memories.forget_states(*message)
            elif isinstance(message, Truncate):
                sequence, length, cut, stored, learns, holds = message
                memories.truncate(sequence, length, cut, stored=stored, learns=learns, holds=holds)
            elif isinstance(message, Pin):
                memories.pin(*message)
            elif isinstance(message, Rest):
                memories.rest(*message)
            else:
                memories.free(*message)

    def _in_step(self) -> AbstractContextManager[None]:
        return nullcontext() if self._steps is None else self._steps.within(self._group.rank)

    def _follow_step(
        self, step: StepInput, times: int, goes_on: bool, forget: tuple[tuple[int, Hashable], ...]
    ) -> None:
        for key in forget:
            self._late.pop(key, None)
            self._seen.pop(key, None)
        for one in step.scheduled:
            self._open(one.sequence_id)
            self.memories[one.sequence_id].kv.reserve(one.stop + times - 1)
        with self._in_step():
            result = self.run(step, times, goes_on)
        fold_counts(step, result, _tiered(step, self.memories))
        own = _failed(step, result)
        failed = others_fail(self._group, own)
        share_counts(self._group, step, result, [not (bad or other) for bad, other in zip(own, failed)])
        audits = self.setting.watch.audits
        self.setting.watch.begin({})
        if audits:
            noted = {number: one.audit for number, one in audits.items()}
            exchange(
                self._group, {number: one.findings for number, one in noted.items() if isinstance(one, HeadsAudit)}
            )
        for number, found in result.requests.items():
            self._late |= {(number, name): late for name, late in found.late.items() if not isinstance(late, LateOfAll)}

    def _open(self, sequence: int) -> None:
        """A memory for a sequence that this rank meets for the first time."""
        if sequence not in self.memories:
            self.memories.open(sequence, self._pool)

    def _broke(self, step: StepInput, result: StepResult, error: Exception) -> None:
        raise error  # the first rank is in another layer now


def _failed(step: StepInput, result: StepResult) -> list[bool]:
    return [not result.requests[one.request_id].is_good for one in step.scheduled]


def _tiered(step: StepInput, memories: Memories) -> list[bool]:
    return [memories[one.sequence_id].kv.pool.tiers is not None for one in step.scheduled]
