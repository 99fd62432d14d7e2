"""Rows of ``saccade bench generate`` as a table on the screen and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.bench.cells import as_markdown, print_cells
from saccade.bench.generate import Row
from saccade.bench.ttft import TRANSFORMERS

COLUMNS = (
    "context",
    "method",
    "ms/token",
    "tokens/s",
    "x dense",
    "x transformers",
    "density",
    "attention ms",
    "selection ms",
    "linear ms",
    "rest ms",
    "floor ms",
)


def cells(row: Row) -> list[str]:
    """One row's cells in the order of ``COLUMNS``."""
    ratios = ["-" if ratio is None else f"{ratio:.2f}" for ratio in (row.x_dense, row.x_transformers)]
    timed = (row.attention_ms, row.selection_ms, row.linear_ms, row.rest_ms)
    parts = ["-" if part is None else f"{part:.2f}" for part in timed]
    if row.method == TRANSFORMERS:
        parts[:2] = ["-", "-"]  # they are in its rest
    return [
        str(row.context),
        row.method,
        f"{row.ms_per_token:.2f}",
        f"{row.tokens_per_s:.2f}",
        *ratios,
        f"{row.density:.3f}",
        *parts,
        f"{row.floor_ms:.2f}",
    ]


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    return as_markdown(COLUMNS, [cells(row) for row in rows])


def print_generate(rows: Sequence[Row]) -> None:
    """Print the rows."""
    print_cells(COLUMNS, [cells(row) for row in rows], 180)
