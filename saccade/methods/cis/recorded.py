"""CIS in recorded steps: anchors at addresses that stay, a place for each step of a block (triton_one_launch.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from saccade.methods.cis.anchors import PARTS, Anchors
from saccade.methods.device_state import DeviceState, Opening
from saccade.selection.forms import Known, PlanSpec, bucket
from saccade.selection.readings import OwnReading

if TYPE_CHECKING:
    from saccade.methods.cis.method import CIS, CISState

AHEAD = 256  # keys that room is made for at a time, where lists grow with the context
MOST_STEPS = 256  # of a block; a power of two


class Words(NamedTuple):
    """A row's int64 words: numbers, then the addresses of a layer's anchors. ``begins``: the position from which steps
    are counted; ``k``: 0 where it is a share; ``best``: -1 for a third of k; ``follow``: -1 for none."""

    begins: int
    steps: int
    k: int
    sinks: int
    local: int
    reach: int
    best: int
    follow: int
    directions: int
    has: int
    counts: int
    keys: int
    positions: int
    moving: int
    capacity: int
    most: int


class Reals(NamedTuple):
    """A row's float64 reals; ``k``: keys, or below 1 their share."""

    tau: float
    k: float


def reference_alone(method: CIS) -> str | None:
    """Which of the paper's other values keeps ``method`` to the torch reference; None where none does."""
    if method.by != "query":
        return f"by={method.by} compares what only the host has"
    if method.chains:
        return "anchors=any lets queries pass on what they share, which only the reference notes"
    return None if method.cover_gap else "cover_gap=false leaves keys unread that all others read"


@dataclass(frozen=True)
class SharedKeys(OwnReading["CIS"]):
    """What ``CIS`` reads, at most ``room`` keys for each query head; 0: any number. ``counted``: the caller counts
    the anchors that queries were held against; else every step of a block has one."""

    windows = True

    room: int
    counted: bool = False

    @classmethod
    def of(cls, method: CIS) -> SharedKeys:
        room = 0
        if method.k >= 1:
            reach = method.follow or 0
            capacity, most = method.room(2**30)
            moved = most * (2 * reach + 1)
            room = bucket(max(int(method.k), capacity + moved + method.s) + method.sinks + method.local)
        return cls(room if room < 2**16 else 0, method=method)

    @property
    def on_host(self) -> SharedKeys:
        return replace(self, counted=True)

    def why_not(self, spec: PlanSpec) -> str | None:
        if (reason := reference_alone(self.method)) is not None:
            return reason
        if self.method.s > MOST_STEPS:
            return f"recorded steps share within up to {MOST_STEPS} steps, not s={self.method.s}"
        return "recorded steps share by query heads, not unit=kv_head" if self.method.unit == "kv_head" else None

    def cost(self, length: int, step: int = 0) -> Known:
        method = self.method
        if length <= method.sinks + method.budget(length) + method.local:
            return Known("dense", 0, 0)
        if self.counted:
            return Known("tokens", 0, 0, searchable=True, chooses=True)
        place = (step if method.align == "step" else length - 1) % method.s
        return Known("tokens", 0, place, searchable=True, chooses=True)

    def read(self, rows: Any) -> Any:
        from saccade.methods.cis import triton_one_launch
        from saccade.methods.cis.triton_keeping import list_and_keep
        from saccade.ops.triton.batch import KeyLists
        from saccade.ops.triton.batched_lists import new_lists
        from saccade.ops.triton.batched_rows import LayerRead

        room = self.room or rows.pages.longest
        # Who watches wants lists that stay, and to time attention by itself.
        fused = rows.watch is None and triton_one_launch.fuses(rows)
        counts, indices = triton_one_launch.kept_lists(rows, room) if fused else new_lists(rows, rows.heads, room)
        lists = KeyLists(None, counts, indices, rows.heads, 1, indices.shape[1])
        chosen = triton_one_launch.choose(rows, counts, indices, attends=fused)
        if not chosen.done:
            list_and_keep(rows, chosen.searching, chosen.bounds, counts, indices, chosen.scores)
        out, lse = chosen.out, chosen.lse
        if out is None or lse is None:
            out, lse = rows.attend(lists)
        return LayerRead(out, lse, lists, None, chosen.scored, chosen.searches)


class RecordedAnchors(DeviceState):
    """Of ``CISState``."""

    def __init__(self, opening: Opening, method: CIS) -> None:
        super().__init__(opening)
        self._method, self._turn, self._device = method, opening.turn, opening.device
        self._begins = 0 if method.align == "position" else opening.turn
        self._fit(opening.length)
        block, shape = self._block(opening.length), (opening.spec.heads, opening.kv.pool.format.head_dim)
        self._layers = [self._opened(state.anchors if state.block == block else None, *shape) for state in self.states]

    def words(self, layer: int) -> Sequence[int]:
        method, own = self._method, self._layers[layer]
        return Words(
            begins=self._begins,
            steps=method.s,
            k=int(method.k) if method.k >= 1 else 0,
            sinks=method.sinks,
            local=method.local,
            reach=method.r,
            best=-1 if method.m is None else method.m,
            follow=-1 if method.follow is None else method.follow,
            capacity=own.capacity,
            most=own.most,
            **{name: getattr(own, name).data_ptr() for name in PARTS},
        )

    def reals(self, layer: int) -> Sequence[float]:
        return Reals(tau=self._method.tau, k=self._method.k)

    def grow(self, length: int) -> None:
        self._fit(length)
        for own in self._layers:
            own.widen(self._capacity, self._most)

    @torch.inference_mode()
    def settle(self, length: int) -> list[Any]:
        if length <= self._turn:
            return self.states
        block, place = self._block(length), (length - 1 - self._begins) % self._method.s
        return [self._settled(state, own, block, place) for state, own in zip(self.states, self._layers)]

    def _fit(self, length: int) -> None:
        """Make plans for rows of up to ``room`` keys."""
        self.room = length + AHEAD
        self._capacity, self._most = self._method.room(self.room)

    def _block(self, length: int) -> int:
        return (length - 1 - self._begins) // self._method.s

    def _opened(self, anchors: Anchors | None, units: int, channels: int) -> Anchors:
        """Anchors with a place for each step of a block, of which ``anchors`` take the first."""
        one = Anchors.empty(units, channels, self._capacity, self._most, self._device)
        own = _joined([part.repeat_interleave(self._method.s, 0) for part in _parts(one)])
        if anchors is not None and anchors.of(units, channels):
            count = anchors.count
            for mine, theirs in zip(_parts(own), _parts(anchors)):
                if theirs.dim() == 3:
                    width = min(mine.shape[2], theirs.shape[2])
                    mine[:count, :, :width] = theirs[:count, :, :width]
                else:
                    mine[:count] = theirs[:count]
            own.has &= own.counts >= 0  # who passes on, by anchors=any, has no list for kernels to share
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
