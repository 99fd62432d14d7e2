"""What a worker keeps of a sequence between steps: keys and values, and what its decode method knows of each layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from saccade.engine.carried import Carried, Weighed
from saccade.kv.blocks import BlockManager
from saccade.kv.sequence import SequenceKV
from saccade.methods.base import Evicting, Method
from saccade.methods.device_state import DeviceState
from saccade.methods.history import StateHistory
from saccade.methods.host_state import HostState
from saccade.methods.state import fork

if TYPE_CHECKING:
    from saccade.engine.hosted_memory import HostedMemory


class SequenceMemory:
    """One sequence's ``kv``, and for each layer: ``states``, the decode method's; ``tails``, the last prefill queries
    that its ``begin`` will see; ``gone``, the keys that earlier turns evicted (see methods.Evicting); ``watched``, what
    it noted of the running prefill. ``history``: within a step with drafts, the states after each of its rows.
    ``carried``: while drafts are made, what their rows read besides.

    ``hosted``: the memory that stands for this one while the CPU attends its keys in host memory. While recorded steps
    decode, a device state has the method's knowledge (:meth:`on_device`); who asks for ``states``
    gets them back on the host, and the next recorded step opens another. ``apart``: whether somebody else attends the
    first keys."""

    apart: ClassVar[bool] = False

    def __init__(self, pool: BlockManager) -> None:
        self.kv = SequenceKV(pool)
        self._states: list[Any] = []
        self._on_device: DeviceState | None = None
        self._opened_by: Method | None = None
        self._hosted: HostedMemory | None = None
        self.tails: list[Tensor | None] = []
        self.gone: list[Tensor | None] = []
        self.watched: list[Any] = []
        self.carried: Carried | None = None
        self.weighed: Weighed | None = None  # room for what verifications leave
        self.history = StateHistory()
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
    def hosted(self) -> HostedMemory | None:
        """See the class; whoever sets it has moved all that is known there."""
        return self._hosted

    @hosted.setter
    def hosted(self, hosted: HostedMemory) -> None:
        self._hosted, self._states, self._on_device = hosted, [None] * self.kv.layers, None

    def on_device(self, method: Method, opened: Callable[[list[Any]], DeviceState]) -> DeviceState:
        """The device state of ``method``; ``opened`` makes one of the states of all layers where there is none."""
        held = self._on_device
        if held is None or isinstance(held, HostState) or (self._opened_by is not method and self._opened_by != method):
            held, self._opened_by = opened(self.states), method
            self._on_device = held
        return held

    def on_host(self, method: Method, opened: Callable[[list[Any]], HostState | None]) -> HostState | None:
        """The host state of ``method``, likewise; None where it has none for these states."""
        held = self._on_device
        if isinstance(held, HostState) and (self._opened_by is method or self._opened_by == method):
            return held
        state = opened(self.states)
        if state is not None:
            self._on_device, self._opened_by = state, method
        return state

    @contextmanager
    def without_method(self) -> Iterator[None]:
        """Within the block no decode method knows anything; afterwards all is known again, on a device too."""
        held = self._states, self._on_device, self._opened_by, self._hosted
        self._hosted = None
        self.states = [None] * self.kv.layers
        try:
            yield
        finally:
            self._states, self._on_device, self._opened_by, self._hosted = held

    @property
    def has_state(self) -> bool:
        """Whether a decode method knows anything."""
        for state in self._states:  # asked in every step: a generator would take ten times as long
            if state is not None:
                return True
        return self._hosted is not None and self._hosted.has_state

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

    def fork(self) -> SequenceMemory:
        """A copy that shares its blocks and goes its own way. CapacityError where there is no block for a copy of the
        last, partly filled one."""
        self.states  # noqa: B018  (back on the host, where it can be copied)
        made = copy.copy(self)  # which does not live on the host
        made.kv = self.kv.fork()
        for name in ("states", "tails", "gone", "watched"):
            setattr(made, name, fork(getattr(self, name)))
        made.history = StateHistory()
        made.carried = made.weighed = None
        return made

    def take_back(self, length: int) -> None:
        """Go back to the first ``length`` tokens, which end with a row of the step with drafts that ran last."""
        self.states = self.history.rollback(length, self.kv.layers)
        self.kv.truncate(length)

    def forget_method(self) -> None:
        """Drop all that decode methods know."""
        layers = self.kv.layers
        self.states, self.tails = [None] * layers, [None] * layers
        self.gone, self.watched = [None] * layers, [None] * layers
        self.history.clear()

    def drop(self) -> None:
        """Give all blocks back and forget everything."""
        self.weighed = None
        self.kv.free()
        self.forget_method()
