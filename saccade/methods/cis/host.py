"""CIS in decode steps of many rows on a CPU: what csrc/sharing_row.h is told of each layer's anchors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from saccade.methods.cis.anchors import Anchors
from saccade.methods.cis.host_passing import Passing
from saccade.methods.cis.recorded import AHEAD
from saccade.methods.device_state import Opening
from saccade.methods.host_state import HostState
from saccade.ops.cpu_readings import Shared
from saccade.ops.cpu_structs import address, native
from saccade.selection import Cone

if TYPE_CHECKING:
    from saccade.methods.base import WindowMethod
    from saccade.methods.cis.method import CIS, CISState


class HostAnchors(HostState):
    """Of ``CISState``, whose anchors the kernels write to where they are."""

    windows = True

    def __init__(self, opening: Opening, method: CIS) -> None:
        self._method, self._turn = method, opening.turn
        heads, layers = opening.spec.heads, opening.spec.layers
        units = heads if method.unit == "q_head" else opening.spec.kv_heads
        self._channels = heads * opening.kv.pool.format.head_dim // units
        self._units, self._block = units, opening.states[0].block
        known = [state.anchors for state in opening.states]
        self._anchors = [
            Anchors.empty(units, self._channels) if own is None or not own.of(units, self._channels) else own
            for own in known
        ]
        self._counts = torch.tensor([one.count for one in self._anchors], device="cpu")
        self._window = torch.zeros(layers, 2, dtype=torch.int64, device="cpu")
        self._cones: tuple[WindowMethod | None, list[Cone | None]] = None, [None] * layers
        self._chosen_for = 0  # keys that the row of the step at hand sees, if it leaves some out
        self._passing: Passing | None = None
        self._copies = method.chains or any(own.passes_on() for own in self._anchors)
        self._make_room(opening.length)
        if self._copies:
            self._passing = Passing(self._anchors, method.local, method.cover_gap)
            self._counts[:] = self._anchors[0].count
        super().__init__(opening)

    @classmethod
    def serves(cls, opening: Opening) -> bool:
        """Whether every layer knows its anchors, all of one block of steps."""
        states = opening.states
        known = all(state is not None and state.block == states[0].block for state in states)
        return known and opening.kv.pool.format.head_dim % 16 == 0

    def lay_out(self) -> None:
        self.layers = [
            native.SharedLayer(
                tally=self.tally[layer].data_ptr(),
                directions=address(own.directions),
                has=address(own.has),
                counts=address(own.counts),
                keys=address(own.keys),
                moving=address(own.moving),
                positions=address(own.positions),
                count=self._counts[layer].data_ptr(),
                window=self._window[layer].data_ptr(),
                channels=self._channels,
                capacity=own.capacity,
                most=own.most,
                room=len(own.positions),
            )
            for layer, own in enumerate(self._anchors)
        ]

    def reads(self, length: int, window: WindowMethod | None = None) -> Shared | None:
        method, best = self._method, self._method.budget(length)
        if method.too_short(length):
            return None
        self._chosen_for = length
        self._begin(length)
        self._look_through(window, length)
        keys = native.SharedKeys(
            units=self._units,
            sinks=method.sinks,
            local=method.local,
            best=best,
            tau=method.tau,
            cover_gap=method.cover_gap,
            follow=method.follow or 0,
            reach=method.r,
            spread=method.spread(length),
        )
        return Shared(keys, self.layers)

    @torch.inference_mode()
    def grow(self, length: int) -> None:
        self._make_room(length)
        self.lay_out()

    @torch.inference_mode()
    def done(self, length: int) -> None:
        if self._method.chains and self._passing is not None and self._chosen_for == length:
            at = self._anchors[0].count
            self._passing.add(at, length - 1, self._method.tau, self._counts > at)
            self._counts[:] = at + 1
            self._take_counts()
        super().done(length)

    @torch.inference_mode()
    def settle(self, length: int) -> list[CISState]:
        if not self._method.chains:
            self._take_counts()
        for state, own in zip(self.states, self._anchors):
            state.block, state.anchors, state.fresh = self._block, own, None
            own.first = int(own.positions[0]) if own.count else own.first
        if self._passing is not None:
            self._passing.settle()
        return self.states

    def _begin(self, length: int) -> None:
        """Begin a step's block, if it is another one; make room for its anchors."""
        step = length - 1 - (self._turn if self._method.align == "step" else 0)
        block = step // self._method.s
        if block != self._block:
            self._block = block
            self._counts.zero_()
            self._take_counts()
            if self._passing is not None:
                self._passing.forget()
        elif int(self._counts.max()) >= min(len(own.positions) for own in self._anchors):
            with torch.inference_mode():
                self._take_counts()
                self._reserve()
            self.lay_out()

    def _look_through(self, window: WindowMethod | None, length: int) -> None:
        """Note what a window hides from the last of ``length`` keys in each layer."""
        if self._cones[0] is not window:
            layers = len(self._anchors)
            self._cones = window, [None if window is None else window.at(layer, layers) for layer in range(layers)]
            self._window.zero_()
        if window is not None:
            seen = [(0, 0) if cone is None else (cone.sink_keys, cone.start(length - 1)) for cone in self._cones[1]]
            self._window.copy_(torch.tensor(seen, device="cpu"))

    def _take_counts(self) -> None:
        for own, count in zip(self._anchors, self._counts.tolist()):
            own.count = count

    def _make_room(self, length: int) -> None:
        self.room = length + AHEAD
        capacity, most = self._method.room(self.room)
        if self._copies:  # they take in what leaves the window within a block
            capacity = min(self.room, capacity + self._method.s)
        for own in self._anchors:
            own.widen(capacity, most)
        self._reserve()

    def _reserve(self) -> None:
        for own in self._anchors:
            own.reserve()
        if self._passing is not None:
            self._passing.stack()
