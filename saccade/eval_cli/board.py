"""``saccade eval board``: every method at equal keys, equal bytes and equal recall, sorted by what a user loses."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli.options import say_device, takes_engine
from saccade.eval_cli.options import TOGETHER

if TYPE_CHECKING:
    from saccade.engine.settings.config import EngineConfig


@takes_engine(model="reference")
def board(
    quick: Annotated[
        bool, typer.Option("--quick", help="4K, two budgets, four tasks, a sample of each: a few minutes.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="2K to 32K, five budgets, 20 samples, oracles of prefill.")
    ] = False,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="Rank this method alone; may be given several times.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option("--without", help="Leave this row out; may be given several times.")
    ] = None,
    budget: Annotated[
        list[float] | None,
        typer.Option("--budget", help="Share of the keys that dense reads; may be given several times."),
    ] = None,
    keys: Annotated[
        list[int] | None,
        typer.Option("--keys", help="In the place of a budget: keys at the one length; may be given several times."),
    ] = None,
    length: Annotated[list[int] | None, typer.Option("--length", help="Tokens; may be given several times.")] = None,
    protocol: Annotated[list[str] | None, typer.Option("--protocol", help="B or D; both if it is not given.")] = None,
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="A task; may be given several times.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", help="Samples of each task and length.")] = None,
    each: Annotated[
        int | None,
        typer.Option("--each", help="Samples of each family of tasks and length, dealt out to its tasks."),
    ] = None,
    drift: Annotated[
        int | None,
        typer.Option("--drift", help="Tokens forced to measure every setting's KL to dense, and to set its dial by."),
    ] = None,
    answers: Annotated[
        bool, typer.Option("--answers/--no-answers", help="Answer samples; else measure drift alone.")
    ] = True,
    limit: Annotated[
        list[int] | None,
        typer.Option(
            "--limit",
            help="Answer the first N of them for now; a later call goes on. Several: a round of every method each.",
        ),
    ] = None,
    recall: Annotated[
        int | None, typer.Option("--recall", help="Samples of each task whose true attention is computed too; 0: none.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Begin nothing more after so long, and write what is finished.")
    ] = None,
    most_seconds: Annotated[
        float | None,
        typer.Option("--most-seconds", help="End a setting that takes longer, keep what it answered; it gets no rank."),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", help="Rows that run side by side, each with a model of its own.")
    ] = 1,
    together: Annotated[int, TOGETHER] = 1,
    mix: Annotated[
        bool, typer.Option("--mix", help="Continue results that other versions, commits or machines began.")
    ] = False,
    like: Annotated[
        list[Path] | None,
        typer.Option("--like", help="A board.json: each dial is first set as it was there, which saves its search."),
    ] = None,
    join: Annotated[
        list[Path] | None,
        typer.Option("--join", help="Run nothing: one page of what the boards in these folders finished."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")] = Path("board"),
    *,
    config: EngineConfig,
) -> None:
    """Rank every method that applies by what a user loses, at equal keys, equal bytes and equal recall.

    A killed run goes on where it was. The page is OUT/board.html, beside it board.json and board.md.
    """
    from saccade.errors import RequestError
    from saccade.eval.board import grid as grids
    from saccade.eval.board import jobs, kept, play
    from saccade.eval.board.page import write_board
    from saccade.eval.runner import default_tasks
    from saccade.eval.setting import load
    from saccade.eval.workers import positive

    if quick and full:
        raise RequestError("--quick and --full are different grids; give one of them")
    if seconds is not None and seconds <= 0:
        raise RequestError(f"seconds={seconds!r} must be above 0")
    if most_seconds is not None and most_seconds <= 0:
        raise RequestError(f"most_seconds={most_seconds!r} must be above 0: seconds that one setting may take")
    for count in limit or ():
        if count < 1:
            raise RequestError(f"limit={count!r} must be an integer >= 1: samples of each task and length")
    positive("together", together)
    if join:
        found, span, missing, commands = kept.joined(join)
        for file in write_board(found, span, out, commands, missing):
            print(file)
        return
    begun = time.monotonic()
    # Hundreds of settings read the same contexts, which are computed once by each worker.
    config = replace(config, enable_prefix_caching=True, kv_memory=config.kv_memory or jobs.room(config, workers))
    base = grids.QUICK if quick else grids.FULL if full else grids.FIXED
    tasks = task or default_tasks(base.tasks, str(config.model))
    grid = base.changed(budget, length, protocol, samples, tasks, recall, method, each, drift, answers, keys, without)
    data = jobs.prepare_data(grid, str(config.model), out / "data")
    until = None if seconds is None else begun + seconds
    before = kept.settings(like or ())
    what = play.Play(grid, config, out / kept.RESULTS, mix, until, together, before, most_seconds)
    todo = jobs.jobs(grid, data, sorted(set(limit)) if limit else (None,))
    play.check_like(todo, what)

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    llm = say_device(load(config, together))
    todo = jobs.slow_last(todo, partial(jobs.why_row_by_row, llm))
    command = shlex.join(["saccade", *_shown(sys.argv[1:])])
    placed: list[jobs.Placed] = []
    for ones in play.play(todo, llm, what, workers, note):
        placed = jobs.settled([*placed, *ones])
        if placed:
            kept.keep(out, placed, todo, grid, command)  # a run that is killed leaves what --join makes a page of
    missing = jobs.unfinished(placed, todo, grid.answers)
    for file in write_board(placed, grid, out, command, missing):
        print(file)


_SLICES = ("--out", "-o", "--seconds", "--most-seconds")


def _shown(words: list[str]) -> list[str]:
    """The command without where it wrote, and in what slices."""
    kept, skip = [], False
    for word in words:
        if (
            not skip
            and word not in (*_SLICES, "--mix")
            and not word.startswith(tuple(f"{option}=" for option in _SLICES))
        ):
            kept.append(word)
        skip = not skip and word in _SLICES
    return kept
