"""Rows of ``saccade bench ttft`` as cells of a table."""

from __future__ import annotations

from saccade.bench.ttft import TRANSFORMERS, Row

COLUMNS = (
    "context",
    "method",
    "seconds",
    "x dense",
    "x transformers",
    "density",
    "frozen",
    "attention",
    "selection",
    "linear",
    "rest",
)

WIDTH = 164


def cells(row: Row) -> list[str]:
    """One row's cells in the order of ``COLUMNS``; the last four are shares of its seconds."""
    parts = (row.attention_s, row.selection_s, row.linear_s, row.rest_s)
    shares = ["-" if part is None else f"{100 * part / row.seconds:.0f} %" for part in parts]
    ratios = ["-" if ratio is None else f"{ratio:.2f}" for ratio in (row.x_own_dense, row.x_transformers)]
    if row.method == TRANSFORMERS:
        shares[:2] = ["-", "-"]  # they are in its rest
    return [
        str(row.context),
        row.method,
        f"{row.seconds:.2f}",
        *ratios,
        f"{row.density:.3f}",
        f"{row.frozen:.3f}",
        *shares,
    ]
