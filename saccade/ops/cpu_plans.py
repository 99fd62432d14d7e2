"""Decode rows under device plans (selection.plan) on the C++ kernels: all rows of a layer in one call, or two.

What a row reads is settled once a step for all layers, so that a layer costs no Python of its own. Rows that choose
blocks by summaries rank, choose and read them in one call: to the last bit what the method's own selection would read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.ops import cpu
from saccade.ops.cpu_rows import attend_calls
from saccade.ops.cpu_structs import ALL_KEYS, band_keys, native
from saccade.ops.layout import written as checked
from saccade.selection.plan import BestBlocks, Ends, Everything, OwnReading, RankedBlocks, Reading

SUMMARIES = {"cuboid": 2, "minmax": 2, "stored_mean": 1}  # that blocks are ranked by, and their parts


def serves(reading: Reading, kv_heads: int) -> str | None:
    """Why rows cannot read so here, on a model with so many KV heads; None where they can."""
    if isinstance(reading, Everything | Ends):
        return None
    if isinstance(reading, OwnReading):
        return "its kernels are the method's own"
    if reading.summary not in SUMMARIES:
        return f"blocks are ranked by {', '.join(SUMMARIES)}, not by {reading.summary}"
    if reading.last < 1:
        return "the last block has no summary yet: it must be among those that are always read"
    if isinstance(reading, RankedBlocks) and reading.rest == "estimate":
        return "its rule goes by guesses, which rows make one by one"
    return cpu.uneven(reading.units, kv_heads)


class Ruled(NamedTuple):
    """What stopping rules let a row do, each [layers, units]: ranked blocks that were read, int64, and the estimate of
    what was covered, fp32. What layers without a rule say means nothing."""

    used: Tensor
    coverage: Tensor


class Readings:
    """What the kernels take of a plan's layers, made once for all rows under it."""

    def __init__(self, layers: Sequence[Reading]) -> None:
        kinds = list(dict.fromkeys(layers))
        self._calls = [_choice(one) if isinstance(one, BestBlocks | RankedBlocks) else _keys(one) for one in kinds]
        self._dense_upto = [_dense_upto(one) for one in kinds]
        self._layers = [kinds.index(one) for one in layers]
        self.units = max((one.units for one in kinds if isinstance(one, RankedBlocks)), default=0)  # of stopping rules

    def of(self, length: int) -> list[Any]:
        """By layer, what a row that sees ``length`` keys reads: a struct Keys or BlockChoice."""
        if len(self._calls) == 1:
            return [self._calls[0] if length > self._dense_upto[0] else ALL_KEYS] * len(self._layers)
        calls = [call if length > upto else ALL_KEYS for call, upto in zip(self._calls, self._dense_upto)]
        return [calls[i] for i in self._layers]


class PlannedRow(NamedTuple):
    """Row ``row`` of a step's q, at ``position`` of a sequence whose blocks ``table`` int32 [layers, kv_heads or 1,
    blocks], contiguous rows, finds. ``summaries``: where a layer chooses for a row of this length, each layer's
    summaries [blocks, parts, kv_heads, head_dim] of all full blocks of the keys before the row's own."""

    row: int
    position: int
    table: Tensor
    readings: Readings
    summaries: Sequence[Tensor] = ()


class PlannedRows:
    """Rows whose readings are known for all layers before a step runs; there is at least one."""

    def __init__(self, rows: Sequence[PlannedRow]) -> None:
        self._rows = rows  # the calls hold addresses
        layers, units = rows[0].table.shape[0], max([row.readings.units for row in rows])
        self._used = torch.zeros(len(rows), layers, units, dtype=torch.int64)
        self._coverage = torch.ones(len(rows), layers, units)
        self._reads: list[list[tuple[dict[str, Any], Any]]] = [[] for _ in range(layers)]
        self._chooses: list[list[tuple[dict[str, Any], Any, Tensor, int]]] = [[] for _ in range(layers)]
        for i, row in enumerate(rows):
            table = row.table
            fields = {
                "row": row.row,
                "q_start": row.position,
                "head_stride": 0 if table.shape[1] == 1 else table.stride(1),
                "blocks": table.shape[2],
            }
            address, layer_bytes = table.data_ptr(), table.stride(0) * table.element_size()
            for layer, call in enumerate(row.readings.of(row.position + 1)):
                where = {**fields, "slots": address + layer * layer_bytes}
                if isinstance(call, native.BlockChoice):
                    noted = (i * layers + layer) * units if row.readings.units else -1
                    self._chooses[layer].append((where, call, row.summaries[layer], noted))
                else:
                    self._reads[layer].append((where, call))

    def attend(
        self,
        layer: int,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        out: Tensor,
        scale: float,
        softcap: float | None,
        threads: int | None,
    ) -> None:
        """The rows' attention at ``layer``, to their rows of ``out`` [n, heads, head_dim] (see cpu_rows.attend)."""
        checked("out", out, q.dtype)
        calls = [native.DecodeRow(**where, keys=keys) for where, keys in self._reads[layer]]
        if calls:
            attend_calls(q, k_pool, v_pool, calls, out, scale, softcap, threads)
        used, coverage = self._used.data_ptr(), self._coverage.data_ptr()
        calls = [
            native.ChoosingRow(
                **where,
                choice=choice,
                summary=summary.data_ptr(),
                summarized=summary.shape[0],
                used=0 if at < 0 else used + 8 * at,
                coverage=0 if at < 0 else coverage + 4 * at,
            )
            for where, choice, summary, at in self._chooses[layer]
        ]
        if calls:
            attend_calls(q, k_pool, v_pool, calls, out, scale, softcap, threads, chooses=True)

    def ruled(self, i: int) -> Ruled | None:
        """What rules let row ``i`` do in the last step; None where it asked none."""
        row = self._rows[i]
        if not row.summaries or not row.readings.units:
            return None
        units = row.readings.units
        return Ruled(self._used[i, :, :units], self._coverage[i, :, :units])


def _dense_upto(reading: Reading) -> int:
    """Rows of so many keys read everything."""
    if isinstance(reading, BestBlocks | RankedBlocks):
        return reading.dense_upto
    return reading.longest if isinstance(reading, Ends) else 0


def _keys(reading: Reading) -> Any:
    return band_keys(reading.window, reading.sinks) if isinstance(reading, Ends) else ALL_KEYS


def _choice(reading: BestBlocks | RankedBlocks) -> Any:
    common = {
        "size": reading.size,
        "units": reading.units,
        "parts": SUMMARIES[reading.summary],
        "first": reading.first,
        "last": reading.last,
    }
    if isinstance(reading, BestBlocks):
        return native.BlockChoice(**common, take=reading.take)
    return native.BlockChoice(
        **common,
        microbatch=reading.microbatch,
        epsilon=reading.epsilon,
        least=reading.rest == "min",
        mean=reading.stop == "mean",
    )
