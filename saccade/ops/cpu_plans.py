"""Decode rows under device plans (selection.plan) on the C++ kernels: all rows of a layer in one call.

What a row reads is settled once a step for all layers, so that a layer costs no Python of its own: the call stores the
new keys and values, chooses and reads. Rows that choose blocks by summaries read to the last bit what the method's own
selection would read; rows that choose single keys learn from what they read, too (methods/host_state.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.block_codes import BlockCodes
from saccade.kv.format import KVFormat
from saccade.ops import cpu
from saccade.ops.cpu_readings import Reads
from saccade.ops.cpu_structs import native, pool_of
from saccade.ops.layer_rows import MOST_ROWS, WholeLayers
from saccade.ops.layout import written as checked

Array = np.ndarray[Any, Any]
NOTHING_NEW: Any = None if native is None else native.NewRows(k=0, v=0, head_stride=0, row_stride=0, count=0)


class Ruled(NamedTuple):
    """What stopping rules let a row do, each [layers, units]: ranked blocks that were read, int64, and the estimate of
    what was covered, fp32. What layers without a rule say means nothing."""

    used: Tensor
    coverage: Tensor


class Residence:
    """Where the blocks ``ids`` (int64) of a sequence lie some of which may be in no slot: ``slots`` int32 [layers,
    blocks of the pool], -1 for none, of which kernels see what it is when they run. ``nowhere``: a slot that nothing
    lies in; ``most``: blocks that a layer may want. What a layer wanted, int64: ``blocks`` of the sequence, each once,
    and their ``slots``; under a rule in the order of ranks. ``reach`` int64 [layers], for stopping rules: ranked blocks
    that a layer wants at first, and afterwards what the next row is to begin with. Kernels wait for blocks that are
    shut (kv.hold.Gate), in whose slots nothing lies yet."""

    def __init__(self, ids: Array, slots: Array, nowhere: int, most: int, reach: Array | None = None) -> None:
        layers, parts = slots.shape
        if reach is not None and (reach.dtype != np.int64 or reach.shape != (layers,) or not reach.flags.c_contiguous):
            raise SaccadeError(f"reach must be int64 [{layers}], contiguous")
        if slots.strides[1] != 4 or ids.dtype != np.int64 or not ids.flags.c_contiguous or ids.max() >= parts:
            raise SaccadeError(f"ids must be int64 blocks of {parts}, and slots int32 with contiguous rows")
        self._kept = ids, slots, reach
        self._shut = np.zeros(len(ids), dtype=np.uint8)
        self._at: Array | None = None  # where a block of the pool is in the sequence
        self._table = np.full(len(ids), nowhere, dtype=np.int32)
        self.table = torch.from_numpy(self._table).expand(layers, 1, -1)
        self.blocks, self.slots = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
        self.call = native.Residence(
            ids=ids.ctypes.data,
            map=slots.ctypes.data,
            layer_stride=slots.strides[0] // 4,
            count=len(ids),
            nowhere=nowhere,
            table=self._table.ctypes.data,
            blocks=self.blocks.ctypes.data,
            slots=self.slots.ctypes.data,
            room=most,
            reach=0 if reach is None else reach.ctypes.data,
            gate=self._shut.ctypes.data,
        )

    def shut(self, blocks: Array) -> None:
        """See Gate."""
        if self._at is None:
            ids = self._kept[0]
            self._at = np.zeros(self._kept[1].shape[1], dtype=np.int64)
            self._at[ids] = np.arange(len(ids))
        self._shut[self._at[blocks]] = 1

    def open(self, blocks: Array) -> None:
        """See Gate."""
        assert self._at is not None
        native.open_gate(self._shut.ctypes.data, self._at[blocks].tolist())


class PlannedRow(NamedTuple):
    """Row ``row`` of a step's q, k and v, at ``position`` of a sequence whose blocks ``table`` int32 [layers, kv_heads
    or 1, blocks], contiguous rows, finds. Without ``reads`` it is stored and nothing else. ``summaries``: where a layer
    chooses for a row of this length by blocks, each layer's summaries [blocks, parts, kv_heads, head_dim] of all full
    blocks of the keys before the row's own; ``codes``: what is known of them in 4 bits, if they are many.
    ``length``: so many rows of the sequence one after the other, the first at ``position``, which then read
    everything or the last keys of a window, each up to its own key; ``peaks`` fp32 [layers, length, kv_heads, regions]
    gets what the heaviest key of each region of ``region`` keys weighs, summed over a KV head's query heads, 0 in about
    the last 128 keys, and in layers whose window hides any.
    ``home``: where its blocks lie if some are in no slot; ``table`` is then its own, and all layers choose blocks.
    ``carried`` int32 [layers, units, n]: blocks that layers with a budget for so many units read besides, in place of
    the last of those that they would choose, and layers with a rule before those that they rank; numbers of no block
    that is chosen from mean none. ``asked`` [layers, heads, head_dim], in the keys' dtype: gets a single row's
    queries."""

    row: int
    position: int
    table: Tensor
    reads: Reads | None = None
    summaries: Sequence[Tensor] = ()
    codes: Sequence[BlockCodes] = ()
    length: int = 1
    peaks: Tensor | None = None
    region: int = 0
    carried: Tensor | None = None
    home: Residence | None = None
    asked: Tensor | None = None


class PlannedRows:
    """Rows of a step whose readings are known for all layers before it runs; there is at least one. They lie in pools
    ``k``, ``v`` [slots, kv_heads, block_size, width] as ``layout`` has them, by default plain ones. ``own_products``:
    the layer's products on few rows are kernels of the same threads, which then stay awake for them. SaccadeError where
    a row's block is in no slot."""

    def __init__(
        self,
        rows: Sequence[PlannedRow],
        k: Tensor,
        v: Tensor,
        own_products: bool = False,
        layout: KVFormat | None = None,
    ) -> None:
        self._rows, self._pools = rows, (k, v)  # the calls hold addresses
        self._own_products = own_products
        dtype, value_dim = (k.dtype, None) if layout is None else (layout.dtype, layout.value_dim)
        self._pool = pool_of(checked("k_pool", k, k.dtype), checked("v_pool", v, k.dtype), dtype, value_dim)
        layers, units = rows[0].table.shape[0], max([_units(row) for row in rows])
        self._used = torch.zeros(len(rows), layers, units, dtype=torch.int64)
        self._coverage = torch.ones(len(rows), layers, units)
        self._step = native.DecodeStep(layers, k.shape[1], k.shape[2])
        self._lse = torch.empty(0)
        for i, row in enumerate(rows):
            self._add(i, row, units)

    def _add(self, i: int, row: PlannedRow, units: int) -> None:
        table, reads = row.table, row.reads
        layer_stride, head_stride, _ = table.stride()
        where = native.StepRow(
            row=row.row,
            q_start=row.position,
            slots=table.data_ptr(),
            head_stride=0 if table.shape[1] == 1 else head_stride,
            layer_stride=layer_stride,
            blocks=table.shape[2],
            count=row.length,
        )
        try:
            number = self._step.add(where)
        except ValueError as error:
            raise SaccadeError(f"{error}: make it resident first") from None
        if reads is None:
            return
        noted = (self._used[i].data_ptr(), self._coverage[i].data_ptr()) if reads.units else (0, 0)
        reads.tell(self._step, number, row.position + row.length, row.summaries, row.codes, noted, units)
        if row.asked is not None:
            self._step.asks(number, row.asked.data_ptr(), row.asked.stride(0) * row.asked.element_size())
        if row.home is not None:
            self._step.resolves(number, row.home.call)
        if row.peaks is not None:
            checked("peaks", row.peaks, torch.float32)
            self._step.weighs(number, row.peaks.data_ptr(), row.region, row.peaks.shape[3])
        if row.carried is not None:
            checked("carried", row.carried, torch.int32)
            self._step.carries(number, row.carried.data_ptr(), *row.carried.shape[1:])

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        out: Tensor,
        scale: float,
        softcap: float | None,
        threads: int | None,
        attends: bool = True,
        watched: bool = False,
    ) -> float:
        """Store the new ``k``, ``v`` [kv_heads, n, head_dim] of all rows at ``layer``, or neither where the rows are
        stored already, and unless it is not to attend write the attention of those that say what they read to their
        rows of ``out`` [n, heads, head_dim] (see cpu_rows.attend). If ``watched``, returns which share of the rows'
        time went to choosing and learning, else 0."""
        if k is None or v is None:
            return self._run(layer, q, NOTHING_NEW, out, scale, softcap, threads, attends, watched)
        if k.stride() != v.stride() or k.stride(2) != 1:
            k, v = torch.stack([k, v]).unbind()
        head_stride, row_stride, _ = k.stride()
        new = native.NewRows(
            k=k.data_ptr(), v=v.data_ptr(), head_stride=head_stride, row_stride=row_stride, count=k.shape[1]
        )
        return self._run(layer, q, new, out, scale, softcap, threads, attends, watched)

    def run_layers(
        self,
        layers: WholeLayers,
        hidden: Tensor,
        q: Tensor,
        rotary: Sequence[tuple[Tensor, Tensor]],
        threads: int | None,
        watched: bool = False,
    ) -> tuple[float, float]:
        """Take ``hidden`` [rows, channels] of all rows, which all say what they read, through the model's ``layers``,
        in place: to the last bit what project, :meth:`run` and finish would do layer by layer, without the
        interpreter's lock. ``q``: room for queries, as ``layers`` makes it; ``rotary`` as of RowLayers.turns. If
        ``watched``, returns which shares of the time went to attention, and to choosing and learning, else 0."""
        count = hidden.shape[0]
        self._room(count, q.shape[0])
        own = max(1, torch.get_num_threads())
        attending = own if threads is None else max(1, threads)
        return layers.run(self._step, self._pool, hidden, q, rotary, self._lse, attending, watched)

    def _room(self, count: int, heads: int) -> None:
        if self._lse.shape != (count, heads):
            self._lse = torch.empty(count, heads)

    def _run(
        self,
        layer: int,
        q: Tensor,
        new: Any,
        out: Tensor,
        scale: float,
        softcap: float | None,
        threads: int | None,
        attends: bool,
        watched: bool,
    ) -> float:
        checked("out", out, q.dtype)
        count, heads, _ = out.shape
        head_stride, row_stride, _ = q.stride()
        self._room(count, heads)
        queries = native.Queries(
            q=q.data_ptr(),
            head_stride=head_stride,
            row_stride=row_stride,
            heads=heads,
            q_len=q.shape[1],
            q_start=0,
            scale=scale,
            softcap=softcap or 0.0,
        )
        written = native.Output(out=out.data_ptr(), lse=self._lse.data_ptr(), rows=count)
        threads = max(1, torch.get_num_threads() if threads is None else threads)
        follows = self._own_products and count <= MOST_ROWS[q.dtype]
        kernels: Any = cpu.kernels()
        share: float = kernels.run_step(
            self._step, threads, layer, self._pool, new, queries, written, attends, follows, watched
        )
        return share

    def foresee(self, layer: int, heads: int, threads: int | None) -> None:
        """Before the layer's queries, of ``heads`` heads, are there: find what rows that pick single keys know of their
        candidates by then. The next run of the layer takes it; what it does is the same."""
        kernels: Any = cpu.kernels()
        kernels.foresee_step(self._step, max(1, torch.get_num_threads() if threads is None else threads), layer, heads)

    def touched(self, i: int) -> int:
        """In how many of its blocks row ``i``, which has no stopping rule, has read keys at the layer that ran last."""
        count: int = self._step.touched(i)
        return count

    def wanted(self, i: int) -> tuple[int, int]:
        """Of row ``i`` that has a ``home``, at the layer that ran last: how many blocks it reads, and how many of them
        are in no slot. Where there are any it was neither stored nor attended, and goes on once it is run again."""
        wanted: tuple[int, int] = self._step.wanted(i)
        return wanted

    @property
    def lse(self) -> Tensor:
        """fp32 [n, heads]: log-sum-exps of the layer that ran last, of rows that say what they read."""
        return self._lse

    def ruled(self, i: int) -> Ruled | None:
        """What rules let row ``i`` do in the last step, if it was long enough to ask them; None where it has none."""
        units = _units(self._rows[i])
        return Ruled(self._used[i, :, :units], self._coverage[i, :, :units]) if units else None


def _units(row: PlannedRow) -> int:
    """Of stopping rules."""
    return 0 if row.reads is None else row.reads.units
