"""CIS in recorded steps: anchors at addresses that stay, a place for each step of a block (triton_recorded.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saccade.methods.cis.anchors import PARTS, Anchors
from saccade.methods.device_state import DeviceState, Opening
from saccade.selection.plan import Known, OwnReading, PlanSpec, bucket

if TYPE_CHECKING:
    from saccade.methods.cis.method import CIS, CISState

AHEAD = 256  # keys that room is made for at a time, where lists grow with the context
MOST_STEPS = 256  # of a block; a power of two


@dataclass(frozen=True)
class SharedKeys(OwnReading):
    """What ``CIS`` reads, at most ``room`` keys for each of ``units``; 0: any number. ``counted``: whoever runs it
    counts the anchors that queries were held against; else every step of a block has one."""

    windows = True

    units: int
    room: int
    method: CIS | None = None
    counted: bool = False

    @classmethod
    def of(cls, method: CIS, spec: PlanSpec) -> SharedKeys:
        room = 0
        if method.k >= 1:
            reach = method.follow or 0
            capacity, most = method.room(2**30)
            moved = most * (2 * reach + 1)
            room = bucket(max(int(method.k), capacity + moved + method.s) + method.sinks + method.local)
        return cls(spec.heads if method.unit == "q_head" else spec.kv_heads, room if room < 2**16 else 0, method)

    @property
    def form(self) -> SharedKeys:
        return replace(self, method=None)

    def why_not(self, spec: PlanSpec) -> str | None:
        assert self.method is not None
        if self.method.s > MOST_STEPS:
            return f"recorded steps share within up to {MOST_STEPS} steps, not s={self.method.s}"
        return None

    def cost(self, length: int, step: int = 0) -> Known:
        method = self.method
        assert method is not None
        if length <= method.sinks + method.budget(length) + method.local:
            return Known("dense", 0, 0)
        if self.counted:
            return Known("tokens", 0, 0, searchable=True, chooses=True)
        place = (step if method.align == "step" else length - 1) % method.s
        return Known("tokens", 0, place, searchable=True, chooses=True)

    def read(self, rows: Any) -> Any:
        from saccade.methods.cis import triton_one_launch, triton_recorded
        from saccade.methods.cis.triton_keeping import keep, list_and_keep
        from saccade.ops.triton.batched_lists import new_lists
        from saccade.ops.triton.batched_rows import LayerRead
        from saccade.ops.triton.batched_tokens import score_keys
        from saccade.ops.triton.batched_weights import weigh_lists
        from saccade.ops.triton.decode import KeyLists

        units, room = self.units, self.room or rows.pages.longest
        # Who watches wants lists that stay, and to time attention by itself.
        fused = units == rows.heads and rows.watch is None and triton_one_launch.fuses(rows)
        counts, indices = triton_one_launch.kept_lists(rows, room) if fused else new_lists(rows, units, room)
        lists = KeyLists(None, counts, indices, units, 1, indices.shape[1])
        if units == rows.heads:
            if fused:
                chosen = triton_one_launch.choose(rows, counts, indices, attends=True)
                assert chosen.out is not None
                assert chosen.lse is not None
                return LayerRead(chosen.out, chosen.lse, lists, None, chosen.scored, chosen.searches)
            chosen = triton_one_launch.choose(rows, counts, indices)
            if not chosen.done:
                list_and_keep(rows, chosen.searching, chosen.bounds, counts, indices, chosen.scores)
            out, lse = rows.attend(lists)
            return LayerRead(out, lse, lists, None, chosen.scored, chosen.searches)
        found = triton_recorded.resemble(rows, units)
        scores = score_keys(rows, units, found.hidden, found.searching)
        triton_recorded.lists_of(rows, units, found, scores, counts, indices)
        out, lse = rows.attend(lists)
        weights = torch.empty(indices.shape, dtype=torch.float32, device=indices.device)
        weigh_lists(rows, lists, lse, weights, active=found.searching)
        where = found.searching, found.bounds, counts, indices
        return LayerRead(out, lse, lists, None, *keep(rows, units, *where, weights))


class RecordedAnchors(DeviceState):
    """Of ``CISState``."""

    def __init__(self, opening: Opening, method: CIS) -> None:
        super().__init__(opening)
        self._method, self._turn, self._device = method, opening.turn, opening.device
        heads, kv_heads = opening.spec.heads, opening.spec.kv_heads
        self._units = heads if method.unit == "q_head" else kv_heads
        channels = heads * opening.kv.pool.format.head_dim // self._units
        self._fit(opening.length)
        block = self._block(opening.length)
        self._layers = [
            self._opened(state.anchors if state.block == block else None, channels) for state in self.states
        ]

    def words(self, layer: int) -> Sequence[int]:
        method, own = self._method, self._layers[layer]
        return (
            self._turn, method.s, method.align == "position", int(method.k) if method.k >= 1 else 0, method.sinks,
            method.local, method.r, -1 if method.m is None else method.m,
            -1 if method.follow is None else method.follow, method.cover_gap, method.chains,
            *(one.data_ptr() for one in _parts(own)), own.capacity, own.most,
        )  # fmt: skip

    def reals(self, layer: int) -> Sequence[float]:
        return self._method.tau, self._method.k

    def grow(self, length: int) -> None:
        self._fit(length)
        for own in self._layers:
            own.widen(self._capacity, self._most)

    @torch.inference_mode()
    def settle(self, length: int) -> list[Any]:
        if length <= self._turn:
            return self.states
        block, place = self._block(length), self._place(length)
        return [self._settled(state, own, block, place) for state, own in zip(self.states, self._layers)]

    def _fit(self, length: int) -> None:
        """Make plans for rows of up to ``room`` keys."""
        self.room = length + AHEAD
        self._capacity, self._most = self._method.room(self.room)

    def _step(self, length: int) -> int:
        return length - 1 - (self._turn if self._method.align == "step" else 0)

    def _block(self, length: int) -> int:
        return self._step(length) // self._method.s

    def _place(self, length: int) -> int:
        return self._step(length) % self._method.s

    def _opened(self, anchors: Anchors | None, channels: int) -> Anchors:
        """Anchors with a place for each step of a block, of which ``anchors`` take the first."""
        one = Anchors.empty(self._units, channels, self._capacity, self._most, self._device)
        own = _joined([part.repeat_interleave(self._method.s, 0) for part in _parts(one)])
        if anchors is not None and anchors.of(self._units, channels):
            count = anchors.count
            for mine, theirs in zip(_parts(own), _parts(anchors)):
                if theirs.dim() == 3:
                    width = min(mine.shape[2], theirs.shape[2])
                    mine[:count, :, :width] = theirs[:count, :, :width]
                else:
                    mine[:count] = theirs[:count]
        return own

    def _settled(self, state: CISState, own: Anchors, block: int, place: int) -> CISState:
        count = place + 1
        left = _joined([part.clone() for part in _parts(own)])
        left.count, left.first = count, int(own.positions[:count].min())
        return type(state)(block, left, None)


def _joined(parts: Sequence[Tensor]) -> Anchors:
    directions, has, counts, keys, positions, moving = parts
    return Anchors(directions, has, counts, keys, positions, moving)


def _parts(anchors: Anchors) -> tuple[Tensor, ...]:
    """As the kernels' words name them."""
    return tuple(getattr(anchors, name) for name in PARTS)
