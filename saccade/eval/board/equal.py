"""What methods lose, and read, where something else is equal: bytes, recall, or drift from dense attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.eval.board.entries import Entry
from saccade.eval.board.matching import Point, at_equal
from saccade.eval.board.rows import Row, difference, interval_data
from saccade.eval.stats import Interval

RECALLS = (0.8, 0.9, 0.95)
DRIFTS = (0.005, 0.01, 0.02, 0.05)  # nats of KL to dense attention


@dataclass(frozen=True)
class Equal:
    """What a method would lose at ``x`` bytes, recall or drift, between its two nearest settings at every length;
    ``loss`` None where no samples were answered."""

    entry: Entry
    protocol: str
    x: float
    keys: float
    loss: Interval | None

    @property
    def place(self) -> tuple[float, float]:
        return -self.loss.mean if self.loss else 2.0, self.keys

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.entry.name,
            "kind": self.entry.kind,
            "protocol": self.protocol,
            "at": self.x,
            "keys": self.keys,
            **interval_data(self.loss),
        }


def equal_bytes(rows: Iterable[Row], protocol: str, budgets: Sequence[float]) -> dict[float, list[Equal]]:
    """At each budget as a share of dense's bytes: what methods lose there, least first."""
    return _equal([row for row in rows if row.entry.phase == "decode"], protocol, budgets, "read", logs=True)


def equal_recall(rows: Iterable[Row], protocol: str) -> dict[float, list[Equal]]:
    """At each of RECALLS: the keys that methods read to keep as much of the attention, fewest first."""
    found = _equal([row for row in rows if row.entry.phase == "decode"], protocol, RECALLS, "recall", logs=False)
    return {x: sorted(ones, key=lambda one: one.keys) for x, ones in found.items()}


def equal_drift(rows: Iterable[Row], protocol: str) -> dict[float, list[Equal]]:
    """At each of DRIFTS nats of KL to dense attention: the keys that methods read for it, fewest first."""
    found = {}
    by_entry: dict[str, list[Row]] = {}
    for row in rows:
        if row.protocol == protocol and row.budget is not None and row.drifts and row.cut is None:
            by_entry.setdefault(row.entry.name, []).append(row)
    for x in DRIFTS:
        ones = [one for own in by_entry.values() if (one := _drifting(own, x)) is not None]
        found[x] = sorted(ones, key=lambda one: one.keys)
    return found


def _drifting(rows: Sequence[Row], x: float) -> Equal | None:
    """Between the two settings around a drift of ``x``, at every length that has drifts; None without them."""
    pairs: list[tuple[float, float]] = []
    keys: list[float] = []
    for length in sorted({length for row in rows for length in row.drifts}):
        points = []
        for row in rows:
            drift, part = row.drifts.get(length), row.parts.get(length)
            read = None if drift is None else drift.keys(row.entry.phase)
            if drift is not None and read and drift.mean > 0:
                points.append(Point(drift.mean, read, part.scores if part is not None else {}))
        point = at_equal(points, x, logs=True)
        if point is None:
            return None
        base = next((row.parts[length].cell.base for row in rows if length in row.parts), {})
        pairs += [(own, base[name]["score"]) for name, own in point.scores.items() if name in base]
        keys.append(point.keys)
    return Equal(rows[0].entry, rows[0].protocol, x, sum(keys) / len(keys), difference(pairs)) if keys else None


def _equal(rows: Sequence[Row], protocol: str, xs: Sequence[float], what: str, logs: bool) -> dict[float, list[Equal]]:
    by_entry: dict[str, list[Row]] = {}
    for row in rows:
        if row.protocol == protocol and row.budget is not None and row.cut is None:
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
    loss = difference(pairs)
    return None if loss is None else Equal(rows[0].entry, rows[0].protocol, x, sum(keys) / len(keys), loss)
