"""Decode rows whose keys, tables, selection and attention are the host's while the device computes everything else
(LFPS as its paper runs it, section 3; docs/tiers.md).

At each layer the rows' queries, keys and values go down and results come up, nothing else. What the CPU can know of a
layer before its queries are there, the candidates that score tables name, it finds while the device computes them. A
step of several such rows runs as two sub-batches that take turns: while the CPU attends one, the device computes the
other's next layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from saccade.engine.memory.hosted import HostedMemory, lives_on_host
from saccade.engine.memory.sequence_memory import SequenceMemory
from saccade.engine.rows.calls import RequestRows, Setting
from saccade.engine.rows.decode_rows import JoinedRows
from saccade.engine.rows.plans import FixedPlans
from saccade.kv.blocks import BlockManager
from saccade.kv.host import HostTier
from saccade.kv.tier import LostKV, TierCounts, TierFull
from saccade.methods.base import Method
from saccade.methods.policy import Policy
from saccade.models.interface import LayerAttention
from saccade.ops import cpu_rows
from saccade.ops.down import Lane
from saccade.selection import Selection
from saccade.selection.pieces import read_blocks


def goes_to_host(pool: BlockManager, policy: Policy) -> bool:
    """Whether decode rows under ``policy`` leave the device: their method follows its keys, or all do, and what lies in
    host memory is attended there."""
    tier = None if pool.tiers is None else pool.tiers.tier
    if not isinstance(tier, HostTier) or tier.compute.mode != "host":
        return False
    return (policy.decode.follows_kv or tier.compute.lodges_all) and cpu_rows.stores(tier.k, tier.format, "auto")


class Hosting:
    """Moves sequences to the host and back, for the steps of one worker. ``most_parts``: a step of theirs alone is cut
    into at most so many sub-batches, so that the device computes one while the CPU attends another."""

    def __init__(self, setting: Setting, plans: FixedPlans) -> None:
        self._setting, self._plans = replace(setting, backend="auto", fa4=False), plans
        self._lanes: list[Lane] = []
        self._thread: ThreadPoolExecutor | None = None
        self.most_parts: int | None = None  # None: by the device

    def gather(self, rows: Sequence[RequestRows], cut: bool) -> list[HostedRows]:
        """Those of ``rows`` that decode there in this step, in sub-batches where it may be ``cut``. Their sequences
        live there from now on; the others', if any did, live on the device."""
        found: list[tuple[RequestRows, HostedMemory]] = []
        for one in rows:
            pool = one.memory.kv.pool
            if not one.decodes or one.drafted or not goes_to_host(pool, one.scheduled.policy):
                continue
            try:
                found.append((one, lives_on_host(one.memory, partial(self._opened, one.method))))
            except TierFull as error:
                one.result.note(f"decode: the device served steps: {error}")
            except LostKV as error:
                one.failed(0, error)
        if not found:
            return []
        device = found[0][0].memory.kv.pool.storage.device
        most = self.most_parts or (2 if device.type == "cuda" else 1)
        cut = cut and len(found) == len(rows) and self._setting.watch.idle
        some = _halves(found) if cut and most > 1 else [found]
        while len(self._lanes) < len(some):
            self._lanes.append(Lane(device))
        setting = replace(self._setting, threads=self._setting.threads or torch.get_num_threads())
        return [HostedRows(setting, self._plans, part, lane) for part, lane in zip(some, self._lanes)]

    def parts(self, hosted: Sequence[HostedRows]) -> list[HostedPart]:
        """Sub-batches, which are all rows of a pass, with a thread that attends them one after the other."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "saccade-hosted")
        return [HostedPart(one, self._thread) for one in hosted]

    def _opened(self, method: Method, memory: SequenceMemory) -> HostedMemory:
        return HostedMemory(memory, self._plans.summarized(method))


class HostedRows:
    """The rows ``found`` of one step, with the memories that stand for theirs; ``requests`` says whose they are. A
    layer of them is :meth:`send`, :meth:`foresee`, :meth:`attend`, :meth:`take`."""

    def __init__(
        self, setting: Setting, plans: FixedPlans, found: Sequence[tuple[RequestRows, HostedMemory]], lane: Lane
    ) -> None:
        self._setting, self._lane = setting, lane
        self.requests = [rows for rows, _ in found]
        self._memories = [memory for _, memory in found]
        self._rows = [
            RequestRows(rows.scheduled, memory, rows.results, first) for first, (rows, memory) in enumerate(found)
        ]
        self._joined = JoinedRows(setting, plans, self._rows)
        self._heads = self._down = 0
        self._result: Tensor

    def send(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> None:
        """Begin to bring the rows' queries, keys and values down."""
        self._heads, self._down = q.shape[0], self._lane.send(q, k, v)
        if layer == 0:
            self._joined.settle_fixed(q.new_empty(q.shape, device="cpu"), spec)

    def foresee(self, layer: int) -> None:
        """Find what is known of the rows' candidates before their queries are here."""
        if self._joined.fixed:
            self._joined.planned.foresee(layer, self._heads, self._setting.threads)

    def attend(self, layer: int, spec: LayerAttention) -> None:
        """Attend on the CPU, once the queries are here."""
        q, k, v = self._lane.wait()
        heads, count, width = q.shape
        out = self._lane.room("out", (count, heads, width), q.dtype)
        if self._joined.chosen:
            out.zero_()  # rows that fail leave nothing
        if spec.sinks is not None:
            spec = replace(spec, sinks=spec.sinks.cpu())
        self._joined.run(layer, q, k, v, spec, out.transpose(0, 1))
        self._result = out
        self._count(out.nbytes)

    def take(self) -> Tensor:
        """The layer's result on the device: [heads, rows, head_dim]."""
        return self._lane.up(self._result).transpose(0, 1)

    def _count(self, up: int) -> None:
        fixed, each = {number for number, _ in self._joined.fixed}, len(self._rows)
        for number, (rows, memory) in enumerate(zip(self._rows, self._memories)):
            hosted, result = memory.hosted_kv, rows.result
            if number in fixed:
                parts = self._joined.planned.touched(number)
            elif result.error is None:
                used = result.calls[-1].used
                assert isinstance(used, Selection)  # a single row's: its lists are kept
                parts = int(read_blocks(used, hosted.pool.format.block_size).sum())
            else:
                parts = 0
            parts *= hosted.heads
            down = self._down // each, up // each
            hosted.attended(parts, *down)
            tiers = result.tiers = result.tiers or TierCounts()
            tiers.attended_on_host += parts
            tiers.bytes_down += down[0]
            tiers.bytes_up += down[1]
            result.asked_bytes += parts * hosted.part_bytes


class HostedPart:
    """A sub-batch as the layer loop has it (models.interface.RowsPart), attended on ``thread``."""

    def __init__(self, hosted: HostedRows, thread: ThreadPoolExecutor) -> None:
        first, last = hosted.requests[0].first, hosted.requests[-1].first + 1
        self._hosted, self._thread, self.rows = hosted, thread, slice(first, last)
        self._task: Future[None] | None = None

    def begin(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> None:
        """See RowsPart."""
        self._hosted.send(layer, q, k, v, spec)
        self._task = self._thread.submit(self._attend, layer, spec)

    def end(self, layer: int, spec: LayerAttention) -> Tensor:
        """See RowsPart."""
        task, self._task = self._task, None
        assert task is not None
        task.result()
        return self._hosted.take()

    def drop(self) -> None:
        """See RowsPart."""
        if self._task is not None:
            wait([self._task])

    @torch.inference_mode()  # which is each thread's own
    def _attend(self, layer: int, spec: LayerAttention) -> None:
        self._hosted.foresee(layer)
        self._hosted.attend(layer, spec)


def _halves(found: list[tuple[RequestRows, HostedMemory]]) -> list[list[tuple[RequestRows, HostedMemory]]]:
    """Two stretches of rows with about as many keys each; one where there is one row."""
    ends = list(itertools.accumulate(rows.scheduled.stop for rows, _ in found))
    cut = min(range(len(ends)), key=lambda at: abs(2 * ends[at] - ends[-1])) + 1
    cut = min(cut, len(found) - 1)
    return [found[:cut], found[cut:]] if cut else [found]
