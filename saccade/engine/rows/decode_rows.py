"""The decode rows of a step on a CPU: stored in one call a layer, and attended in one call where that is possible.

Rows whose readings are known before the step (engine/rows/plans.py) share one call a layer; a step of such rows alone
is one call for all layers. For each other row the method chooses keys by itself; such rows share the call for reading
where their selections allow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from saccade.engine.rows.calls import Chosen, RequestRows, Setting, choose, finish, read
from saccade.engine.rows.plans import FixedPlans, FixedRow
from saccade.engine.steps.carried import REGION
from saccade.kv.block_codes import BlockCodes
from saccade.models.interface import LayerAttention
from saccade.ops import Result, cpu, cpu_rows
from saccade.ops.cpu_plans import PlannedRow, PlannedRows
from saccade.ops.cpu_readings import Readings
from saccade.ops.layer_rows import WholeLayers


class JoinedRows:
    """The decode rows ``rows`` of one step, whose new keys count as stored from here on."""

    def __init__(
        self,
        setting: Setting,
        plans: FixedPlans,
        rows: list[RequestRows],
        own_products: bool = False,
    ) -> None:
        self.setting, self.plans = setting, plans
        self._pool = rows[0].memory.kv.pool
        self.fixed: list[tuple[int, FixedRow]] = []  # with their numbers among all
        self.chosen: list[RequestRows] = []  # rows that are chosen for layer by layer
        self.why_chosen: dict[int, str] = {}  # by their id()
        self.ran_whole = False  # whether one call ran all layers
        planned: list[tuple[RequestRows, FixedRow | None]] = []
        for number, one in enumerate(rows):
            fixed = plans.of(one)
            if isinstance(fixed, FixedRow):
                self.fixed.append((number, fixed))
                planned.append((one, fixed))
            else:
                self.why_chosen[id(one)] = fixed
                self.chosen.append(one)
                planned.append((one, None))
        self._rows: list[PlannedRows] = []
        for group, own in enumerate(self._pool.groups):
            parts = list[PlannedRow]()
            for one, reads in planned:  # no comprehension: summaries made on the way lie a frame deeper below each
                parts.append(_planned(one, reads, group))
            self._rows.append(PlannedRows(parts, own.storage.k, own.storage.v, own_products, own.format))
        for one in rows:
            one.memory.kv.stored(one.scheduled.length)

    @property
    def planned(self) -> PlannedRows:
        """The rows as the kernels know them, where all layers lie alike."""
        (rows,) = self._rows
        return rows

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        spec: LayerAttention,
        out: Tensor | None = None,
    ) -> Tensor:
        """Store the rows' keys and values at ``layer`` and write their attention to their rows of ``out`` [heads, rows,
        head_dim], rows before heads in memory; by default of a new tensor."""
        setting = self.setting
        setting.watch.pulse.layer()
        if out is None:
            out = q.new_zeros(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1)
        if layer == 0:
            self.settle_fixed(q, spec)
        group, own = self._pool.places[layer] if len(self._rows) > 1 else (0, layer)
        planned = self._rows[group]
        given = own, q, k, v, out.transpose(0, 1), spec.scale, spec.softcap, setting.threads, bool(self.fixed)
        clock = setting.watch.clock
        if clock is None:
            planned.run(*given)
        else:
            clock.begin("attention")
            share = 0.0
            try:
                share = planned.run(*given, watched=True)
            finally:
                clock.end({"selection": share})
        if self.fixed and setting.watch.audits:
            for _, row in self.fixed:
                self._audit(row.rows, layer, q, spec, out, planned.lse)
        if layer == setting.spec.layers - 1:
            self._count()
        joins = spec.sinks is None and len(self.chosen) > 1 and self._joins(q, self.chosen[0], layer)
        together: list[Chosen] = []
        for rows in self.chosen:
            if rows.result.error is not None:
                continue
            here = slice(rows.first, rows.first + rows.scheduled.length)
            try:
                chosen = choose(setting, rows, layer, q[:, here], rows.scheduled.stop, spec)
                waits = joins and not chosen.want_weights
                if rows.drafted and rows.memory.states[layer] is not None:
                    waits = False  # the next row of its request chooses by what this one learns
                if waits and cpu_rows.serves_row(chosen.chunk.kv, chosen.selection) is None:
                    together.append(chosen)
                else:
                    out[:, here] = finish(setting, chosen, spec, read(setting, chosen))
            except Exception as error:
                rows.failed(layer, error)
        if together:
            self._attend_together(layer, together, q, spec, out)
        return out

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """None of the rows is frozen (see models.interface.AttentionContext)."""

    def run_layers(
        self,
        layers: WholeLayers,
        hidden: Tensor,
        rotary: Sequence[tuple[Tensor, Tensor]],
        attention: Sequence[LayerAttention],
    ) -> bool:
        """See models.interface.WholeRows, for rows of which none is chosen for and none audited."""
        q = layers.queries(hidden.shape[0])
        self.settle_fixed(q, next((one for one in attention if one.sinks is not None), attention[0]))
        if self.chosen or len(self._rows) > 1:
            return False
        clock, given = self.setting.watch.clock, (layers, hidden, q, rotary, self.setting.threads)
        if clock is None:
            self.planned.run_layers(*given)
        else:
            clock.begin("linear")
            shares = 0.0, 0.0
            try:
                shares = self.planned.run_layers(*given, watched=True)
            finally:
                clock.end(dict(zip(("attention", "selection"), shares)))
        self._count()
        self.ran_whole = True
        return True

    def _count(self) -> None:
        """All rows that need no help were attended in every layer."""
        backend = f"cpu/{cpu.isa()}"
        for number, row in self.fixed:
            self.plans.count(row, backend, self._rows[0].ruled(number))

    def _audit(self, rows: RequestRows, layer: int, q: Tensor, spec: LayerAttention, out: Tensor, lse: Tensor) -> None:
        audit, at = self.setting.watch.audits.get(rows.scheduled.request_id), rows.first
        if audit is None or layer not in audit.drawn:
            return
        kv = rows.memory.kv.view(layer).upto(rows.scheduled.stop)
        rows.result.note_of(audit.take(layer, q[:, at], out[:, at], lse[at], kv, spec, self.setting.threads))

    def settle_fixed(self, q: Tensor, spec: LayerAttention) -> None:
        """Have rows chosen for one by one where the kernels do not read these tensors, or a layer has sinks."""
        if self.fixed and (spec.sinks is not None or not self._joins(q, self.fixed[0][1].rows, 0)):
            self.why_chosen |= {id(row.rows): "a layer has sinks, or tensors of another kind" for _, row in self.fixed}
            self.chosen = sorted([*self.chosen, *(row.rows for _, row in self.fixed)], key=lambda rows: rows.first)
            self.fixed = []

    def _joins(self, q: Tensor, rows: RequestRows, layer: int) -> bool:
        return cpu_rows.serves(q, rows.memory.kv.view(layer), self.setting.backend) is None

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


def _planned(rows: RequestRows, fixed: FixedRow | None, group: int) -> PlannedRow:
    """A row's part of the step in a group of layers, its keys not stored yet."""
    length, kv, count = rows.scheduled.stop, rows.memory.kv, rows.scheduled.length
    if fixed is None:
        return PlannedRow(rows.first, length - count, kv.parts[group].tables, length=count)
    if len(kv.parts) > 1:  # it chooses nothing
        layers = [layer for layer, (own, _) in enumerate(kv.pool.places) if own == group]
        return PlannedRow(
            rows.first,
            length - count,
            kv.parts[group].tables,
            cast(Readings, fixed.reads).of_layers(layers),
            length=count,
            region=REGION,
        )
    if rows.together:
        weighed = rows.weighed() if fixed.weighs else None
        peaks = None if weighed is None else weighed.peaks
        return PlannedRow(rows.first, length - count, kv.tables, fixed.reads, length=count, peaks=peaks, region=REGION)
    carried = rows.memory.carried
    choice, blocks = fixed.plan.choice, fixed.plan.blocks if fixed.state is None else fixed.state.summarized
    summaries: Sequence[Tensor] = ()
    codes: Sequence[BlockCodes] = ()
    if blocks is not None and (choice is None or length > choice.dense_upto):
        summaries = kv.summaries(blocks.summary, blocks.size)
        if fixed.state is None:
            codes = kv.summary_codes(blocks.summary, blocks.size)
    more = carried.blocks(choice) if carried is not None and summaries and choice is not None else None
    asked = None if fixed.state is None else fixed.state.asked(length)
    return PlannedRow(rows.first, length - 1, kv.tables, fixed.reads, summaries, codes, carried=more, asked=asked)
