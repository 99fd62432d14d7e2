"""Recall rows and methods at equal recall, on a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.bench.cells import as_markdown, print_cells
from saccade.bench.recall.equal import EqualRow
from saccade.bench.recall.measure import RecallRow

WIDTH = 210
HIDDEN = "dial hidden by"  # a least number of keys: the thresholds of such rows change nothing


def print_recall(rows: Sequence[RecallRow], equal: Sequence[EqualRow], mean: float, worst: float) -> None:
    """Both tables, the second headed by the recalls that it is at."""
    print_cells(*_rows(rows), WIDTH)
    if equal:
        print(f"\n{_heading(mean, worst)}")
        print_cells(*_equal(equal), WIDTH)


def markdown(rows: Sequence[RecallRow], equal: Sequence[EqualRow], mean: float, worst: float) -> str:
    """Both tables as Markdown."""
    second = f"\n{_heading(mean, worst)}\n\n{as_markdown(*_equal(equal))}" if equal else ""
    return as_markdown(*_rows(rows)) + second


def _heading(mean: float, worst: float) -> str:
    return f"At recall {mean:g} in the mean and {worst:g} of the worst head:"


def _rows(rows: Sequence[RecallRow]) -> tuple[list[str], list[list[str]]]:
    timed, sdpa = any(row.ms for row in rows), any(row.sdpa_ms for row in rows)
    erring, hidden = (any(getattr(row, name) is not None for row in rows) for name in ("error", "hidden_by"))
    columns = ["input", "method", "density", "recall", "worst", "p1", *(["error"] if erring else [])]
    columns += ["oracle", "x oracle", "of the mean"]
    columns += (["ms", "choosing", "x dense"] if timed else []) + (["x sdpa"] if sdpa else [])
    columns += [HIDDEN] if hidden else []
    cells = []
    for row in rows:
        line = [_input(row), row.method, _share(row.density), f"{row.recall:.3f}", f"{row.worst:.3f}", f"{row.p1:.3f}"]
        if erring:
            line.append(_number(row.error, 3))
        line += [_share(row.oracle), f"{row.density / row.oracle:.1f}" if row.oracle else "-", _share(row.oracle_mean)]
        if timed:
            line += [_number(row.ms), f"{row.choosing_ms:.2f}", _number(row.speedup)]
        if sdpa:
            line.append(_number(row.sdpa_ms / row.ms if row.ms else None))
        cells.append(line + ([row.hidden_by or "-"] if hidden else []))
    return columns, cells


def _equal(rows: Sequence[EqualRow]) -> tuple[list[str], list[list[str]]]:
    timed, hidden = any(row.ms for row in rows), any(row.hidden_by is not None for row in rows)
    columns = ["input", "method", "density", "oracle", "x oracle", *(["ms", "choosing", "x dense"] if timed else [])]
    columns += [HIDDEN] if hidden else []
    cells = []
    for row in rows:
        if row.density is None:
            line = [
                f"not reached (best {row.best_recall:.3f}, worst head {row.best_worst:.3f})",
                _share(row.oracle),
                "-",
            ]
        else:
            bound = "<= " if row.below else ""
            line = [bound + _share(row.density), _share(row.oracle), f"{bound}{row.density / row.oracle:.1f}"]
        line += [_number(row.ms), _number(row.choosing_ms), _number(row.speedup)] if timed else []
        cells.append([_input(row), row.ladder, *line, *([row.hidden_by or "-"] if hidden else [])])
    return columns, cells


def _input(row: RecallRow | EqualRow) -> str:
    return f"{row.family} {row.context}"


def _number(value: float | None, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if value is not None and (value or digits == 3) else "-"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"
