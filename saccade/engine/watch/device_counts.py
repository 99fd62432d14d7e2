"""Counts of what batched decode steps read, by request, kept on the device until a report asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from saccade.engine.steps.step import CallCount, ReadPairs
from saccade.engine.watch.layer_stats import LayerStats
from saccade.kv.tier import TierCounts
from saccade.methods.host_state import HostState
from saccade.ops.tallies import Counted
from saccade.selection import Selection
from saccade.selection.plan import DevicePlan
from saccade.selection.readings import Reading

NOTED = 32  # rows whose stopping rules are added up at once


@dataclass
class DeviceCounts:
    """``layers`` of a request that were called, by number, and how often which ``kinds`` of selection and which
    ``backends`` ran, layers added up. ``order``: by layer, kinds and how many calls in a row had them, where other
    processes may have chosen another kind for their heads. ``tiers``: all that other processes' tiers have moved so
    far; ``step_bytes``: of keys and values that the last decode step asked for there. ``sparse_elsewhere``: calls in
    which the heads here read everything, and others' did not."""

    layers: dict[int, LayerStats] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    backends: dict[str, int] = field(default_factory=dict)
    order: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    tiers: TierCounts | None = None
    step_bytes: int | None = None
    sparse_elsewhere: int = 0

    def add(self, call: CallCount) -> None:
        """Count one call."""
        self.layers.setdefault(call.layer, LayerStats()).add(call)
        for names, name in ((self.kinds, selection_kind(call.used)), (self.backends, call.backend)):
            names[name] = names.get(name, 0) + 1

    def plus(self, other: DeviceCounts) -> None:
        """Count the calls that ``other`` has counted, which nothing else reads any more."""
        for layer, more in other.layers.items():
            have = self.layers.setdefault(layer, more)
            if have is not more:
                have.plus(more)
        for known, fresh in ((self.kinds, other.kinds), (self.backends, other.backends)):
            for name, calls in fresh.items():
                known[name] = known.get(name, 0) + calls


def selection_kind(selection: Selection | ReadPairs) -> str:
    """What a report calls it."""
    kind = selection.kind if isinstance(selection, ReadPairs) else type(selection)
    return kind.__name__.lower()


class LateCounts:
    """Counts of one request under one plan, handed over by :meth:`take`."""

    def __init__(self, plan: DevicePlan, heads: int) -> None:
        self.plan, self.heads = plan, heads
        self.row: int | None = None  # of the step's buffers, where more may be counted
        self._source: Callable[[], Counted] | None = None
        self._state: HostState | None = None
        self._verified: list[tuple[int, str, int]] = []  # rows that were not added up yet
        self._noted: list[tuple[Tensor, Tensor]] = []  # by rules, not added up yet
        self._late: Counted | None = None
        self._start_anew()

    @property
    def on_host(self) -> bool:
        """Whether no device is asked for what was counted."""
        return self.row is None and (self._late is None or self._late.keys.device.type == "cpu")

    def add(self, length: int, backend: str, times: int = 1, step: int = 0, whole: bool = False) -> bool:
        """Count one row that sees ``length`` keys, the turn's decode step ``step``; with ``times=-1`` take that back.
        ``whole`` says that a method's own readings leave nothing out. Returns whether a layer read them all."""
        self._backends[backend] = self._backends.get(backend, 0) + times * len(self.plan.layers)
        everything = False
        for reading, sums in self._sums.items():
            known = reading.cost(length, step)
            kind = "dense" if whole and not reading.listed else known.kind
            sums.calls += times
            sums.causal += times * length
            sums.even += times * known.keys
            sums.estimated += times * known.scored
            sums.scored += times * known.exact
            sums.searchable += times * known.searchable * self.heads
            sums.retrievals += times * (known.scored > 0 or known.exact > 0 or known.chooses)
            kinds = self._kinds[reading]
            kinds[kind] = kinds.get(kind, 0) + times
            everything |= kind == "dense"
        return everything

    def add_first(self, start: int, backend: str, rows: int) -> None:
        """Count the first ``rows`` rows of a verification after ``start`` keys. They are added up once a report asks:
        between a verification and the next draft the device waits."""
        self._verified.append((start, backend, rows))

    def attach(self, row: int, source: Callable[[], Counted] | None) -> None:
        """Count for ``row`` from now on; ``source`` takes what rules, or readings of the method's own, do there."""
        self.row, self._source = row, source

    def follow(self, state: HostState) -> None:
        """Count what ``state`` counts from now on."""
        if self._state is not state:
            self.detach()
            self._state, self._source = state, lambda: Counted.of(state.take())

    def detach(self) -> None:
        """Take what the row has counted, and leave it."""
        self._gather()
        self.row = self._source = self._state = None

    def take(self) -> DeviceCounts:
        """What was counted since the last time."""
        self._gather()
        done, late = DeviceCounts(backends=self._backends), self._late
        for layer, reading in enumerate(self.plan.layers):
            counts = done.layers[layer] = replace(self._sums[reading])
            if not counts.calls:
                del done.layers[layer]
                continue
            if late is not None and (reading.ruled or not reading.listed):
                counts.attended = late.keys[layer].cpu()
                counts.scored += round(float(late.scored[layer]))
                counts.searches = round(float(late.searches[layer]))
                counts.estimated += round(float(late.estimated[layer]))
            if late is not None and reading.choice is not None and reading.ruled:
                counts.covered, counts.least_covered = float(late.covered[layer]), float(late.least[layer])
                counts.units, counts.estimates = reading.choice.units, counts.retrievals * reading.choice.units
            for kind, calls in self._kinds[reading].items():
                done.kinds[kind] = done.kinds.get(kind, 0) + calls
        self._start_anew()
        return done

    def _start_anew(self) -> None:
        self._late = None
        self._backends: dict[str, int] = {}
        self._sums = {one: LayerStats(heads=self.heads) for one in self.plan.layers}  # of all layers with one reading
        self._kinds: dict[Reading, dict[str, int]] = {one: {} for one in self.plan.layers}

    def _gather(self) -> None:
        for start, backend, rows in self._verified:
            for length in range(start + 1, start + rows + 1):
                self.add(length, backend)
        self._verified.clear()
        if self._noted:
            self._add_noted()
        if self._source is not None:
            self._count(self._source())

    def note_rule(self, keys: Tensor, coverage: Tensor) -> None:
        """Count what stopping rules let one row do, each [layers, units]: ``keys`` int64 that were read beyond those
        known for certain, ``coverage`` fp32. They may not be written to any more: rows are added up many at a time."""
        self._noted.append((keys, coverage))
        if len(self._noted) >= NOTED:
            self._add_noted()

    def _add_noted(self) -> None:
        keys, coverage = (torch.stack(part) for part in zip(*self._noted))
        self._noted.clear()
        self._count(Counted.ruled(keys, coverage, self.heads))

    def _count(self, fresh: Counted) -> None:
        self._late = fresh if self._late is None else self._late.plus(fresh)
