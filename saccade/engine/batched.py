"""A decode step of many requests at once on a GPU: a few launches a layer for the whole batch, recorded in CUDA graphs.

Requests whose method has a plan (engine.batched_plan) are served here, those of one method as one group of rows; all
others keep to the executor's own path, in the same step. What is stored, read and reported is the same on both.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saccade.engine.batched_attention import Group, StepAttention
from saccade.engine.batched_plan import Plan, plan_of
from saccade.engine.batched_rows import RowBuffers
from saccade.engine.batched_tally import Tally
from saccade.engine.report import Report
from saccade.engine.request import Work
from saccade.kv.pool import BlockPool
from saccade.methods.base import Method
from saccade.models.decode_step import DecodeStep
from saccade.models.runner import HFRunner
from saccade.ops.triton.common import pad

MOST_GRAPHS = 24  # recorded ones are kept while they are used; the least recently used goes first
MOST_ROWS = 64
SHORTEST = 1024  # keys: rows of up to so many share their graphs

Key = tuple[tuple[tuple[Plan, int], ...], int]


class StepFailedError(RuntimeError):
    """A batched step did not run: its requests must take their own path."""


@dataclass
class _Step:
    """One shape of step: its groups, how many keys its rows have at most, and its graph once there is one."""

    groups: tuple[Group, ...]
    longest: int
    runs: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    best: Tensor = field(default_factory=lambda: torch.empty(0))


class BatchedDecode:
    """Serves decode rows of ``runner`` on its device. ``graphs`` says whether steps are recorded: a shape of step runs
    once as it is, which compiles its kernels, and from a recording afterwards."""

    Failed = StepFailedError

    def __init__(self, runner: HFRunner, graphs: bool = True) -> None:
        self.runner = runner
        self.graphs = graphs and runner.device.type == "cuda"
        self.note: str | None = None  # why steps are not recorded although they should be
        self._plans: dict[Method, Plan | None] = {}
        self._steps: OrderedDict[Key, _Step] = OrderedDict()
        self._buffers: RowBuffers | None = None
        self._kv: weakref.ref[BlockPool] | None = None  # what recordings read; theirs is no claim on its memory
        self._tallies: dict[int, Tally] = {}  # by row
        self._pool: Any = None
        self._stream = torch.cuda.Stream(runner.device) if runner.device.type == "cuda" else None
        self._forward = DecodeStep(runner)

    def serves(self, work: Work) -> bool:
        """Whether this row can be part of a batched step."""
        policy, sequence = work.policy, work.request.sequence
        return (
            self._forward.serves
            and work.phase == "decode"
            and work.length == 1
            and work.request.error is None
            and policy.window is None
            and all(gone is None for gone in sequence.gone)
            and all(state is None for state in sequence.states)
            and self._plan(policy.decode) is not None
            and not work.request.to_score(work.start, work.stop)
        )

    def parts(self, works: list[Work]) -> list[list[Work]]:
        """``works`` in as many steps as they need."""
        return [works[first : first + MOST_ROWS] for first in range(0, len(works), MOST_ROWS)]

    def run(self, works: list[Work]) -> dict[int, Tensor | int]:
        """One row of each of ``works`` (all served, at most ``MOST_ROWS``). By request id, where the row ends its
        sequence, the next token where the request takes the likeliest, else logits fp32 [vocab] on the CPU.

        StepFailedError if it cannot be run; nothing counts as stored then, and its methods are served no more.
        """
        grouped: dict[Plan, list[Work]] = {}
        for work in works:
            plan = self._plan(work.policy.decode)
            assert plan is not None
            grouped.setdefault(plan, []).append(work)
        order = sorted(grouped, key=lambda plan: plan.name)
        sizes = [(plan, pad(len(grouped[plan]), 1)) for plan in order]
        longest = pad(max(work.stop for work in works), SHORTEST)
        pool = works[0].request.sequence.kv.pool
        buffers = self._room(pool, sum(rows for _, rows in sizes), -(-longest // pool.block_size))
        placed: list[Work | None] = []
        for plan, rows in sizes:
            placed += [*grouped[plan], *[None] * (rows - len(grouped[plan]))]
        try:
            self._place(buffers, placed)
            step = self._step((tuple(sizes), longest))
            with self._here():
                self._launch(step, buffers, pool, placed)
        except Exception as error:
            for plan in grouped:  # not tried again
                self._plans = {method: None if known == plan else known for method, known in self._plans.items()}
            raise StepFailedError(f"{type(error).__name__}: {error}") from error
        for row, placed_work in enumerate(placed):
            if placed_work is not None:
                self._count(row, placed_work)
        return self._results(step, placed)

    def _plan(self, method: Method) -> Plan | None:
        if method not in self._plans:
            self._plans[method] = plan_of(method, self.runner.spec)
        return self._plans[method]

    def _room(self, pool: BlockPool, rows: int, pages: int) -> RowBuffers:
        have = self._buffers
        if have is None or self._kv is None or self._kv() is not pool or not have.fits(rows, pages):
            self._kv = weakref.ref(pool)
            for row in list(self._tallies):
                self._take(row)
            self._steps.clear()  # recordings know the old buffers and pool
            rows, pages = max(rows, 8, 0 if have is None else have.rows), max(pages, 0 if have is None else have.pages)
            spec = self.runner.spec
            self._buffers = have = RowBuffers(spec.layers, pad(rows, 1), pages, spec.kv_heads, self.runner.device)
        return have

    def _place(self, buffers: RowBuffers, placed: list[Work | None]) -> None:
        """Bring the rows' buffers up to date, and see whose counts each row gathers."""
        numbers = []
        for row, work in enumerate(placed):
            if work is None:
                numbers.append((0, 0, 0))
                continue
            plan = self._plan(work.policy.decode)
            assert plan is not None
            buffers.hold(row, work.request.sequence.kv, plan.blocks, work.stop)
            numbers.append((work.request.sequence.tokens[work.start], work.start, work.stop))
            self._assign(row, work.request.report, plan, buffers)
        buffers.load(numbers)

    def _assign(self, row: int, report: Report, plan: Plan, buffers: RowBuffers) -> None:
        """Let ``row`` count for ``report`` from now on."""
        tally = report.decode.late.get(plan)
        if not isinstance(tally, Tally):
            tally = report.decode.late[plan] = Tally(report, plan, self.runner.spec.heads)
        if tally.row == row and self._tallies.get(row) is tally:
            return
        for other in (row, tally.row):
            self._take(other)
        self._tallies[row] = tally
        tally.row = row
        if plan.ruled:
            tally.source = lambda: tally.gather(buffers.read[:, row])

    def _take(self, row: int | None) -> None:
        """Hand what a row has counted on the device to the request that it served."""
        tally = None if row is None else self._tallies.pop(row, None)
        if tally is not None:
            if tally.source is not None:
                tally.source()
            tally.row = tally.source = None

    def _step(self, key: Key) -> _Step:
        if key not in self._steps:
            groups, first = [], 0
            for plan, rows in key[0]:
                groups.append(Group(plan, first, rows))
                first += rows
            self._steps[key] = _Step(tuple(groups), key[1])
            while len(self._steps) > MOST_GRAPHS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return self._steps[key]

    def _launch(self, step: _Step, buffers: RowBuffers, pool: BlockPool, placed: list[Work | None]) -> None:
        rows = len(placed)

        def forward() -> None:
            context = StepAttention(step.groups, buffers, pool, step.longest)
            tokens, positions = buffers.numbers[0, :rows], buffers.numbers[1, :rows]
            step.logits = self._forward.run(tokens, positions, context)
            step.best = step.logits.argmax(-1)

        if step.graph is not None:
            step.graph.replay()
        elif self._stream is None or not self.graphs or step.runs == 0:
            self._on_stream(forward)
        else:
            self._record(step, forward)
        step.runs += 1
        for work in placed:
            if work is not None and self.note is not None:
                work.request.report.note(self.note)

    def _here(self) -> AbstractContextManager[Any]:
        """The model's device as the current one: launches and recordings go there."""
        device = self.runner.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _on_stream(self, forward: Callable[[], None]) -> None:
        """Run on the stream that records: what kernels keep for a stream then exists before a recording."""
        if self._stream is None:
            forward()
            return
        current = torch.cuda.current_stream(self.runner.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            forward()
        current.wait_stream(self._stream)

    def _record(self, step: _Step, forward: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                forward()
        except RuntimeError as error:  # a module that asks the host something, say
            self.graphs = False
            self.note = f"decode steps were not recorded in CUDA graphs: {str(error).splitlines()[0]}"
            torch.cuda.synchronize(self.runner.device)
            self._on_stream(forward)
            return
        self._pool = self._pool or graph.pool()
        step.graph = graph
        graph.replay()

    def _count(self, row: int, work: Work) -> None:
        sequence, tally = work.request.sequence, self._tallies[row]
        sequence.kv.appended(1)
        blocks = tally.plan.blocks
        if blocks is not None and work.stop % blocks.choice.size == 0:
            sequence.kv.summarized(blocks.choice.kind, blocks.choice.size)
        sequence.advance(work.stop)
        tally.add(work.stop)

    def _results(self, step: _Step, placed: list[Work | None]) -> dict[int, Tensor | int]:
        best = step.best.tolist()  # waits for the step
        done: dict[int, Tensor | int] = {}
        for row, work in enumerate(placed):
            if work is not None and work.stop == len(work.request.sequence.tokens):
                greedy = work.request.sampler is not None and work.request.sampler.takes_likeliest
                done[work.request.id] = best[row] if greedy else step.logits[row].cpu()
        return done
