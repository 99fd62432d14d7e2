"""LFPS in recorded steps: tables at addresses that stay, and beside them what a step has learnt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from saccade.methods.device_state import DeviceState, Opening
from saccade.methods.lfps.tables import learnt
from saccade.selection.forms import Known, PlanSpec, Room, Summarized
from saccade.selection.readings import OwnReading

if TYPE_CHECKING:
    from saccade.methods.lfps.method import LFPS
    from saccade.methods.lfps.state import LFPSState

AHEAD = 1024  # keys that room is made for at a time
MOST_PROBES = 128


class Words(NamedTuple):
    """A row's numbers, and addresses of what kernels find and leave (see ops/triton/state_words.py)."""

    sinks: int
    local: int  # last keys, which are forced
    k: int  # 0: a share
    least: int
    before: int
    after: int
    blocks: int
    probes: int
    capacity: int  # of the tables
    room: int  # keys that a step may learn of
    vertical: int  # float32 [units, capacity], as is slash
    slash: int
    sums: int  # float64 [units, 2, 4]
    scale: int  # float64 [units]
    mean_key: int  # float32 [kv_heads, head_dim], as is mean_value
    mean_value: int
    spread: int  # float32 [heads]
    pending: int  # int32 [units, room]: keys that the step has read
    gains: int  # float32 [units, room]: what they gain
    marks: int  # int64 [units, 3]: Marks


class Reals(NamedTuple):
    share: float  # k where it is a share
    decay: float
    a: float
    epsilon: float


class Marks(NamedTuple):
    """Of a unit: the length that what is pending belongs to; the length learnt up to; how many keys are pending, -1
    where the unit learns nothing."""

    until: int
    learnt: int
    keys: int


@dataclass(frozen=True)
class ForeseenKeys(OwnReading["LFPS"]):
    """What ``LFPS`` reads, as many keys as ``room`` says for each of ``units``. ``size``: of the blocks whose
    means name candidates, 0 where none do."""

    units: int
    room: Room
    size: int

    @classmethod
    def of(cls, method: LFPS, spec: PlanSpec) -> ForeseenKeys:
        units = spec.heads if method.unit == "q_head" else spec.kv_heads
        room = Room.of(method.k, method.sinks + method.local + (method.least if method.k < 1 else 0))
        return cls(units, room, method.block_size if method.blocks else 0, method=method)

    @property
    def blocks(self) -> Summarized | None:
        return Summarized(self.size, "stored_mean") if self.size else None

    def why_not(self, spec: PlanSpec) -> str | None:
        if self.method.probes > MOST_PROBES:
            return f"the kernels take up to {MOST_PROBES} probes, not {self.method.probes}"
        return self.method.reference_alone

    def cost(self, length: int, step: int = 0) -> Known:
        method = self.method
        first = min(method.sinks, length)
        keys = length - first
        if keys <= method.budget(keys):
            return Known("dense", 0, 0)
        bypasses = method.epsilon < 1 and first > 0
        local = min(method.local, keys)
        exact = (first + method.local) * bypasses + local + first
        estimated = int(bypasses)
        if method.rest is not None:
            exact += min(method.probes, keys - local)
        if method.blocks:
            estimated += length // method.block_size
        return Known("tokens", 0, estimated, exact, chooses=True)

    def read(self, rows: Any) -> Any:
        from saccade.methods.lfps.triton_row_begin import begin_step, look
        from saccade.methods.lfps.triton_row_candidates import candidates
        from saccade.methods.lfps.triton_row_choice import choose, read_values
        from saccade.methods.lfps.triton_row_rest import join_rest
        from saccade.ops.triton.batched_rows import LayerRead
        from saccade.ops.triton.batched_tokens import score_heads

        units = self.units
        begun = begin_step(rows, units, self.size)
        idle = begun.idle
        found = candidates(rows, units, look(rows, units, begun), idle, self.size)
        logits, ranks = score_heads(rows, units, lists=found.lists, idle=idle)
        chosen = choose(rows, units, logits, ranks, found, begun, self.room.upto(rows.pages.longest))
        parts, lse = read_values(rows, units, chosen, idle)
        out, lse = join_rest(rows, parts, lse, chosen.rest, units)
        return LayerRead(out, lse, chosen.lists, None, found.scored)


@dataclass(eq=False)
class _Layer:
    """Beside the tables, as ``Words`` says."""

    pending: Tensor
    gains: Tensor
    marks: Tensor


class RecordedTables(DeviceState):
    """Of ``LFPSState``, whose tables and means the kernels write to where they are."""

    def __init__(self, opening: Opening, method: LFPS) -> None:
        super().__init__(opening)
        self._method, self._device = method, opening.device
        self.room = opening.length + AHEAD
        self._layers = [self._opened(state) for state in self.states]
        self._spread = [state.spread.float().contiguous() for state in self.states]

    def words(self, layer: int) -> Sequence[int]:
        method, state, own = self._method, self.states[layer], self._layers[layer]
        tables = state.tables
        tables.check()
        return Words(
            sinks=tables.first,
            local=method.local,
            k=int(method.k) if method.k >= 1 else 0,
            least=method.least,
            before=method.before,
            after=method.after,
            blocks=method.blocks,
            probes=0 if method.rest is None else method.probes,
            capacity=tables.capacity,
            room=own.pending.shape[1],
            vertical=tables.vertical.data_ptr(),
            slash=tables.slash.data_ptr(),
            sums=tables.sums.data_ptr(),
            scale=tables.scale.data_ptr(),
            mean_key=state.mean_key.data_ptr(),
            mean_value=state.mean_value.data_ptr(),
            spread=self._spread[layer].data_ptr(),
            pending=own.pending.data_ptr(),
            gains=own.gains.data_ptr(),
            marks=own.marks.data_ptr(),
        )

    def reals(self, layer: int) -> Sequence[float]:
        method = self._method
        assert method.a is not None
        return Reals(share=method.k, decay=method.r, a=method.a, epsilon=method.epsilon)

    @torch.inference_mode()
    def grow(self, length: int) -> None:
        self.room = length + AHEAD
        for state, own in zip(self.states, self._layers):
            state.tables.grow(self.room - state.tables.first)
            room = self._pending_room(state.tables.first) - own.pending.shape[1]
            own.pending = torch.nn.functional.pad(own.pending, (0, max(0, room)))
            own.gains = torch.nn.functional.pad(own.gains, (0, max(0, room)))

    @torch.inference_mode()
    def settle(self, length: int) -> list[Any]:
        for state, own in zip(self.states, self._layers):
            self._settle(state, own, length)
        return self.states

    def _pending_room(self, first: int) -> int:
        """Most keys that a step learns of: as many as it reads, or all where it reads everything."""
        keys = self.room - first
        return min(self._method.budget(keys), keys) + self._method.local + first

    def _opened(self, state: LFPSState) -> _Layer:
        tables, device = state.tables, self._device
        tables.grow(self.room - tables.first)
        state.mean_key, state.mean_value = state.mean_key.contiguous(), state.mean_value.contiguous()
        room = self._pending_room(tables.first)
        marks = torch.tensor([Marks(until=0, learnt=0, keys=-1)] * tables.units, dtype=torch.int64, device="cpu").to(
            device
        )
        return _Layer(
            torch.zeros(tables.units, room, dtype=torch.int32, device=device),
            torch.zeros(tables.units, room, device=device),
            marks,
        )

    def _settle(self, state: LFPSState, own: _Layer, length: int) -> None:
        """Take in what the last step has left."""
        tables = state.tables
        state.seen, state.idle = length - 1, None
        tables.row.fill_(length - 1)
        for unit, (until, done, count) in enumerate(own.marks.tolist()):
            if until == length and done < until and count >= 0:
                learnt(tables, unit, own.pending[unit, :count].long(), own.gains[unit, :count], self._method.r)
        tables.refresh(slice(None))
