"""Decode rows on a CPU whose readings are known for a whole step before it runs, and what they have counted.

A row whose method has a device plan (selection.plan) is planned once a step for all layers where the kernels serve its
readings, so that a layer costs no Python of its own. So are rows whose method picks single keys and has told the
kernels of its state (methods/host_state.py).
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from saccade.engine.carried import carries
from saccade.engine.device_counts import LateCounts
from saccade.engine.host_calls import RequestRows, Setting
from saccade.engine.phase_stats import ran_dense
from saccade.methods.base import Method
from saccade.methods.device_state import Opening
from saccade.methods.host_state import HostState
from saccade.methods.verified import Verified
from saccade.ops import cpu_readings
from saccade.ops.cpu_plans import Ruled
from saccade.ops.cpu_readings import Listed, Readings, Shared
from saccade.selection.forms import Summarized
from saccade.selection.plan import DevicePlan
from saccade.selection.readings import Everything

PLANS = 4096  # of methods used last


class Prepared(NamedTuple):
    """``readings``: None where each sequence has its own."""

    plan: DevicePlan
    readings: Readings | None


class FixedRow(NamedTuple):
    """A row that needs no help of its method in this step. ``state``: what its sequence knows, where that matters."""

    rows: RequestRows
    plan: DevicePlan
    reads: Readings | Listed | Shared
    state: HostState | None
    weighs: bool = False  # rows of a verification that say where they looked


class FixedPlans:
    """The plans that the kernels serve without a method's help, and what rows under them have counted."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._everything = Readings([Everything()] * setting.spec.layers)
        self._plan = lru_cache(maxsize=PLANS)(self._planned)
        self._counts: weakref.WeakValueDictionary[tuple[int, str], LateCounts] = weakref.WeakValueDictionary()

    def of(self, rows: RequestRows) -> FixedRow | None:
        """How a decode row reads; None where something else decides, somebody looks on, or the row may be rejected,
        which leaves no trace in counts."""
        if self._followed(rows):
            return None
        if rows.together:
            plan = rows.scheduled.policy.decode.device_plan(self.setting.spec)
            if plan is None or not plan.dense:
                return None
            return FixedRow(rows, plan, self._everything, None, self._weighs(rows.scheduled.policy.decode))
        prepared = self._plan(rows.method)
        if prepared is None:
            return None
        return self._listed(rows, prepared.plan) if prepared.readings is None else self._read(rows, prepared)

    def of_blocks(self, rows: RequestRows) -> FixedRow | None:
        """The same of a row that chooses blocks in every layer, where no audit follows the step and nothing is carried;
        None else."""
        if not rows.decodes or self._followed(rows) or self.setting.watch.audits or rows.memory.carried is not None:
            return None
        prepared = self._plan(rows.method)
        fixed = None if prepared is None else self._read(rows, prepared)
        if fixed is None:
            return None
        for reading in set(fixed.plan.layers):
            if reading.choice is None or rows.scheduled.stop <= reading.all_upto:
                return None
        return fixed

    def _followed(self, rows: RequestRows) -> bool:
        """Whether somebody looks on layer by layer, or the row may be rejected or reads over evicted keys."""
        watch = self.setting.watch
        return rows.drafted or watch.sees_calls or rows.memory.has_gone or rows.scheduled.request_id in watch.bounds

    def _read(self, rows: RequestRows, prepared: Prepared) -> FixedRow | None:
        """A row that the kernels read by its plan alone."""
        if prepared.readings is None or rows.memory.has_state or rows.scheduled.policy.window is not None:
            return None
        return FixedRow(rows, prepared.plan, prepared.readings, None)

    def count(self, row: FixedRow, backend: str, ruled: Ruled | None) -> None:
        """Count a row that was attended in every layer, and what rules let it do."""
        rows, plan, state = row.rows, row.plan, row.state
        key = rows.scheduled.request_id, plan.name
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = LateCounts(plan, self.setting.spec.heads)
        if rows.together:
            rows.result.late["host", plan.name] = counts
            rows.result.stay = partial(counts.add_first, rows.scheduled.start, backend)
            return
        if state is not None:
            state.done(rows.scheduled.stop)
            counts.follow(state)
        if ruled is not None and plan.blocks is not None:
            counts.note_rule(ruled.used * plan.blocks.size, ruled.coverage)
        if counts.add(rows.scheduled.stop, backend) and not rows.method.means_dense:
            rows.result.note(ran_dense("decode", plan.method))
        rows.result.late["host", plan.name] = counts

    def _weighs(self, method: Method) -> bool:
        """Whether the next draft is to know where rows under ``method`` looked."""
        if not isinstance(method, Verified):
            return False
        prepared = self._plan(method.draft)
        return prepared is not None and carries(prepared.plan, method.carried)

    def _listed(self, rows: RequestRows, plan: DevicePlan) -> FixedRow | None:
        method, length, window = rows.method, rows.scheduled.stop, rows.scheduled.policy.window
        reading = plan.layers[0]
        dense = reading.cost(length).kind == "dense"
        if dense and (window is not None or (method.wants_weights and reading.learns_from_all)):
            return None  # it reads what the window leaves, or reads everything and learns from it
        if window is not None and not reading.windows:
            return None
        state = rows.memory.on_host(method, partial(self._opened, rows))
        if state is None or (window is not None and not state.windows):
            return None
        if length > state.room:
            state.grow(length)
        reads = state.reads(length, window)
        if reads is None:
            state.tally[:, : self.setting.spec.heads] += length
        return FixedRow(rows, plan, reads or self._everything, state)

    @torch.inference_mode()  # in which the states were made
    def _opened(self, rows: RequestRows, states: list[Any]) -> HostState | None:
        one, memory = rows.scheduled, rows.memory
        opening = Opening(states, memory.kv, self.setting.spec, one.span_start, one.stop, memory.apart)
        return rows.method.host_state(opening)

    def summarized(self, method: Method) -> Summarized | None:
        """Blocks whose summaries rows under ``method`` read, if it knows how to say so."""
        prepared = self._plan(method)
        return None if prepared is None or prepared.plan.choice is not None else prepared.plan.blocks

    def _planned(self, method: Method) -> Prepared | None:
        spec = self.setting.spec
        plan = method.device_plan(spec)
        if plan is None:
            return None
        if len(set(plan.layers)) == 1 and not plan.listed:
            return Prepared(replace(plan, layers=tuple(one.on_host for one in plan.layers)), None)
        if any(cpu_readings.serves(one, spec.kv_heads) is not None for one in set(plan.layers)):
            return None
        return Prepared(plan, Readings(plan.layers))
