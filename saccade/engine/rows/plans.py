"""Decode rows on a CPU whose readings are known for a whole step before it runs, and what they have counted.

A row whose method has a device plan (selection.plan) is planned once a step for all layers where the kernels serve its
readings, so that a layer costs no Python of its own. So are rows whose method picks single keys and has told the
kernels of its state (methods/host_state.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from saccade.engine.rows.calls import RequestRows, Setting
from saccade.engine.steps.carried import carries
from saccade.engine.watch.device_counts import LateCounts
from saccade.engine.watch.phase_stats import SLIDES, ran_dense
from saccade.methods.base import Method, WindowMethod
from saccade.methods.device_state import Opening
from saccade.methods.host_state import ActingRows, HostState
from saccade.methods.verified import Verified
from saccade.models.interface import ModelSpec
from saccade.ops import cpu_readings
from saccade.ops.cpu_plans import Ruled
from saccade.ops.cpu_readings import Readings, Reads, Seen
from saccade.selection.forms import Summarized
from saccade.selection.levels import Levels
from saccade.selection.plan import DevicePlan
from saccade.selection.readings import Ends, Everything, Reading
from saccade.selection.visible import VisibleKeys

PLANS = 4096  # of methods used last
SEVERAL_SIZES = "layers have heads of more than one size"


class Prepared(NamedTuple):
    """``readings``: None where each sequence has its own. ``acting``: the layers where the method decides, where these
    are not all."""

    plan: DevicePlan
    readings: Readings | None
    acting: tuple[int, ...] | None = None


class FixedRow(NamedTuple):
    """A row that needs no help of its method in this step. ``state``: what its sequence knows, where that matters.
    ``acting`` as of :class:`Prepared`."""

    rows: RequestRows
    plan: DevicePlan
    reads: Reads
    state: HostState | None
    weighs: bool = False  # rows of a verification that say where they looked
    acting: tuple[int, ...] | None = None


class FixedPlans:
    """The plans that the kernels serve without a method's help, and what rows under them have counted."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._everything = Readings([Everything()] * setting.spec.layers)
        windows = setting.spec.windows
        self._dense = Readings(_all_within(windows))
        self._levels = Levels(windows)
        self._plan = lru_cache(maxsize=PLANS)(self._planned)
        self._whole = lru_cache(maxsize=PLANS)(self._plan_of_all)
        self._counts: weakref.WeakValueDictionary[tuple[int, str], LateCounts] = weakref.WeakValueDictionary()

    def of(self, rows: RequestRows) -> FixedRow | str:
        """How a decode row reads, or why its method is to choose for each layer."""
        if (reason := self._followed(rows)) is not None:
            return reason
        several = len(rows.memory.kv.parts) > 1
        if rows.together:
            plan, window = rows.scheduled.policy.decode.device_plan(self.setting.spec), rows.scheduled.policy.window
            if plan is None or (window is not None and window.acts(self.setting.spec.layers)):
                return "rows under a policy's window are attended one by one"
            weighs = not several and self._weighs(rows.scheduled.policy.decode)
            return FixedRow(rows, plan, self._dense, None, weighs)
        method, length, window = rows.method, rows.scheduled.stop, rows.scheduled.policy.window
        level = self._levels.of(length)
        acting = self._levels.acting(level) if level else None
        prepared = self._plan(method, level)
        fixed = None if isinstance(prepared, str) else self._read(rows, prepared)
        if several:  # a plan that chooses says for how many KV heads, and states have as many
            alike = fixed is not None and fixed.plan.choice is None and fixed.plan.blocks is None
            return fixed if fixed is not None and alike else SEVERAL_SIZES
        if fixed is not None:
            return fixed
        state = rows.memory.on_host(method, length, acting)  # what its method has told the kernels of its state
        if state is None:
            state = rows.memory.opened_on_host(method, self._opened(rows, rows.memory.states, level, acting), acting)
        if state is None:
            return prepared if isinstance(prepared, str) else f"'{method.text}': the kernels do not serve its state"
        if window is not None and not state.windows:
            return f"the kernels of '{method.text}' know no windows"
        if length > state.room:
            state.grow(length)
        reads = state.reads(length, window)
        if reads is not None:
            return prepared if isinstance(prepared, str) else FixedRow(rows, prepared.plan, reads, state, acting=acting)
        return FixedRow(rows, *self._whole(method, window, level), state, acting=acting)

    def of_blocks(self, rows: RequestRows) -> FixedRow | None:
        """The same of a row that chooses blocks in every layer, where no audit follows the step and nothing is carried;
        None else."""
        if not rows.decodes or self._followed(rows) or self.setting.watch.audits or rows.memory.carried is not None:
            return None
        prepared = self._plan(rows.method, self._levels.of(rows.scheduled.stop))
        fixed = None if isinstance(prepared, str) else self._read(rows, prepared)
        if fixed is None:
            return None
        for reading in set(fixed.plan.layers):
            if reading.choice is None or rows.scheduled.stop <= reading.all_upto:
                return None
        return fixed

    def _followed(self, rows: RequestRows) -> str | None:
        """Why a row needs its layers one by one, whatever its method is."""
        if rows.method.joins_heads and not self.setting.part.is_whole:
            return "it asks other processes what their heads look for"
        if rows.drafted:
            return "rows of drafts are counted, and taken back, one by one"
        if self.setting.watch.sees_calls:
            return "an observer looks at its calls"
        if rows.memory.has_gone:
            return "an earlier turn evicted keys"
        return "bounds of its errors are wanted" if rows.scheduled.request_id in self.setting.watch.bounds else None

    def _read(self, rows: RequestRows, prepared: Prepared) -> FixedRow | None:
        """A row that the kernels read by its plan alone."""
        memory = rows.memory
        if prepared.readings is None or rows.scheduled.policy.window is not None:
            return None
        if memory.has_state and memory.knows_of(prepared.acting):
            return None
        return FixedRow(rows, prepared.plan, prepared.readings, None, acting=prepared.acting)

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
        slides = row.acting is not None and not rows.method.means_dense
        if slides and row.acting and row.acting[0] > 0:
            rows.result.note(SLIDES)  # notes stand as the layers do
        if state is not None:
            state.done(rows.scheduled.stop)
            if row.reads.tallied:
                counts.follow(state)
            for note in state.notes(rows.scheduled.stop):
                rows.result.note(note)
        if ruled is not None and plan.choice is not None and rows.scheduled.stop > plan.choice.dense_upto:
            counts.note_rule(ruled.used * plan.choice.size, ruled.coverage)
        whole = state is not None and state.reads_all(rows.scheduled.stop)
        if counts.add(rows.scheduled.stop, backend, whole=whole) and not rows.method.means_dense:
            rows.result.note(ran_dense("decode", plan.method))
        if slides:
            rows.result.note(SLIDES)
        rows.result.late["host", plan.name] = counts

    def _weighs(self, method: Method) -> bool:
        """Whether the next draft is to know where rows under ``method`` looked."""
        if not isinstance(method, Verified):
            return False
        prepared = self._plan(method.draft, 0)
        if isinstance(prepared, str) or prepared.readings is None:
            return False
        return carries(prepared.plan, method.carried)

    @torch.inference_mode()  # in which the states were made
    def _opened(
        self, rows: RequestRows, states: list[Any], level: int, acting: tuple[int, ...] | None
    ) -> HostState | None:
        one, memory = rows.scheduled, rows.memory
        windowed = one.policy.window is not None
        opening = Opening(states, memory.kv, self._spec(level), one.span_start, one.stop, windowed)
        if acting is None:
            return rows.method.host_state(opening)
        own = rows.method.host_state(opening.of(acting)) if acting and not windowed else None
        return None if own is None else ActingRows(opening, acting, own)

    def summarized(self, method: Method) -> Summarized | None:
        """Blocks whose summaries rows under ``method`` read, if it knows how to say so."""
        prepared = self._plan(method, 0)
        return None if isinstance(prepared, str) or prepared.plan.choice is not None else prepared.plan.blocks

    def _spec(self, level: int) -> ModelSpec:
        """The model as rows of a level see it."""
        return replace(self.setting.spec, windows=self._levels.windows_at(level))

    def _planned(self, method: Method, level: int) -> Prepared | str:
        """Or why there is none."""
        spec, acting = self._spec(level), self._levels.acting(level) if level else None
        plan = DevicePlan.at(method, spec)
        if plan is None:
            return f"'{method.text}': {method.rows_only or 'no plan for this model'}"
        if level:
            plan = replace(plan, name=f"{plan.name}, level {level}")  # it is counted by itself
        if plan.keeps and len({plan.layers[layer] for layer in acting or range(spec.layers)}) == 1:
            return Prepared(replace(plan, layers=tuple(one.on_host for one in plan.layers)), None, acting)
        for one in dict.fromkeys(plan.layers):
            if (reason := cpu_readings.serves(one, spec.kv_heads)) is not None:
                return f"'{method.text}': {reason}"
        return Prepared(plan, Readings(plan.layers), acting)

    def _plan_of_all(self, method: Method, window: WindowMethod | None, level: int) -> tuple[DevicePlan, Readings]:
        """What rows of a level read that read everything, as far as ``window`` shows it at the level 0, or the layers'
        own windows at others: a plan that is counted by itself."""
        if level:
            own = _all_within(self._levels.windows_at(level))
            return DevicePlan(f"{method.text}, all, level {level}", method.name, tuple(own)), Readings(own)
        layers = self.setting.spec.layers
        cones = [None if window is None else window.at(layer, layers) for layer in range(layers)]
        seen = [Everything() if cone is None else VisibleKeys(cone=cone) for cone in cones]
        name = f"{method.text}, all" if window is None else f"{method.text}, all within {window.text}"
        reads = self._everything if window is None else Seen(cones)
        return DevicePlan(name, method.name, tuple(seen)), reads


def _all_within(windows: Sequence[int | None]) -> list[Reading]:
    """What layers with these windows of their own, or with none, read densely."""
    return [Everything() if size is None else Ends(0, size) for size in windows]
