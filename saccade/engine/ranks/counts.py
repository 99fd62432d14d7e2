"""Counts of what attention read, from several ranks that each have some of the heads, joined for reports.

Each rank keeps what its steps counted until a report asks, over tiers too: asked for after each step, all ranks would
wait for their devices and for each other, and no step could be launched ahead. Nothing that is counted decides what a
step does.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from saccade.engine.ranks.meeting import Group
from saccade.engine.ranks.outcomes import Outcome
from saccade.engine.steps.step import CallCount, RequestResult, ScheduledRequest, StepInput, StepResult
from saccade.engine.watch.device_counts import DeviceCounts, LateCounts, selection_kind
from saccade.engine.watch.layer_stats import LayerStats
from saccade.engine.watch.phase_stats import Late
from saccade.kv.tier import TierCounts
from saccade.methods.policy import Policy
from saccade.methods.verified import Verified
from saccade.selection import Dense, Mixed
from saccade.selection.head_part import HeadPart

DENSE = Policy()


class LateOfRanks:
    """What each rank counts of its heads of one request in one phase, and keeps until a report is made. ``ask`` gives
    what all of them have counted, for what the first has; ``part`` says which heads they have."""

    def __init__(self, ask: Callable[[DeviceCounts], Sequence[DeviceCounts]], part: HeadPart) -> None:
        self._ask, self._part = ask, part
        self._own: Late | None = None  # while there is anything new
        self._alike = True

    def note(self, own: Late, alike: bool = False) -> None:
        """A step has counted into ``own``, here. ``alike``: nothing else was counted on any other rank."""
        self._own, self._alike = own, self._alike and alike

    def take(self) -> DeviceCounts:
        """What was counted since the last time."""
        own, self._own = self._own, None
        if own is None:
            return DeviceCounts()
        counts = own.take()
        return joined_counts([counts] * self._part.parts if self._alike else self._ask(counts), self._part)


class KeptCounts:
    """What this rank has counted of one request in one phase, on the device that counted it."""

    def __init__(self) -> None:
        self._counts = DeviceCounts()
        self._late: dict[Hashable, LateCounts] = {}
        self._tiers: TierCounts | None = None
        self._step_bytes: int | None = None

    def add(self, calls: Iterable[CallCount], late: Iterable[DeviceCounts] = ()) -> None:
        """Count some more: ``calls``, and what is at hand of what was counted beside them."""
        for call in calls:
            self._counts.add(call)
            kind, order = selection_kind(call.used), self._counts.order.setdefault(call.layer, [])
            if order and order[-1][0] == kind:
                order[-1] = kind, order[-1][1] + 1
            else:
                order.append((kind, 1))
        for one in late:
            self._counts.plus(one)

    def add_later(self, late: MutableMapping[Hashable, LateCounts]) -> None:
        """Count what is in ``late``, by name, once it is asked for."""
        self._late.update(late)

    def add_moved(self, tiers: TierCounts, step_bytes: int | None) -> None:
        """A step moved so much for the request; a decode step asked for ``step_bytes`` of keys and values."""
        self._tiers = self._tiers or TierCounts()
        self._tiers.add(tiers)
        self._step_bytes = step_bytes or self._step_bytes

    def take(self) -> DeviceCounts:
        """What was counted since the last time, on the host; of tiers all so far."""
        taken, self._counts = self._counts, DeviceCounts()
        for layer in taken.layers.values():
            layer.rest()
        late, self._late = self._late, {}
        for one in late.values():
            taken.plus(one.take())
        taken.tiers = None if self._tiers is None else self._tiers.copy()
        taken.step_bytes = self._step_bytes
        return taken


def joined_counts(parts: Sequence[DeviceCounts], part: HeadPart) -> DeviceCounts:
    """What each rank counted of its heads, of all heads, of which ``part`` says what each has."""
    own, *others = parts
    kinds, sparse_elsewhere = _kinds(parts)
    total = DeviceCounts(kinds=kinds, backends=own.backends, sparse_elsewhere=sparse_elsewhere)
    for layer in own.layers:
        total.layers[layer] = _stats([one.layers[layer] for one in parts if layer in one.layers], part.at(layer))
    for one in others:
        if one.tiers is not None:
            total.tiers = one.tiers if total.tiers is None else total.tiers.beside(one.tiers)
        if one.step_bytes is not None:
            total.step_bytes = one.step_bytes + (total.step_bytes or 0)
    return total


def _kinds(parts: Sequence[DeviceCounts]) -> tuple[dict[str, int], int]:
    """How often which kind of selection ran in calls of all heads. Ranks choose by their own heads: one whose heads all
    read by lines has lines where another has a mixture, which one process has of all heads. And in how many calls the
    heads of the first rank alone read everything."""
    total, sparse_elsewhere = Counter(parts[0].kinds), 0
    for layer in parts[0].order:
        for kinds in zip(*(_one_by_one(part.order.get(layer, ())) for part in parts)):
            others = set(kinds) - {Dense.__name__.lower()}  # heads that read everything go with any
            if len(set(kinds)) > 1:
                sparse_elsewhere += kinds[0] not in others
                total[kinds[0]] -= 1
                total[others.pop() if len(others) == 1 else Mixed.__name__.lower()] += 1
    return {kind: calls for kind, calls in total.items() if calls}, sparse_elsewhere


def _one_by_one(order: Sequence[tuple[str, int]]) -> Iterator[str]:
    return chain.from_iterable(repeat(kind, calls) for kind, calls in order)


def name_of(one: ScheduledRequest) -> tuple[str, bool]:
    """Under which name a request's counts are kept: rows of its drafts are counted apart from those that verify."""
    return one.phase, isinstance(one.policy.decode, Verified)


def keep_counts(
    step: StepInput,
    result: StepResult,
    outcomes: Sequence[Outcome],
    tiered: Sequence[bool],
    kept: MutableMapping[tuple[int, Hashable], Any],
) -> None:
    """Leave what the requests of ``step`` did on this rank in ``kept``, by request and phase, until a report asks for
    it. ``tiered`` ones ran over tiers. Rows of drafts are left as they are (engine/ranks/drafted.py)."""
    for one, outcome, moves in zip(step.scheduled, outcomes, tiered):
        found = result.requests[one.request_id]
        calls, late, at_hand = found.calls, found.late, []
        drop_counts(found, rows=not outcome.good)
        if moves:  # taken now, so that of a step that failed in another rank nothing stays where rows are counted here
            at_hand = [counts.take() for counts in late.values() if counts.on_host]
            late = {name: counts for name, counts in late.items() if not counts.on_host}
        if found.rows or found.undone or outcome.lost or one.request_id < 0:
            continue  # what is computed again is counted then, and replays (negative numbers) are not
        name = name_of(one)
        own = kept.get((one.request_id, name))
        if own is None:
            own = kept[one.request_id, name] = KeptCounts()
        if outcome.good:
            own.add(calls, at_hand)
            own.add_later(late)
        else:  # as far as all ranks came
            own.add(calls[: outcome.calls])
        found.late = {name: own}


def drop_counts(found: RequestResult, rows: bool = True) -> None:
    """Count nothing of a request, nor with ``rows`` of those that were drafted: what one rank alone counted."""
    for each in (found, *(found.rows if rows else ())):
        each.calls, each.late = [], {}


def keep_moved(step: StepInput, result: StepResult, kept: MutableMapping[tuple[int, Hashable], Any]) -> None:
    """Leave what tiers of a rank other than the first moved in ``step`` in ``kept``; for replays, whose requests have
    negative numbers, with what is kept of the requests themselves."""
    for one in step.scheduled:
        found = result.requests[one.request_id]
        if found.tiers is not None:
            key = abs(one.request_id), name_of(one)
            own = kept.get(key)
            if own is None:
                own = kept[key] = KeptCounts()
            own.add_moved(found.tiers, found.step_bytes(one))


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
