"""LoopServe's decode in recorded steps: dense steps, choosing steps and lines, whatever each row is at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from saccade.methods.device_state import DeviceState, Opening
from saccade.selection.forms import Known, PlanSpec, bucket
from saccade.selection.readings import OwnReading

if TYPE_CHECKING:
    from saccade.methods.loopserve.method import LoopServe, LoopServeState


class Words(NamedTuple):
    """A row's int64 words: numbers, then addresses. ``turn``: the position of the turn's first decode row;
    ``observed``: 0 for all; ``known``: the position of the first query that is remembered."""

    turn: int
    first: int
    every: int
    budget: int
    observed: int
    known: int
    queries: int  # [every, heads, head_dim]
    chosen: int  # int32 [kv_heads, budget]
    until: int  # int64 [1], the length at which lines were chosen


@dataclass(frozen=True)
class ChosenLines(OwnReading["LoopServe"]):
    """What ``LoopServe`` reads in decode, at most ``room`` keys for each KV head once it has chosen, by the queries of
    the last ``every`` steps."""

    every: int
    room: int

    @classmethod
    def of(cls, method: LoopServe) -> ChosenLines:
        return cls(method.n_d, bucket(method.budget + method.n_d + 1), method=method)

    def why_not(self, spec: PlanSpec) -> str | None:
        """Choices as the paper prints them are the reference's alone."""
        method = self.method
        given = [f"{name}=true" for name in ("at_start", "force") if getattr(method, name)]
        given += ["slashes=false"] * (not method.slashes) + ["unit=q_head"] * (method.unit == "q_head")
        return f"recorded steps choose without {', '.join(given)}" if given else None

    def cost(self, length: int, step: int = 0) -> Known:
        method = self.method
        since = (step - method.first) % method.n_d  # of the last step that may have chosen
        last = step - since
        chose = last >= method.first and length - since > method.budget
        if not chose:
            return Known("dense", 0, 0)
        return Known("tokens", 0, 0, searchable=True, chooses=since == 0)

    def read(self, rows: Any) -> Any:
        from saccade.methods.loopserve import triton_recorded as kernels
        from saccade.methods.loopserve.triton_choosing import choose_lines
        from saccade.ops.triton.batched_rows import LayerRead

        due = kernels.remember(rows)
        choose_lines(rows, self.every, due)
        lists = kernels.line_lists(rows, due, self.room)
        out, lse = rows.attend(lists)
        whole = due.chosen == 0
        pages = replace(rows.pages, lengths=torch.where(whole, rows.pages.lengths, 0))
        every, every_lse = rows.attend(None, pages)
        out = torch.where(whole[:, None, None], every, out)
        lse = torch.where(whole[:, None], every_lse, lse)
        return LayerRead(out, lse, lists, whole, due.scored, due.now.to(torch.float64) * rows.heads)


@dataclass(eq=False)
class _Layer:
    """``queries`` [n_d, heads, head_dim], each at its position modulo n_d; ``chosen`` int32 [kv_heads, budget];
    ``until`` int64 [1], 0: none yet."""

    queries: Tensor
    chosen: Tensor
    until: Tensor


class RecordedLines(DeviceState):
    """Of ``LoopServeState``."""

    def __init__(self, opening: Opening, method: LoopServe) -> None:
        super().__init__(opening)
        self._method, self._turn = method, opening.turn
        self._next = opening.length - 1  # the position of the row that comes next
        self._layers = [self._opened(state, opening.spec.kv_heads) for state in self.states]

    def words(self, layer: int) -> Sequence[int]:
        method, own, state = self._method, self._layers[layer], self.states[layer]
        return Words(
            turn=self._turn,
            first=method.first,
            every=method.n_d,
            budget=method.budget,
            observed=method.observed or 0,
            known=self._next - state.rows.shape[1],
            queries=own.queries.data_ptr(),
            chosen=own.chosen.data_ptr(),
            until=own.until.data_ptr(),
        )

    @torch.inference_mode()
    def settle(self, length: int) -> list[Any]:
        return [self._settled(state, own, length) for state, own in zip(self.states, self._layers)]

    def _opened(self, state: LoopServeState, kv_heads: int) -> _Layer:
        heads, known, head_dim = state.rows.shape
        n_d, device = self._method.n_d, state.rows.device
        queries = state.rows.new_zeros(n_d, heads, head_dim)
        places = torch.arange(self._next - known, self._next, device=device) % n_d
        queries[places] = state.rows.transpose(0, 1)
        chosen = torch.zeros(kv_heads, self._method.budget, dtype=torch.int32, device=device)
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
