"""The board's tables as text: rows at one budget, and rows at equal bytes, drift or recall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from saccade.eval.board.equal import Equal
from saccade.eval.board.matching import MATCHED
from saccade.eval.board.rows import Row
from saccade.eval.plots import in_k
from saccade.eval.stats import Interval


@dataclass(frozen=True)
class Line:
    """A row of a table as text. ``worse``: its whole interval lies below dense."""

    name: str
    cells: tuple[str, ...]
    kind: str = ""
    worse: bool = False
    note: str = ""


@dataclass(frozen=True)
class Table:
    """``more``: how many of the last columns small screens leave out."""

    title: str
    head: tuple[str, ...]
    lines: tuple[Line, ...]
    said: str = ""
    more: int = 0


@dataclass(frozen=True)
class Columns:
    """What the tables of a protocol tell apart: families of tasks where there are several, lengths where there are
    several, and what was measured at all."""

    answered: bool
    families: tuple[str, ...]
    lengths: tuple[int, ...]
    bytes: bool
    recall: bool
    drift: bool
    times: bool

    @classmethod
    def of(cls, rows: Sequence[Row], lengths: Sequence[int]) -> Columns:
        families = tuple(dict.fromkeys(name for row in rows for name in row.families))
        answered = any(row.parts for row in rows)
        return cls(
            answered,
            families if len(families) > 1 else (),
            tuple(lengths) if answered and (len(lengths) > 1 or len(families) < 2) else (),
            any(row.read is not None for row in rows),
            any(row.recall is not None for row in rows),
            any(row.kl is not None for row in rows),
            any(row.time is not None for row in rows),
        )

    @property
    def head(self) -> tuple[str, ...]:
        return (
            *(["points lost [95 %]"] if self.answered else []),
            *self.families,
            *(f"at {in_k(length)}" for length in self.lengths),
            "keys read",
            *(["bytes read"] if self.bytes else []),
            *(["recall"] if self.recall else []),
            *(["KL, nats [95 %]", "tokens that agree"] if self.drift else []),
            *(["time, of dense's"] if self.times else []),
            *(["p (McNemar)", "n"] if self.answered else []),
            "setting",
        )


def budget_table(rows: Sequence[Row], budget: float, columns: Columns) -> Table:
    """The rows that were set to read that share of the keys."""
    own = [row for row in rows if row.budget == budget]
    off = sum(not row.matched for row in own)
    said = f"{len(own) - off} methods within {100 * MATCHED:g} % of the budget"
    said += (
        f"; {off} below them could not be set to read that many keys, or were cut short, so no rank is theirs."
        if off
        else "."
    )
    lines = tuple(line_of(row, columns) for row in own)
    return Table(f"At equal keys: {100 * budget:g} % of what dense reads", columns.head, lines, said, 3)


def line_of(row: Row, columns: Columns) -> Line:
    """A setting under ``columns``."""
    parts = [row.parts.get(length) for length in columns.lengths]
    chances = [part.cell.chance for part in row.parts.values() if part.cell.chance is not None]
    settings = dict.fromkeys(
        [part.policy for part in row.parts.values()] or [one.policy for one in row.drifts.values()]
    )
    counted = [f"{min(chances):.2g}" if chances else "–", str(row.loss.n) if row.loss else "–"]
    drift = _nats(row.kl), _share(row.agree)
    cells = (
        *([_lost(row.loss)] if columns.answered else []),
        *(_mean_lost(row.families.get(name)) for name in columns.families),
        *("–" if part is None else _mean_lost(part.cell.difference) for part in parts),
        _share(row.keys),
        *([_share(row.read)] if columns.bytes else []),
        *([_share(row.recall)] if columns.recall else []),
        *(drift if columns.drift else []),
        *(["–" if row.time is None else f"{row.time:.2f}"] if columns.times else []),
        *(counted if columns.answered else []),
        "; ".join(settings) or "; ".join(row.errors) or "not finished",
    )
    note = ""
    if row.errors:
        note = row.errors[0]
    elif row.cut is not None:
        note = f"cut after {row.cut:g} s"
    elif not row.complete:
        note = "not finished at every length"
    elif row.budget is not None and not row.matched:
        note = "off the budget"
    return Line(row.entry.name, cells, row.entry.kind, row.loss is not None and row.loss.high < 0, note)


def _nats(kl: Interval | None) -> str:
    return "–" if kl is None else f"{kl.mean:.2g} [{kl.low:.2g}, {kl.high:.2g}]"


def equal_table(title: str, ones: Sequence[Equal], said: str) -> Table:
    """What methods lose, and read, where they are alike in something else; ``said``: how they were brought there."""
    lines = tuple(
        Line(
            one.entry.name,
            (_lost(one.loss), _share(one.keys)),
            one.entry.kind,
            one.loss is not None and one.loss.high < 0,
        )
        for one in ones
    )
    return Table(title, ("points lost [95 %]", "keys read"), lines, said)


def _lost(loss: Interval | None) -> str:
    if loss is None:
        return "–"
    return f"{_points(-loss.mean)} [{_points(-loss.high)}, {_points(-loss.low)}]"


def _mean_lost(loss: Interval | None) -> str:
    return "–" if loss is None else _points(-loss.mean)


def _points(value: float) -> str:
    text = f"{100 * value:.1f}"
    return "0.0" if text == "-0.0" else text


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
