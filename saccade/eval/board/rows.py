"""Folding what was run into the board's rows: what a user loses at equal keys, at equal bytes and at equal recall."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from saccade.eval.board.entries import ENTRIES, Entry
from saccade.eval.board.matching import MATCHED, Point, at_equal, distance
from saccade.eval.board.play import RECALL, Placed
from saccade.eval.results import read_json
from saccade.eval.stats import Interval, paired_difference
from saccade.eval.summary import Cell, Group, Run

RECALLS = (0.8, 0.9, 0.95)
BY_NAME: Mapping[str, Entry] = {entry.name: entry for entry in ENTRIES}


@dataclass(frozen=True)
class Part:
    """One setting at one length. ``cell``: its samples beside dense's."""

    policy: str
    cell: Cell
    phase: str
    summary: float | None

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
    """A method at one budget (None: its one setting). ``parts`` by length; ``errors``: what failed."""

    entry: Entry
    protocol: str
    budget: float | None
    parts: Mapping[int, Part]
    complete: bool
    errors: tuple[str, ...] = ()

    @cached_property
    def loss(self) -> Interval | None:
        """Score minus dense's over the samples of all lengths, with its paired interval."""
        return _difference([pair for part in self.parts.values() for pair in part.cell.pairs])

    @property
    def keys(self) -> float | None:
        return _mean(part.keys for part in self.parts.values())

    @property
    def read(self) -> float | None:
        return _mean(part.read for part in self.parts.values())

    @property
    def recall(self) -> float | None:
        return _mean(part.recall for part in self.parts.values())

    @property
    def matched(self) -> bool:
        """Whether it was run at every length and reads what the budget says at each."""
        return self.complete and all(
            part.keys is not None and self.budget is not None and distance(part.keys, self.budget) <= MATCHED
            for part in self.parts.values()
        )

    @property
    def place(self) -> tuple[float, float]:
        """Where it stands: least lost first, then fewest keys read."""
        return (-self.loss.mean if self.loss else 2.0, self.keys or 2.0)

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.entry.name,
            "kind": self.entry.kind,
            "phase": self.entry.phase,
            "protocol": self.protocol,
            "budget": self.budget,
            "matched": self.matched if self.budget is not None else None,
            **_interval(self.loss),
            "keys": self.keys,
            "bytes": self.read,
            "recall": self.recall,
            "lengths": {
                str(length): {
                    "policy": part.policy,
                    "score": part.cell.score,
                    **_interval(_difference(part.cell.pairs)),
                    "keys": part.keys,
                    "bytes": part.read,
                    "recall": part.recall,
                    "mcnemar_p": part.cell.chance,
                    "errors": part.cell.errors,
                }
                for length, part in sorted(self.parts.items())
            },
            "failed": list(self.errors),
        }


@dataclass(frozen=True)
class Equal:
    """What a method would lose at ``x`` bytes or recall, between its two nearest settings at every length."""

    entry: Entry
    protocol: str
    x: float
    keys: float
    loss: Interval

    @property
    def place(self) -> tuple[float, float]:
        return -self.loss.mean, self.keys

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.entry.name,
            "kind": self.entry.kind,
            "protocol": self.protocol,
            "at": self.x,
            "keys": self.keys,
            **_interval(self.loss),
        }


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
    for (name, protocol, budget), ones in found.items():
        entry = BY_NAME[name]
        parts = {}
        for one in sorted(ones, key=lambda one: one.length):
            if one.folder is not None:
                run = next(run for run in groups[one.length].runs if run.folder == one.folder)
                parts[one.length] = Part(one.policy, groups[one.length].cell(run), entry.phase, entry.summary)
        errors = tuple(dict.fromkeys(one.error for one in ones if one.error))
        rows.append(Row(entry, protocol, budget, parts, set(parts) == set(lengths), errors))
    return sorted(rows, key=lambda row: (row.protocol, row.budget or 0.0, not row.matched, row.place))


def equal_bytes(rows: Iterable[Row], protocol: str, budgets: Sequence[float]) -> dict[float, list[Equal]]:
    """At each budget as a share of dense's bytes: what methods lose there, least first."""
    return _equal([row for row in rows if row.entry.phase == "decode"], protocol, budgets, "read", logs=True)


def equal_recall(rows: Iterable[Row], protocol: str) -> dict[float, list[Equal]]:
    """At each of RECALLS: the keys that methods read to keep as much of the attention, fewest first."""
    found = _equal([row for row in rows if row.entry.phase == "decode"], protocol, RECALLS, "recall", logs=False)
    return {x: sorted(ones, key=lambda one: one.keys) for x, ones in found.items()}


def _equal(rows: Sequence[Row], protocol: str, xs: Sequence[float], what: str, logs: bool) -> dict[float, list[Equal]]:
    by_entry: dict[str, list[Row]] = {}
    for row in rows:
        if row.protocol == protocol and row.budget is not None:
            by_entry.setdefault(row.entry.name, []).append(row)
    found: dict[float, list[Equal]] = {}
    for x in xs:
        ones = [one for own in by_entry.values() if (one := _mixed(own, x, what, logs)) is not None]
        found[x] = sorted(ones, key=lambda one: one.place)
    return found


def _mixed(rows: Sequence[Row], x: float, what: str, logs: bool) -> Equal | None:
    """None unless the settings enclose ``x`` at every length that the method was run at."""
    pairs: list[tuple[float, float]] = []
    keys: list[float] = []
    for length in sorted({length for row in rows for length in row.parts}):
        parts = [row.parts[length] for row in rows if length in row.parts]
        points = [
            Point(value, part.keys, part.scores)
            for part in parts
            if (value := getattr(part, what)) is not None and part.keys
        ]
        point = at_equal(points, x, logs)
        if point is None:
            return None
        base = parts[0].cell.base
        pairs += [(own, base[name]["score"]) for name, own in point.scores.items() if name in base]
        keys.append(point.keys)
    loss = _difference(pairs)
    return None if loss is None else Equal(rows[0].entry, rows[0].protocol, x, sum(keys) / len(keys), loss)


def _difference(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    if not pairs:
        return None
    own, dense = zip(*pairs)
    return paired_difference(own, dense)


def _interval(found: Interval | None) -> dict[str, Any]:
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
