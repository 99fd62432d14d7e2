"""Decode rows on a CPU that choose blocks of a KV of which a part lies in a tier: one call a layer, as where all KV is
resident.

The kernels choose blocks, look up which of them are resident, and read. If some are not resident, the kernels name them
before anything was stored or read; the blocks are brought in, and the call continues from there. Of a ranking (``psa``)
the first blocks are brought in at once, about as many as the last row read, and more if its rule goes on.

Over a disk the kernels do not wait for all blocks (PSA, section 3.3, pipelined iteration): they begin with the resident
ones and wait before each other block until it has come; blocks come in the order of ranks. Once the kernels have ended,
blocks that a rule did not ask for are not read from the disk any more. Blocks that several rows lack are asked for
before the first of these rows is attended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from saccade.engine.rows.calls import RequestRows, Setting
from saccade.engine.rows.plans import FixedPlans, FixedRow
from saccade.engine.rows.tiers import count_tiers, tier_counts
from saccade.kv.disk import DiskTier
from saccade.kv.hold import Hold
from saccade.kv.host import HostTier
from saccade.kv.tier import TierCounts, TierError
from saccade.kv.tiers import Tiers
from saccade.kv.view import KVView
from saccade.models.interface import LayerAttention
from saccade.ops import cpu, cpu_rows
from saccade.ops.cpu_plans import PlannedRow, PlannedRows, Residence
from saccade.ops.tiered import FIRST_RANKED

PIPELINED = True  # whether kernels begin before all blocks have come from a disk
LEAST_HERE = 0.5  # of what a layer wants: where less is there, they do not, for waiting is as fast (docs/tiers.md)


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
        self._gated = PIPELINED and isinstance(tiers.tier, DiskTier)
        self._holds: list[Hold] = []
        self._chosen = -1  # the layer whose first call was made
        self._wanted = self._missing = 0  # blocks of the last call, and those of them that have no slot
        self._asked = 0  # blocks that ``_holds`` hold
        self._failure: Exception | None = None  # of ask
        self._home: Residence

    def serves(self, q: Tensor, spec: LayerAttention) -> bool:
        """Whether the kernels read the first layer's tensors, and it has no sinks."""
        plain = KVView(self._kv.view(0).layout())
        return spec.sinks is None and cpu_rows.serves(q, plain, self.setting.backend) is None

    def ask(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, spec: LayerAttention, out: Tensor) -> None:
        """Before :meth:`run`, where other rows come first: choose, and begin to bring in what is absent, if memory has
        room for as much again. What goes wrong is raised there."""
        if not self._gated or self.setting.watch.clock is not None or self.fixed.rows.result.error is not None:
            return
        try:
            self._choose(layer, q, k, v, spec, out)
            if self._missing and self._begins and 2 * self._most <= self._tiers.room_in(layer):
                self._fetch(layer)
        except Exception as error:
            self._let_go()
            self._failure = error

    def run(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, spec: LayerAttention, out: Tensor) -> None:
        """As of host_rows.JoinedRows. Raises what Tiers.fetch raises."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
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
        self._planned = PlannedRows([row], storage.k, storage.v, self._own_products, storage.format)
        kv.stored(1)

    def _attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        spec: LayerAttention,
        out: Tensor,
        watched: bool = False,
    ) -> float:
        """Which share of the time went to choosing, if ``watched``."""
        began = time.perf_counter()
        share = self._choose(layer, q, k, v, spec, out, watched)
        planned, tiers = self._planned, self._tiers
        assert planned is not None
        self._chosen = -1
        if not self._missing:
            wanted, result = self._wanted, self.fixed.rows.result
            tiers.found(layer, self._home.slots[:wanted])
            assert result.tiers is not None
            result.tiers.hits += wanted
            result.widest = max(result.widest, wanted)
            result.asked_bytes += wanted * tiers.tier.cell_bytes
            return share
        chosen = time.perf_counter() - began
        try:
            while self._missing:
                asked = self._wanted
                if not self._holds or asked > self._asked:
                    self._fetch(layer)
                self._run(layer, q, k, v, spec, out)  # more is wanted than was asked for where a rule goes on
                if self._missing and self._wanted == asked:
                    raise TierError(f"KV blocks of layer {layer} are not resident although they were brought in")
            for hold in self._holds:
                hold.stop()
            before = [tiers.counts.copy()]
            for hold in self._holds:
                hold.wait()
            count_tiers(self.fixed.rows, before)
        finally:
            self._let_go()
        return chosen * share / (time.perf_counter() - began)

    def _choose(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        spec: LayerAttention,
        out: Tensor,
        watched: bool = False,
    ) -> float:
        """The first call of a layer, which attends where nothing is absent, once. As :meth:`_attend`."""
        if self._planned is None:
            self._begin()
        if self._chosen == layer:
            return 0.0
        share = self._run(layer, q, k, v, spec, out, watched)
        self._chosen = layer
        return share

    def _run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        spec: LayerAttention,
        out: Tensor,
        watched: bool = False,
    ) -> float:
        assert self._planned is not None
        self._tiers.opened(slice(layer, layer + 1), self._tail)
        share = self._planned.run(
            layer, q, k, v, out.transpose(0, 1), spec.scale, spec.softcap, self.setting.threads, watched=watched
        )
        self._wanted, self._missing = self._planned.wanted(0)
        return share

    @property
    def _begins(self) -> bool:
        """Whether the kernels begin before what the layer lacks has come."""
        return self._gated and self._wanted - self._missing >= LEAST_HERE * self._wanted

    def _fetch(self, layer: int) -> None:
        """Begin to bring in what the layer wants; without a gate, wait for it. The block that the new row is stored to
        is always waited for."""
        wanted, before = self._home.blocks[: self._wanted], [self._tiers.counts.copy()]
        try:
            if self._begins:
                if (self._tiers.slots_of(layer, self._tail) < 0).any():
                    self._holds.append(self._tiers.fetch(layer, self._tail))
                    self._holds[-1].wait()
                self._holds.append(self._tiers.fetch(layer, self._ids[wanted], gate=self._home))
            else:
                self._holds.append(self._tiers.fetch(layer, self._ids[np.sort(wanted)]))
                self._holds[-1].wait()
            self._asked = self._wanted
        finally:
            count_tiers(self.fixed.rows, before)

    def _let_go(self) -> None:
        holds, self._holds, self._asked = self._holds, [], 0
        for hold in holds:
            hold.stop()
        for hold in holds:
            hold.release()


def resolved(
    setting: Setting, plans: FixedPlans, some: Sequence[RequestRows], own_products: bool = False
) -> dict[int, ResolvedRow]:
    """Those of ``some`` that can be served so, by request: what a layer may want fits in memory, and is attended
    there."""
    found: dict[int, ResolvedRow] = {}
    for rows in some:
        pool = rows.memory.kv.pool
        tiers = pool.tiers
        if not isinstance(tiers, Tiers) or not pool.absent or pool.shares_layers:
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
