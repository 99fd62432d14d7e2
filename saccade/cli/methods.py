"""``saccade methods``: what a policy can be made of."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from saccade.methods.base import PolicyPart


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, or a name for several; all by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List methods with the phases that they serve, their papers and options; with a name, one of them.

    saccade methods psa
    """
    from saccade.methods.auto import FEWEST, SAFE
    from saccade.methods.outside import load_outside
    from saccade.methods.policy import part_named
    from saccade.methods.registry import KNOWN, PRESETS

    load_outside()
    if name is None:
        chosen = dict(sorted(KNOWN.items()))
    else:  # a name for a sum shows what it joins
        chosen = {one: part_named(one) for one in PRESETS.get(name, name).split("+")}
    rows = {one: describe(part) for one, part in chosen.items()}
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(show_lines=False)
    for column in ("method", "phases", "paper", "options and their defaults"):
        table.add_column(column, no_wrap=column in ("method", "phases"))
    for one, row in rows.items():
        options = ", ".join(f"{option}={value}" for option, value in row["options"].items())
        table.add_row(one, ", ".join(row["phases"]), row["paper"], options or "-")
    console.print(table)
    if name is None:
        short = "; ".join(f"{one} is {text}" for one, text in PRESETS.items())
        console.print(f"A policy joins them: flexprefill+psa. For short, {short}.")
        console.print(
            "auto, the default of serve and chat, is dense where nothing is gained, else what saccade tune found for "
            f"the model, else {SAFE}."
        )
        console.print(f"Chosen by hand: {SAFE} to answer as dense attention does, {FEWEST} to read the fewest keys.")
        console.print(
            "At 256 keys lfps lost nothing that 36 long answers and 41 samples of 16K of Qwen2.5-Coder-0.5B show "
            "(docs/results/board-h200.md, 2026-11-29), outside auto's bound; psa keeps that bound."
        )
    for part in () if name is None else chosen.values():
        console.print(" ".join((part.__doc__ or "").split()))


def describe(part: type[PolicyPart]) -> dict[str, Any]:
    """A method's phases, paper and options with their defaults, as plain data."""
    from saccade.methods.base import PolicyPart

    options: dict[str, Any] = {}
    for one in fields(part):
        default = None if one.default is MISSING else one.default
        options[one.name] = default.text if isinstance(default, PolicyPart) else default
    return {"phases": list(part.phases), "paper": part.paper, "options": options}
