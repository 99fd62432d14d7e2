"""Where a board's rows come from: model, samples, and every version and machine that answered some of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saccade.eval.board.drifts import load_drift
from saccade.eval.board.jobs import Placed
from saccade.eval.board.rows import low_tasks
from saccade.eval.results import ENVIRONMENT, MIXED, machine_name
from saccade.eval.summary import Run


def about(placed: Sequence[Placed], command: str, missing: int) -> dict[str, Any]:
    """Plain data for the page: ``lines`` to print, and what they are made of. ``placed`` has at least one folder, or
    drift."""
    if all(one.folder is None for one in placed):
        return _drift_alone(placed, command, missing)
    runs = {one.folder: Run.load(one.folder) for one in placed if one.folder is not None}
    config = next(iter(runs.values())).config
    tasks = next(iter(runs.values())).tasks
    sizes = sorted({len(run.rows) for run in runs.values()})
    samples = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    made: dict[str, Counter[str]] = {}
    for one in placed:
        if one.folder is not None:
            for environment in _environments(runs[one.folder].config):
                made.setdefault(_said(environment), Counter())[one.protocol] += 1
    model = config["model"]
    head = (
        f"{Path(model['name']).name}, weights {model['weights_sha256'][:12]}, {model['dtype']}; {len(tasks)} tasks, "
        f"{samples} samples a length"
    )
    if len(made) == 1:
        lines = [f"{head}; {next(iter(made))}."]
    else:
        lines = [f"{head}. Rows come from several runs, which round apart; the samples are the same."]
        lines += [
            f"{' and '.join(f'{count} of {letter}' for letter, count in sorted(counts.items()))}: {said}."
            for said, counts in made.items()
        ]
    for low in dict.fromkeys(
        ", ".join(f"{task} ({100 * score:.0f})" for task, score in low_tasks(runs[one.folder]).items())
        for one in placed
        if one.name == "dense" and one.folder is not None
    ):
        lines += [f"Left out, as dense attention does less than half of them: {low}."] if low else []
    lines += [f"{missing} settings are not finished; the same command goes on with them."] if missing else []
    return {
        "lines": lines,
        "command": command,
        "tasks": tasks,
        "config": {name: config[name] for name in ENVIRONMENT},
        "runs": {said: dict(sorted(counts.items())) for said, counts in made.items()},
        "weights": model["weights_sha256"],
        "dtype": model["dtype"],
    }


def _drift_alone(placed: Sequence[Placed], command: str, missing: int) -> dict[str, Any]:
    """Of a board on which no sample was answered."""
    drifts = [drift for one in placed if one.drift is not None and (drift := load_drift(one.drift)) is not None]
    made = Counter(f"{one.record['dtype']} on {one.record['device']}" for one in drifts)
    first = drifts[0].record
    tokens = sorted({one.record["tokens"] for one in drifts})
    lines = [
        f"Drift alone, no samples were answered: weights {first['weights'][:12]}, "
        f"{' to '.join(map(str, tokens[:: max(1, len(tokens) - 1)]))} forced tokens; {', '.join(made)}."
    ]
    lines += [f"{one.error}" for one in placed if one.name == "dense" and one.error is not None]
    lines += [f"{missing} settings are not finished; the same command goes on with them."] if missing else []
    return {
        **{"lines": lines, "command": command, "tasks": [], "config": {}, "runs": dict(made)},
        **{"weights": first["weights"], "dtype": first["dtype"]},
    }


def _environments(config: dict[str, Any]) -> list[dict[str, Any]]:
    """That of the run that began a folder, and those that went on with it."""
    return [config, *config.get(MIXED, [])]


def _said(environment: dict[str, Any]) -> str:
    versions = environment["versions"]
    commit, _, changed = (environment["commit"] or "no commit").partition("+")
    commit = commit[:12] + (" with changes" if changed else "")
    return (
        f"saccade {versions['saccade']} at {commit}, torch {versions['torch']}; {machine_name(environment['machine'])}"
    )
