"""Decode rows on a CPU whose KV lies in a tier in part and that choose blocks: a layer is one call, as where all KV is
resident.

The kernels choose, look up which blocks are resident, and read them. Where some are not, they say which before anything
was stored or read; these are brought in, and the call goes on from there. Of a ranking (``psa``) the first blocks are
wanted, about as many as the last row read, and more where its rule goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from saccade.engine.host_calls import RequestRows, Setting
from saccade.engine.host_plans import FixedPlans, FixedRow
from saccade.engine.host_tiers import count_tiers, tier_counts
from saccade.kv.host import HostTier
from saccade.kv.tier import TierCounts, TierError
from saccade.kv.tiers import Tiers
from saccade.kv.view import KVView
from saccade.models.interface import LayerAttention
from saccade.ops import cpu, cpu_rows
from saccade.ops.cpu_plans import PlannedRow, PlannedRows, Residence
from saccade.ops.tiered import FIRST_RANKED


class ResolvedRow:
    """One such row; see :func:`resolved`. ``most``: blocks that a layer may want."""

    def __init__(
        self, setting: Setting, plans: FixedPlans, fixed: FixedRow, most: int, own_products: bool = False
    ) -> None:
        self.setting, self.plans, self.fixed = setting, plans, fixed
        self._most, self._own_products = most, own_products
        self._kv = fixed.rows.memory.kv
        tiers = self._kv.pool.tiers
        assert isinstance(tiers, Tiers)
        self._tiers = tiers
        self._ids = self._kv.block_table.numpy()
        self._start = fixed.rows.scheduled.start
        self._tail = self._ids[self._start // self._kv.pool.format.block_size :][:1]
        self._planned: PlannedRows | None = None
        self._home: Residence

    def serves(self, q: Tensor, spec: LayerAttention) -> bool:
        """Whether the kernels read the first layer's tensors, and it has no sinks."""
        plain = KVView(self._kv.view(0).layout())
        return spec.sinks is None and cpu_rows.serves(q, plain, self.setting.backend) is None

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention, out: Tensor) -> None:
        """As of host_rows.JoinedRows. Raises what Tiers.fetch raises."""
        if layer == 0:
            self._begin()
        clock = self.setting.watch.clock
        if clock is None:
            self._attend(layer, q, k, v, spec, out)
        else:
            clock.begin("attention")
            share = 0.0
            try:
                share = self._attend(layer, q, k, v, spec, out, watched=True)
            finally:
                clock.end({"selection": share})
        self._kv.written(layer, self._start, self._start + 1)
        if layer == self.setting.spec.layers - 1:
            assert self._planned is not None
            self.plans.count(self.fixed, f"cpu/{cpu.isa()}", self._planned.ruled(0))
            if self.fixed.plan.ruled:
                self._kv.hints.update(enumerate(self._reach.tolist()))

    def _begin(self) -> None:
        """Bring summaries up to date, and plan all layers. The row counts as stored from here on."""
        kv, rows, before = self._kv, self.fixed.rows, tier_counts(self.fixed.rows)
        blocks = self.fixed.plan.blocks
        assert blocks is not None
        try:
            summaries = kv.summaries(blocks.summary, blocks.size)
        finally:
            if before is not None:
                count_tiers(rows, before)
        codes = kv.summary_codes(blocks.summary, blocks.size)
        rows.result.tiers = rows.result.tiers or TierCounts()
        first = [kv.hints.get(layer, FIRST_RANKED) for layer in range(kv.layers)]
        self._reach = np.array(first, dtype=np.int64)
        self._home = Residence(self._ids, kv.pool.map_of(0), self._tiers.guard, self._most, self._reach)
        row = PlannedRow(rows.first, self._start, self._home.table, self.fixed.reads, summaries, codes, home=self._home)
        storage = kv.pool.storage
        self._planned = PlannedRows([row], storage.k, storage.v, self._own_products, storage.format.dtype)
        kv.stored(1)

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention, out: Tensor, watched: bool = False
    ) -> float:
        """Which share of the time went to choosing, if ``watched``."""
        planned, tiers, here = self._planned, self._tiers, slice(layer, layer + 1)
        assert planned is not None
        given = layer, q, k, v, out.transpose(0, 1), spec.scale, spec.softcap, self.setting.threads
        began = time.perf_counter()
        tiers.opened(here, self._tail)
        share = planned.run(*given, watched=watched)
        wanted, missing = planned.wanted(0)
        if not missing:
            tiers.found(self._home.slots[:wanted])
            result = self.fixed.rows.result
            assert result.tiers is not None
            result.tiers.hits += wanted
            result.widest = max(result.widest, wanted)
            result.asked_bytes += wanted * tiers.tier.cell_bytes
            return share
        chosen, before = time.perf_counter() - began, tiers.counts.copy()
        try:
            while missing:
                asked = wanted
                with tiers.fetch(layer, self._ids[np.sort(self._home.blocks[:wanted])]):
                    tiers.opened(here, self._tail)
                    planned.run(*given)
                wanted, missing = planned.wanted(0)  # more than was asked for where a rule goes on
                if missing and wanted == asked:
                    raise TierError(f"KV blocks of layer {layer} were brought in and are not there")
        finally:
            count_tiers(self.fixed.rows, before)
        return chosen * share / (time.perf_counter() - began)


def resolved(
    setting: Setting, plans: FixedPlans, some: Sequence[RequestRows], own_products: bool = False
) -> dict[int, ResolvedRow]:
    """Those of ``some`` that can be served so, by request: what a layer may want fits in memory, and is attended
    there."""
    found: dict[int, ResolvedRow] = {}
    for rows in some:
        pool = rows.memory.kv.pool
        tiers = pool.tiers
        if not isinstance(tiers, Tiers) or not pool.absent:
            break
        if isinstance(tiers.tier, HostTier) and tiers.tier.compute.mode != "device":
            break
        fixed = plans.of_blocks(rows)
        if fixed is None:
            continue
        blocks = len(rows.memory.kv.block_table)
        most = max(one.most_blocks(pool.format.block_size, blocks) for one in set(fixed.plan.layers))
        if most <= min(tiers.room_in(layer) for layer in range(pool.layers)):
            found[rows.scheduled.request_id] = ResolvedRow(setting, plans, fixed, most, own_products)
    return found
