"""The buffers that recordings of batched steps read: allocated, and enlarged, as the number of rows and blocks
needs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from saccade.engine.device import prefill
from saccade.engine.device.graphs import StepKinds
from saccade.engine.device.rows import RowBuffers
from saccade.engine.device.watch import PlacedRow
from saccade.engine.steps.step import StepInput
from saccade.engine.watch.device_counts import LateCounts
from saccade.kv.blocks import BlockManager
from saccade.methods.device_state import ActingState, DeviceState, Opening
from saccade.models.interface import ModelSpec
from saccade.ops.triton.common import pad
from saccade.selection.plan import DevicePlan

EACH = prefill.EACH  # rows of one request that a step verifies at once, at most


class RowRooms:
    """``buffers``: for steps that verify or prefill (True), and for all others. ``counts``: whose readings the rows of
    the latter gather. ``kinds`` are what was recorded over them."""

    def __init__(self, spec: ModelSpec, device: torch.device, kinds: StepKinds) -> None:
        self._spec, self.device, self._kinds = spec, device, kinds
        self.buffers: dict[bool, RowBuffers] = {}
        self.counts = RowCounts(spec.heads)
        self._kv: weakref.ref[BlockManager] | None = None  # what recordings read; theirs is no claim on its memory

    def room(self, pool: BlockManager, rows: int, blocks: int, verifies: bool) -> RowBuffers:
        """Buffers for so many rows and blocks of ``pool``; ``verifies``: of EACH tokens a row."""
        same = self._kv is not None and self._kv() is pool
        have = self.buffers.get(verifies)
        if have is not None and same and have.fits(rows, blocks):
            return have
        if have is not None or not same:
            if not (verifies and same):
                self.counts.detach()
            self._kinds.clear(verifies if same else None)  # recordings know the old buffers and pool
        if have is not None:
            rows, blocks = max(rows, have.rows), max(blocks, have.blocks)
            del have, self.buffers[verifies]
        if not same:
            self.buffers, self._kv = {}, weakref.ref(pool)
        spec, each = self._spec, EACH if verifies else 1
        rows = pad(rows, prefill.MOST_PIECES if verifies else 8)
        made = self.buffers[verifies] = RowBuffers(
            spec.layers, rows, blocks, pool.rows, spec.kv_heads, spec.heads, self.device, each, pool.layers
        )
        return made

    @torch.inference_mode()  # in which the row path may have made summaries
    def load(
        self, buffers: RowBuffers, step: StepInput, placed: Sequence[PlacedRow | None], each: int, times: int
    ) -> bool:
        """Bring the rows' buffers up to date, and see whose counts each row gathers. Returns whether that took long:
        the first step after a prompt makes the summaries of its blocks."""
        prepared = False
        ids = step.input_ids.tolist()
        firsts = {one.request_id: at - one.start for one, at in zip(step.scheduled, step.query_start_loc)}
        inputs: list[tuple[int, int, int]] = []
        states = None if self._spec.states is None else [(-1, -1) if row is None else row.states for row in placed]
        for number, row in enumerate(placed):
            if row is None:
                inputs += [(0, 0, 0)] * each
                continue
            one = row.scheduled
            prepared |= buffers.hold(number, row.kv, row.plan, one.stop + times - 1)
            if row.plan.keeps:
                buffers.own.hold(number, self.state(row), row.cones, one.stop)
            first = firsts[one.request_id] + one.start
            inputs += [(ids[first + at], one.start + at, one.start + at + 1) for at in range(one.length)]
            if each > 1:
                inputs += [(0, 0, 0)] * (each - one.length)
            else:
                self.counts.attach(number, one.request_id, row.plan, buffers)
        buffers.load(inputs, [0 if row is None else row.scheduled.stop for row in placed], states)
        return prepared

    @torch.inference_mode()
    def follow(self, buffers: RowBuffers, placed: Sequence[PlacedRow | None]) -> None:
        """Make the rows of a step that runs ready for the step after it, which is launched before it is asked for."""
        counts = False
        for number, row in enumerate(placed):
            if row is None:
                continue
            buffers.hold(number, row.kv, row.plan, row.scheduled.stop + 1)
            if row.plan.keeps:
                buffers.own.hold(number, self.state(row), row.cones, row.scheduled.stop + 1)
            counts |= row.plan.keeps or row.plan.ruled
        buffers.go_ahead(counts)

    def stored(self, row: PlacedRow, length: int) -> bool:
        """Tell the row's state that ``length`` tokens are stored. Returns whether the step reads everything."""
        state, stop = self.state(row), row.scheduled.stop
        state.length = length
        for note in state.notes(stop):
            row.result.note(note)
        return state.reads_all(stop)

    @torch.inference_mode()
    def come_back(self) -> None:
        """What was launched ahead of its turn is not asked for."""
        for buffers in self.buffers.values():
            buffers.come_back(False)

    def state(self, row: PlacedRow) -> DeviceState:
        """What the row's decode method keeps on the device."""
        return row.memory.on_device(row.scheduled.policy.decode, partial(self._opened, row), row.acting)

    @torch.inference_mode()  # in which the row path's states were made
    def _opened(self, row: PlacedRow, states: list[Any]) -> DeviceState:
        one, opened = row.scheduled, row.scheduled.policy.decode.device_state
        opening = Opening(states, row.kv, self._spec, one.span_start, one.stop)
        return opened(opening) if row.acting is None else ActingState(opening, row.acting, opened)


class RowCounts:
    """Whose counts each row of recorded steps gathers. ``rows``: by row of the buffers, what it counts for. ``heads``:
    query heads of the model."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.rows: dict[int, LateCounts] = {}
        self._all: weakref.WeakValueDictionary[tuple[int, str], LateCounts] = weakref.WeakValueDictionary()

    def of(self, request_id: int, plan: DevicePlan) -> LateCounts:
        """What a request counts under a plan."""
        held = (request_id, plan.name)
        counts = self._all.get(held)
        if counts is None:
            counts = self._all[held] = LateCounts(plan, self.heads)
        return counts

    def attach(self, row: int, request_id: int, plan: DevicePlan, buffers: RowBuffers) -> None:
        """Let ``row`` of ``buffers`` count for a request under its plan from now on."""
        counts = self.of(request_id, plan)
        if counts.row == row and self.rows.get(row) is counts:
            return
        for other in (row, counts.row):
            self._detach(other)
        self.rows[row] = counts
        counts.attach(row, partial(buffers.take, row) if plan.keeps or plan.ruled else None)

    def detach(self) -> None:
        """Take what all rows have counted: their buffers go."""
        for row in list(self.rows):
            self._detach(row)

    def _detach(self, row: int | None) -> None:
        counts = None if row is None else self.rows.pop(row, None)
        if counts is not None:
            counts.detach()
