"""Who looks on sees batched decode steps as they are: the same kernels, launched one by one instead of replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saccade.engine.attention import Watch
from saccade.engine.memory import SequenceMemory
from saccade.engine.observe import AttentionCall
from saccade.engine.step import RequestResult, ScheduledRequest
from saccade.kv.sequence import SequenceKV
from saccade.kv.view import KVView
from saccade.models.interface import LayerAttention
from saccade.ops.triton.batched_rows import listed
from saccade.ops.triton.decode import KeyLists
from saccade.ops.triton.progressive import Progress
from saccade.selection import Band, Blocks, Cone, Dense, Selection, Shape, Tokens
from saccade.selection.plan import BestBlocks, DevicePlan, Ends, OwnReading, RankedBlocks, Reading


@dataclass(frozen=True)
class PlacedRow:
    """One request's row of a batched step, decoded under ``plan``."""

    scheduled: ScheduledRequest
    memory: SequenceMemory
    plan: DevicePlan
    result: RequestResult
    cones: tuple[Cone | None, ...] = ()  # the policy's window, a layer each

    @property
    def kv(self) -> SequenceKV:
        return self.memory.kv

    @property
    def next(self) -> PlacedRow:
        """The row after this one."""
        one = self.scheduled
        return replace(self, scheduled=one._replace(start=one.start + 1, stop=one.stop + 1))


class StepWatch:
    """Times a step's stretches for a clock and hands its attention calls to an observer. On a GPU stretches are timed
    by its events, so that they take as long as the kernels do, not as long as launching them."""

    def __init__(self, watch: Watch, placed: Sequence[PlacedRow | None], device: torch.device) -> None:
        self._watch, self._clock, self._placed, self._device = watch, watch.clock, placed, device
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, name: str) -> None:
        """A stretch begins. Stretches do not nest."""
        if self._clock is None:
            return
        if self._device.type != "cuda":
            self._clock.begin(name)
            return
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        self._events.append((name, began, ended))

    def end(self) -> None:
        """The stretch that has begun ends."""
        if self._clock is None:
            return
        if self._device.type != "cuda":
            self._clock.end()
        else:
            self._events[-1][2].record()

    def settle(self) -> None:
        """Add the stretches to the clock, once the step is done."""
        if self._clock is None or not self._events:
            return
        torch.cuda.synchronize(self._device)
        for name, began, ended in self._events:
            self._clock.seconds[name] = self._clock.seconds.get(name, 0.0) + began.elapsed_time(ended) / 1e3
        self._events = []

    def called(
        self,
        layer: int,
        first: int,
        q: Tensor,
        out: Tensor,
        spec: LayerAttention,
        lists: KeyLists | None,
        ranking: tuple[Tensor, Tensor, Tensor] | None,
        progress: Progress | None,
        everything: Tensor | None = None,
    ) -> None:
        """Rows ``first`` on have attended for ``q``, to ``lists``, or to what the rule let in of ``ranking`` (see
        rank_blocks), or to ``everything`` (bool [rows]). What an observer raises fails its request alone."""
        if not self._watch.sees_calls:
            return
        for number in range(q.shape[0]):
            row = self._placed[first + number]
            if row is None or row.result.error is not None:
                continue
            scheduled, reading = row.scheduled, row.plan.layers[layer]
            try:
                # Summaries of a block that this step fills are known to nobody yet: without a store of them the
                # view computes its own.
                view = KVView(row.kv.view(layer).upto(scheduled.stop).paged())
                shape = Shape.suffix(q.shape[1], view.kv_heads, 1, scheduled.stop, q.device)
                blocks = [] if progress is None or ranking is None else _ranked(reading, number, ranking, progress)
                if lists is not None:
                    blocks = _listed(number, lists)
                whole = everything is not None and bool(everything[number])
                selection = Dense(shape) if whole else _selection(reading, shape, blocks)
                heads = q[number][:, None], out[number][:, None]
                self._watch.see(
                    AttentionCall(scheduled.request_id, layer, "decode", heads[0], view, selection, spec, heads[1])
                )
            except Exception as error:  # one request's failure must not take the others down
                row.result.error = f"layer {layer}, decode: {type(error).__name__}: {error}"


def _selection(reading: Reading, shape: Shape, blocks: list[Tensor]) -> Selection:
    """What one row read; ``blocks``: its lists, one a unit."""
    if isinstance(reading, OwnReading):
        return Tokens.from_lists(shape, blocks)
    kind = reading.cost(shape.k_len).kind
    if kind == "dense":
        return Dense(shape)
    if isinstance(reading, Ends):
        return Band(shape, window=reading.window, sinks=reading.sinks)
    assert isinstance(reading, BestBlocks | RankedBlocks)
    return Blocks.from_lists(shape, reading.size, blocks)


def _listed(row: int, lists: KeyLists) -> list[Tensor]:
    assert lists.counts is not None
    entries = range(row * lists.units, (row + 1) * lists.units)
    if lists.starts is not None:
        return [listed(lists, entry) for entry in entries]
    return [lists.indices[entry, : int(lists.counts[entry])] for entry in entries]


def _ranked(reading: Reading, row: int, ranking: tuple[Tensor, Tensor, Tensor], progress: Progress) -> list[Tensor]:
    assert isinstance(reading, RankedBlocks)
    always, order, counts = ranking
    lists = []
    for entry in range(row * reading.units, (row + 1) * reading.units):
        used = min(int(progress.used[entry]) * reading.microbatch, int(counts[1, entry]))
        lists.append(torch.cat([always[entry, : int(counts[0, entry])], order[entry, :used]]))
    return lists
