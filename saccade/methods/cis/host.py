"""CIS in decode steps of many rows on a CPU: what csrc/sharing_row.h is told of each layer's anchors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from saccade.methods.cis.anchors import Anchors
from saccade.methods.cis.recorded import AHEAD, reference_alone
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
        self._make_room(opening.length)
        super().__init__(opening)

    @classmethod
    def why_not(cls, opening: Opening, method: CIS) -> str | None:
        """Why the kernels do not serve ``method`` from here on; None where they do."""
        if (reason := reference_alone(method)) is not None:
            return reason
        states, head_dim = opening.states, opening.kv.pool.format.head_dim
        if head_dim % 16:
            return f"they read heads of a multiple of 16 channels, not of {head_dim}"
        if any(state is None or state.block != states[0].block for state in states):
            return "layers know anchors of several blocks of steps"
        passing = any(state.anchors is not None and state.anchors.passes_on() for state in states)
        return "some queries have passed on what they shared (anchors=any)" if passing else None

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
        step = length - 1 - (self._turn if method.align == "step" else 0)
        if (block := step // method.s) != self._block:
            self._block = block
            self._counts.zero_()
            self._take_counts()
        elif int(self._counts.max()) >= min(len(own.positions) for own in self._anchors):
            with torch.inference_mode():
                self._take_counts()
                for own in self._anchors:
                    own.reserve()
            self.lay_out()
        self._look_through(window, length)
        keys = native.SharedKeys(
            units=self._units,
            sinks=method.sinks,
            local=method.local,
            best=best,
            tau=method.tau,
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
    def settle(self, length: int) -> list[CISState]:
        self._take_counts()
        for state, own in zip(self.states, self._anchors):
            state.block, state.anchors, state.fresh = self._block, own, None
            own.first = int(own.positions[0]) if own.count else own.first
        return self.states

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
        for own in self._anchors:
            own.widen(capacity, most)
            own.reserve()
