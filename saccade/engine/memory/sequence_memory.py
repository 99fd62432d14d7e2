"""What a worker keeps of a sequence between steps: keys and values, and what its decode method knows of each layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from torch import Tensor

from saccade.engine.steps.carried import Carried, Weighed
from saccade.errors import SaccadeError
from saccade.kv.blocks import BlockManager
from saccade.kv.grouped_sequence import open_kv
from saccade.kv.hosted import HostedKV
from saccade.kv.sequence_states import SequenceStates
from saccade.methods.base import Evicting, Method
from saccade.methods.device_state import DeviceState
from saccade.methods.history import StateHistory
from saccade.methods.host_state import HostState
from saccade.methods.state import MethodState, fork, snapshot
from saccade.methods.verified import bare
from saccade.ops import debug


class OnHost(Protocol):
    """A sequence's memory while it lives in host memory, as that of the sequence knows it (engine/memory/hosted.py)."""

    hosted_kv: HostedKV

    @property
    def states(self) -> list[MethodState | None]:
        """The decode method's, a layer each."""
        ...

    @property
    def has_state(self) -> bool:
        """Whether the decode method knows anything."""
        ...

    def leave(self) -> None:
        """The sequence lives on the device again."""
        ...


class Cut(Enum):
    """What method states have to do with rows that are cut off.

    UNSEEN: no state knows of them, or none that is used again. BLOCKS: there are none: only blocks that were reserved
    for more go. REJECTED: they are drafts of the last step, and states were marked after each row of it. DRAFTED: they
    were drafted since states were set aside. BROKEN: they are of a step that broke on the way. TURN: they are of the
    last turn, or of earlier ones. FORGOTTEN: all states go. RESUMED: likewise, and what follows is computed again."""

    UNSEEN = auto()
    BLOCKS = auto()
    REJECTED = auto()
    DRAFTED = auto()
    BROKEN = auto()
    TURN = auto()
    FORGOTTEN = auto()
    RESUMED = auto()


@dataclass(frozen=True)
class TurnMark:
    """What a turn taken back returns to, after ``reached`` tokens. A prefill leaves the states it finds as they are;
    none once dropped."""

    reached: int
    states: list[Any] = field(default_factory=list)
    gone: list[Tensor | None] = field(default_factory=list)


class SequenceMemory:
    """One sequence's ``kv``, and for each layer: ``states``, the decode method's; ``tails``, the last prefill queries
    that its ``begin`` will see; ``gone``, the keys that earlier turns evicted (see methods.Evicting); ``watched``, what
    it noted of the running prefill. ``history``: within a step with drafts, the states after each of its rows.
    ``carried``: while drafts are made, what their rows read besides. ``mark``: where the last turn began.

    ``stands``: the tokens after which ``states``, ``tails``, ``gone`` and ``watched`` stand, all layers alike; None
    from the beginning of a step to its good end. Who goes on from them compares it with the tokens that are stored:
    where a step broke, some layers have learnt from its rows and others have not.

    ``kept``: the states of the model's own layers that keep one; None where none does.

    ``hosted``: the memory that stands for this one while the CPU attends its keys in host memory. While recorded steps
    decode, a device state has the method's knowledge (:meth:`on_device`); who asks for ``states``
    gets them back on the host, and the next recorded step opens another."""

    def __init__(self, pool: BlockManager) -> None:
        self.kv = open_kv(pool)
        self.kept = None if pool.states is None else SequenceStates(pool.states)
        self._states: list[Any] = []
        self._on_device: DeviceState | None = None
        self._opened_by: Method | None = None
        self._opened_for: tuple[int, ...] | None = None
        self._hosted: OnHost | None = None
        self.tails: list[Tensor | None] = []
        self.gone: list[Tensor | None] = []
        self.watched: list[Any] = []
        self.carried: Carried | None = None
        self.weighed: Weighed | None = None  # room for what verifications leave
        self.history = StateHistory()
        self.stands: int | None = 0
        self.mark: TurnMark | None = None
        self._aside: list[Any] = []  # the states while drafts are made
        self.forget_method()

    @property
    def states(self) -> list[Any]:
        hosted, self._hosted = self._hosted, None
        if hosted is not None:
            hosted.leave()
            self._states = hosted.states
        held, self._on_device = self._on_device, None
        if held is not None:
            self._states = held.settle(held.length)
        return self._states

    @states.setter
    def states(self, states: list[Any]) -> None:
        self._states, self._on_device = states, None
        hosted, self._hosted = self._hosted, None
        if hosted is not None:
            hosted.hosted_kv.close()

    @property
    def hosted(self) -> OnHost | None:
        """See the class; its setter has moved all that is known there."""
        return self._hosted

    @hosted.setter
    def hosted(self, hosted: OnHost) -> None:
        self._hosted, self._states, self._on_device = hosted, [None] * self.kv.readers, None

    def on_device(
        self,
        method: Method,
        opened: Callable[[list[Any]], DeviceState],
        acting: tuple[int, ...] | None = None,
    ) -> DeviceState:
        """The device state of ``method`` for rows where it decides in the layers ``acting``, or in all; ``opened``
        makes one of the states of all layers where there is none."""
        held = self._on_device
        same = self._opened_for == acting and (self._opened_by is method or self._opened_by == method)
        if held is None or isinstance(held, HostState) or not same:
            held, self._opened_by, self._opened_for = opened(self.states), method, acting
            self._on_device = held
        return held

    def on_host(self, method: Method, length: int, acting: tuple[int, ...] | None = None) -> HostState | None:
        """The host state of ``method`` for a row that sees ``length`` keys, where it decides in the layers ``acting``
        or in all, if one is open."""
        held = self._on_device
        same = self._opened_for == acting and (self._opened_by is method or self._opened_by == method)
        return held if isinstance(held, HostState) and same and length <= held.upto else None

    def opened_on_host(
        self, method: Method, state: HostState | None, acting: tuple[int, ...] | None = None
    ) -> HostState | None:
        """``state``, which was opened with all layers' ``states``, is from now on that of ``method`` for the layers
        ``acting``, or all; None: there is none for these."""
        if state is not None:
            self._on_device, self._opened_by, self._opened_for = state, method, acting
        return state

    @contextmanager
    def without_method(self) -> Iterator[None]:
        """Within the block no decode method knows anything; afterwards all is known again, on a device too, and the
        states of the model's own layers are what they were."""
        length = self.kv.length
        own = None if self.kept is None else self.kept.save(length)
        held = self._states, self._on_device, self._opened_by, self._opened_for, self._hosted
        stands, self._hosted = self.stands, None
        self.states = [None] * self.kv.readers
        try:
            yield
        finally:
            self._states, self._on_device, self._opened_by, self._opened_for, self._hosted = held
            self.stands = stands
            if self.kept is not None:
                self.kept.put_back(length, own)

    @property
    def has_state(self) -> bool:
        """Whether a decode method knows anything."""
        for state in self._states:  # asked in every step: a generator would take ten times as long
            if state is not None:
                return True
        return self._hosted is not None and self._hosted.has_state

    def knows_of(self, layers: Iterable[int] | None) -> bool:
        """Whether a decode method knows anything of ``layers``, or of any."""
        if layers is None or self._hosted is not None:
            return self.has_state
        return any(self._states[layer] is not None for layer in layers)

    def gone_within(self, layers: Sequence[int] | None) -> bool:
        """Whether ``layers``, or all, have all keys that earlier turns evicted."""
        return layers is None or all(one is None or layer in layers for layer, one in enumerate(self.gone))

    @property
    def has_gone(self) -> bool:
        """Whether earlier turns evicted keys."""
        for gone in self.gone:  # noqa: SIM110  (as above)
            if gone is not None:
                return True
        return False

    @property
    def evicts(self) -> bool:
        """Whether keys were evicted, or may be."""
        return any(isinstance(state, Evicting) for state in self._states) or self.has_gone

    @property
    def is_learning(self) -> bool:
        """Whether a prefill under way has left something that its end needs."""
        return any(kept is not None for kept in (*self.tails, *self.watched))

    @property
    def knows(self) -> bool:
        """Whether a method has left anything here, decoding or in a prefill."""
        return self.has_state or self.evicts or self.is_learning

    def begin_step(self, start: int, decodes: bool) -> None:
        """Rows from ``start`` on are about to be computed, and learnt from. SaccadeError where states were built from
        more or fewer tokens than come before them."""
        if self.stands != start:
            raise SaccadeError(f"states that were built from {self.stands} tokens cannot go on at token {start}")
        if debug.ON and decodes:
            self._check(start)
        self.stands = None

    def end_step(self) -> None:
        """The step ended well: every layer has stored its rows, and learnt from them."""
        self.stands = self.kv.length

    def _check(self, length: int) -> None:
        """SaccadeError where a layer's state on the host, one that counts, has learnt from more than ``length``
        tokens."""
        for layer, state in enumerate(self._states if self._on_device is None and self._hosted is None else ()):
            learnt = state.learnt() if isinstance(state, MethodState) else None
            if learnt is not None and learnt > length:
                raise SaccadeError(f"the state of layer {layer} has learnt from {learnt} of {length} tokens")

    def fork(self, length: int | None, mark: TurnMark | None) -> SequenceMemory:
        """A copy that shares its blocks and goes its own way from ``mark``; with ``length``, of the keys and values of
        so many tokens. CapacityError where there is no block for a copy of the last, partly filled one."""
        if length is not None:
            made = SequenceMemory(self.kv.pool)
            made.kv, made.stands, made.mark = self.kv.fork(length), length, mark
            made.kept = None if self.kept is None else self.kept.fork(length)
            return made
        self.states  # noqa: B018  (back on the host, where it can be copied)
        made = copy.copy(self)  # which does not live on the host
        made.kv = self.kv.fork()
        made.kept = None if self.kept is None else self.kept.fork()
        for name in ("states", "tails", "gone", "watched"):
            setattr(made, name, fork(getattr(self, name)))
        made.history, made.mark = StateHistory(), mark
        made.carried = made.weighed = None
        return made

    def begin_turn(self, reached: int, keeps: bool) -> None:
        """Mark where a turn begins, after ``reached`` tokens; ``keeps``: with the states that there are."""
        self.mark = TurnMark(reached, list(self.states), list(self.gone)) if keeps else TurnMark(reached)

    def begin_drafts(self, carried: Carried | None) -> None:
        """Go on with copies of the states, and what is ``carried``, until drafted rows are cut off."""
        self._aside, self.carried = self.states, carried
        if self.kept is not None:
            self.kept.set_aside(self.kv.length)
        if any(state is not None for state in self._aside):
            self.states = [snapshot(bare(state)) for state in self._aside]

    def truncate(self, length: int, cut: Cut, stored: int, learns: bool, holds: bool) -> bool:
        """See ``Memories.truncate``. False, with some states undone, where everything has to go."""
        if cut is Cut.BLOCKS:
            self.kv.truncate(min(length, self.kv.length))
            return True
        if cut is Cut.REJECTED:
            self.states = self.history.rollback(length, self.kv.readers)
        elif cut is Cut.DRAFTED:
            self.states, self.carried, self._aside = self._aside, None, []
        elif cut is Cut.FORGOTTEN:
            self.forget_method()
            self.mark = None
        elif cut is Cut.RESUMED:
            self.forget_method()
            self.mark = self.mark and TurnMark(self.mark.reached)
        elif cut is Cut.BROKEN:
            if self.stands != stored and ((learns and self.has_state) or self.evicts or self.is_learning):
                return False  # a state may have seen the step already; it is built again with the keys
            self.history.clear()
        elif cut is Cut.TURN and not self._go_back(length, stored):
            return False
        self.cut(min(length, stored) if cut is Cut.TURN else length, holds)
        return True

    def _go_back(self, length: int, stored: int) -> bool:
        """Undo what rows from ``length`` on have evicted or left half done, and what a broken step has: from the turn's
        beginning if the states of that are marked. False where that takes computing everything again."""
        torn, mark = self.stands != stored, self.mark
        if not torn and not (stored > length or (stored == length and self.is_learning)):
            return True
        evicting = [state for state in self.states if isinstance(state, Evicting)]
        broken = self.is_learning or (torn and self.knows)
        known = max((gone.shape[1] for gone in self.gone if gone is not None), default=0)
        self.watched, self.tails = [None] * self.kv.readers, [None] * self.kv.readers
        back = mark is not None and mark.reached == length
        if mark is not None and back and mark.states:
            self.states, self.gone = list(mark.states), list(mark.gone)
            return True
        lost = back and self.has_state  # those of the turn before, unless marked
        return not (lost or length < known or broken) and all(state.holds(length) for state in evicting)

    def cut(self, length: int, holds: bool = False) -> None:
        """Forget the keys and values from ``length`` on, with or without their blocks (SequenceKV.truncate), of which
        no state knows, or none that is used again."""
        self.kv.truncate(length, holds)
        self.stands = length
        if self.kept is not None:
            self.kept.truncate(length)

    def forget_method(self) -> None:
        """Drop all that decode methods know."""
        layers = self.kv.readers
        self.states, self.tails = [None] * layers, [None] * layers
        self.gone, self.watched = [None] * layers, [None] * layers
        self.history.clear()

    def drop(self) -> None:
        """Give all blocks back and forget everything."""
        self.weighed = None
        self.kv.free()
        if self.kept is not None:
            self.kept.truncate(0)
        self.forget_method()
        self.stands = 0
        self.mark = self.mark and TurnMark(self.mark.reached)
