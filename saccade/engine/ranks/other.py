"""The worker of a rank without an engine: it does what the first rank says, with the heads that it has."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from saccade.engine.memory.saved_memory import OLDER
from saccade.engine.ranks.counts import KeptCounts, exchange, keep_counts, keep_moved
from saccade.engine.ranks.drafted import share_rows
from saccade.engine.ranks.findings import AUDIT
from saccade.engine.ranks.leads import OtherLead
from saccade.engine.ranks.looks import looking, seen_by
from saccade.engine.ranks.meeting import Group, RankGroup
from saccade.engine.ranks.memories import gathered
from saccade.engine.ranks.messages import (
    Audits,
    BeginDrafts,
    BeginTurn,
    Decision,
    ForgetStates,
    Fork,
    Load,
    LoadRows,
    LoadState,
    Look,
    Message,
    Pin,
    RecordStep,
    Replay,
    Rest,
    Run,
    Save,
    SaveRows,
    SaveSnapshot,
    Settled,
    TakeCounts,
    TakeFindings,
    TakeSeen,
    Truncate,
)
from saccade.engine.ranks.outcomes import outcomes, uneven
from saccade.engine.ranks.watch import SumCounts
from saccade.engine.ranks.worker import RankWorker, gone_rows, tiered_rows
from saccade.engine.rows.calls import Setting
from saccade.engine.steps.step import StepInput, StepResult
from saccade.engine.watch.audit import AuditOptions, HeadsAudit, RowAudit
from saccade.engine.watch.bounds import Bounds
from saccade.engine.watch.device_counts import DeviceCounts
from saccade.engine.watch.maps import Maps
from saccade.errors import SaccadeError
from saccade.kv.blocks import BlockManager
from saccade.kv.states import StateFormat
from saccade.models.runner import HFRunner

if TYPE_CHECKING:
    pass


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
        self._kept: dict[tuple[int, Hashable], KeptCounts] = {}  # counts that the first rank may ask for
        self._audits: dict[int, HeadsAudit] = {}  # of requests
        self._seen: dict[tuple[int, Hashable], Maps | Bounds] = {}  # likewise what was seen

    @property
    def _states(self) -> StateFormat | None:
        return None if self._pool.states is None else self._pool.states.format

    def group_of(self) -> Group:
        """See RankWorker."""
        return self._group

    def follow(self, messages: Iterator[Message]) -> None:
        """Do what the first rank says until it says no more. Raises what breaks a pass."""
        memories, heads = self.memories, self.setting.part
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
                watch = self.setting.watch
                watch.audited, watch.replays, watch.replays_next = message[1:]
                watch.audits = {
                    number: RowAudit(
                        self._audits.setdefault(number, HeadsAudit(AuditOptions(), 0)), drawn, whole, heads
                    )
                    for number, (drawn, whole) in message.drawn.items()
                }
            elif isinstance(message, TakeFindings):
                exchange(self._group, self._audits[message.request].take())
            elif isinstance(message, TakeCounts):
                kept = self._kept.get((message.request, message.name))
                exchange(self._group, DeviceCounts() if kept is None else kept.take())
            elif isinstance(message, RecordStep):
                with self._in_step():
                    if self.device is None or not self.device.prepare_one(self._pool, *message):
                        raise SaccadeError("a step could not be recorded; the log says why")
            elif isinstance(message, Decision):
                raise SaccadeError("the first rank sent a Decision outside of a step")
            elif isinstance(message, Fork):
                memories.fork(*message)
            elif isinstance(message, Save):
                gathered(self._group, memories.save(*message).tensors, heads, self._states)
            elif isinstance(message, SaveSnapshot):
                own = memories.save_snapshot(*message) or {}
                gathered(self._group, {f"{OLDER}/{name}": one for name, one in own.items()}, heads, self._states)
            elif isinstance(message, LoadState):
                sequence, length, parts, snapshot = message
                (memories.load_snapshot if snapshot else memories.load_kept)(sequence, length, parts)
            elif isinstance(message, SaveRows):
                gathered(self._group, memories.save_rows(*message), heads)
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
            self._kept.pop(key, None)
            self._seen.pop(key, None)
            if key[1] == AUDIT:
                self._audits.pop(key[0], None)
        for one in step.scheduled:
            self._open(one.sequence_id)
            self.memories[one.sequence_id].kv.reserve(one.stop + times - 1)
        with self._in_step():
            result = self.run(step, times, goes_on)
        ends = outcomes(self._group, step, result, uneven(step, result, gone_rows(step, self.memories)))
        keep_moved(step, result, self._kept)
        keep_counts(step, result, ends, tiered_rows(step, self.memories), self._kept)
        share_rows(self._group, step, result, ends)
        self.setting.watch.begin({})

    def _open(self, sequence: int) -> None:
        """A memory for a sequence that this rank meets for the first time."""
        if sequence not in self.memories:
            self.memories.open(sequence, self._pool)

    def _broke(self, step: StepInput, result: StepResult, error: Exception) -> None:
        raise error  # the first rank is in another layer now
