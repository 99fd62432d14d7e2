"""The device backend: decode steps of many requests at once on a GPU, a few launches a layer, recorded in CUDA graphs.

It serves requests whose method has a device plan (selection.plan); all others keep to the host backend, in the same
step. Requests whose plans have one form are one group of rows, whatever their numbers. What is stored, read and counted
is the same on both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from saccade.engine.attention import Watch
from saccade.engine.device_attention import DeviceAttention, Group, why_not
from saccade.engine.device_counts import LateCounts
from saccade.engine.device_graphs import GraphStats, Key, StepKind, StepKinds
from saccade.engine.device_rows import RowBuffers
from saccade.engine.device_sampling import fetch_tokens
from saccade.engine.device_tiers import DeviceTiers
from saccade.engine.device_watch import PlacedRow, StepWatch
from saccade.engine.device_words import ReadCounts, RuleCounts
from saccade.engine.memory import SequenceMemory
from saccade.engine.report import ran_dense
from saccade.engine.step import RequestResult, ScheduledRequest, StepInput
from saccade.kv.blocks import BlockManager
from saccade.kv.offers import Offers
from saccade.kv.tier import TierError
from saccade.methods.base import Method, WindowMethod
from saccade.methods.device_state import DeviceState, Opening
from saccade.methods.policy import Policy
from saccade.models.decode_step import DecodeStep
from saccade.models.runner import HFRunner
from saccade.ops.triton.common import clear_kept, pad
from saccade.selection import Cone
from saccade.selection.plan import DevicePlan, Reading

MOST_ROWS = 64
SHORTEST = 1024  # keys: rows of up to so many share their graphs
PLANS = 4096  # of methods used last


class StepFailedError(RuntimeError):
    """A batched step did not run: nothing of it counts as stored, and its requests must be served otherwise."""


class StepShortError(StepFailedError):
    """Nothing of a step holds because the device had no room for all that it read."""


@dataclass(frozen=True, eq=False)
class _Planned:
    """A method's plan and the number of its form; or why there is none."""

    plan: DevicePlan | None
    form: int = 0
    why_not: str | None = None
    cones: tuple[Cone | None, ...] = ()  # the policy's window, a layer each


class DeviceBackend:
    """Serves decode rows of ``runner`` on its device. ``cuda_graphs`` says whether steps are recorded; while somebody
    looks on (``watch``) their kernels are launched one by one, and reports say so. ``covers``: a step may run as a
    larger one that is recorded, with padding for its other rows; products of other sizes round differently."""

    Failed = StepFailedError
    Short = StepShortError

    def __init__(
        self, runner: HFRunner, cuda_graphs: bool = True, watch: Watch | None = None, covers: bool = True
    ) -> None:
        self.runner, self.covers = runner, covers
        self.watch = Watch() if watch is None else watch
        self.kinds = StepKinds(runner.device, cuda_graphs)
        self._forward = DecodeStep(runner)
        self._tiers = DeviceTiers()
        self._forms: dict[tuple[Reading, ...], int] = {}
        self._plan = lru_cache(maxsize=PLANS)(self._planned)
        self._same: dict[tuple[int, int], tuple[Method, WindowMethod | None, _Planned]] = {}
        self._buffers: RowBuffers | None = None
        self._kv: weakref.ref[BlockManager] | None = None  # what recordings read; theirs is no claim on its memory
        self._rows: dict[int, LateCounts] = {}  # whose counts each row gathers
        self._counts: weakref.WeakValueDictionary[tuple[int, str], LateCounts] = weakref.WeakValueDictionary()

    @property
    def graphs(self) -> GraphStats:
        """How many graphs are recorded, how many may be, and what they hold."""
        return self.kinds.stats

    def serves(self, step: StepInput, index: int, memory: SequenceMemory) -> str | None:
        """Why request ``index`` of a step cannot be part of a batched one; None where it can."""
        one = step.scheduled[index]
        if one.phase != "decode" or one.length != 1:
            return "only single decode rows are batched"
        if one.row is not None:
            return "rows of drafts are counted, and taken back, one by one"
        if not self._forward.serves:
            return "the model's rotary factors hang on more than a row's position"
        if one.scored:
            return "log-probabilities of its tokens are wanted"
        planned = self._plan_of(one.policy)
        if memory.kv.pool.absent:
            if not self.watch.idle and not memory.kv.resident:
                return "somebody looks on, and some of its KV blocks are not resident"
            if (reason := self._tiers.why_not(memory.kv, planned.plan)) is not None:
                return reason
        if planned.plan is not None:
            if memory.has_state and not planned.plan.keeps:
                return "the decode method keeps a state that its device plan does not know"
            if memory.has_gone and not one.policy.decode.evicts:
                return "an earlier turn evicted keys"
        return planned.why_not

    def parts(self, which: Sequence[int], before: Sequence[int] = ()) -> list[list[int]]:
        """The requests ``which`` in as many steps as they need, those of ``before`` in steps of their own before all
        others."""
        early = set(before)
        kinds = [one for one in which if one in early], [one for one in which if one not in early]
        return [kind[at : at + MOST_ROWS] for kind in kinds for at in range(0, len(kind), MOST_ROWS)]

    def before(self, step: StepInput, which: Sequence[int], memories: Mapping[int, SequenceMemory]) -> list[int]:
        """Those of the served requests ``which`` whose blocks must all stay resident while those of others may not."""
        found = []
        for number in which:
            one = step.scheduled[number]
            plan = self._plan_of(one.policy).plan
            if plan is not None and not plan.listed and self._tiers.absent(memories[one.sequence_id].kv.pool):
                found.append(number)
        return found

    def run(self, step: StepInput, memories: Mapping[int, SequenceMemory]) -> dict[int, RequestResult]:
        """Run a step of requests that are all served, at most ``MOST_ROWS``. ``memories`` by sequence id; results by
        request id: where logits are wanted, the token that is to be chosen from them if the step says how and they are
        sound, else logits fp32 [1, vocab] on the CPU.

        StepFailedError if the step cannot be run. Nothing counts as stored then, and the next step is tried again.
        """
        results = {one.request_id: RequestResult() for one in step.scheduled}
        placed, key, groups = self._arranged(step, memories, results)
        if (reason := self.kinds.why_not(key)) is not None:
            raise StepFailedError(reason)
        counted: list[tuple[int, PlacedRow]] = []
        before = self._tiers.counts(_rows(placed))
        try:
            kind, offers = self._run(step, placed, key, groups)
            for number, row in enumerate(placed):  # while the device works
                if row is not None and row.result.error is None:
                    self._count(number, row)
                    counted.append((number, row))
            fetch_tokens(kind, placed)
            if offers is not None and (reason := self._tiers.settle(offers, _rows(placed), before)) is not None:
                raise StepShortError(reason)
        except StepShortError:
            self._clean_up(counted)
            raise
        except torch.cuda.OutOfMemoryError as error:
            self._clean_up(counted)
            self.kinds.free()
            raise StepFailedError(f"{type(error).__name__}: {error}") from error
        except Exception as error:
            self._clean_up(counted)
            self.kinds.failed(key, error)
            raise StepFailedError(f"{type(error).__name__}: {error}") from error
        except BaseException:  # an interrupt
            self._clean_up(counted)
            raise
        self.kinds.succeeded(key)
        if self.watch.audits:
            self._audit(placed, key)
        return results

    def _plan_of(self, policy: Policy) -> _Planned:
        """``_plan``, without asking every number of the method for its hash twice a step."""
        method, window = policy.decode, policy.window
        key = id(method), id(window)
        known = self._same.get(key)
        if known is None or known[0] is not method or known[1] is not window:
            if len(self._same) >= PLANS:
                self._same.clear()
            known = self._same[key] = method, window, self._plan(method, window)
        return known[2]

    def _planned(self, method: Method, window: WindowMethod | None = None) -> _Planned:
        spec = self.runner.spec
        plan = method.device_plan(spec)
        if plan is None:
            return _Planned(None, why_not=f"'{method.text}': {method.host_only or 'no device plan for this model'}")
        cones = tuple(None if window is None else window.at(layer, spec.layers) for layer in range(spec.layers))
        if window is not None:
            plan = window.narrowed(plan)
            if plan is None:
                return _Planned(None, why_not=f"the kernels of '{method.text}' know no windows")
        reason = why_not(plan, spec)
        if reason is not None:
            return _Planned(None, why_not=f"'{method.text}': {reason}")
        return _Planned(plan, self._forms.setdefault(plan.form, len(self._forms)), cones=cones)

    def _arranged(
        self, step: StepInput, memories: Mapping[int, SequenceMemory], results: dict[int, RequestResult]
    ) -> tuple[list[PlacedRow | None], Key, tuple[Group, ...]]:
        """The rows, one form after the other and padded so that few numbers of rows occur."""
        grouped: dict[int, list[PlacedRow | None]] = {}
        for one in step.scheduled:
            planned = self._plan_of(one.policy)
            assert planned.plan is not None
            memory = memories[one.sequence_id]
            row = PlacedRow(one, memory, planned.plan, results[one.request_id], planned.cones)
            grouped.setdefault(planned.form, []).append(row)
        sizes = tuple((form, pad(len(grouped[form]), 1)) for form in sorted(grouped))
        rows = [row for own in grouped.values() for row in own if row is not None]
        absent = self._tiers.absent(rows[0].kv.pool) and all(row.plan.listed for row in rows)
        tapped = not absent and any(one in self.watch.audits for one in step.request_ids)
        key = sizes, pad(max(step.seq_lens), SHORTEST), absent, tapped
        if self.covers and not absent and self.watch.idle and (cover := self.kinds.cover(key)) is not None:
            key = cover[0]
        forms = list(self._forms)  # by their numbers
        placed: list[PlacedRow | None] = []
        groups = []
        for form, count in key[0]:
            own = grouped.get(form, [])
            groups.append(Group(forms[form], len(placed), count))
            placed += own + [None] * (count - len(own))
        return placed, key, tuple(groups)

    def _run(
        self, step: StepInput, placed: list[PlacedRow | None], key: Key, groups: tuple[Group, ...]
    ) -> tuple[StepKind, Offers | None]:
        pool = next(row.kv.pool for row in placed if row is not None)
        buffers = self._room(pool, len(placed), pool.format.blocks(key[1]))
        self._load(buffers, step, placed)
        try:
            offers = self._tiers.prepare(pool, _rows(placed)) if key[2] else None
        except TierError as error:
            raise StepShortError(str(error)) from error
        if key[3]:
            buffers.tap_for(self.runner.spec)
        kind = self.kinds.of(key, groups)
        watch = None if self.watch.idle else StepWatch(self.watch, placed, self.runner.device)

        def forward() -> None:
            tap = buffers.tap if key[3] else None
            context = DeviceAttention(kind.groups, buffers, pool, kind.longest, watch, offers, tap)
            tokens, positions = buffers.inputs[0, : len(placed)], buffers.inputs[1, : len(placed)]
            kind.logits = self._forward.run(tokens, positions, context)
            greatest, best = kind.logits.max(-1)
            kind.best = torch.where(greatest.abs() < torch.inf, best, -1)  # else the sampler says what is wrong
            context.finish()

        self.kinds.launch(kind, forward, watched=watch is not None)
        if watch is not None:
            watch.settle()
        return kind, offers

    def _room(self, pool: BlockManager, rows: int, blocks: int) -> RowBuffers:
        have = self._buffers
        if have is None or self._kv is None or self._kv() is not pool or not have.fits(rows, blocks):
            for row in list(self._rows):
                self._detach(row)
            self.kinds.clear()  # recordings know the old buffers and pool
            self._buffers, self._kv = None, weakref.ref(pool)
            if have is not None:
                rows, blocks = max(rows, have.rows), max(blocks, have.blocks)
            del have
            spec = self.runner.spec
            self._buffers = RowBuffers(
                spec.layers, pad(rows, 8), blocks, pool.rows, spec.kv_heads, spec.heads, self.runner.device
            )
            return self._buffers
        return have

    @torch.inference_mode()  # in which the host path may have made summaries
    def _load(self, buffers: RowBuffers, step: StepInput, placed: list[PlacedRow | None]) -> None:
        """Bring the rows' buffers up to date, and see whose counts each row gathers."""
        tokens = dict(zip(step.request_ids, step.input_ids.tolist()))
        inputs = []
        for number, row in enumerate(placed):
            if row is None:
                inputs.append((0, 0, 0))
                continue
            one = row.scheduled
            buffers.hold(number, row.kv, row.plan, one.stop)
            if row.plan.keeps:
                state = row.memory.on_device(row.scheduled.policy.decode, partial(self._opened, row))
                buffers.own.hold(number, state, row.cones, one.stop)
                for note in state.notes(one.stop):
                    row.result.note(note)
            inputs.append((tokens[one.request_id], one.start, one.stop))
            self._attach(number, one, row.plan, buffers)
        buffers.load(inputs)

    @torch.inference_mode()  # in which the host path's states were made
    def _opened(self, row: PlacedRow, states: list[Any]) -> DeviceState:
        one = row.scheduled
        return one.policy.decode.device_state(Opening(states, row.kv, self.runner.spec, one.span_start, one.stop))

    def _attach(self, row: int, one: ScheduledRequest, plan: DevicePlan, buffers: RowBuffers) -> None:
        """Let ``row`` count for a request under its plan from now on."""
        held = (one.request_id, plan.name)
        counts = self._counts.get(held)
        if counts is None:
            counts = self._counts[held] = LateCounts(plan, self.runner.spec.heads)
        if counts.row == row and self._rows.get(row) is counts:
            return
        for other in (row, counts.row):
            self._detach(other)
        self._rows[row] = counts
        source: Callable[[], RuleCounts | ReadCounts] | None = None
        if plan.ruled:
            source = partial(buffers.take_rules, row)
        elif plan.keeps:
            source = partial(buffers.own.take, row)
        counts.attach(row, source)

    def _detach(self, row: int | None) -> None:
        counts = None if row is None else self._rows.pop(row, None)
        if counts is not None:
            counts.detach()

    def _count(self, number: int, row: PlacedRow, times: int = 1) -> None:
        """The row is stored; its counts are added up by the request and its plan. With ``times=-1`` it is not."""
        one, choice, counts = row.scheduled, row.plan.blocks, self._rows[number]
        row.kv.appended(times)
        if choice is not None and one.stop % choice.size == 0:
            row.kv.summarized(choice.summary, choice.size)
        whole = False
        if row.plan.keeps:
            state = row.memory.on_device(row.scheduled.policy.decode, partial(self._opened, row))
            state.length = one.stop if times > 0 else one.start
            whole = state.reads_all(one.stop)
        backend = "triton" if self.watch.idle else "triton (eager)"
        everything = counts.add(one.stop, backend, times, one.start - one.span_start, whole)
        if everything and not one.policy.decode.means_dense:
            row.result.note(ran_dense("decode", row.plan.method))
        if self.kinds.note is not None:
            row.result.note(self.kinds.note)
        row.result.late[row.plan.name] = counts

    @torch.inference_mode()
    def _audit(self, placed: list[PlacedRow | None], key: Key) -> None:
        """Hold what was drawn of the step against true attention, now that it has run."""
        for number, row in enumerate(placed):
            audit = None if row is None else self.watch.audits.get(row.scheduled.request_id)
            if row is None or audit is None or row.result.error is not None:
                continue
            tap = None if self._buffers is None or not key[3] else self._buffers.tap
            if tap is None:
                row.result.note("audit: steps whose keys may lie in host memory were left out")
                continue
            for layer in audit.drawn:
                kv, spec = row.kv.view(layer).upto(row.scheduled.stop), tap.specs[layer]
                q, out, lse = tap.q[layer, number], tap.out[layer, number], tap.lse[layer, number]
                row.result.note_of(audit.take(layer, q, out, lse, kv, spec))

    def _clean_up(self, counted: list[tuple[int, PlacedRow]]) -> None:
        """After a step that stopped halfway: nothing of it counts, and kernels that did not run have left words of
        those before them."""
        for number, row in counted:
            self._count(number, row, -1)
        with suppress(Exception):  # of a device that answers no more
            self._tiers.give_up()
        clear_kept(self.runner.device)


def _rows(placed: Sequence[PlacedRow | None]) -> list[PlacedRow]:
    """Those that are no padding."""
    return [row for row in placed if row is not None]
