"""What the board runs: the settings that it asks for as jobs, their samples and their room, and what came of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from saccade.engine.settings.config import EngineConfig
from saccade.eval.board.entries import Entry
from saccade.eval.board.grid import Grid
from saccade.eval.board.matching import distance
from saccade.eval.runner import data_name, default_tasks, given_by, prepare
from saccade.machine import available_bytes

_MOST_ROOM = 4 * 2**30


@dataclass(frozen=True)
class Job:
    """One row of the board under one protocol at one length, for ``budgets`` (None where it has no dial). ``limit``:
    samples of each task that are answered; None: all."""

    entry: Entry | None  # None: dense
    protocol: str
    length: int
    data: Path
    budgets: tuple[float | None, ...] = (None,)
    limit: int | None = None


@dataclass(frozen=True)
class Placed:
    """A setting that was run for a budget (None: the same at all). ``folder``: its results; ``error``: why there are
    none; ``drift``: the file of its drift, where that was measured."""

    name: str
    protocol: str
    length: int
    budget: float | None
    policy: str
    folder: Path | None
    error: str | None = None
    drift: Path | None = None


def room(model: EngineConfig, workers: int) -> int | None:
    """Bytes of keys and values for the contexts of a grid, in each of the workers; None leaves it to the engine."""
    if model.device != "cpu" and torch.cuda.is_available():
        return None
    return min(_MOST_ROOM, int(0.4 * available_bytes()) // max(1, workers))


def prepare_data(grid: Grid, model: str, out: Path, seed: int = 0) -> dict[int, Path]:
    """The samples of each length, a file each. RequestError as ``runner.prepare``."""
    tasks = default_tasks(grid.tasks, model) if grid.tasks == ("all",) else list(grid.tasks)
    made = {}
    for length in grid.lengths:
        name = (
            "board-" + data_name("core", tasks, [length], grid.samples, seed, model) + ("-dealt" if grid.dealt else "")
        )
        if not grid.answers:
            made[length] = out / f"{name}.jsonl"
            continue
        made[length] = prepare(
            out, tasks, [length], grid.samples, seed, name=name, given=given_by(model), dealt=grid.dealt
        )
    return made


def jobs(grid: Grid, data: dict[int, Path], rounds: Sequence[int | None] = (None,)) -> list[Job]:
    """Dense of both kinds first, then every row; long contexts first, so that no worker ends with one alone. Where
    drift turns the dials, a row's budgets are jobs of their own, the middle one first: a board that is cut short has
    that one whole. ``rounds``: how many samples of each task (None: all) every job answers before any of them answers
    more, so that one that is cut short has asked every method as much, and keys and values of a round's prompts alone
    need room at once."""
    rows: list[Job] = []
    middle = sorted(grid.budgets)[(len(grid.budgets) - 1) // 2]
    parts: list[tuple[float | None, ...]] = [
        (one,) for one in sorted(grid.budgets, key=lambda one: distance(one, middle))
    ]
    for length in sorted(grid.lengths, reverse=True):
        for letter in grid.protocols:
            rows.append(Job(None, letter, length, data[length]))
            for entry in grid.entries:
                if entry.serves(letter):
                    own = [(None,)] if entry.dial is None else parts if grid.drift else [grid.budgets]
                    rows += [Job(entry, letter, length, data[length], budgets) for budgets in own]
    order = {budgets: at for at, budgets in enumerate(parts, 1)} if grid.drift else {}
    rows.sort(key=lambda job: (job.entry is not None, order.get(job.budgets, 0)))
    return [replace(job, limit=limit) for limit in rounds for job in rows]


def settled(placed: Iterable[Placed]) -> list[Placed]:
    """What was placed, each setting as its last round left it; one that a round did not reach, as the one before."""
    found: dict[tuple[str, str, int, float | None], Placed] = {}
    for one in placed:
        key = one.name, one.protocol, one.length, one.budget
        if one.folder is not None or one.error is not None or key not in found:
            found[key] = one
    return list(found.values())


def unfinished(placed: Iterable[Placed], todo: Sequence[Job], answers: bool) -> int:
    """How many settings are not placed, or without the answers that they were to give."""
    weak = {(one.protocol, one.length) for one in placed if one.name == "dense" and one.error is not None}
    done = {
        (one.name, one.protocol, one.length, one.budget)
        for one in placed
        if not answers or one.folder is not None or one.error is not None or (one.protocol, one.length) in weak
    }
    return len(set(asked(todo)) - done)


def asked(todo: Iterable[Job]) -> list[tuple[str, str, int, float | None]]:
    """The settings that jobs are to place: name, protocol, length, budget."""
    wanted = (
        (job.entry.name if job.entry else "dense", job.protocol, job.length, budget)
        for job in todo
        for budget in job.budgets
    )
    return list(dict.fromkeys(wanted))


def wanted(job: Job) -> int:
    """How many settings a job places."""
    return len(job.budgets)
