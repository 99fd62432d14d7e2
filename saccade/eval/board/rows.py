"""Folding what was run into the board's rows: what a user loses at each setting, and what that reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from saccade.eval.board.drifts import Drift, load_drift
from saccade.eval.board.entries import Entry, entry_named
from saccade.eval.board.jobs import Placed
from saccade.eval.board.matching import MATCHED, distance
from saccade.eval.board.play import RECALL
from saccade.eval.results import read_json
from saccade.eval.sources import family
from saccade.eval.stats import STRETCH, Interval, paired_difference, stretch_interval
from saccade.eval.summary import Cell, Group, Run
from saccade.eval.weak import dense_score


@dataclass(frozen=True)
class Part:
    """One setting at one length. ``cell``: its samples beside dense's; ``families``: the same by what tasks have in
    common (sources.family)."""

    policy: str
    cell: Cell
    phase: str
    summary: float | None
    families: Mapping[str, Cell] = field(default_factory=dict)

    @property
    def keys(self) -> float | None:
        """Share of dense attention's (query, key) pairs that were read, in the row's phase."""
        return self.cell.density(self.phase)

    @property
    def read(self) -> float | None:
        """Keys, values, keys scored exactly and summaries read, bytes over dense attention's; None where the size of
        what stands for keys is not known."""
        attended, causal, scored, estimated = (
            self.cell.total(self.phase, f"keys_{name}") for name in ("attended", "causal", "scored", "estimated")
        )
        if attended is None or not causal or self.summary is None:
            return None
        return (2 * attended + (scored or 0) + self.summary * (estimated or 0)) / (2 * causal)

    @cached_property
    def recall(self) -> float | None:
        """Mean share of the true attention's mass that was kept, in the row's phase."""
        file = self.cell.run.folder / RECALL
        return read_json(file).get(self.phase) if file.is_file() else None

    @property
    def scores(self) -> dict[str, float]:
        return {row["id"]: row["score"] for row in self.cell.rows if row["score"] is not None}


@dataclass(frozen=True)
class Row:
    """A method at one budget (None: its one setting). ``parts`` and ``drifts`` by length; ``errors``: what failed;
    ``cut``: the seconds after which it was ended at one of them, before it had answered all samples; ``timed``: whether
    its times are told."""

    entry: Entry
    protocol: str
    budget: float | None
    parts: Mapping[int, Part]
    complete: bool
    errors: tuple[str, ...] = ()
    drifts: Mapping[int, Drift] = field(default_factory=dict)
    cut: float | None = None
    timed: bool = True

    @cached_property
    def families(self) -> dict[str, Interval]:
        """``loss`` by what tasks have in common, of those that have scores."""
        names = dict.fromkeys(name for part in self.parts.values() for name in part.families)
        found = {
            name: difference(
                [pair for part in self.parts.values() if name in part.families for pair in part.families[name].pairs]
            )
            for name in names
        }
        return {name: loss for name, loss in found.items() if loss is not None}

    @cached_property
    def kl(self) -> Interval | None:
        """To dense attention over forced tokens, nats, with its interval by stretches of them."""
        values = [value for _, drift in sorted(self.drifts.items()) for value in drift.kl]
        return stretch_interval(values, min(STRETCH, len(values))) if values else None

    @property
    def agree(self) -> float | None:
        return _mean(drift.agree for drift in self.drifts.values())

    @property
    def time(self) -> float | None:
        """Of its phase, over dense attention's, of one sequence where drift was measured."""
        return None if not self.timed else _mean(drift.time(self.entry.phase) for drift in self.drifts.values())

    @cached_property
    def loss(self) -> Interval | None:
        """Score minus dense's over the samples of all lengths, with its paired interval."""
        return difference([pair for part in self.parts.values() for pair in part.cell.pairs])

    @property
    def keys(self) -> float | None:
        """Of the samples; where none were answered, of the forced tokens."""
        if self.parts:
            return _mean(part.keys for part in self.parts.values())
        return _mean(drift.keys(self.entry.phase) for drift in self.drifts.values())

    @property
    def read(self) -> float | None:
        """Of the samples; where none were answered, of the forced tokens."""
        if self.parts:
            return _mean(part.read for part in self.parts.values())
        return _mean(drift.read(self.entry.phase, self.entry.summary) for drift in self.drifts.values())

    @property
    def recall(self) -> float | None:
        return _mean(part.recall for part in self.parts.values())

    @property
    def matched(self) -> bool:
        """Whether it was run at every length to the end, and reads what the budget says at each, where its dial was
        turned."""
        turned = {length: drift.keys(self.entry.phase) for length, drift in self.drifts.items()}
        turned = {length: part.keys for length, part in self.parts.items()} | turned
        return (
            self.complete
            and self.cut is None
            and all(
                keys is not None and self.budget is not None and distance(keys, self.budget) <= MATCHED
                for keys in turned.values()
            )
        )

    @property
    def place(self) -> tuple[float, float]:
        """Where it stands: least lost first, then fewest keys read; behind them by drift, where no samples were
        answered."""
        unknown = 2.0 if self.kl is None else 1.0 + self.kl.mean / (1.0 + self.kl.mean)
        return (-self.loss.mean if self.loss else unknown, self.keys or 2.0)

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.entry.name,
            "kind": self.entry.kind,
            "phase": self.entry.phase,
            "protocol": self.protocol,
            "budget": self.budget,
            "matched": self.matched if self.budget is not None else None,
            "cut": self.cut,
            **interval_data(self.loss),
            "keys": self.keys,
            "bytes": self.read,
            "recall": self.recall,
            "families": {name: interval_data(loss) for name, loss in self.families.items()},
            "kl": None if self.kl is None else [self.kl.mean, self.kl.low, self.kl.high],
            "agree": self.agree,
            "time": self.time,
            "lengths": {
                str(length): self._drift_at(length) | self._answers_at(length)
                for length in sorted(self.parts.keys() | self.drifts.keys())
            },
            "failed": list(self.errors),
        }

    def _answers_at(self, length: int) -> dict[str, Any]:
        part = self.parts.get(length)
        if part is None:
            return {}
        return {
            "policy": part.policy,
            "score": part.cell.score,
            **interval_data(difference(part.cell.pairs)),
            "keys": part.keys,
            "bytes": part.read,
            "recall": part.recall,
            "mcnemar_p": part.cell.chance,
            "errors": part.cell.errors,
        }

    def _drift_at(self, length: int) -> dict[str, Any]:
        drift = self.drifts.get(length)
        if drift is None:
            return {}
        phase = self.entry.phase
        read = {"keys": drift.keys(phase), "bytes": drift.read(phase, self.entry.summary)}
        return {"policy": drift.policy, **read, "kl": drift.mean, "agree": drift.agree}


def fold(placed: Sequence[Placed], lengths: Sequence[int]) -> list[Row]:
    """All rows, sorted by protocol, budget and what is lost; dense rows are what the others are compared with."""
    groups: dict[int, Group] = {}
    for length in lengths:
        folders = dict.fromkeys(
            one.folder
            for one in sorted(placed, key=lambda one: one.name != "dense")
            if one.length == length and one.folder is not None
        )
        groups[length] = Group([Run.load(folder) for folder in folders if folder is not None])
    found: dict[tuple[str, str, float | None], list[Placed]] = {}
    for one in placed:
        if one.name != "dense":
            found.setdefault((one.name, one.protocol, one.budget), []).append(one)
    rows = []
    answered = any(one.folder is not None for one in placed)
    for (name, protocol, budget), ones in found.items():
        entry, ones = entry_named(name), sorted(ones, key=lambda one: one.length)
        parts = {one.length: _part(one, entry, groups[one.length]) for one in ones if one.folder is not None}
        errors = tuple(dict.fromkeys(one.error for one in ones if one.error))
        drifts = {one.length: load_drift(one.drift) for one in ones if one.drift is not None}
        known = {length: drift for length, drift in drifts.items() if drift is not None}
        complete = set(parts if answered else known) == set(lengths)
        cut = next((one.cut for one in ones if one.cut is not None), None)
        rows.append(Row(entry, protocol, budget, parts, complete, errors, known, cut))
    return sorted(rows, key=lambda row: (row.protocol, row.budget or 0.0, not row.matched, row.place))


def _part(one: Placed, entry: Entry, group: Group) -> Part:
    """Over the tasks that dense attention does to half or more."""
    run = next(run for run in group.runs if run.folder == one.folder)
    low = low_tasks(group.baseline(run))

    def cell(name: str | None) -> Cell:
        return group.cell(run, lambda row: row["task"] not in low and name in (None, family(row["task"])))

    names = dict.fromkeys(family(row["task"]) for row in run.rows.values())
    return Part(one.policy, cell(None), entry.phase, entry.summary, {name: cell(name) for name in names})


def low_tasks(dense: Run | None) -> dict[str, float]:
    """The tasks that dense attention does to less than half, and its scores; none where there is no such run."""
    found = None if dense is None else dense_score(dense)
    return {} if found is None else found.low


def difference(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """Of (own, dense's) scores; None without any."""
    if not pairs:
        return None
    own, dense = zip(*pairs)
    return paired_difference(own, dense)


def interval_data(found: Interval | None) -> dict[str, Any]:
    """As plain data."""
    if found is None:
        return {"difference": None, "difference_low": None, "difference_high": None, "n": 0}
    return {
        "difference": found.mean,
        "difference_low": found.low,
        "difference_high": found.high,
        "n": found.n,
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
