"""LoopServe's decode in recorded steps: dense steps, choosing steps and lines, whatever each row is at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saccade.methods.device_state import DeviceState, Opening
from saccade.selection.forms import Known, PlanSpec, bucket
from saccade.selection.readings import OwnReading

if TYPE_CHECKING:
    from saccade.methods.loopserve.method import LoopServe, LoopServeState


@dataclass(frozen=True)
class ChosenLines(OwnReading):
    """What ``LoopServe`` reads in decode, at most ``room`` keys for each of ``units`` once it has chosen, by the
    queries of the last ``every`` steps."""

    units: int
    every: int
    room: int
    method: LoopServe | None = None

    @classmethod
    def of(cls, method: LoopServe, spec: PlanSpec) -> ChosenLines:
        units = spec.heads if method.unit == "q_head" else spec.kv_heads
        return cls(units, method.n_d, bucket(method.budget + method.n_d + 1), method)

    @property
    def form(self) -> ChosenLines:
        return replace(self, method=None)

    def cost(self, length: int, step: int = 0) -> Known:
        method = self.method
        assert method is not None
        since = (step - method.first) % method.n_d  # of the last step that may have chosen
        last = step - since
        chose = (last >= method.first or method.at_start) and last >= 0 and length - since > method.budget
        if not chose:
            return Known("dense", 0, 0)
        return Known("tokens", 0, 0, searchable=True, chooses=since == 0)

    def read(self, rows: Any) -> Any:
        from saccade.methods.loopserve import triton_recorded as kernels
        from saccade.methods.loopserve.triton_choosing import choose_lines
        from saccade.ops.triton.batched_rows import LayerRead

        due = kernels.remember(rows)
        choose_lines(rows, self.units, self.every, due)
        lists = kernels.line_lists(rows, self.units, due, self.room)
        out, lse = rows.attend(lists)
        whole = due.chosen == 0
        pages = replace(rows.pages, lengths=torch.where(whole, rows.pages.lengths, 0))
        every, every_lse = rows.attend(None, pages)
        out = torch.where(whole[:, None, None], every, out)
        lse = torch.where(whole[:, None], every_lse, lse)
        return LayerRead(out, lse, lists, whole, due.scored, due.now.to(torch.float64) * rows.heads)


@dataclass(eq=False)
class _Layer:
    """``queries`` [n_d, heads, head_dim], each at its position modulo n_d; ``chosen`` int32 [units, budget]; ``until``
    int64 [1], 0: none yet."""

    queries: Tensor
    chosen: Tensor
    until: Tensor


class RecordedLines(DeviceState):
    """Of ``LoopServeState``."""

    def __init__(self, opening: Opening, method: LoopServe) -> None:
        super().__init__(opening)
        self._method, self._turn = method, opening.turn
        self._next = opening.length - 1  # the position of the row that comes next
        self._units = opening.spec.heads if method.unit == "q_head" else opening.spec.kv_heads
        self._layers = [self._opened(state) for state in self.states]

    def words(self, layer: int) -> Sequence[int]:
        method, own, state = self._method, self._layers[layer], self.states[layer]
        return (
            self._turn, method.first, method.n_d, method.at_start, method.budget, method.observed or 0, method.force,
            method.sinks, method.slashes, self._next - state.rows.shape[1], own.queries.data_ptr(),
            own.chosen.data_ptr(), own.until.data_ptr(),
        )  # fmt: skip

    @torch.inference_mode()
    def settle(self, length: int) -> list[Any]:
        return [self._settled(state, own, length) for state, own in zip(self.states, self._layers)]

    def _opened(self, state: LoopServeState) -> _Layer:
        heads, known, head_dim = state.rows.shape
        n_d, device = self._method.n_d, state.rows.device
        queries = state.rows.new_zeros(n_d, heads, head_dim)
        places = torch.arange(self._next - known, self._next, device=device) % n_d
        queries[places] = state.rows.transpose(0, 1)
        chosen = torch.zeros(self._units, self._method.budget, dtype=torch.int32, device=device)
        if state.chosen is not None:
            chosen.copy_(state.chosen)
        until = torch.full((1,), 0 if state.chosen is None else state.until, dtype=torch.int64, device=device)
        return _Layer(queries, chosen, until)

    def _settled(self, state: LoopServeState, own: _Layer, length: int) -> LoopServeState:
        first = max(self._next - state.rows.shape[1], length - self._method.n_d)
        places = torch.arange(first, length, device=own.queries.device) % self._method.n_d
        until = int(own.until)
        chosen = own.chosen.long() if until > 0 else None
        return type(state)(own.queries[places].transpose(0, 1).contiguous(), chosen, until)
