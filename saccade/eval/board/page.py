"""The board as one HTML page with nothing from outside, the same as JSON, and its tables as Markdown."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2

from saccade.errors import RequestError
from saccade.eval import figures
from saccade.eval.board import origin
from saccade.eval.board.entries import EXCLUDED, KINDS
from saccade.eval.board.equal import DRIFTS, RECALLS, equal_bytes, equal_drift, equal_recall
from saccade.eval.board.grid import Grid
from saccade.eval.board.jobs import Placed
from saccade.eval.board.pictures import drift_panel, marker, panels
from saccade.eval.board.play import refuse_weak
from saccade.eval.board.rows import Row, fold
from saccade.eval.board.tables import Columns, Table, budget_table, equal_table, line_of
from saccade.files import write_text

PROTOCOLS = {
    "B": "Dense prefill of the context; question and answer run as decode steps by the method.",
    "D": "Sparse prefill and sparse decode. Decode methods follow a prefill by flexprefill at its "
    "defaults; prefill methods are followed by the exact top-k at the budget, so that what is lost is theirs.",
}


def write_board(
    placed: Sequence[Placed], grid: Grid, out: Path, command: str = "", missing: int = 0, timed: bool = True
) -> list[Path]:
    """Write board.html, board.json and board.md to ``out`` and return their paths. Without matplotlib the page has its
    tables and no figures. ``missing``: settings that are not finished. ``timed``: tell times, which mean nothing
    where other processes ran beside. RequestError where nothing is, where dense
    attention scores below half of what is possible, or if ``out`` cannot be written."""
    if all(one.folder is None and one.drift is None for one in placed):
        raise RequestError("nothing of the board is finished yet; the same command goes on where it stopped")
    refuse_weak(placed)
    lengths = sorted({one.length for one in placed})
    rows = [replace(row, timed=timed) for row in fold(placed, lengths)]
    sections = [_section(rows, letter, grid, lengths) for letter in grid.protocols]
    about = origin.about(placed, command, missing)
    files = {
        "board.html": _page(sections, about, rows),
        "board.json": json.dumps(_plain(rows, grid, about), indent=1, ensure_ascii=False) + "\n",
        "board.md": _markdown(sections, about),
    }
    for name, text in files.items():
        write_text(out / name, text)
    return [out / name for name in files]


def _section(rows: Sequence[Row], letter: str, grid: Grid, lengths: Sequence[int]) -> dict[str, Any]:
    own = [row for row in rows if row.protocol == letter]
    columns = Columns.of(own, lengths)
    budgets = {row.budget for row in own}
    tables = [budget_table(own, budget, columns) for budget in grid.budgets if budget in budgets]
    fixed = [row for row in own if row.budget is None]
    if fixed:
        tables.append(
            Table("The same at every budget", columns.head, tuple(line_of(row, columns) for row in fixed), "", 3)
        )
    others = [
        equal_table(f"At equal bytes: {100 * x:g} % of what dense reads", ones, "between the two settings around it")
        for x, ones in equal_bytes(rows, letter, grid.budgets).items()
        if ones
    ]
    others += [
        equal_table(f"At equal drift: {x:g} nats of KL to dense attention", ones, "fewest keys first")
        for x, ones in equal_drift(rows, letter).items()
        if ones
    ]
    others += [
        equal_table(f"At equal recall: {100 * x:g} % of the attention's mass", ones, "fewest keys first")
        for x, ones in equal_recall(rows, letter).items()
        if ones
    ]
    drawn = figures.available()
    shown = [one for length in lengths if drawn for one in drift_panel(own, length)]
    shown += [one for phase in ("decode", "prefill") for one in (panels(rows, letter, phase) if drawn else ())]
    names = list(dict.fromkeys(row.entry.name for row in own if row.parts))
    return {
        "letter": letter,
        "said": PROTOCOLS[letter],
        "tables": tables,
        "others": others,
        "panels": shown,
        "names": names,
    }


def _made(about: dict[str, Any]) -> list[str]:
    return [f"Made by `{about['command']}`."] if about["command"] else []


HOW = (
    "Points lost: dense's score minus the method's over the same samples, with the paired 95 % bootstrap interval. "
    "Rows are sorted by it, the least first; equal losses by keys read. Every method has one option, its dial, which "
    "was turned until the keys that it read on the first sample of each task, or on forced tokens where there is a KL, "
    "met the budget; the keys in a row are those of all its samples.",
    "Bytes are keys, values, keys scored exactly and block summaries or labels, over what dense reads; – where the "
    "size of what stands for keys is not known. In prefill they are products, not traffic. Tables at equal bytes and "
    "equal recall take the straight line between a method's two nearest budgets, sample by sample, and nothing beyond.",
    "KL is that of the next token's distribution to dense attention's, over forced tokens of made prose in which "
    "facts come again; tables at equal drift take the straight line between the logarithms of two settings' KL. Time "
    "is that of the method's phase over dense attention's there, one sequence alone, kernels compiled before.",
    "Recall is the mean share of the true softmax weight that lay on keys read, over layers, heads and rows of the "
    "first samples, as they were run. The p of McNemar's test is the smaller one of the lengths; n samples were "
    "answered.",
    "A small model's scores rank methods; they predict no large model's.",
)


def _page(sections: Sequence[dict[str, Any]], about: dict[str, Any], rows: Sequence[Row]) -> str:
    here = jinja2.Environment(
        loader=jinja2.PackageLoader("saccade.eval", ""), autoescape=True, undefined=jinja2.StrictUndefined
    )
    names = list(dict.fromkeys(row.entry.name for row in rows))
    drawn = figures.available()
    markers = {name: base64.b64encode(marker(name).encode()).decode() for name in names} if drawn else {}
    page = here.get_template("board/board.html.jinja").render(
        sections=sections,
        about=about,
        how=HOW,
        kinds=KINDS,
        excluded=EXCLUDED,
        numbers={name: number for number, name in enumerate(names)},
        markers=markers,
        missing="" if drawn else figures.MISSING,
    )
    return page + "\n"


def _plain(rows: Sequence[Row], grid: Grid, about: dict[str, Any]) -> dict[str, Any]:
    shown = {name: list(getattr(grid, name)) for name in ("budgets", "lengths", "protocols")}
    equal: dict[str, Any] = {"bytes": [], "recall": [], "drift": []}
    for letter in grid.protocols:
        for ones in equal_bytes(rows, letter, grid.budgets).values():
            equal["bytes"] += [one.as_dict() for one in ones]
        for ones in equal_recall(rows, letter).values():
            equal["recall"] += [one.as_dict() for one in ones]
        for ones in equal_drift(rows, letter).values():
            equal["drift"] += [one.as_dict() for one in ones]
    return {
        "about": {key: value for key, value in about.items() if key != "lines"},
        "grid": {
            **shown,
            "samples": grid.samples,
            "recall_samples": grid.recall,
            "recalls": list(RECALLS),
            "drifts": list(DRIFTS),
        },
        "rows": [row.as_dict() for row in rows],
        "equal": equal,
    }


def _markdown(sections: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    parts = ["# The board\n", *(f"{line}\n" for line in (*about["lines"], *_made(about), *HOW))]
    for section in sections:
        parts += [f"## Protocol {section['letter']}\n", f"{section['said']}\n"]
        for table in (*section["tables"], *section["others"]):
            head = ["method", *table.head, "note"]
            body = [
                [
                    f"`{line.name}`",
                    *line.cells,
                    ", ".join(one for one in (line.kind, line.note) if one != "method" and one),
                ]
                for line in table.lines
            ]
            lines = [head, ["---", *["---:"] * len(table.head), "---"], *body]
            text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
            parts += [f"### {table.title}\n", *([f"{table.said}\n"] if table.said else []), text + "\n"]
    return "\n".join(parts)
