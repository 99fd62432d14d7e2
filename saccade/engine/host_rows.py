"""The decode rows of a step on a CPU: stored in one call a layer, and attended in one call where that can be.

A row whose method has a device plan (selection.plan) is planned once a step for all layers where the kernels serve its
readings, so that a layer costs no Python of its own. All other rows are chosen for one by one, and share the call where
their selections allow it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from saccade.engine.device_counts import LateCounts
from saccade.engine.device_words import RuleCounts
from saccade.engine.host_calls import Chosen, RequestRows, Setting, choose, finish, read
from saccade.engine.report import ran_dense
from saccade.methods.base import Method
from saccade.models.interface import LayerAttention
from saccade.ops import Result, cpu, cpu_plans, cpu_rows
from saccade.ops.cpu_plans import PlannedRow, PlannedRows, Readings, Ruled
from saccade.selection.plan import BestBlocks, DevicePlan, RankedBlocks

PLANS = 4096  # of methods used last


class Prepared(NamedTuple):
    plan: DevicePlan
    readings: Readings


class FixedPlans:
    """The plans that the kernels serve without a method's help, and what rows under them have counted."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._plan = lru_cache(maxsize=PLANS)(self._planned)
        self._counts: weakref.WeakValueDictionary[tuple[int, str], LateCounts] = weakref.WeakValueDictionary()

    def of(self, rows: RequestRows) -> Prepared | None:
        """The plan of a decode row; None where something else decides, somebody looks on, or the row may be rejected,
        which leaves no trace in counts."""
        memory = rows.memory
        if rows.drafted or rows.scheduled.policy.window is not None or not self.setting.watch.idle:
            return None
        if memory.has_state or memory.has_gone:
            return None
        return self._plan(rows.method)

    def count(self, rows: RequestRows, plan: DevicePlan, backend: str, ruled: Ruled | None) -> None:
        """Count a row that was attended under ``plan`` in every layer, and what rules let it do."""
        key = rows.scheduled.request_id, plan.name
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = LateCounts(plan, self.setting.spec.heads)
        if ruled is not None and plan.blocks is not None:
            covered = ruled.coverage.double()
            counts.rule(RuleCounts(ruled.used * plan.blocks.size, covered, ruled.coverage.clone()))
        if counts.add(rows.scheduled.stop, backend) and not rows.method.is_dense:
            rows.result.note(ran_dense("decode", plan.method))
        rows.result.late["host", plan.name] = counts

    def _planned(self, method: Method) -> Prepared | None:
        spec = self.setting.spec
        plan = method.device_plan(spec)
        if plan is None or any(cpu_plans.serves(one, spec.kv_heads) is not None for one in set(plan.layers)):
            return None
        return Prepared(plan, Readings(plan.layers))


class JoinedRows:
    """The decode rows ``rows`` of one step, whose new keys count as stored from here on."""

    def __init__(self, setting: Setting, plans: FixedPlans, rows: list[RequestRows]) -> None:
        self.setting, self.plans = setting, plans
        self.storage = rows[0].memory.kv.pool.storage
        self.fixed: list[tuple[RequestRows, Prepared]] = []
        self.chosen: list[RequestRows] = []  # rows that are chosen for layer by layer
        tables = [one.memory.kv.tables for one in rows]
        planned: list[PlannedRow] = []
        for one, table in zip(rows, tables):
            plan = plans.of(one)  # None while a clock runs: what it times is told apart
            if plan is None:
                self.chosen.append(one)
            else:
                self.fixed.append((one, plan))
                planned.append(_planned(one, plan, table))
        self._stored = cpu_rows.StoredRows(
            [one.first for one in rows],
            [one.scheduled.start for one in rows],
            tables,
            self.storage.format.block_size,
        )
        self._attended = PlannedRows(planned) if planned else None
        for one in rows:
            one.memory.kv.stored(1)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention, out: Tensor) -> None:
        """Store the rows' keys and values at ``layer`` and write their attention to their rows of ``out`` [heads, rows,
        head_dim], rows before heads in memory."""
        setting, storage = self.setting, self.storage
        self._stored.store(layer, k, v, storage.k, storage.v)
        if layer == 0:
            self._settle_fixed(q, spec)
        if self.fixed and self._attended is not None:
            by_row = out.transpose(0, 1)
            self._attended.attend(layer, q, storage.k, storage.v, by_row, spec.scale, spec.softcap, setting.threads)
            if layer == setting.spec.layers - 1:
                backend = f"cpu/{cpu.isa()}"
                for i, (rows, prepared) in enumerate(self.fixed):
                    self.plans.count(rows, prepared.plan, backend, self._attended.ruled(i))
        if self.chosen:
            self._run_chosen(layer, q, spec, out)

    def _settle_fixed(self, q: Tensor, spec: LayerAttention) -> None:
        """Have rows chosen for one by one where the kernels do not read these tensors, or a layer has sinks."""
        if self.fixed and (spec.sinks is not None or not self._joins(q, self.fixed[0][0], 0)):
            self.chosen = sorted([*self.chosen, *(rows for rows, _ in self.fixed)], key=lambda rows: rows.first)
            self.fixed = []

    def _joins(self, q: Tensor, rows: RequestRows, layer: int) -> bool:
        return cpu_rows.serves(q, rows.memory.kv.view(layer), self.setting.backend) is None

    def _run_chosen(self, layer: int, q: Tensor, spec: LayerAttention, out: Tensor) -> None:
        setting = self.setting
        joins = spec.sinks is None and len(self.chosen) > 1 and self._joins(q, self.chosen[0], layer)
        together: list[Chosen] = []
        for rows in self.chosen:
            if rows.result.error is not None:
                continue
            row = slice(rows.first, rows.first + 1)
            try:
                chosen = choose(setting, rows, layer, q[:, row], rows.scheduled.stop, spec)
                waits = joins and not chosen.want_weights
                if rows.drafted and rows.memory.states[layer] is not None:
                    waits = False  # the next row of its request chooses by what this one learns
                if waits and cpu_rows.serves_row(chosen.chunk.kv, chosen.selection) is None:
                    together.append(chosen)
                else:
                    out[:, row] = finish(setting, chosen, spec, read(setting, chosen))
            except Exception as error:
                rows.failed(layer, error)
        if together:
            self._attend_together(layer, together, q, spec, out)

    def _attend_together(self, layer: int, some: list[Chosen], q: Tensor, spec: LayerAttention, out: Tensor) -> None:
        with self.setting.timed("attention"):
            lse = cpu_rows.attend(
                q,
                [one.rows.first for one in some],
                [one.chunk.kv for one in some],
                [one.selection for one in some],
                out.transpose(0, 1),
                scale=spec.scale,
                softcap=spec.softcap,
                threads=self.setting.threads,
            )
        backend = f"cpu/{cpu.isa()}"
        for one in some:
            row = slice(one.rows.first, one.rows.first + 1)
            try:
                ran = Result(out[:, row], lse[row].transpose(0, 1), one.selection, backend)
                finish(self.setting, one, spec, ran)
            except Exception as error:
                one.rows.failed(layer, error)


def _planned(rows: RequestRows, prepared: Prepared, tables: Tensor) -> PlannedRow:
    """A row's part of the step, its keys not stored yet."""
    length, kv, blocks = rows.scheduled.stop, rows.memory.kv, prepared.plan.blocks
    summaries: Sequence[Tensor] = ()
    if isinstance(blocks, BestBlocks | RankedBlocks) and length > blocks.dense_upto:
        summaries = kv.summaries(blocks.summary, blocks.size)
    return PlannedRow(rows.first, length - 1, tables, prepared.readings, summaries)
