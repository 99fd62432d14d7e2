"""Rows of ``saccade bench generate`` as cells of a table."""

from __future__ import annotations

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

WIDTH = 180


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
