"""Tables of end-to-end rows: a row's first cells are its context and its method."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def as_markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of rows of cells."""
    lines = [list(columns), ["---"] * len(columns)]
    for context, method, *rest in rows:
        lines.append([context, f"`{method}`", *rest])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def print_cells(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    """Print rows of cells; ``width`` characters wide where no terminal says how wide it is."""
    table = Table()
    for name in columns:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else width).print(table)
