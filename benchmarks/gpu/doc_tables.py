"""Tables of docs/results/performance-tables.md from a run: ``OUT=results python benchmarks/gpu/doc_tables.py``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

OUT = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
Row = dict[str, Any]
PEERS = ("sdpa", "flashinfer", "flex_attention")  # dense kernels of others, by the beginnings of their rows' names


def rows_of(part: str) -> list[Row]:
    try:
        return [row for row in json.loads((OUT / f"{part}.json").read_text())["rows"] if "failed" not in row]
    except (OSError, ValueError):
        return []


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])


def number(value: float | None, digits: str = ".4g") -> str:
    return "" if value is None else format(value, digits)


def prefill() -> str:
    def row(one: Row) -> Sequence[str]:
        best = min(r["ms"] for r in rows if r["context"] == one["context"] and r["what"].startswith(PEERS))
        chosen = one.get("selection_ms")
        part = "" if chosen is None else f"{chosen:.2f} ({one['selection_percent_of_best']:.1f} %)"
        return (
            str(one["context"]),
            one["what"].replace("blocks 128", "blocks of 128,"),
            number(one["ms"]),
            f"{one['density']:.3f}",
            f"{one['tflops']:.0f}",
            f"{one['percent_of_floor']:.0f}",
            f"{best / one['ms']:.2f}",
            number(one["over_density"], ".2f"),
            part,
        )

    rows = [one for one in rows_of("prefill") if not one["what"].startswith("tile")]
    head = ("context", "what", "ms", "density", "TFLOP/s", "% of matmul", "x best", "over density", "selection ms")
    return table(head, [row(one) for one in sorted(rows, key=lambda one: one["context"])])


def decode() -> str:
    kinds = ("blocks 32 (0.125)", "blocks 64 (0.125)", "tokens (0.125)", "blocks 32 (0.02)", "tokens (0.02)")
    rows = [row for row in rows_of("decode") if "tiles" not in row]

    def cells(batch: int, context: int) -> Sequence[str]:
        here = {row["what"]: row for row in rows if (row["batch"], row["context"]) == (batch, context)}
        peers = [row for name, row in here.items() if name.startswith(PEERS)]
        best = min(peers, key=lambda row: row["us"])
        cells = [str(batch), str(context), best["what"], number(best["us"])]
        cells.append(number(here["saccade dense"]["us"]) if "saccade dense" in here else "")
        for kind in kinds:
            row = here.get(kind)
            cells.append(
                ""
                if row is None
                else f"{row['us']:.4g} ({best['us'] / row['us']:.1f}x, {row['percent_of_copy']:.0f} %)"
            )
        return cells

    cases = sorted({(row["batch"], row["context"]) for row in rows}, key=lambda case: (case[1], case[0]))
    head = ("batch", "context", "best dense peer", "us", "`dense` us", *kinds)
    return table(head, [cells(*case) for case in cases])


def progressive() -> str:
    rows = [row for row in rows_of("decode") if row["what"].startswith("psa")]
    head = ("batch", "rule's epsilon", "density", "one call, us", "loop, us", "loop / call", "read beyond the stop")
    return table(
        head,
        [
            (
                str(row["batch"]),
                row["what"].removeprefix("psa (").removesuffix(")"),
                f"{row['density']:.3f}",
                f"{row['us'] / row['over_one_call']:.1f}",
                f"{row['us']:.1f}",
                f"{row['over_one_call']:.2f}",
                f"{100 * row['read_beyond']:.0f} %",
            )
            for row in rows
        ],
    )


def others(part: str) -> str:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows_of(part):
        groups.setdefault(tuple(row), []).append(row)
    return "\n".join(
        table(
            head, [[number(row[key]) if isinstance(row[key], float) else str(row[key]) for key in head] for row in rows]
        )
        for head, rows in groups.items()
    )


def main() -> None:
    parts = {"Prefill": prefill, "Decode": decode, "PSA": progressive}
    for title, make in parts.items():
        print(f"## {title}\n\n{make()}")
    for part in ("endtoend", "reference"):
        print(f"## {part}\n\n{others(part)}")


main()
