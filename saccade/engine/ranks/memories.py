"""Memories of the first of several ranks: saved keys and values are split by heads for the ranks, and joined again from
them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from saccade.engine.memory.memories import Memories
from saccade.engine.memory.saved_memory import OLDER, SavedMemory
from saccade.engine.memory.sequence_memory import Cut
from saccade.engine.ranks.link import RankLink, RanksLost
from saccade.engine.ranks.meeting import Group
from saccade.engine.ranks.messages import (
    BeginDrafts,
    BeginTurn,
    ForgetStates,
    Fork,
    Free,
    Load,
    LoadRows,
    LoadState,
    Message,
    Pin,
    Rest,
    Save,
    SaveRows,
    SaveSnapshot,
    Settled,
    Truncate,
)
from saccade.engine.ranks.states import cut_states, is_state, joined_state
from saccade.engine.settings.rank_limits import check_policy
from saccade.engine.steps.carried import Carried
from saccade.errors import PolicyError, SaccadeError, whole_number
from saccade.kv.held import HeldBlocks
from saccade.kv.saved import SavedKV
from saccade.kv.states import StateFormat
from saccade.methods.policy import Policy
from saccade.selection.head_part import HeadPart


class SharedMemories(Memories):
    """The first rank's memories: what becomes of them is told to the others."""

    def __init__(self, link: RankLink, part: HeadPart) -> None:
        super().__init__()
        self._link, self._heads = link, part

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
        tells = Truncate(sequence, length, cut, stored, learns, holds)
        if self[sequence].kept is not None:  # rows may be done again to its layers' states, by all ranks together
            self._tell(tells)
            return super().truncate(sequence, length, cut, stored=stored, learns=learns, holds=holds)
        stood = super().truncate(sequence, length, cut, stored=stored, learns=learns, holds=holds)
        if stood:  # else it was freed, which has been told
            self._tell(tells)
        return stood

    def resume(self, sequence: int, stored: int, good: Callable[[int], bool]) -> int:
        left = super().resume(sequence, stored, good)
        if left != stored:
            self._tell(Truncate(sequence, left, Cut.RESUMED, stored, False, False))
        return left

    def pin(self, sequence: int, stored: int) -> None:
        kept = self[sequence].kept
        moves = kept is not None and not kept.stands(stored)
        super().pin(sequence, stored)
        if moves:
            self._tell(Pin(sequence, stored))

    def rest(self, sequence: int) -> None:
        super().rest(sequence)
        if (memory := self.get(sequence)) is not None and memory.kept is not None:
            self._tell(Rest(sequence))

    def free(self, sequence: int, closes: bool = False) -> None:
        super().free(sequence, closes)
        self._tell(Free(sequence, closes))

    def begin_turn(self, sequence: int, reached: int, keeps: bool) -> None:
        super().begin_turn(sequence, reached, keeps)
        self._tell(BeginTurn(sequence, reached, keeps))

    def begin_drafts(self, sequence: int, carried: Carried | None) -> None:
        super().begin_drafts(sequence, None)  # verified rows are attended one by one, which leaves nothing
        self._tell(BeginDrafts(sequence))

    def settled(self, sequence: int) -> None:
        super().settled(sequence)
        self._tell(Settled(sequence))

    def forget_states(self, sequence: int) -> None:
        super().forget_states(sequence)
        self._tell(ForgetStates(sequence))

    def save(self, sequence: int, segment: int | None = None, older: Iterable[int] = ()) -> SavedMemory:
        if self[sequence].knows:
            what = "whose decode method keeps a state" if self.has_state(sequence) else "of which keys were evicted"
            raise PolicyError(
                f"a session {what} cannot be saved with tensor_parallel_size={self._link.ranks}; use "
                "tensor_parallel_size=1, or a method without one"
            )
        lengths = tuple(older)
        made = super().save(sequence, segment, lengths)
        tensors = self._whole(Save(sequence, segment, lengths), made.tensors, self._states(sequence))
        return replace(made, tensors=tensors, kv={**made.kv, "kv_heads": made.kv["kv_heads"] * self._heads.parts})

    def save_rows(self, sequence: int, start: int, stop: int) -> dict[str, Tensor]:
        return self._whole(SaveRows(sequence, start, stop), super().save_rows(sequence, start, stop))

    def save_snapshot(self, sequence: int, length: int) -> dict[str, Tensor] | None:
        own = super().save_snapshot(sequence, length)
        if own is None:
            return None
        named = {f"{OLDER}/{name}": one for name, one in own.items()}
        whole = self._whole(SaveSnapshot(sequence, length), named, self._states(sequence))
        return {name.removeprefix(f"{OLDER}/"): one for name, one in whole.items()}

    def load_kept(self, sequence: int, length: int, parts: Mapping[str, Tensor]) -> None:
        own, *others = self._cut(sequence, parts)
        super().load_kept(sequence, length, own)
        if parts and others:
            self._link.tell_each([LoadState(sequence, length, one, False) for one in others])

    def load_snapshot(self, sequence: int, length: int, parts: Mapping[str, Tensor]) -> None:
        own, *others = self._cut(sequence, parts)
        super().load_snapshot(sequence, length, own)
        self._link.tell_each([LoadState(sequence, length, one, True) for one in others])

    def _states(self, sequence: int) -> StateFormat | None:
        kept = self[sequence].kept
        return None if kept is None else kept.pool.format

    def _cut(self, sequence: int, parts: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """What each rank has of a state."""
        format = self._states(sequence)
        return [dict(parts)] * self._link.ranks if format is None else cut_states(format, parts, self._link.ranks)

    def check_policies(self, policies: Iterable[Policy]) -> None:
        for policy in policies:
            check_policy(self._link.ranks, policy)

    def check_known(self) -> None:
        raise SaccadeError(
            f"that is of all heads, which tensor_parallel_size={self._link.ranks} shares out; tensor_parallel_size=1 "
            "goes on from it"
        )

    def check_kv(self, sequence: int, saved: SavedKV) -> None:
        super().check_kv(sequence, self._part(saved))

    def load(self, sequence: int, saved: SavedKV) -> HeldBlocks:
        own = self._part(saved)
        made = super().load(sequence, own)
        parts = self._of_others(saved.tensors)
        self._link.tell_each([Load(sequence, SavedKV(part, own.metadata)) for part in parts])
        return made

    def load_rows(self, sequence: int, tensors: Mapping[str, Tensor], count: int | None = None) -> None:
        super().load_rows(sequence, _parts(tensors, self._heads)[0], count)
        self._link.tell_each([LoadRows(sequence, part, count) for part in self._of_others(tensors)])

    def _part(self, saved: SavedKV) -> SavedKV:
        """What this rank takes of saved keys and values."""
        metadata, parts = saved.metadata, self._heads.parts
        heads: Any = metadata.get("kv_heads")
        if whole_number(heads, 1) and heads % parts == 0:
            metadata = {**metadata, "kv_heads": heads // parts}
        return SavedKV(_parts(saved.tensors, self._heads)[0], metadata)

    def _of_others(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """What each other rank takes of them."""
        parts, copies = _parts(tensors, self._heads), self._heads.copies
        return [parts[rank // copies] for rank in range(1, self._link.ranks)]

    def _whole(self, message: Message, own: dict[str, Tensor], states: StateFormat | None = None) -> dict[str, Tensor]:
        """``own`` tensors, those of keys, values and ``states`` with the heads of all ranks, which are asked for by
        ``message``."""
        self._link.tell(message)
        try:
            heads = gathered(self._link.group, own, self._heads, states)
        except RuntimeError as error:
            raise self._link.lose(error) from error
        return {name: tensor for name, tensor in own.items() if _heads_at(name) is None} | heads

    def _tell(self, message: Message) -> None:
        """What became of a sequence; where the others are gone, it is not sent."""
        with suppress(RanksLost):
            self._link.tell(message)


def _heads_at(name: str) -> int | None:
    """The dimension of KV heads of a saved tensor of keys, values or what summarises them; None of others."""
    if name.removeprefix("kv/") in ("k", "v"):
        return 1
    return -2 if name.removeprefix("kv/").startswith("summary/") else None


def gathered(
    group: Group, own: Mapping[str, Tensor], heads: HeadPart, states: StateFormat | None = None
) -> dict[str, Tensor]:
    """Those of ``own`` tensors that have heads, with the heads of all ranks, of which ``heads`` are this one's, and
    ``states``. Each calls it; summaries that not all have made alike are left out."""
    names = sorted(name for name in own if _heads_at(name) is not None)
    shapes = repr([(name, own[name].shape, own[name].dtype) for name in names if _heads_at(name) == -2])
    said = torch.tensor([crc32(shapes.encode())], dtype=torch.int64, device="cpu")
    alike = all(torch.equal(other, said) for other in group.gather(said))
    made: dict[str, Tensor] = {}
    for name in names:
        dim = _heads_at(name)
        if dim is not None and (alike or dim == 1):
            made[name] = _joined(name, group.gather(own[name])[:: heads.copies], dim, heads)
    known = {} if states is None else {one.name: one for one in states.parts}
    for name in sorted(filter(is_state, own)):
        part = known[name.rpartition("/")[2]]
        made[name] = joined_state(part, group.gather(own[name]) if part.blocks else [own[name]])
    return made


def _parts(tensors: Mapping[str, Tensor], heads: HeadPart) -> list[dict[str, Tensor]]:
    """Keys, values and summaries by part of the ``heads``. What is no such tensor is left to those who take it in, and
    to refuse it; summaries that lack heads, as earlier versions saved them, are made again."""
    parts = [replace(heads, number=number) for number in range(heads.parts)]
    made: list[dict[str, Tensor]] = [{} for _ in parts]
    for name, tensor in tensors.items():
        dim = _heads_at(name)
        if dim is not None and tensor.dim() >= 4 and tensor.shape[dim] % heads.parts == 0:
            for part, own in zip(parts, made):
                own[name] = _own(name, tensor, dim, part)
        elif dim != -2:
            for own in made:
                own[name] = tensor
    return made


def _own(name: str, whole: Tensor, dim: int, part: HeadPart) -> Tensor:
    """What a ``part`` has of a saved tensor: one of all layers [layers, ...], or a summary of one. A copy: a part of a
    tensor is pickled with all of it."""
    layer = _layer_of(name)
    if not part.orders:
        return part.own(whole, dim).clone()
    if layer is not None:
        return part.at(layer).own(whole, dim).clone() if layer < len(part.orders) else whole
    if len(whole) != len(part.orders):  # of another model, which is refused
        return whole
    return torch.stack([part.at(at).own(one, _within(dim)) for at, one in enumerate(whole)])


def _joined(name: str, parts: list[Tensor], dim: int, heads: HeadPart) -> Tensor:
    """The other way round."""
    layer = _layer_of(name)
    if not heads.orders:
        return heads.join(parts, dim)
    if layer is not None:
        return heads.at(layer).join(parts, dim)
    return torch.stack([heads.at(at).join(one, _within(dim)) for at, one in enumerate(zip(*parts))])


def _within(dim: int) -> int:
    """A dimension of a tensor of all layers, in one layer's."""
    return dim - 1 if dim > 0 else dim


def _layer_of(name: str) -> int | None:
    """The layer that a saved summary is of: ``summary/<layer>/<kind>/<block size>``; None of tensors of all layers."""
    _, *parts = name.removeprefix("kv/").split("/")
    return int(parts[0]) if len(parts) == 3 and parts[0].isdecimal() and len(parts[0]) < 10 else None
