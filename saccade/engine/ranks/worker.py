"""One engine over several ranks, each with a part of the model's KV heads (models/shards.py).

The first rank has the engine. Before it runs a step it sends the same plain data to the others, and so it does with
what becomes of sequences. Each rank keeps block tables of its own for the keys and values of its heads: those of the
others are never longer than the engine's, so its pool, of as many blocks, speaks for theirs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from saccade.engine.memory.memories import Memories
from saccade.engine.memory.saved_memory import SavedMemory
from saccade.engine.memory.sequence_memory import Cut
from saccade.engine.ranks.counts import LateOfAll, RankCounts, fold_counts, join_counts, share_counts
from saccade.engine.ranks.link import RankGroup, RankLink, RanksLost, others_fail
from saccade.engine.ranks.messages import (
    BeginTurn,
    ForgetStates,
    Fork,
    Free,
    Load,
    LoadRows,
    Message,
    Save,
    SaveRows,
    Settled,
    Truncate,
)
from saccade.engine.rows.calls import Setting
from saccade.engine.settings.rank_limits import check_policy
from saccade.engine.steps.step import StepInput, StepResult
from saccade.engine.worker import Worker
from saccade.errors import PolicyError, whole_number
from saccade.kv.blocks import BlockManager
from saccade.kv.held import HeldBlocks
from saccade.kv.saved import SavedKV
from saccade.methods.policy import Policy
from saccade.models.runner import HFRunner


class SharedMemories(Memories):
    """The first rank's memories: what becomes of them is told to the others."""

    def __init__(self, link: RankLink) -> None:
        super().__init__()
        self._link = link

    def fork(self, source: int, target: int, length: int | None = None) -> HeldBlocks:
        made = super().fork(source, target, length)
        self._tell(Fork(source, target, length))
        return made

    def truncate(
        self,
        sequence: int,
        length: int,
        cut: Cut = Cut.UNSEEN,
        *,
        stored: int | None = None,
        learns: bool = False,
        holds: bool = False,
    ) -> bool:
        stood = super().truncate(sequence, length, cut, stored=stored, learns=learns, holds=holds)
        if stood:  # else it was freed, which has been told
            self._tell(Truncate(sequence, length, cut, stored, learns, holds))
        return stood

    def free(self, sequence: int, closes: bool = False) -> None:
        super().free(sequence, closes)
        self._tell(Free(sequence, closes))

    def begin_turn(self, sequence: int, reached: int, keeps: bool) -> None:
        super().begin_turn(sequence, reached, keeps)
        self._tell(BeginTurn(sequence, reached, keeps))

    def settled(self, sequence: int) -> None:
        super().settled(sequence)
        self._tell(Settled(sequence))

    def forget_states(self, sequence: int) -> None:
        super().forget_states(sequence)
        self._tell(ForgetStates(sequence))

    def save(self, sequence: int, segment: int | None = None, older: Iterable[int] = ()) -> SavedMemory:
        if self.has_state(sequence):
            raise PolicyError(
                f"a session whose decode method keeps a state cannot be saved with tensor_parallel_size="
                f"{self._link.ranks}; use tensor_parallel_size=1, or a method without one"
            )
        made = super().save(sequence, segment)
        tensors = self._whole(Save(sequence, segment), made.tensors)
        return replace(made, tensors=tensors, kv={**made.kv, "kv_heads": made.kv["kv_heads"] * self._link.ranks})

    def save_rows(self, sequence: int, start: int, stop: int) -> dict[str, Tensor]:
        return self._whole(SaveRows(sequence, start, stop), super().save_rows(sequence, start, stop))

    def check_policies(self, policies: Iterable[Policy]) -> None:
        for policy in policies:
            check_policy(self._link.ranks, policy)

    def check_kv(self, sequence: int, saved: SavedKV) -> None:
        super().check_kv(sequence, self._part(saved))

    def load(self, sequence: int, saved: SavedKV) -> HeldBlocks:
        own = self._part(saved)
        made = super().load(sequence, own)
        parts = _parts(saved.tensors, self._link.ranks)
        self._link.tell_each([Load(sequence, SavedKV(part, own.metadata)) for part in parts[1:]])
        return made

    def load_rows(self, sequence: int, tensors: Mapping[str, Tensor], count: int | None = None) -> None:
        parts = _parts(tensors, self._link.ranks)
        super().load_rows(sequence, parts[0], count)
        self._link.tell_each([LoadRows(sequence, part, count) for part in parts[1:]])

    def _part(self, saved: SavedKV) -> SavedKV:
        """What this rank takes of saved keys and values."""
        metadata, ranks = saved.metadata, self._link.ranks
        heads: Any = metadata.get("kv_heads")
        if whole_number(heads, 1) and heads % ranks == 0:
            metadata = {**metadata, "kv_heads": heads // ranks}
        return SavedKV(_parts(saved.tensors, ranks)[0], metadata)

    def _whole(self, message: Message, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """``own`` tensors, those of keys and values with the heads of all ranks, which are asked for by ``message``."""
        self._link.tell(message)
        try:
            heads = _gathered(self._link.group, own)
        except RuntimeError as error:
            raise self._link.lose(error) from error
        return own | heads

    def _tell(self, message: Message) -> None:
        """What became of a sequence; where the others are gone, there is nobody to tell."""
        with suppress(RanksLost):
            self._link.tell(message)


class FirstRank(Worker):
    """The worker of the rank that has the engine. A step is the others', too; once one of them is gone every step
    raises RanksLost."""

    def __init__(self, link: RankLink, runner: HFRunner, setting: Setting, exact: bool) -> None:
        super().__init__(runner, setting, exact, cuda_graphs=False, memories=SharedMemories(link))
        self._link = link
        self._late: WeakValueDictionary[tuple[int, Hashable], LateOfAll] = WeakValueDictionary()

    def run(self, step: StepInput, times: int = 1, goes_on: bool = False) -> StepResult:
        self._link.tell(step)
        try:
            result = super().run(step, times, goes_on)
            if self._link.lost is None or not all(_failed(step, result)):  # a rank may be lost behind the last sum
                fold_counts(step, result, _tiered(step, self.memories))
                group, own = self._link.group, _failed(step, result)
                failed = others_fail(group, own)
                for one in (one for one, bad in zip(step.scheduled, failed) if bad):
                    result.requests[one.request_id].error = f"{one.phase}: it failed in another rank"
                good = [not (bad or other) for bad, other in zip(own, failed)]
                told = share_counts(group, step, result, good)
                join_counts(group.ranks, step, result, good, told)
                self._count_late(result, told)
        except BaseException as error:  # an interrupt, too: the others are within the step
            lost = self._link.lose(error)
            if not isinstance(error, Exception):
                raise
            raise lost from error
        return result

    def _count_late(self, result: StepResult, told: list[RankCounts]) -> None:
        """Count what kernels did beside the calls, of the heads of all ranks."""
        for number, found in result.requests.items():
            for name, own in found.late.items():
                late = self._late.setdefault((number, name), LateOfAll())
                late.add([rank.late[number, name] for rank in told] or [own.take()] * self._link.ranks)
                found.late[name] = late

    def _broke(self, step: StepInput, result: StepResult, error: Exception) -> None:
        super()._broke(step, result, self._link.lose(error))


class OtherRank(Worker):
    """The worker of a rank without an engine, whose sequences have their blocks in ``pool``."""

    def __init__(self, group: RankGroup, pool: BlockManager, runner: HFRunner, setting: Setting, exact: bool) -> None:
        super().__init__(runner, setting, exact, cuda_graphs=False)
        self._group, self._pool = group, pool

    def follow(self, messages: Iterator[Message]) -> None:
        """Do what the first rank says until it says no more. Raises what breaks a pass."""
        memories = self.memories
        for message in messages:
            if isinstance(message, StepInput):
                for one in message.scheduled:
                    self._open(one.sequence_id)
                    memories[one.sequence_id].kv.reserve(one.stop)
                result = self.run(message)
                fold_counts(message, result, _tiered(message, memories))
                own = _failed(message, result)
                failed = others_fail(self._group, own)
                share_counts(self._group, message, result, [not (bad or other) for bad, other in zip(own, failed)])
            elif isinstance(message, Fork):
                memories.fork(*message)
            elif isinstance(message, Save):
                _gathered(self._group, memories.save(*message).tensors)
            elif isinstance(message, SaveRows):
                _gathered(self._group, memories.save_rows(*message))
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
            elif isinstance(message, Settled):
                memories.settled(*message)
            elif isinstance(message, ForgetStates):
                memories.forget_states(*message)
            elif isinstance(message, Truncate):
                sequence, length, cut, stored, learns, holds = message
                memories.truncate(sequence, length, cut, stored=stored, learns=learns, holds=holds)
            else:
                memories.free(*message)

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


HEADS = ("kv/k", "kv/v", "k", "v")  # tensors of keys and values, [layers, kv_heads, tokens, head_dim]


def _gathered(group: RankGroup, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keys and values with the heads of all ranks; each calls it for tensors of the same names."""
    return {name: torch.cat(group.gather(own[name]), 1) for name in HEADS if name in own}


def _parts(tensors: Mapping[str, Tensor], ranks: int) -> list[dict[str, Tensor]]:
    """Keys and values by rank. What is no such tensor is left to those who take it in, and to refuse it."""
    made: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
    for name, tensor in tensors.items():
        if name in HEADS and tensor.dim() == 4 and tensor.shape[1] % ranks == 0:
            for part, own in zip(made, tensor.chunk(ranks, 1)):
                part[name] = own.clone()  # a part of a tensor is pickled with all of it
        else:
            for part in made:
                part[name] = tensor
    return made
