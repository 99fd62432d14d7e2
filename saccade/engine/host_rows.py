"""The decode rows of a step on a CPU: stored in one call a layer, and attended in one call where that can be.

A row whose method has a device plan (selection.plan) is planned once a step for all layers where the kernels serve its
readings, so that a layer costs no Python of its own. So are rows whose method picks single keys and has told the
kernels of its state (methods/host_state.py). All other rows are chosen for one by one, and share the call where their
selections allow it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.engine.carried import REGION, Choice, carries
from saccade.engine.device_counts import LateCounts
from saccade.engine.host_calls import Chosen, RequestRows, Setting, choose, finish, read
from saccade.engine.phase_stats import ran_dense
from saccade.kv.block_codes import BlockCodes
from saccade.methods.base import Method
from saccade.methods.device_state import Opening
from saccade.methods.host_state import HostState
from saccade.methods.verified import Verified
from saccade.models.interface import LayerAttention
from saccade.ops import Result, cpu, cpu_readings, cpu_rows
from saccade.ops.cpu_plans import PlannedRow, PlannedRows, Ruled
from saccade.ops.cpu_readings import Listed, Readings, Shared
from saccade.ops.layer_rows import RowLayers
from saccade.selection.plan import BestBlocks, DevicePlan, Everything, OwnReading, RankedBlocks, Summarized

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
            if plan is None or set(plan.layers) != {Everything()}:
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
            if not isinstance(reading, BestBlocks | RankedBlocks) or rows.scheduled.stop <= reading.dense_upto:
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
        assert isinstance(reading, OwnReading)
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
        return FixedRow(rows, state.plan(plan), reads or self._everything, state)

    @torch.inference_mode()  # in which the states were made
    def _opened(self, rows: RequestRows, states: list[Any]) -> HostState | None:
        one, memory = rows.scheduled, rows.memory
        opening = Opening(states, memory.kv, self.setting.spec, one.span_start, one.stop, memory.apart)
        return rows.method.host_state(opening)

    def summarized(self, method: Method) -> Summarized | None:
        """Blocks whose summaries rows under ``method`` read, if it knows how to say so."""
        prepared = self._plan(method)
        blocks = None if prepared is None else prepared.plan.blocks
        return blocks if isinstance(blocks, Summarized) else None

    def _planned(self, method: Method) -> Prepared | None:
        spec = self.setting.spec
        plan = method.device_plan(spec)
        if plan is None:
            return None
        if len(set(plan.layers)) == 1 and isinstance(plan.layers[0], OwnReading):
            return Prepared(plan, None)
        if any(cpu_readings.serves(one, spec.kv_heads) is not None for one in set(plan.layers)):
            return None
        return Prepared(plan, Readings(plan.layers))


class JoinedRows:
    """The decode rows ``rows`` of one step, whose new keys count as stored from here on. ``whole``: makes results and
    log-sum-exps, [heads, rows, head_dim] and [rows, heads], those of all keys where others have a part in them, for who
    looks at them here."""

    def __init__(
        self,
        setting: Setting,
        plans: FixedPlans,
        rows: list[RequestRows],
        own_products: bool = False,
        whole: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.setting, self.plans, self._whole = setting, plans, whole
        self.storage = rows[0].memory.kv.pool.storage
        self.fixed: list[tuple[int, FixedRow]] = []  # with their numbers among all
        self.chosen: list[RequestRows] = []  # rows that are chosen for layer by layer
        planned: list[PlannedRow] = []
        for number, one in enumerate(rows):
            fixed = plans.of(one)
            if fixed is None:
                self.chosen.append(one)
            else:
                self.fixed.append((number, fixed))
            planned.append(_planned(one, fixed))
        self._rows = PlannedRows(planned, self.storage.k, self.storage.v, own_products)
        for one in rows:
            one.memory.kv.stored(one.scheduled.length)

    @property
    def planned(self) -> PlannedRows:
        """The rows as the kernels know them."""
        return self._rows

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention, out: Tensor) -> None:
        """Store the rows' keys and values at ``layer`` and write their attention to their rows of ``out`` [heads, rows,
        head_dim], rows before heads in memory."""
        setting = self.setting
        if layer == 0:
            self.settle_fixed(q, spec)
        given = layer, q, k, v, out.transpose(0, 1), spec.scale, spec.softcap, setting.threads, bool(self.fixed)
        clock = setting.watch.clock
        if clock is None:
            self._rows.run(*given)
        else:
            clock.begin("attention")
            share = 0.0
            try:
                share = self._rows.run(*given, watched=True)
            finally:
                clock.end({"selection": share})
        if self.fixed and setting.watch.audits:
            seen = (out, self._rows.lse) if self._whole is None else self._whole(out, self._rows.lse)
            for _, row in self.fixed:
                self._audit(row.rows, layer, q, spec, *seen)
        if layer == setting.spec.layers - 1:
            self._count()
        if self.chosen:
            self._run_chosen(layer, q, spec, out)

    def run_layers(
        self,
        layers: RowLayers,
        hidden: Tensor,
        rotary: Sequence[tuple[Tensor, Tensor]],
        attention: Sequence[LayerAttention],
    ) -> bool:
        """See models.interface.WholeRows, for rows of which none is chosen for and none audited."""
        q = layers.queries(hidden.shape[0])
        self.settle_fixed(q, next((one for one in attention if one.sinks is not None), attention[0]))
        if self.chosen:
            return False
        clock, given = self.setting.watch.clock, (layers, hidden, q, rotary, self.setting.threads)
        if clock is None:
            self._rows.run_layers(*given)
        else:
            clock.begin("linear")
            shares = 0.0, 0.0
            try:
                shares = self._rows.run_layers(*given, watched=True)
            finally:
                clock.end(dict(zip(("attention", "selection"), shares)))
        self._count()
        return True

    def _count(self) -> None:
        """All rows that need no help were attended in every layer."""
        backend = f"cpu/{cpu.isa()}"
        for number, row in self.fixed:
            self.plans.count(row, backend, self._rows.ruled(number))

    def _audit(self, rows: RequestRows, layer: int, q: Tensor, spec: LayerAttention, out: Tensor, lse: Tensor) -> None:
        audit, at = self.setting.watch.audits.get(rows.scheduled.request_id), rows.first
        if audit is None or layer not in audit.drawn:
            return
        kv = rows.memory.kv.view(layer).upto(rows.scheduled.stop)
        rows.result.note_of(audit.take(layer, q[:, at], out[:, at], lse[at], kv, spec, self.setting.threads))

    def settle_fixed(self, q: Tensor, spec: LayerAttention) -> None:
        """Have rows chosen for one by one where the kernels do not read these tensors, or a layer has sinks."""
        if self.fixed and (spec.sinks is not None or not self._joins(q, self.fixed[0][1].rows, 0)):
            self.chosen = sorted([*self.chosen, *(row.rows for _, row in self.fixed)], key=lambda rows: rows.first)
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
            row = slice(rows.first, rows.first + rows.scheduled.length)
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


def _planned(rows: RequestRows, fixed: FixedRow | None) -> PlannedRow:
    """A row's part of the step, its keys not stored yet."""
    length, kv, count = rows.scheduled.stop, rows.memory.kv, rows.scheduled.length
    if fixed is None:
        return PlannedRow(rows.first, length - count, kv.tables, length=count)
    if rows.together:
        weighed = rows.weighed() if fixed.weighs else None
        peaks = None if weighed is None else weighed.peaks
        return PlannedRow(rows.first, length - count, kv.tables, fixed.reads, length=count, peaks=peaks, region=REGION)
    carried = rows.memory.carried
    blocks = fixed.plan.blocks if fixed.state is None else fixed.state.summarized
    summaries: Sequence[Tensor] = ()
    codes: Sequence[BlockCodes] = ()
    if blocks is not None and (isinstance(blocks, Summarized) or length > blocks.dense_upto):
        summaries = kv.summaries(blocks.summary, blocks.size)
        if isinstance(fixed.reads, Readings):
            codes = kv.summary_codes(blocks.summary, blocks.size)
    more = carried.blocks(blocks) if carried is not None and summaries and isinstance(blocks, Choice) else None
    return PlannedRow(rows.first, length - 1, kv.tables, fixed.reads, summaries, codes, carried=more)
