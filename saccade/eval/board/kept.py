"""What a board has finished, beside its results: boards of several runs, lengths or machines become one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from saccade.errors import RequestError
from saccade.eval.board.grid import Grid
from saccade.eval.board.jobs import Job, Key, Placed, asked
from saccade.eval.results import read_json, write_json

KEPT, RESULTS = "placed.json", "results"


def keep(out: Path, placed: Sequence[Placed], todo: Sequence[Job], grid: Grid, command: str) -> None:
    """Write what was placed and what was wanted by ``command`` to ``out``."""
    said = [
        asdict(one)
        | {"folder": one.folder and one.folder.name, "drift": one.drift and str(one.drift.relative_to(out / RESULTS))}
        for one in placed
    ]
    write_json(
        out / KEPT,
        {
            **{"command": command, "samples": grid.samples, "recall": grid.recall},
            **{"placed": said, "wanted": [list(one) for one in asked(todo)]},
        },
    )


def settings(files: Sequence[Path]) -> dict[tuple[str, str, int, float], str]:
    """(name, protocol, length, budget) -> the policy that a board.json of ``files`` has there; the first file that has
    one counts. RequestError for a file that is no board.json, or has no setting with which a search could begin."""
    found: dict[tuple[str, str, int, float], str] = {}
    for file in files:
        board, own = read_json(file), {}
        try:
            for row in board["rows"]:
                for length, cell in row["lengths"].items():
                    if row["budget"] is not None:
                        own[row["method"], row["protocol"], int(length), row["budget"]] = cell["policy"]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RequestError(f"{file} is not the board.json of saccade eval board: {error!r}") from error
        if not own:
            raise RequestError(
                f"{file} has no setting of any method, so no dial can begin as it was there: make that board again, "
                "give another one, or leave --like out"
            )
        found = own | found
    return found


def joined(folders: Sequence[Path]) -> tuple[list[Placed], Grid, int, str]:
    """(what the boards of ``folders`` placed, the grid they span, how many settings none of them finished, their
    commands). Where two finished the same, the first counts. RequestError for a folder that holds no board."""
    placed: dict[Key, Placed] = {}
    wanted: set[tuple[Any, ...]] = set()
    commands: dict[str, None] = {}
    samples = recall = 0
    for folder in folders:
        if not (folder / KEPT).is_file():
            raise RequestError(f"{folder} has no {KEPT}; give the --out of a board that was run")
        data = read_json(folder / KEPT)
        commands[data["command"]] = None
        wanted |= {tuple(one) for one in data["wanted"]}
        samples, recall = max(samples, data["samples"]), max(recall, data["recall"])
        for said in data["placed"]:
            files = {name: folder / RESULTS / said[name] for name in ("folder", "drift") if said.get(name)}
            one = Placed(**said | {"folder": None, "drift": None} | files)
            before = placed.get(one.key)
            if before is None or before.folder is None or (before.cut is not None and one.cut is None):
                placed[one.key] = one
    grid = replace(
        Grid(),
        budgets=tuple(sorted({one[3] for one in wanted if one[3] is not None})),
        lengths=tuple(sorted({one[2] for one in wanted})),
        protocols=tuple(sorted({one[1] for one in wanted})),
        samples=samples,
        recall=recall,
    )
    return (
        list(placed.values()),
        grid,
        len(wanted - {key for key, one in placed.items() if one.cut is None}),
        "; ".join(commands),
    )
