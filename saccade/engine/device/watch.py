"""Observed decode steps on a device: the kernels of a recorded step, launched one by one instead of replayed, so that
an observer sees each attention call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saccade.engine.attention import Watch
from saccade.engine.memory.sequence_memory import SequenceMemory
from saccade.engine.steps.step import RequestResult, ScheduledRequest
from saccade.engine.watch.observe import AttentionCall
from saccade.errors import failure
from saccade.kv.sequence import SequenceKV
from saccade.kv.view import KVView
from saccade.models.interface import LayerAttention
from saccade.ops.triton.batched_rows import LayerRead
from saccade.selection import Cone, Dense, Shape
from saccade.selection.plan import DevicePlan


@dataclass(frozen=True)
class PlacedRow:
    """One request's row of a batched step, decoded under ``plan``. ``acting``: the layers where its method decides,
    where these are not all."""

    scheduled: ScheduledRequest
    memory: SequenceMemory
    plan: DevicePlan
    result: RequestResult
    cones: tuple[Cone | None, ...] = ()  # the policy's window, a layer each
    acting: tuple[int, ...] | None = None

    @property
    def kv(self) -> SequenceKV:
        return self.memory.kv

    @property
    def states(self) -> tuple[int, int]:
        """The slots from and to which a step moves what layers that keep a state have of it; -1 where none does."""
        kept = self.memory.kept
        return (-1, -1) if kept is None or kept.slot is None or kept.spare is None else (kept.slot, kept.spare)

    @property
    def next(self) -> PlacedRow:
        """The row after this one."""
        one = self.scheduled
        return replace(self, scheduled=one._replace(start=one.start + 1, stop=one.stop + 1))


class StepWatch:
    """Times a step's stretches for a clock and hands its attention calls to an observer. On a GPU stretches are timed
    by its events, so that they take as long as the kernels do, not as long as launching them."""

    def __init__(self, watch: Watch, placed: Sequence[PlacedRow | None], device: torch.device) -> None:
        self._watch, self._clock, self._placed, self._device = watch, watch.clock, placed, device
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, name: str) -> None:
        """A stretch begins. Stretches do not nest."""
        if self._clock is None:
            return
        if self._device.type != "cuda":
            self._clock.begin(name)
            return
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        self._events.append((name, began, ended))

    def end(self) -> None:
        """The stretch that has begun ends."""
        if self._clock is None:
            return
        if self._device.type != "cuda":
            self._clock.end()
        else:
            self._events[-1][2].record()

    def settle(self) -> None:
        """Add the stretches to the clock, once the step is done."""
        if self._clock is None or not self._events:
            return
        torch.cuda.synchronize(self._device)
        for name, began, ended in self._events:
            self._clock.seconds[name] = self._clock.seconds.get(name, 0.0) + began.elapsed_time(ended) / 1e3
        self._events = []

    def called(self, layer: int, first: int, q: Tensor, out: Tensor, spec: LayerAttention, read: LayerRead) -> None:
        """Rows ``first`` on have attended for ``q`` to what was ``read``. What an observer raises fails its request
        alone."""
        if not self._watch.sees_calls:
            return
        for number in range(q.shape[0]):
            row = self._placed[first + number]
            if row is None or row.result.error is not None:
                continue
            scheduled, reading = row.scheduled, row.plan.layers[layer]
            try:
                # Summaries of a block that this step fills are not known yet: without a store of them the
                # view computes its own.
                view = KVView(row.kv.view(layer).upto(scheduled.stop).paged())
                shape = Shape.suffix(q.shape[1], view.kv_heads, 1, scheduled.stop, q.device)
                whole = read.everything is not None and bool(read.everything[number])
                selection = Dense(shape) if whole else reading.selection(shape, read.of_row(number))
                heads = q[number][:, None], out[number][:, None]
                self._watch.see(
                    AttentionCall(scheduled.request_id, layer, "decode", heads[0], view, selection, spec, heads[1])
                )
            except Exception as error:  # one request's failure must not take the others down
                row.result.error, row.result.error_type = failure(error, f"layer {layer}, decode")
