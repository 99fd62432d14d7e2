"""Folding results into one self-contained HTML page and the same tables as Markdown and csv."""

from __future__ import annotations

import base64
import json
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from saccade.eval import figures, plots
from saccade.eval.multiturn.sets import SCORED
from saccade.eval.results import ENVIRONMENT, MIXED, machine_name
from saccade.eval.summary import Cell, Group, Run, load_groups, position_scores
from saccade.eval.tables import OVERALL, PER_TASK, Line, to_csv, to_markdown
from saccade.eval.weak import dense_score
from saccade.files import write_text

NAMES = ("task", "length", "policy", "protocol")
_PROTOCOLS = (
    "A: dense prefill of everything, then decode by the policy. B: dense prefill of the context; question and answer "
    "run as decode steps by the policy. C: sparse prefill, dense decode. D: sparse in both."
)


def write_report(folders: Iterable[Path], out: Path) -> list[Path]:
    """Write report.html, report.md and report.csv to ``out``; returns their paths. Without matplotlib the page has its
    tables and no figures, and a warning says so.

    ``folders``: scored result folders, or folders that hold some. Runs are compared where model, samples and history
    agree; what does not agree gets a section of its own. Raises RequestError if there are none or ``out`` cannot be
    written.
    """
    groups = load_groups(folders)
    if not figures.available():
        warnings.warn(figures.MISSING, stacklevel=2)
    files = {
        "report.html": _page(groups),
        "report.md": _markdown(groups),
        "report.csv": to_csv(("model", "data", "history", *NAMES), [line for group in groups for line in _flat(group)]),
    }
    for name, text in files.items():
        write_text(out / name, text)
    return [out / name for name in files]


def print_summary(folders: Iterable[Path]) -> None:
    """The overall table on the terminal, and what must be known to read it."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 250)
    for group in load_groups(folders):
        table = Table(title=_title(group))
        for name in ("policy", "protocol"):
            table.add_column(name, no_wrap=True)
        for column in OVERALL:
            table.add_column(column.title, justify="right")
        for line in _overall(group):
            table.add_row(*line.labels, *(column.text(line.cell) for column in OVERALL))
        console.print(table)
        for warning in _warnings(group):
            console.print(warning, style="yellow", markup=False, highlight=False)


def _overall(group: Group) -> list[Line]:
    return [Line((cell.run.policy, cell.protocols), cell) for cell in group.overall]


def _per_task(group: Group) -> list[Line]:
    lines: list[Line] = []
    before: tuple[str, int] | None = None
    for task, length, cell in group.cells:
        new = (task, length) != before
        labels = (task, str(length)) if new else ("", "")
        lines.append(Line((*labels, cell.run.policy, cell.protocols), cell, strong=new))
        before = (task, length)
    return lines


def _flat(group: Group) -> list[Line]:
    head = (_model(group), _data(group), group.head.config["history"])
    overall = [Line((*head, "all", "all", *line.labels), line.cell) for line in _overall(group)]
    return overall + [
        Line((*head, task, str(length), cell.run.policy, cell.protocols), cell) for task, length, cell in group.cells
    ]


def _model(group: Group) -> str:
    return Path(group.head.config["model"]["name"]).name


def _data(group: Group) -> str:
    data = group.head.config["data"]
    return data["name"] or Path(data["path"]).stem


def _title(group: Group) -> str:
    history = ", gold history" if group.head.config["history"] == "gold" else ""
    return f"{_model(group)} on {_data(group)}{history}"


def _gap_rows(group: Group) -> list[tuple[str, ...]]:
    """Policy, score by position, End minus Begin, and that minus dense's."""
    found = [(run, scores) for run in group.runs if len(scores := position_scores(run)) > 1]
    dense = next((scores for run, scores in found if run.policy == "dense"), {})
    rows = []
    for run, scores in found:
        shown = [f"{100 * scores[name]:.1f}" if name in scores else "–" for name in ("begin", "middle", "end")]
        gap = scores["end"] - scores["begin"] if {"begin", "end"} <= scores.keys() else None
        own = dense["end"] - dense["begin"] if {"begin", "end"} <= dense.keys() else None
        relative = None if gap is None or own is None or run.policy == "dense" else gap - own
        tail = ["–" if value is None else f"{100 * value:+.1f}" for value in (gap, relative)]
        rows.append((run.policy, *shown, *tail))
    return rows


_GAP_NAMES = ("policy", "begin", "middle", "end", "end − begin", "the same minus dense's")


def _markdown(groups: Sequence[Group]) -> str:
    parts = ["# Evaluation report\n"]
    for group in groups:
        parts += [f"## {_title(group)}\n", _about(group) + "\n"]
        parts += ["\n".join(f"* **{line}**" for line in _warnings(group)) + "\n"] if _warnings(group) else []
        parts += [_PROTOCOLS + "\n"]
        parts.append(to_markdown(("policy", "protocol"), _overall(group), OVERALL))
        if rows := _gap_rows(group):
            rule = ["---", *["---:"] * 5]
            lines = [_GAP_NAMES, rule, *((f"`{row[0]}`", *row[1:]) for row in rows)]
            parts += [
                "### Where the question stands\n",
                "\n".join("| " + " | ".join(row) + " |" for row in lines) + "\n",
            ]
        parts += ["### By task and length\n", to_markdown(NAMES, _per_task(group), PER_TASK)]
        said = [f"* `{cell.run.policy}`: {line}" for cell in group.overall for line in _counted(cell)]
        parts += ["### What requests noted\n", "\n".join(said) + "\n"] if said else []
    return "\n".join(parts)


def _page(groups: Sequence[Group]) -> str:
    here = jinja2.Environment(
        loader=jinja2.PackageLoader("saccade.eval", ""), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = here.get_template("report.html.jinja").render(
        sections=[_section(group) for group in groups],
        names=NAMES,
        gap_names=_GAP_NAMES,
        overall_columns=OVERALL,
        task_columns=PER_TASK,
        protocols=_PROTOCOLS,
        missing="" if figures.available() else figures.MISSING,
    )
    return page + "\n"


def _section(group: Group) -> dict[str, Any]:
    """What the page shows of a group."""
    drawn = figures.available()
    shown = (
        ("The frontier: score against what was read", plots.frontier(group) if drawn else None),
        ("Score by depth and length", plots.depth_maps(group) if drawn else None),
    )
    gaps = _gap_rows(group)
    return {
        "title": _title(group),
        "about": _about(group),
        "warnings": _warnings(group),
        "overall": _overall(group),
        "figures": [(title, figure) for title, figure in shown if figure],
        "gaps": gaps,
        "positions": (plots.positions(group) if gaps and drawn else None) or "",
        "per_task": _per_task(group),
        "pictures": [(run.policy, pictures) for run in group.runs if (pictures := _pictures(run))],
        "runs": [_details(cell) for cell in group.overall],
    }


def _about(group: Group) -> str:
    config = group.head.config
    model, versions = config["model"], config["versions"]
    commit, _, changed = (config["commit"] or "no commit").partition("+")
    commit = commit[:12] + (" with changes" if changed else "")
    return (
        f"{len(group.head.tasks)} tasks at {', '.join(map(str, group.head.lengths))} tokens, "
        f"{len(group.head.rows)} samples; data {config['data']['sha256'][:12]}, "
        f"weights {model['weights_sha256'][:12]}, {model['dtype']}; saccade {versions['saccade']} at {commit}, torch "
        f"{versions['torch']}, Python {versions['python']}; {machine_name(config['machine'])}."
    ) + (f" {SCORED}" if any(task.startswith("mtlb:") for task in group.head.tasks) else "")


def _warnings(group: Group) -> list[str]:
    """What a reader must know before comparing rows."""
    lines = []
    if not any(run.policy == "dense" for run in group.runs):
        lines.append(
            "No dense run among these results: nothing can be said against dense. saccade eval run adds one unless it "
            "is told --oracle none; --policy dense adds it to the same folder."
        )
    for run in group.runs:
        if run.policy == "dense" and (dense := dense_score(run)) is not None:
            if dense.warning:
                lines.append(dense.warning if run.protocol == "A" else f"Protocol {run.protocol}: {dense.warning}")
            elif dense.low:
                lines.append(f"Dense attention scores below half on {dense.listed}: these rows say little against it.")
    lines += [
        f"{run.policy} was begun and continued in unlike environments; its config names them."
        for run in group.runs
        if MIXED in run.config
    ]
    for run in group.runs[1:]:
        if len(run.rows) != len(group.head.rows):
            lines.append(f"{run.policy} has {len(run.rows)} samples, {group.head.policy} {len(group.head.rows)}.")
    environments = {json.dumps({key: run.config[key] for key in ENVIRONMENT}) for run in group.runs}
    if len(environments) > 1:
        count = len(environments)
        lines.append(f"These rows come from {count} environments (versions, commits or machines); see How it was run.")
    return lines


def _pictures(run: Run) -> list[tuple[str, str]]:
    """(markup, caption) of what lies in the result folder's ``figures/``, such as maps of what each head read."""
    pictures = []
    for file in sorted(file for file in (run.folder / "figures").glob("*") if file.suffix in (".png", ".svg")):
        if file.suffix == ".svg":
            text = file.read_text(encoding="utf-8")
            picture = re.sub(r"^.*?(?=<svg)", "", text, flags=re.DOTALL)
        else:
            picture = f'<img alt="" src="data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}">'
        pictures.append((picture, file.stem.replace("_", " ")))
    return pictures


def _counted(cell: Cell) -> list[str]:
    """What samples say of themselves, errors first, and how many say it."""
    counts: dict[str, int] = {}
    for said in [
        *(f"error: {row['error']}" for row in cell.rows if row["error"]),
        *(n for r in cell.rows for n in r["notes"]),
    ]:
        counts[said] = counts.get(said, 0) + 1
    return [f"{count} of {len(cell.rows)} samples: {said}" for said, count in counts.items()]


def _shareable(config: Any) -> Any:
    """``config`` with files and folders by name alone: where they lay on one machine is no one else's business."""
    if not isinstance(config, dict):
        return config
    return {
        key: Path(part).name if key in ("path", "name") and isinstance(part, str) else _shareable(part)
        for key, part in config.items()
    }


def _details(cell: Cell) -> dict[str, Any]:
    return {
        "name": cell.run.folder.name,
        "errors": cell.errors,
        "said": _counted(cell),
        "config": json.dumps(_shareable(cell.run.config), indent=2, ensure_ascii=False),
    }
