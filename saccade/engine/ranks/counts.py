"""Counts of what attention read, from several ranks that each have some of the heads, joined for reports."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.engine.ranks.link import Group
from saccade.engine.steps.step import CallCount, ReadPairs, RequestResult, StepInput, StepResult
from saccade.engine.watch.device_counts import DeviceCounts
from saccade.engine.watch.layer_stats import LayerStats
from saccade.engine.watch.phase_stats import Late
from saccade.methods.base import Cost
from saccade.methods.policy import Policy
from saccade.ops.pairs import pairs as pairs_of
from saccade.selection import Selection, Shape
from saccade.selection.head_part import WHOLE, HeadPart

DENSE = Policy()


class LateOfRanks:
    """What each rank counts of its heads of one request under one name, and keeps until a report is made. ``ask`` gives
    what all of them have counted, for what the first has; ``part`` says which heads they have."""

    def __init__(self, ask: Callable[[DeviceCounts], Sequence[DeviceCounts]], part: HeadPart) -> None:
        self._ask, self._part = ask, part
        self._own: Late | None = None  # while there is anything new

    def note(self, own: Late) -> None:
        """A step has counted into ``own``, here."""
        self._own = own

    def take(self) -> DeviceCounts:
        """What was counted since the last time."""
        own, self._own = self._own, None
        if own is None:
            return DeviceCounts()
        total = LateOfAll(self._part)
        total.add(self._ask(own.take()))
        return total.take()


class KeptCalls:
    """What this rank's calls of one request counted, where its device has it: asked for at each step, all ranks would
    wait for their devices, and no step could be launched ahead of them."""

    def __init__(self) -> None:
        self._counts = DeviceCounts()

    def add(self, calls: Sequence[CallCount]) -> None:
        """Count some more."""
        for call in calls:
            self._counts.add(call)

    def take(self) -> DeviceCounts:
        """What was counted since the last time, on the host."""
        taken, self._counts = self._counts, DeviceCounts()
        for layer in taken.layers.values():
            layer.rest()
        return taken


class LateOfAll:
    """Counts of one request under one plan, of the heads of all ranks, of which ``part`` says what each has; ``take``
    hands them over."""

    def __init__(self, part: HeadPart = WHOLE) -> None:
        self._part = part
        self._counts = DeviceCounts()

    def add(self, parts: Sequence[DeviceCounts]) -> None:
        """Count what each rank did since the last time."""
        kept = self._counts
        for layer in parts[0].layers:
            counted = [one.layers[layer] for one in parts if layer in one.layers]
            more, have = _stats(counted, self._part.at(layer)), kept.layers.get(layer)
            kept.layers[layer] = more
            if have is not None:
                more.plus(have)
        for known, fresh in ((kept.kinds, parts[0].kinds), (kept.backends, parts[0].backends)):
            for kind, calls in fresh.items():
                known[kind] = known.get(kind, 0) + calls

    def take(self) -> DeviceCounts:
        """What was counted since the last time."""
        taken, self._counts = self._counts, DeviceCounts()
        return taken


def fold_counts(step: StepInput, result: StepResult, tiered: Sequence[bool]) -> None:
    """Have what ``tiered`` requests did counted by layer: over tiers each rank attends rows together or alone, as its
    own memory allows, and calls of one rank are not those of another."""
    for one, moves in zip(step.scheduled, tiered):
        found = result.requests[one.request_id]
        if moves and found.is_good and not found.rows and not found.stay:
            called, total = KeptCalls(), LateOfAll()
            called.add(found.calls)
            for late in (called, *found.late.values()):
                total.add([late.take()])
            found.calls, found.late = [], {("ranks", one.phase): total}


def keep_counts(
    step: StepInput, result: StepResult, good: Sequence[bool], kept: MutableMapping[tuple[int, Hashable], Any]
) -> None:
    """Leave what sparse prefills among the ``good`` requests of ``step`` did on this rank, in ``kept`` by request and
    name, until a report asks for it."""
    for one, stood in zip(step.scheduled, good):
        found = result.requests[one.request_id]
        if stood and one.phase == "prefill" and one.policy != DENSE and found.calls:
            name = ("calls", one.phase)
            own = kept.get((one.request_id, name))
            if own is None:
                own = kept[one.request_id, name] = KeptCalls()
            own.add(found.calls)
            found.calls, found.late = [], {**found.late, name: own}


def exchange(group: Group, own: Any) -> list[Any]:
    """Each rank's ``own``, in the order of ranks, its tensors on the host; all of them call it."""
    written = io.BytesIO()
    _HostPickler(written, pickle.HIGHEST_PROTOCOL).dump(own)
    data = torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)
    sizes = [int(size) for size in group.gather(torch.tensor([len(data)]))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = data
    parts = group.gather(padded)
    return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes)]


class _HostPickler(pickle.Pickler):
    """A device's tensors would come back on the device of the rank that sent them."""

    def reducer_override(self, obj: Any) -> Any:
        """See pickle."""
        if isinstance(obj, Tensor) and obj.device.type != "cpu":
            return obj.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def share_counts(group: Group, step: StepInput, result: StepResult, good: Sequence[bool]) -> list[RankCounts]:
    """What each rank counted of the ``good`` requests of ``step``, in the order of ranks; each calls it for the same
    ones. Nothing is sent where all of them are dense, since their ranks read alike, nor where all was counted on
    devices."""
    if all(one.policy == DENSE for one in step.scheduled):
        return []
    rows, late = _rows(step, result, good), {}
    for one, stood in zip(step.scheduled, good):
        if stood:
            for name, counts in result.requests[one.request_id].late.items():
                if isinstance(counts, LateOfAll):
                    late[one.request_id, name] = counts.take()
    if not late and not any(row.calls for row in rows):
        return []
    return exchange(group, RankCounts([[_told(call) for call in row.calls] for row in rows], late))


def drop_counts(step: StepInput, result: StepResult) -> None:
    """Count nothing of requests that failed: what one rank counted until then is of its heads, and is joined with
    none."""
    for one in step.scheduled:
        found = result.requests[one.request_id]
        if not found.is_good:
            for each in (found, *found.rows):
                each.calls, each.late = [], {}


def join_counts(
    part: HeadPart, step: StepInput, result: StepResult, good: Sequence[bool], told: list[RankCounts]
) -> None:
    """Let the calls of the ``good`` requests of ``step`` count the heads of all ranks, as they were ``told``; ``part``
    says which heads these have."""
    for number, row in enumerate(_rows(step, result, good)):
        for at, call in enumerate(row.calls):
            parts = [rank.calls[number][at] for rank in told]
            if parts:
                row.calls[at] = _joined(call, parts, part.at(call.layer))
            else:
                row.calls[at] = replace(call, used=_widened(call.used, part.parts))


def _rows(step: StepInput, result: StepResult, good: Sequence[bool]) -> list[RequestResult]:
    """Where the calls of the good requests are written down."""
    requests = [result.requests[one.request_id] for one, stood in zip(step.scheduled, good) if stood]
    return [row for one in requests for row in (one, *one.rows)]


class RankCounts(NamedTuple):
    """What a rank counted in a step: its part of each call of each row; by request and plan, what its kernels did."""

    calls: list[list[_Told]]
    late: dict[tuple[int, Hashable], DeviceCounts]


class _Told(NamedTuple):
    """A rank's part of a call: ``pairs`` int64 [its heads]."""

    pairs: Tensor
    cost: Cost
    coverage: Tensor | None


def _told(call: CallCount) -> _Told:
    heads = call.used.shape.heads
    read = call.used.pairs if isinstance(call.used, ReadPairs) else pairs_of(call.used)
    return _Told(read.cpu().expand(heads).clone(), call.cost, None if call.coverage is None else call.coverage.cpu())


def _joined(call: CallCount, parts: Sequence[_Told], heads: HeadPart) -> CallCount:
    costs, kind = [part.cost for part in parts], call.used.kind if isinstance(call.used, ReadPairs) else type(call.used)
    searches = [cost.searches for cost in costs if cost.searches is not None]
    cost = Cost(
        scored=round(sum(one.scored for one in costs) / len(costs)),  # of each head
        estimated=round(sum(one.estimated for one in costs) / len(costs)),
        searches=sum(searches) if searches else None,
        notes=list(dict.fromkeys(note for one in costs for note in one.notes)),
        certified=dict(sum((Counter(one.certified) for one in costs), Counter())),
        rounding=max((one.rounding for one in costs if one.rounding is not None), default=None),
    )
    coverage = [part.coverage for part in parts if part.coverage is not None]
    shape = _wide(call.used.shape, len(parts))
    used = ReadPairs(shape, heads.join([part.pairs for part in parts]), kind)
    return replace(call, used=used, cost=cost, coverage=torch.cat(coverage) if coverage else None)


def _wide(shape: Shape, ranks: int) -> Shape:
    return replace(shape, heads=shape.heads * ranks, kv_heads=shape.kv_heads * ranks)


def _widened(used: Selection | ReadPairs, ranks: int) -> Selection | ReadPairs:
    """What reads alike in all heads, of the heads of all ranks."""
    return replace(used, shape=_wide(used.shape, ranks))  # type: ignore[type-var]


def _stats(parts: Sequence[LayerStats], heads: HeadPart) -> LayerStats:
    """One layer's counts of all heads."""
    own, ranks, attended, even = parts[0], len(parts), None, parts[0].even
    if any(part.attended is not None or part.even != even for part in parts):
        # What reads alike in all heads of one rank may not do so in those of another.
        counted = [part.pairs() for part in parts]
        attended = heads.join(
            [torch.zeros(part.heads, dtype=torch.int64) if one is None else one for part, one in zip(parts, counted)]
        )
        even = 0
    return replace(
        own,
        attended=attended,
        even=even,
        rounding=max((part.rounding for part in parts if part.rounding is not None), default=None),
        heads=sum(part.heads for part in parts),
        scored=round(sum(part.scored for part in parts) / ranks),  # of each head
        estimated=round(sum(part.estimated for part in parts) / ranks),
        searches=sum(part.searches for part in parts),
        searchable=sum(part.searchable for part in parts),
        covered=sum(part.covered for part in parts),
        estimates=sum(part.estimates for part in parts),
        units=sum(part.units for part in parts),
        least_covered=min(part.least_covered for part in parts),
        certified=dict(sum((Counter(part.certified) for part in parts), Counter())),
    )
