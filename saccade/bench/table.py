"""Bench rows as a table: ratios first, since absolute times belong to one machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from saccade.bench.decode import DecodeRow
from saccade.bench.ops import Row


def print_ops(rows: Sequence[Row], limits: dict[str, float]) -> None:
    """Print operator rows and the limits they were measured beside."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table()
    for name in ("context", "method"):
        table.add_column(name, no_wrap=True)
    columns = (
        "density",
        "ms",
        "selection (% of dense)",
        "x own dense",
        "x torch sdpa",
        "x best torch",
        "% of GEMM",
        "% of limit",
        "time / density",
        "backend",
    )
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.context),
            row.method,
            f"{row.density:.3f}",
            f"{row.ms:.2f}",
            f"{row.selection_ms:.2f} ({row.selection_percent_of_dense:.1f})",
            f"{row.speedup_own_dense:.2f}",
            f"{row.speedup_torch_sdpa:.2f}" if row.torch_sdpa_ms else "-",
            f"{row.speedup_best_torch:.2f} ({row.best_torch})",
            f"{row.percent_of_gemm:.0f}" if row.op == "prefill" else "-",
            f"{row.percent_of_limit:.0f}",
            f"{row.time_over_density:.2f}",
            row.backend,
        )
    console.print(table)
    steps = [row for row in rows if isinstance(row, DecodeRow)]
    if steps:
        _print_steps(console, steps)
    shown = ", ".join(f"{name} {value:.1f}" for name, value in limits.items())
    console.print(f"limits measured in this run: {shown}", highlight=False)


def _print_steps(console: Console, rows: Sequence[DecodeRow]) -> None:
    """What decode steps scored and learnt, beside own exact top-k and the rate of gathering rows."""
    table = Table()
    for name in ("context", "method"):
        table.add_column(name, no_wrap=True)
    for name in ("keys scored", "searches", "observe ms", "x own top-k", "gather limit ms", "% of it"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.context),
            row.method,
            f"{row.keys_scored:.0f}",
            "-" if row.search_ratio is None else f"{row.search_ratio:.3f}",
            f"{row.observe_ms:.2f}",
            f"{row.speedup_topk:.2f}" if row.topk_ms else "-",
            f"{row.gather_limit_ms:.2f}",
            f"{row.percent_of_gather_limit:.0f}",
        )
    console.print(table)
