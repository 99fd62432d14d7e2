"""States of layers that keep one: a pool of slots, each of which holds the states of all such layers of one sequence
after some token.

A state stands for all tokens before it and cannot be shortened, so going back takes a copy of an earlier state: a
snapshot. States in use and snapshots share one pool of slots. A sequence that needs a slot gets that of the least
useful snapshot, by GreedyDual (Cao and Irani 1997, "Cost-aware WWW proxy caching algorithms"): a snapshot is worth the
tokens that would be computed again without it, and ages by the worth of those dropped before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor

from saccade.errors import CapacityError
from saccade.machine import show_bytes

if TYPE_CHECKING:
    from saccade.kv.sequence_states import SequenceStates


@dataclass(frozen=True)
class StatePart:
    """A tensor that a layer keeps of a sequence. ``blocks``: where several processes have some of its heads or channels
    each, what there is of these in the model, one run after another along its first dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class StateFormat:
    """What ``layers`` layers keep of a sequence, each all ``parts``: the one source of a state's bytes and shapes."""

    layers: int
    parts: tuple[StatePart, ...]

    @property
    def nbytes(self) -> int:
        """Of one slot: all layers' state of one sequence."""
        return self.layers * sum(torch.Size(one.shape).numel() * one.dtype.itemsize for one in self.parts)

    def empty(self, slots: int, device: torch.device | str) -> dict[str, Tensor]:
        """Tensors by part, [layers, slots, ...], not filled."""
        return {
            one.name: torch.empty((self.layers, slots, *one.shape), dtype=one.dtype, device=device)
            for one in self.parts
        }


class StatePool:
    """``slots`` slots of ``format`` on ``device``; ``tensors`` by part, [layers, slots, ...], never move.

    A slot is *pinned* while a sequence computes with it, *held* by sequences that may go back to it, else free.
    ``given_up``: snapshots that went for others; ``losers``: whose they were, until they have been looked at;
    ``orphaned``: tokens of prefixes that were given up as their keys could no longer be continued. ``block``: where
    others go on from a sequence's snapshots, the tokens of which they take whole multiples; else 0. Not safe for use by
    several threads at once. CapacityError where there is no such memory.
    """

    def __init__(self, format: StateFormat, slots: int, device: torch.device | str = "cpu") -> None:
        self.format, self.slots, self.block = format, slots, 0
        self.given_up = self.orphaned = 0
        self.losers: WeakSet[SequenceStates] = WeakSet()
        try:
            self.tensors: Mapping[str, Tensor] = format.empty(slots, device)
        except RuntimeError as error:
            raise CapacityError(
                f"{slots} states of {show_bytes(format.nbytes)} cannot be allocated on {device}; lower kv_memory"
            ) from error
        self._free = list(range(slots - 1, -1, -1))
        self._held: dict[int, dict[SequenceStates, int]] = {}  # by slot, who may go back to it, and to which length
        self._pins: dict[int, int] = {}
        self._spares: dict[int, SequenceStates] = {}  # pinned slots that their sequences can do without
        self._since: dict[int, float] = {}  # by held slot: the age when it was last of use
        self._age = 0.0

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self.slots * self.format.nbytes

    @property
    def used(self) -> int:
        """Slots that are taken. For any thread."""
        return self.slots - len(self._free)

    @property
    def pinned(self) -> int:
        """Slots that sequences compute with. For any thread."""
        return len(self._pins)

    def numbers(self) -> dict[str, int]:
        """What there is of slots, and their bytes. For any thread."""
        pinned = self.pinned
        return {
            "slots": self.slots,
            "in_use": pinned,
            "snapshots": max(0, self.used - pinned),
            "given_up": self.given_up,
            "orphaned": self.orphaned,
            "bytes": self.nbytes,
        }

    def take(self, own: int | None = None) -> int:
        """A slot, pinned: a free one, or the least useful snapshot's. ``own``, if it is less useful still, is given to
        its only holder: no snapshot refers to it then. CapacityError where all slots are pinned."""
        if not self._free:
            can = [slot for slot in self._held if slot not in self._pins or (slot == own and self._pins[slot] == 1)]
            if not can and self._spares:
                next(iter(self._spares.values())).drop_spare()
                return self.take(own)
            if not can:
                raise CapacityError(
                    f"all {self.slots} states are in use; raise kv_memory, a quarter of which they may take, or lower "
                    "max_requests"
                )
            slot = min(can, key=self._worth)
            self._age = self._worth(slot)
            for states in list(self._held[slot]):
                states.lose(slot)
                self.losers.add(states)
            self.given_up += 1
            if slot == own:
                return slot
        slot = self._free.pop()
        self._pins[slot] = 1
        return slot

    def take_for(self, gap: int) -> int | None:
        """A slot, pinned, for a snapshot without which ``gap`` tokens would be computed again; None where no slot is
        free, and all snapshots are worth more."""
        if not self._free:
            can = [slot for slot in self._held if slot not in self._pins]
            if not can or min(map(self._worth, can)) >= self._age + gap:
                return None
        return self.take()

    def take_spare(self, states: SequenceStates) -> int | None:
        """A slot, pinned, that ``states`` gives back where others need it (``drop_spare``); None where all slots are
        pinned."""
        if self.pinned == self.slots:
            return None
        slot = self.take()
        self._spares[slot] = states
        return slot

    def swap_spare(self, spare: int, slot: int) -> None:
        """A pinned ``slot`` is to spare from now on, and ``spare`` is not any more."""
        self._spares[slot] = self._spares.pop(spare)

    def drop_spare(self, spare: int) -> None:
        del self._spares[spare]
        self.unpin(spare)

    def pin(self, slot: int) -> None:
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            self._let_go(slot)

    def hold(self, slot: int, states: SequenceStates, length: int) -> None:
        """``states`` may go back to what is in a slot, which stands after ``length`` tokens."""
        self._held.setdefault(slot, {})[states] = length
        self.touch(slot)

    def release(self, slot: int, states: SequenceStates) -> None:
        """It never will."""
        del self._held[slot][states]
        if not self._held[slot]:
            del self._held[slot], self._since[slot]
            self._let_go(slot)

    def touch(self, slot: int) -> None:
        """A snapshot is of use."""
        self._since[slot] = self._age

    def is_shared(self, slot: int) -> bool:
        """Whether any other sequence than the one that pinned a slot may need what is in it."""
        return slot in self._held or self._pins.get(slot, 0) > 1

    def copy(self, source: int, target: int) -> None:
        for part in self.tensors.values():
            part[:, target].copy_(part[:, source])

    def clear(self, slot: int) -> None:
        """Make it the state before the first token."""
        for part in self.tensors.values():
            part[:, slot].zero_()

    def read(self, slot: int) -> dict[str, Tensor]:
        """Copies on the host, [layers, ...]."""
        return {name: part[:, slot].cpu().clone() for name, part in self.tensors.items()}

    def write(self, slot: int, parts: Mapping[str, Tensor]) -> None:
        for name, part in self.tensors.items():
            part[:, slot].copy_(parts[name])

    def _let_go(self, slot: int) -> None:
        if slot not in self._held and slot not in self._pins:
            self._free.append(slot)

    def _worth(self, slot: int) -> float:
        return self._since[slot] + max(states.gap(length) for states, length in self._held[slot].items())


def check_parts(format: StateFormat, parts: Mapping[str, Tensor]) -> str | None:
    """Why ``parts``, [layers, ...] each, are no state of ``format``; None where they are."""
    expected: Sequence[StatePart] = format.parts
    if set(parts) != {one.name for one in expected}:
        return f"a state of {', '.join(sorted(parts)) or 'nothing'}, not of {', '.join(one.name for one in expected)}"
    for one in expected:
        part, shape = parts[one.name], (format.layers, *one.shape)
        if part.shape != shape or part.dtype != one.dtype:
            return f"a state's {one.name} is {part.dtype} {list(part.shape)}, not {one.dtype} {list(shape)}"
    return None
