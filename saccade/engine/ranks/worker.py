"""One engine over several ranks, each with a part of the model's KV heads (models/shards.py).

The first rank has the engine. It sends the same step, as plain data, to the others before it runs it, and likewise what
becomes of sequences. Each rank keeps block tables of its own for the keys and values of its heads. They are never
longer than the engine's, and all pools have as many blocks, so what fits in the first rank's
pool fits in all.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from saccade.engine.attention import AttentionBackend, StepFailedError
from saccade.engine.memory.memories import Memories
from saccade.engine.ranks.counts import DENSE, KeptCounts, LateOfRanks, drop_counts, exchange, keep_counts
from saccade.engine.ranks.drafted import join_rows, share_rows
from saccade.engine.ranks.findings import AuditsOfRanks
from saccade.engine.ranks.leads import FirstLead
from saccade.engine.ranks.link import RankLink, RanksLost
from saccade.engine.ranks.looks import Looks
from saccade.engine.ranks.meeting import Group
from saccade.engine.ranks.memories import SharedMemories
from saccade.engine.ranks.messages import (
    RecordStep,
    Replay,
    Run,
    TakeCounts,
)
from saccade.engine.ranks.outcomes import Outcome, outcomes, uneven
from saccade.engine.rows.calls import Setting
from saccade.engine.steps.step import StepInput, StepResult, results_of
from saccade.engine.watch.device_counts import DeviceCounts
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
        all of whose blocks are resident there. That takes a message of its own in each step: the ranks of a request
        must all launch a recorded step or none, and no rank knows what is resident on another."""
        served, left = super()._served(backend, step, which, result)
        if backend is not self.device or not which or not any(tiered_rows(step, self.memories)):
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
        self._late: WeakValueDictionary[tuple[int, Hashable], LateOfRanks] = WeakValueDictionary()
        self._kept: WeakValueDictionary[tuple[int, Hashable], KeptCounts] = WeakValueDictionary()  # of this rank
        self._forgotten: deque[tuple[int, Hashable]] = deque()  # what no report asks for any more
        self._replays = False  # whether a step is a replay
        self._looks, self._audits = Looks(link, setting.part), AuditsOfRanks(link, setting.part)
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
            raise self._link.lose(SaccadeError("a step could not be recorded; the log says why"))
        return done

    def run(self, step: StepInput, times: int = 1, goes_on: bool = False) -> StepResult:
        goes_on = goes_on and not any(tiered_rows(step, self.memories))
        self._looks.tell(self.setting.watch, self._forgotten)
        self._audits.tell(self.setting.watch, self._forgotten)
        if self._replays:
            self._link.tell(Replay(step))
        else:
            forget = tuple(self._forgotten.popleft() for _ in range(len(self._forgotten)))
            self._link.tell(Run(step, times, goes_on, forget))
        try:
            with self._link.in_step():
                result = super().run(step, times, goes_on)
            if self._link.lost is None or not all(failed_rows(step, result)):  # a rank may be lost behind the last sum
                group, tiered = self._link.group, tiered_rows(step, self.memories)
                ends = outcomes(group, step, result, uneven(step, result, gone_rows(step, self.memories)))
                note_failed(step, result, ends)
                keep_counts(step, result, ends, tiered, self._kept)
                heads = self.setting.part
                join_rows(heads, step, result, ends, share_rows(group, step, result, ends)[:: heads.copies])
                self._count_late(step, result, ends, tiered)
            else:
                for found in result.requests.values():
                    drop_counts(found)
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

    def _count_late(self, step: StepInput, result: StepResult, ends: Sequence[Outcome], tiered: Sequence[bool]) -> None:
        """Have reports ask for what was kept, of the heads of all ranks. Ranks read alike what is dense, where no key
        of some head is gone; what their tiers have moved they know alone."""
        for one, end, moves in zip(step.scheduled, ends, tiered):
            found, alike = result.requests[one.request_id], one.policy == DENSE and not end.uneven and not moves
            for name, own in found.late.items():
                key = one.request_id, name
                late = self._late.get(key)
                if late is None:
                    late = self._late[key] = LateOfRanks(partial(self._counted, *key), self.setting.part)
                    weakref.finalize(late, self._forgotten.append, key)
                late.note(own, alike)
                found.late[name] = late

    def _counted(self, request: int, name: Hashable, own: DeviceCounts) -> Sequence[DeviceCounts]:
        """What all ranks have counted; as much as the first where the others are lost."""
        if self._link.lost is None:
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


def failed_rows(step: StepInput, result: StepResult) -> list[bool]:
    """Which requests of a step this rank has failed."""
    return [not result.requests[one.request_id].is_good for one in step.scheduled]


def note_failed(step: StepInput, result: StepResult, ends: Sequence[Outcome]) -> None:
    """Say of requests that another rank has failed that they failed; or that they are to be computed again, where it
    has lost some of their keys."""
    for one, end in zip(step.scheduled, ends):
        found = result.requests[one.request_id]
        if end.here and not end.good:
            found.error = f"{one.phase}: it failed in another rank"
        found.lost = end.lost


def gone_rows(step: StepInput, memories: Memories) -> list[bool]:
    """Of each request of ``step``: whether earlier turns evicted keys here."""
    return [memories[one.sequence_id].has_gone for one in step.scheduled]


def tiered_rows(step: StepInput, memories: Memories) -> list[bool]:
    """Which requests of a step have blocks in tiers."""
    return [memories[one.sequence_id].kv.pool.tiers is not None for one in step.scheduled]
