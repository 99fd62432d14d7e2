"""Bench rows as a table: ratios first, since absolute times belong to one machine."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.bench.cells import print_cells
from saccade.bench.decode import DecodeRow
from saccade.bench.ops import Row

WIDTH = 200
COLUMNS = (
    "context",
    "method",
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
STEPS = ("context", "method", "keys scored", "searches", "observe ms", "x own top-k", "gather limit ms", "% of it")


def print_ops(rows: Sequence[Row], limits: dict[str, float]) -> None:
    """Print operator rows and the limits they were measured beside; of decode steps also what they scored and learnt,
    beside own exact top-k and the rate of gathering rows."""
    print_cells(COLUMNS, [_cells(row) for row in rows], WIDTH)
    steps = [row for row in rows if isinstance(row, DecodeRow)]
    if steps:
        print_cells(STEPS, [_step_cells(row) for row in steps], WIDTH)
    shown = ", ".join(f"{name} {value:.1f}" for name, value in limits.items())
    print(f"limits measured in this run: {shown}")


def _cells(row: Row) -> list[str]:
    return [
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
    ]


def _step_cells(row: DecodeRow) -> list[str]:
    return [
        str(row.context),
        row.method,
        f"{row.keys_scored:.0f}",
        "-" if row.search_ratio is None else f"{row.search_ratio:.3f}",
        f"{row.observe_ms:.2f}",
        f"{row.speedup_topk:.2f}" if row.topk_ms else "-",
        f"{row.gather_limit_ms:.2f}",
        f"{row.percent_of_gather_limit:.0f}",
    ]
