"""What the board runs: the settings that it asks for as jobs and their order, their samples and room, and what came of
them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from saccade.engine.settings.config import EngineConfig
from saccade.eval.board.entries import Entry
from saccade.eval.board.grid import Grid
from saccade.eval.board.matching import distance
from saccade.eval.runner import data_name, default_tasks, given_by, prepare
from saccade.llm import LLM
from saccade.machine import available_bytes
from saccade.methods.policy import Policy

_MOST_ROOM = 4 * 2**30
Key = tuple[str, str, int, float | None]  # of a setting: name, protocol, length, budget


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

    @property
    def name(self) -> str:
        return self.entry.name if self.entry else "dense"

    @property
    def keys(self) -> list[Key]:
        """Its settings, one for each of ``budgets``."""
        return [(self.name, self.protocol, self.length, budget) for budget in self.budgets]


@dataclass(frozen=True)
class Placed:
    """A setting that was run for a budget (None: the same at all). ``folder``: its results; ``error``: why there are
    none; ``drift``: the file of its drift, where that was measured; ``cut``: after how many seconds it was ended, where
    it had not answered what it was to, or its dial was not set."""

    name: str
    protocol: str
    length: int
    budget: float | None
    policy: str
    folder: Path | None
    error: str | None = None
    drift: Path | None = None
    cut: float | None = None

    @property
    def key(self) -> Key:
        """What was asked for."""
        return self.name, self.protocol, self.length, self.budget


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


def why_row_by_row(llm: LLM, policy: Policy) -> str | None:
    """Why a GPU decodes under ``policy`` row by row, though it decodes under others in steps that many requests share;
    None where it does not, and on a CPU."""
    device = llm.engine.worker.device
    return None if device is None else device.why_not(policy)


def slow_last(todo: Sequence[Job], why: Callable[[Policy], str | None]) -> list[Job]:
    """Jobs whose decode rows run one by one (``why``: see :func:`why_row_by_row`) behind all budgets and rounds of the
    others: one of them can take as long as all of these."""
    known: dict[tuple[str, str, int], bool] = {}

    def slow(job: Job) -> bool:
        if job.entry is None:
            return False
        key = job.entry.name, job.protocol, job.length
        if key not in known:
            values = [None] if job.entry.dial is None else job.entry.dial.values(job.length)
            policy = job.entry.policy(job.protocol, job.budgets[0] or 1.0, values[len(values) // 2])
            known[key] = why(policy) is not None
        return known[key]

    return sorted(todo, key=slow)


def settled(placed: Iterable[Placed]) -> list[Placed]:
    """What was placed, each setting as its last round left it; one that a round did not reach, as the one before."""
    found: dict[Key, Placed] = {}
    for one in placed:
        if one.folder is not None or one.error is not None or one.key not in found:
            found[one.key] = one
    return list(found.values())


def unfinished(placed: Iterable[Placed], todo: Sequence[Job], answers: bool) -> int:
    """How many settings are not placed, cut short, or without the answers that they were to give."""
    weak = {(one.protocol, one.length) for one in placed if one.name == "dense" and one.error is not None}
    done = {
        one.key
        for one in placed
        if one.cut is None
        and (not answers or one.folder is not None or one.error is not None or (one.protocol, one.length) in weak)
    }
    return len(set(asked(todo)) - done)


def asked(todo: Iterable[Job]) -> list[Key]:
    """The settings that jobs are to place: name, protocol, length, budget."""
    return list(dict.fromkeys(key for job in todo for key in job.keys))


def wanted(job: Job) -> int:
    """How many settings a job places."""
    return len(job.budgets)
