"""``saccade eval``: samples, predictions, scores and reports, each a step that can be resumed, or all in one."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli.options import HELP_NAMES, MODEL, say_device, takes_engine
from saccade.eval_cli.board import board
from saccade.eval_cli.drift import drift
from saccade.eval_cli.model_card import model_card
from saccade.eval_cli.multiturn import multiturn
from saccade.eval_cli.options import (
    CORPUS,
    DATA,
    HAYSTACK,
    HISTORY,
    INFINITEBENCH,
    LENGTH,
    LIMIT,
    LONGBENCH,
    MICRO,
    MIX,
    OUT,
    POLICY,
    PROTOCOL,
    SAMPLES,
    SEED,
    SIZE,
    TASK,
    TOGETHER,
    UNKNOWN,
    WORKERS,
)

if TYPE_CHECKING:
    from saccade.engine.settings.config import EngineConfig
    from saccade.eval.predict import Setting
    from saccade.eval.samples import Sample
    from saccade.eval.sources import Given
    from saccade.llm import LLM

app = typer.Typer(no_args_is_help=True, context_settings=HELP_NAMES, pretty_exceptions_enable=False)
app.command("board")(board)
app.command("drift")(drift)
app.command("model-card")(model_card)
app.command("multiturn")(multiturn)

RESULTS = Path("eval-results")


@app.callback()
def _eval() -> None:
    """Tell whether sparsity costs accuracy: scores beside measured cost, every sample paired with dense attention."""


@app.command("prepare")
def prepare(
    out: Annotated[Path, OUT] = RESULTS / "data",
    size: Annotated[str, SIZE] = "smoke",
    task: Annotated[list[str] | None, TASK] = None,
    length: Annotated[list[int] | None, LENGTH] = None,
    samples: Annotated[int | None, SAMPLES] = None,
    seed: Annotated[int, SEED] = 0,
    model: Annotated[str | None, MODEL] = None,
    longbench: Annotated[Path | None, LONGBENCH] = None,
    haystack: Annotated[str, HAYSTACK] = "prose",
    corpus: Annotated[Path | None, CORPUS] = None,
    allow_unknown: Annotated[bool, UNKNOWN] = False,
    infinitebench: Annotated[Path | None, INFINITEBENCH] = None,
) -> None:
    """Write samples and what they are. The options replace what the size says; a longer run begins with a shorter's."""
    from saccade.eval.runner import given_by

    given = given_by(model, longbench, haystack, corpus, allow_unknown, infinitebench)
    print(_prepare(out, size, task, length, samples, seed, model, given))


@app.command("predict")
@takes_engine(model="reference")
def predict(
    data: Annotated[Path, typer.Argument(help="Samples made by prepare (jsonl).")],
    policy: Annotated[list[str], POLICY],
    protocol: Annotated[str, PROTOCOL] = "A",
    history: Annotated[str, HISTORY] = "self",
    limit: Annotated[int | None, LIMIT] = None,
    mix: Annotated[bool, MIX] = False,
    workers: Annotated[int, WORKERS] = 1,
    together: Annotated[int, TOGETHER] = 1,
    out: Annotated[Path, OUT] = RESULTS / "results",
    micro: Annotated[int, MICRO] = 0,
    *,
    config: EngineConfig,
) -> None:
    """Answer samples under policies. A killed run goes on where it was and ends with the same file."""
    from saccade.eval import predict as step
    from saccade.eval.setting import computed, load
    from saccade.eval.workers import one_way
    from saccade.methods.policy import Policy

    settings = [step.Setting(Policy.parse(text), protocol, history) for text in policy]
    list(step.take(data, limit))
    one_way(workers, together)
    config = computed(config)
    llm = say_device(load(config, together))
    for setting in settings:
        say = _count(setting.policy.text)
        folder = step.predict(
            data, llm, config, setting, out, limit=limit, mix=mix, workers=workers, together=together, progress=say
        )
        print(folder)
        if micro:
            _micro(folder, llm, step.take(data, micro), setting)


def _micro(folder: Path, llm: LLM, samples: Iterable[Sample], setting: Setting) -> None:
    """Write micro.jsonl into the result folder, and say what it means over all heads."""
    from saccade.eval.micro import micro_samples, micro_table, text_table
    from saccade.eval.samples import write_jsonl

    records = list(micro_samples(llm, samples, setting))
    write_jsonl(folder / "micro.jsonl", records)
    print(text_table(micro_table(records)), end="")


@app.command("score")
def score(
    folders: Annotated[list[Path], typer.Argument(help="Result folders.")],
    data: Annotated[Path | None, DATA] = None,
) -> None:
    """Score predictions; needs the samples, not the model."""
    from saccade.eval.score import score_folder

    for folder in folders:
        print(score_folder(folder, data))


@app.command("report")
def report(
    folders: Annotated[list[Path], typer.Argument(help="Result folders, or folders of them.")],
    out: Annotated[Path, OUT] = RESULTS / "report",
) -> None:
    """Fold results into report.html (one self-contained page), report.md and report.csv."""
    from saccade.eval.report import write_report

    for file in write_report(folders, out):
        print(file)


@app.command("run")
@takes_engine(model="reference")
def run(
    size: Annotated[str, SIZE] = "smoke",
    policy: Annotated[list[str] | None, POLICY] = None,
    task: Annotated[list[str] | None, TASK] = None,
    length: Annotated[list[int] | None, LENGTH] = None,
    samples: Annotated[int | None, SAMPLES] = None,
    seed: Annotated[int, SEED] = 0,
    protocol: Annotated[str, PROTOCOL] = "A",
    history: Annotated[str, HISTORY] = "self",
    limit: Annotated[int | None, LIMIT] = None,
    mix: Annotated[bool, MIX] = False,
    workers: Annotated[int, WORKERS] = 1,
    together: Annotated[int, TOGETHER] = 1,
    longbench: Annotated[Path | None, LONGBENCH] = None,
    haystack: Annotated[str, HAYSTACK] = "prose",
    corpus: Annotated[Path | None, CORPUS] = None,
    allow_unknown: Annotated[bool, UNKNOWN] = False,
    infinitebench: Annotated[Path | None, INFINITEBENCH] = None,
    oracle: Annotated[
        str, typer.Option(help="decode: exact top-k at each decode method's measured density; both; none.")
    ] = "decode",
    out: Annotated[Path, OUT] = RESULTS,
    *,
    config: EngineConfig,
) -> None:
    """All steps: dense, the policies, and the oracle beside them; then the report. Resumes what is there."""
    from saccade.eval import runner
    from saccade.eval.report import print_summary, write_report
    from saccade.eval.setting import computed, load
    from saccade.eval.workers import one_way
    from saccade.methods.policy import Policy

    for text in policy or ():
        Policy.parse(text)
    one_way(workers, together)
    given = runner.given_by(str(config.model), longbench, haystack, corpus, allow_unknown, infinitebench)
    data = _prepare(out / "data", size, task, length, samples, seed, str(config.model), given)
    config = computed(config)
    folders = runner.run_policies(
        data,
        say_device(load(config, together)),
        config,
        policy or runner.POLICIES,
        out / "results",
        protocol=protocol,
        history=history,
        limit=limit,
        mix=mix,
        workers=workers,
        together=together,
        oracle=oracle,
        note=_note,
    )
    files = write_report(folders, out / "report")
    print_summary(folders)
    for file in files:
        print(file)


@app.command("target")
@takes_engine(model="reference")
def target(
    method: Annotated[str, typer.Option("--method", help="The method, with options of its own if need be.")],
    option: Annotated[str, typer.Option("--option", help="Its option to vary.")],
    values: Annotated[str, typer.Option("--values", help="0.5,0.9,0.98, or low:high:count.")],
    keep: Annotated[float, typer.Option(help="Share of dense's score to keep.")] = 0.98,
    size: Annotated[str, SIZE] = "smoke",
    task: Annotated[list[str] | None, TASK] = None,
    length: Annotated[list[int] | None, LENGTH] = None,
    samples: Annotated[int | None, SAMPLES] = None,
    seed: Annotated[int, SEED] = 0,
    protocol: Annotated[str, PROTOCOL] = "A",
    history: Annotated[str, HISTORY] = "self",
    limit: Annotated[int | None, LIMIT] = None,
    mix: Annotated[bool, MIX] = False,
    workers: Annotated[int, WORKERS] = 1,
    together: Annotated[int, TOGETHER] = 1,
    haystack: Annotated[str, HAYSTACK] = "prose",
    out: Annotated[Path, OUT] = RESULTS,
    *,
    config: EngineConfig,
) -> None:
    """Find the sparsest setting of a method that keeps a share of dense's score; probes are kept and used again."""
    from saccade.eval.results import slug, write_json
    from saccade.eval.runner import given_by
    from saccade.eval.setting import computed, load
    from saccade.eval.target import find_target, grid
    from saccade.eval.workers import one_way
    from saccade.methods.policy import Policy

    points = grid(values)
    Policy.parse(method)
    one_way(workers, together)
    given = given_by(str(config.model), haystack=haystack)
    data = _prepare(out / "data", size, task, length, samples, seed, str(config.model), given)
    config = computed(config)
    found = find_target(
        data,
        say_device(load(config, together)),
        config,
        method,
        option,
        points,
        out / "results",
        keep=keep,
        protocol=protocol,
        history=history,
        limit=limit,
        mix=mix,
        workers=workers,
        together=together,
        note=_note,
    )
    file = out / f"target__{slug(method)}__{slug(option)}__{keep:g}__{slug(Path(config.model).name)}__{data.stem}.json"
    write_json(file, {"method": method, "option": option, "data": str(data), **found.as_dict()})
    print(found.said(option))
    print(file)


def _prepare(
    out: Path,
    size: str,
    tasks: list[str] | None,
    lengths: list[int] | None,
    samples: int | None,
    seed: int,
    model: str | None,
    given: Given,
) -> Path:
    from saccade.eval import runner

    chosen = runner.size_named(size)
    wanted = tasks or runner.default_tasks(chosen.tasks, model)
    return runner.prepare(
        out,
        wanted,
        lengths or chosen.lengths,
        chosen.samples if samples is None else samples,
        seed,
        name=runner.data_name(size, wanted, lengths, samples, seed, model, given.haystack),
        given=given,
    )


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _count(policy: str) -> Any:
    def say(done: int, whole: int) -> None:
        if sys.stderr.isatty() or done == whole:
            _note(f"{policy}: {done}/{whole}")

    return say
