"""The report's tables: columns once, as csv and Markdown; report.html.jinja has them as HTML."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.eval.summary import Cell
from saccade.machine import show_bytes


@dataclass(frozen=True)
class Column:
    """``value`` for csv, in full; ``show`` for readers."""

    key: str
    title: str
    value: Callable[[Cell], Any]
    show: Callable[[Any], str] = str
    help: str = ""

    def text(self, cell: Cell) -> str:
        value = self.value(cell)
        return "–" if value is None else self.show(value)

    def marked(self, cell: Cell) -> str:
        """:meth:`text`, with a mark where the whole interval lies on one side of dense."""
        if self.key != "difference" or cell.difference is None or cell.run.policy == "dense":
            return self.text(cell)
        mark = "▼ " if cell.difference.high < 0 else "▲ " if cell.difference.low > 0 else ""
        return mark + self.text(cell)

    def alarms(self, cell: Cell) -> bool:
        """Whether the cell should catch the eye."""
        if self.key == "difference":
            return self.marked(cell).startswith("▼")
        return self.key in ("empty", "errors") and bool(self.value(cell))


def _points(value: float) -> str:
    return f"{100 * value:.1f}"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %" if value >= 0.0995 or value == 0 else f"{100 * value:.2g} %"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _low(cell: Cell) -> float | None:
    return cell.difference.low if cell.difference else None


def _high(cell: Cell) -> float | None:
    return cell.difference.high if cell.difference else None


def _difference(cell: Cell) -> str | None:
    found = cell.difference
    if found is None or cell.run.policy == "dense":
        return None
    return f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


SCORES = (
    Column("n", "n", lambda cell: cell.n, str, "samples scored"),
    Column("score", "score", lambda cell: cell.score, _points, "mean over samples, 0 to 100"),
    Column(
        "difference",
        "minus dense [95 %]",
        _difference,
        str,
        "mean difference to dense over the same samples, with its paired bootstrap interval",
    ),
    Column("percent", "% of dense", lambda cell: cell.percent, lambda value: f"{value:.1f}"),
)
CHANCE = Column(
    "mcnemar_p",
    "p (McNemar)",
    lambda cell: None if cell.run.policy == "dense" else cell.chance,
    lambda value: f"{value:.2g}",
    "chance that as many samples change between wholly right and not, for or against dense, by a fair coin",
)
COSTS = (
    Column("prefill_density", "prefill density", lambda cell: cell.density("prefill"), _share, "pairs read / causal"),
    Column("decode_density", "decode density", lambda cell: cell.density("decode"), _share, "pairs read / causal"),
    Column(
        "keys_per_step",
        "keys/head per step",
        lambda cell: cell.per_step("keys_attended"),
        _count,
        "in decode, per layer",
    ),
    Column(
        "retrieval_ratio",
        "retrieval ratio",
        lambda cell: cell.retrieval_ratio,
        lambda value: f"{value:.2f}",
        "share of decode steps (of query heads' steps, where they at times reuse) that scored keys or summaries anew",
    ),
    Column(
        "kv_bytes_per_step",
        "KV read per step",
        lambda cell: cell.kv_bytes,
        show_bytes,
        "keys and values attended to and keys scored exactly, all layers; block summaries are not in it",
    ),
)
QUALITY = (
    Column("empty", "empty", lambda cell: cell.empty, str, "answers without text"),
    Column("errors", "errors", lambda cell: cell.errors, str, "samples that did not fit or failed"),
)
TIME = (Column("seconds", "seconds", lambda cell: cell.seconds, lambda value: f"{value:.1f}", "prefill and decode"),)
REACHED = (Column("prompt_tokens", "prompt tokens", lambda cell: cell.prompt_tokens, _count, "mean length reached"),)
OVERALL = (*SCORES, CHANCE, *COSTS, *QUALITY, *TIME)
PER_TASK = (*SCORES, *(column for column in COSTS if column.key != "retrieval_ratio"), *QUALITY, *REACHED)
_EXTRA = (  # for csv alone
    Column("difference_low", "", _low),
    Column("difference_high", "", _high),
    Column("paired", "", lambda cell: cell.paired),
    *(
        Column(f"{phase}_{name}", "", lambda cell, p=phase, n=name: cell.total(p, n))  # type: ignore[misc]
        for phase in ("prefill", "decode")
        for name in ("tokens", "keys_attended", "keys_causal", "keys_scored", "keys_estimated", "retrievals")
    ),
)


@dataclass(frozen=True)
class Line:
    """A row: its labels, then what ``columns`` say of its cell. ``strong`` rows begin a stretch of the table."""

    labels: Sequence[str]
    cell: Cell
    strong: bool = False


def to_csv(names: Sequence[str], lines: Sequence[Line]) -> str:
    """Every column, unrounded; the difference to dense as mean, low and high."""
    columns = [
        Column("difference", "", lambda cell: cell.difference.mean if cell.difference else None)
        if column.key == "difference"
        else column
        for column in (*OVERALL, *REACHED, *_EXTRA)
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *(column.key for column in columns)])
    for line in lines:
        values = [column.value(line.cell) for column in columns]
        writer.writerow([*line.labels, *("" if value is None else value for value in values)])
    return out.getvalue()


def to_markdown(names: Sequence[str], lines: Sequence[Line], columns: Sequence[Column]) -> str:
    head = [*names, *(column.title for column in columns)]
    rule = ["---"] * len(names) + ["---:"] * len(columns)
    rows = [[*map(_code, line.labels), *(column.text(line.cell) for column in columns)] for line in lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows]) + "\n"


def _code(label: str) -> str:
    return f"`{label}`" if label else ""
