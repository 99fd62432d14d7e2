"""LFPS in recorded steps: tables at addresses that stay, and beside them what a step has learnt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saccade.methods.device_state import DeviceState, Opening
from saccade.methods.lfps.tables import GATES, learnt
from saccade.selection.forms import Known, PlanSpec, Room, Summarized
from saccade.selection.readings import OwnReading

if TYPE_CHECKING:
    from saccade.methods.lfps.method import LFPS, LFPSState

AHEAD = 1024  # keys that room is made for at a time
MOST_PROBES = 128
BYPASSES = ("sink", "sink_mean", "mean")


@dataclass(frozen=True)
class ForeseenKeys(OwnReading):
    """What ``LFPS`` reads, as many keys as ``room`` says for each of ``units``. ``size``: of the blocks whose
    means name candidates, 0 where none do. ``running``: whether the means run."""

    units: int
    room: Room
    size: int
    running: bool = False
    method: LFPS | None = None

    @classmethod
    def of(cls, method: LFPS, spec: PlanSpec) -> ForeseenKeys:
        units = spec.heads if method.unit == "q_head" else spec.kv_heads
        room = Room.of(method.k, method.sinks + method.local + (method.least if method.k < 1 else 0))
        return cls(units, room, method.block_size if method.blocks else 0, method.running_means, method)

    @property
    def form(self) -> ForeseenKeys:
        return replace(self, method=None)

    @property
    def blocks(self) -> Summarized | None:
        return Summarized(self.size, "stored_mean") if self.size else None

    def why_not(self, spec: PlanSpec) -> str | None:
        assert self.method is not None
        if self.method.probes > MOST_PROBES:
            return f"the kernels take up to {MOST_PROBES} probes, not {self.method.probes}"
        return None

    def cost(self, length: int, step: int = 0) -> Known:
        method = self.method
        assert method is not None
        first = min(method.sinks, length)
        keys = length - first
        if keys - (not method.read_local) <= method.budget(keys):
            return Known("dense", 0, 0)
        bypasses = method.epsilon < 1 and first > 0
        local = min(method.local if method.read_local else 1, keys)
        exact = (first + method.local) * bypasses + local + first
        estimated = int(bypasses)
        if method.a is None and method.gate == "off":  # every key is a candidate: nothing is left to estimate
            return Known("tokens", 0, estimated, exact, chooses=True)
        if method.rest is not None:
            exact += min(method.probes, keys - local)
        if method.blocks:
            estimated += length // method.block_size
        return Known("tokens", 0, estimated, exact, chooses=True)

    def read(self, rows: Any) -> Any:
        from saccade.methods.lfps.triton_row_blocks import best_blocks
        from saccade.methods.lfps.triton_row_candidates import candidates, scan
        from saccade.methods.lfps.triton_row_choice import choose, read_values
        from saccade.methods.lfps.triton_row_learning import move_means, take_in
        from saccade.methods.lfps.triton_row_rest import bypasses, join_rest
        from saccade.ops.triton.batched_rows import LayerRead
        from saccade.ops.triton.batched_tokens import score_heads

        units = self.units
        seen = scan(rows, units, take_in(rows, units))
        if self.running:
            move_means(rows)
        idle, instead = bypasses(rows)
        blocks = best_blocks(rows, units, self.size) if self.size else None
        found = candidates(rows, units, seen, idle, blocks, self.size)
        logits, ranks = score_heads(rows, units, lists=found.lists, idle=idle)
        chosen = choose(rows, units, logits, ranks, found, idle, self.room.upto(rows.pages.longest))
        parts, lse = read_values(rows, units, chosen, idle)
        out, lse = join_rest(rows, parts, lse, found.marks, found.listed, idle, instead, units)
        return LayerRead(out, lse, chosen.lists, None, found.scored)


@dataclass(eq=False)
class _Layer:
    """Beside the tables: see triton_row_words.py."""

    pending: Tensor
    gains: Tensor
    marks: Tensor
    counted: Tensor


class RecordedTables(DeviceState):
    """Of ``LFPSState``, whose tables and means the kernels write to where they are."""

    def __init__(self, opening: Opening, method: LFPS) -> None:
        super().__init__(opening)
        self._method, self._device = method, opening.device
        self._kv_heads = opening.spec.kv_heads
        self.room = opening.length + AHEAD
        self._layers = [self._opened(state) for state in self.states]
        self._spread = [state.spread.float().contiguous() for state in self.states]

    def words(self, layer: int) -> Sequence[int]:
        method, state, own = self._method, self.states[layer], self._layers[layer]
        tables = state.tables
        tables.check()
        tensors = (
            tables.vertical, tables.slash, tables.sums, tables.scale, tables.row, state.mean_key, state.mean_value,
            self._spread[layer], own.pending, own.gains, own.marks, own.counted,
        )  # fmt: skip
        probes = 0 if method.rest is None or (method.a is None and method.gate == "off") else method.probes
        return (
            tables.first, method.local if method.read_local else 1, int(method.k) if method.k >= 1 else 0,
            method.least, method.before, method.after, method.blocks, probes, BYPASSES.index(method.bypass),
            method.slash_shift_on_read + 2 * method.bypass_shift + 4 * method.read_local,
            GATES.index(method.gate), method.running_means,
            tables.capacity, own.pending.shape[1], *(one.data_ptr() for one in tensors), method.local,
        )  # fmt: skip

    def reals(self, layer: int) -> Sequence[float]:
        method = self._method
        return method.k, method.r, -1.0 if method.a is None else method.a, method.epsilon

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
        marks = torch.zeros(tables.units, 4, dtype=torch.int64, device=device)
        marks[:, 2] = -1
        return _Layer(
            torch.zeros(tables.units, room, dtype=torch.int32, device=device),
            torch.zeros(tables.units, room, device=device),
            marks,
            torch.full((self._kv_heads,), state.counted, dtype=torch.int64, device=device),
        )

    def _settle(self, state: LFPSState, own: _Layer, length: int) -> None:
        """Take in what the last step has left."""
        tables = state.tables
        state.seen, state.idle, state.counted = length - 1, None, int(own.counted[0])
        tables.row.fill_(length - 1)
        for unit, (pending, done, count, stays) in enumerate(own.marks.tolist()):
            if pending == length and done < pending:
                if stays:
                    tables.stay(torch.arange(tables.units, device=self._device) == unit, length - tables.first)
                if count >= 0:
                    learnt(tables, unit, own.pending[unit, :count].long(), own.gains[unit, :count], self._method.r)
        tables.refresh(slice(None))
