"""The next decode step, launched before the host has read this step's tokens: the device goes on while the host turns
tokens into answers and schedules what follows.

If the host then asks for that very step, it is done already. If not, its result is dropped: the keys that it stored lie
behind all keys that count, in blocks that the rows had reserved, and are overwritten, as method states are
(methods.device_state); what it counted is taken back. Blocks that it moved between host memory and the device stay
where they are now (device_tiers).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from saccade.engine.device.graphs import Key, StepKind
from saccade.engine.device.rows import RowBuffers
from saccade.engine.device.watch import PlacedRow
from saccade.engine.steps.step import StepInput
from saccade.kv.sequence import SequenceKV
from saccade.selection.plan import DevicePlan

AheadRow = tuple[SequenceKV, DevicePlan, int, int, int, tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Launched:
    """A step that runs: its kind, and ``forward`` over ``buffers``, which launches it again."""

    kind: StepKind
    key: Key
    buffers: RowBuffers
    forward: Callable[[], None]


@dataclass(frozen=True, eq=False)
class Ahead:
    """A step that was launched ahead of its turn: a row is a sequence under a plan whose ``token`` goes to place
    ``start``, in a slot, and whose state went from one slot to another; None for padding. ``dense``: the logits of its
    dense replay, where it has one."""

    launched: Launched
    rows: tuple[AheadRow | None, ...]
    dense: Tensor | None = None

    @classmethod
    def of(
        cls, launched: Launched, placed: Sequence[PlacedRow | None], tokens: Sequence[int], dense: Tensor | None
    ) -> Ahead:
        """After a step of ``placed``, whose rows go on with ``tokens``."""
        rows: list[AheadRow | None] = []
        for row, token in zip(placed, tokens):
            if row is None:
                rows.append(None)
                continue
            stop, (reads, writes) = row.scheduled.stop, row.states
            rows.append((row.kv, row.plan, stop, _slot(row.kv, stop), token, (writes, reads)))
        return cls(launched, tuple(rows), dense)

    def serves(self, step: StepInput, placed: Sequence[PlacedRow | None], key: Key) -> bool:
        """Whether it is the step that the host asks for."""
        if key != self.launched.key or not self.launched.buffers.ahead or len(placed) != len(self.rows):
            return False
        tokens = dict(zip(step.request_ids, step.input_ids.tolist()))
        for row, own in zip(placed, self.rows):
            if row is None or own is None:
                if row is not own:
                    return False
                continue
            one = row.scheduled
            kv, plan, start, slot, token, states = own
            same = row.kv is kv and row.plan is plan and one.start == start and one.length == 1
            same = same and row.states == states
            same = same and (key.absent or not kv.pool.absent)
            if not same or one.together or tokens[one.request_id] != token or _slot(kv, start) != slot:
                return False
        return True


def may_follow(placed: Sequence[PlacedRow | None], key: Key) -> bool:
    """Whether rows of a step of this key, that have run and are counted, can go on by themselves: the device chooses
    each one's token, and has room for it."""
    for row in placed:
        if row is None:
            continue
        one = row.scheduled
        if not (one.chosen_there and one.wants_logits) or one.length > 1 or one.together:
            return False
        absent = row.kv.pool.absent and not key.absent
        if absent or one.stop + 1 > key.longest or row.kv.missing_blocks(one.stop + 1):
            return False
    return True


def _slot(kv: SequenceKV, place: int) -> int:
    return kv.logical_slots(place, place + 1)[0]


class Lead(Protocol):
    """Decisions that a device backend takes by itself (record a step, launch the next one ahead), taken by one process
    where several ranks run the same steps; every rank asks for them at the same places of each step.

    All ranks are told the same and would mostly decide the same. But a rank without memory to record a step, say, may
    not launch the next one ahead, and all ranks must launch the same sums."""

    def takes_ahead(self, own: bool, said: Hashable) -> bool:
        """Whether a step is the one that was launched ahead; ``own``: what this process would say. ``said``: what must
        be alike in all of them."""

    def goes_on(self, own: bool) -> bool:
        """Whether the next step is launched ahead of its turn."""

    def tokens(self, own: Tensor) -> Tensor:
        """The drawn tokens of rows, int64 [rows], with which the next step runs."""


class OwnLead:
    """One process alone."""

    def takes_ahead(self, own: bool, said: Hashable) -> bool:
        """See :class:`Lead`."""
        return own

    def goes_on(self, own: bool) -> bool:
        """See :class:`Lead`."""
        return own

    def tokens(self, own: Tensor) -> Tensor:
        """See :class:`Lead`."""
        return own
