"""Running the board: every row's dial is turned until it reads what the budget says, then its samples are answered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from saccade.engine.settings.config import EngineConfig
from saccade.errors import RequestError, SaccadeError
from saccade.eval.board.drifts import Drift, Drifts, place_of
from saccade.eval.board.entries import Entry
from saccade.eval.board.grid import PROTOCOLS, Grid
from saccade.eval.board.jobs import Job, Key, Placed, why_row_by_row
from saccade.eval.board.matching import distance, nearest
from saccade.eval.micro import micro_samples, micro_table
from saccade.eval.predict import Setting, configuration, folder_name, predict, take
from saccade.eval.results import PREDICTIONS, SCORES, read_json, write_json
from saccade.eval.runner import Note
from saccade.eval.score import score_folder
from saccade.eval.setting import sparse_in
from saccade.eval.summary import Group, Run
from saccade.eval.weak import dense_score
from saccade.eval.workers import in_order
from saccade.llm import LLM
from saccade.methods.policy import Policy

RECALL = "recall.json"  # in a result folder: mean mass kept, by phase
APART = 4  # samples that are answered at once, at most, where rows share no launches: then some are finished early
_ROWS = 32  # prefill rows and decode steps of a sample whose attention is compared


@dataclass(frozen=True)
class Play:
    """What every job needs, as plain data that pickles. ``until``: when no more is begun, on ``monotonic``'s clock.
    ``together``: samples that a model answers at once. ``like``: (name, protocol, length, budget) -> the policy that
    another board has there, with which a search begins. ``most``: seconds that a setting may take, dense attention's
    aside; ``ends``: when the one that is run has taken them."""

    grid: Grid
    model: EngineConfig
    results: Path
    mix: bool = False
    until: float | None = None
    together: int = 1
    like: Mapping[tuple[str, str, int, float], str] = field(default_factory=dict)
    most: float | None = None
    ends: float | None = None

    @property
    def late(self) -> bool:
        return self.until is not None and monotonic() > self.until

    @property
    def over(self) -> bool:
        return self.ends is not None and monotonic() > self.ends

    def begun(self) -> Play:
        """For a setting that begins now."""
        return self if self.most is None else replace(self, ends=monotonic() + self.most)


class _Late(Exception):
    pass


class _Cut(Exception):
    """A setting has taken ``Play.most``. ``folder``: what it has answered, None where that is nothing."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder


def play(todo: Sequence[Job], llm: LLM, play: Play, workers: int = 1, note: Note = print) -> Iterator[list[Placed]]:
    """Run jobs, side by side with ``workers``; what a job placed comes as it ends. What lies in the results already is
    used again. Jobs that ``play.until`` cut off give what they had finished. A setting that ``play.most`` cut short is
    left alone in later rounds (several workers know nothing of each other: there it gets its time in each).
    RequestError as ``refuse_weak``, unless drift is measured: then that is said, and nothing more is answered at that
    length."""
    work = _Work(play)
    for job, placed in zip(todo, in_order(work, todo, llm, play.model, workers, play.together)):
        refuse_weak(placed)
        note(f"{job.name} ({job.protocol}, {job.length} tokens): {len(placed)} of {len(job.budgets)} settings")
        for one in placed:
            if one.error is not None:
                note(f"{one.policy}: {one.error}")
            if one.cut is not None:
                note(f"{one.policy}: cut after {one.cut:g} s; the same command goes on with it")
        yield placed


def refuse_weak(placed: Iterable[Placed]) -> None:
    """RequestError if dense attention scores below half of what is possible in every task of one of these: the order of
    rows that are compared with it would be chance. Tasks that it does to less than half are left out of the others."""
    for one in placed:
        if one.name == "dense" and one.folder is not None and (warning := weak(one.folder)) is not None:
            raise RequestError(
                f"no board can be made of {one.folder.name} ({one.length} tokens, protocol {one.protocol}): {warning}"
            )


def weak(folder: Path) -> str | None:
    """What is said of dense attention's answers where it scores below half in every task, else None."""
    dense = dense_score(Run.load(folder))
    return None if dense is None or len(dense.low) < len(dense.tasks) else dense.warning


@dataclass(frozen=True)
class _Work:
    play: Play
    cut: set[Key] = field(default_factory=set)

    def __call__(self, llm: LLM, job: Job) -> list[Placed]:
        left = tuple(budget for key, budget in zip(job.keys, job.budgets) if key not in self.cut)
        found = list(_run(llm, replace(job, budgets=left), self.play)) if left else []
        self.cut.update(one.key for one in found if one.cut is not None)
        return found


def _run(llm: LLM, job: Job, play: Play) -> Iterator[Placed]:
    drifts = None
    if play.grid.drift:
        drifts = Drifts(llm, play.model, play.results, job.length, play.grid.drift)

    def placed(policy: Policy, budget: float | None, play: Play) -> Placed:
        file, cut = None, None
        if drifts is not None and job.entry is not None and job.entry.kind != "lossless":
            _drift(drifts, policy, play)
            file = place_of(play.results, job.length, play.grid.drift, policy.text)
        folder, why = None, None
        if play.grid.answers and not (file is not None and _weak_dense(llm, job, play)):
            try:
                folder = _answer(llm, job, play, policy)
            except _Late:
                if file is None:
                    raise
            except _Cut as error:
                folder, cut = error.folder, play.most
        if job.entry is None and drifts is not None and folder is not None and (why := weak(folder)) is not None:
            folder = None  # its drift ranks methods all the same
        return Placed(job.name, job.protocol, job.length, budget, policy.text, folder, why, file, cut)

    def failed(policy: Policy, budget: float | None, error: SaccadeError) -> Placed:
        assert job.entry is not None, "what dense attention cannot do, nothing is compared with"
        why = " ".join(str(error).split())
        return Placed(job.name, job.protocol, job.length, budget, policy.text, None, why)

    def unset(policy: Policy, budget: float | None) -> Placed:
        """Cut short before its drift was measured, or the dial set."""
        return Placed(job.name, job.protocol, job.length, budget, policy.text, None, cut=play.most)

    entry = job.entry
    try:
        if entry is None:
            yield placed(Policy(), None, play)
            return
        if entry.dial is None:
            policy = entry.policy(job.protocol, 1.0, None)
            try:
                yield placed(policy, None, play.begun())
            except SaccadeError as error:
                yield failed(policy, None, error)
            except _Cut:
                yield unset(policy, None)
            return
        values = entry.dial.values(job.length)
        seen: dict[int, float] = {}
        for budget in job.budgets:
            assert budget is not None, "a row with a dial has budgets"
            policies = [entry.policy(job.protocol, budget, value) for value in values]
            own = play.begun()

            def measure(at: int, policies: list[Policy] = policies, own: Play = own) -> float:
                if at not in seen:
                    if drifts is not None:
                        seen[at] = _drift(drifts, policies[at], own).keys(entry.phase) or 0.0
                    else:
                        run = Run.load(_answer(llm, job, own, policies[at], probe=True))
                        seen[at] = _density(run, entry.phase)
                return seen[at]

            first = _known(entry, job, budget, values, play)
            if first is None and entry.dial.guess is None and seen:
                first = min(seen, key=lambda at: distance(seen[at], budget))
            if first is None:
                first = entry.dial.first(budget, job.length)
            try:
                found = nearest(len(values), measure, budget, first, entry.dial.step)
                yield placed(policies[found.at], budget, own)
            except SaccadeError as error:
                yield failed(policies[first], budget, error)
            except _Cut:
                yield unset(policies[first], budget)
    except _Late:
        return


def _weak_dense(llm: LLM, job: Job, play: Play) -> bool:
    """Whether dense attention has answered, and too badly for comparisons."""
    letter = "B" if job.protocol == "B" else "A"
    name = folder_name(configuration(job.data, llm, play.model, Setting(Policy(), letter)))
    return (play.results / name / SCORES).is_file() and weak(play.results / name) is not None


def check_like(todo: Sequence[Job], play: Play) -> None:
    """RequestError if another board's settings are given and no search would begin with one of them."""
    begun = (
        _known(job.entry, job, budget, job.entry.dial.values(job.length), play) is not None
        for job in todo
        if job.entry is not None and job.entry.dial is not None
        for budget in job.budgets
        if budget is not None
    )
    if not play.like or any(begun):
        return
    budgets, lengths = ({key[at] for key in play.like} for at in (3, 2))
    raise RequestError(
        f"--like has no setting that this board asks for: it has budgets of {', '.join(map(str, sorted(budgets)))} at "
        f"lengths of {', '.join(map(str, sorted(lengths)))}; take one of them, or leave --like out"
    )


def _drift(drifts: Drifts, policy: Policy, play: Play) -> Drift:
    """A policy's drift, unless the time is over, or the setting's, and it was not measured before."""
    if (play.late or play.over) and drifts.known(policy) is None:
        raise _Late if play.late else _Cut
    return drifts.of(policy)


def _known(entry: Entry, job: Job, budget: float, values: Sequence[str], play: Play) -> int | None:
    """The number of the setting that another board has for this budget, in this protocol or the other."""
    for letter in sorted(PROTOCOLS, key=lambda one: one != job.protocol):
        text = play.like.get((entry.name, letter, job.length, budget))
        if text is not None and entry.serves(letter):
            texts = [entry.policy(letter, budget, value).text for value in values]
            if text in texts:
                return texts.index(text)
    return None


def _answer(llm: LLM, job: Job, play: Play, policy: Policy, probe: bool = False) -> Path:
    """The result folder of a policy, answered and scored; with what it keeps of the attention, unless it is a probe of
    the first sample of each task."""
    letter = "B" if job.protocol == "B" and not sparse_in("prefill", policy) else "A"
    setting = Setting(policy, letter)
    limit = 1 if probe else job.limit
    if (play.late or play.over) and not _answered(llm, job, setting, play, limit):
        raise _Late if play.late else _Cut(_scored(llm, job, setting, play))
    if job.entry is not None and job.entry.phase == "prefill":
        llm.reset_prefix_cache()  # no other task begins as its prompts do, and its prefill is to be counted
    folder = predict(
        *(job.data, llm, play.model, setting, play.results),
        limit=limit,
        mix=play.mix,
        together=min(play.together, APART) if why_row_by_row(llm, policy) else play.together,
        progress=_stop(play),
        until=play.ends,
    )
    score_folder(folder, job.data)
    if play.over and not _answered(llm, job, setting, play, limit):
        raise _Cut(None if probe else _scored(llm, job, setting, play))
    if job.entry is not None and job.entry.kind != "lossless" and play.grid.recall and not probe:
        _keep(folder, llm, job, setting, play)
    return folder


def _answered(llm: LLM, job: Job, setting: Setting, play: Play, limit: int | None) -> bool:
    """Whether the results hold an answer to every sample already."""
    name = folder_name(configuration(job.data, llm, play.model, setting))
    file = play.results / name / PREDICTIONS
    return file.is_file() and file.read_bytes().count(b"\n") >= sum(1 for _ in take(job.data, limit))


def _scored(llm: LLM, job: Job, setting: Setting, play: Play) -> Path | None:
    """The folder of a setting's answers so far, scored; None where there are none."""
    folder = play.results / folder_name(configuration(job.data, llm, play.model, setting))
    file = folder / PREDICTIONS
    if not file.is_file() or not file.stat().st_size:
        return None
    score_folder(folder, job.data)
    return folder


def _stop(play: Play) -> Any:
    """Between two samples: what is finished is written, and the next call goes on there."""

    def say(done: int, whole: int) -> None:
        if play.late and done < whole:
            raise _Late

    return say


def _keep(folder: Path, llm: LLM, job: Job, setting: Setting, play: Play) -> None:
    """Write the mean share of the true attention's mass that was kept, by phase, over layers, heads, steps, samples."""
    if (folder / RECALL).is_file() and read_json(folder / RECALL)["samples"] >= play.grid.recall:
        return
    llm.reset_prefix_cache()  # what is taken over is not seen
    records = list(micro_samples(llm, take(job.data, play.grid.recall), setting, rows=_ROWS))
    kept = {row["phase"]: row["mass"] for row in micro_table(records, ("phase",))}
    write_json(folder / RECALL, {"samples": play.grid.recall, "rows": _ROWS, **kept})


def _density(run: Run, phase: str) -> float:
    """Of the first samples alone, so that a search takes the same way when the folder holds more. SaccadeError, with
    what a sample says, where nothing ran."""
    first = min((row["index"] for row in run.rows.values()), default=0)
    cell = Group([run]).cell(run, lambda row: row["index"] == first)
    density = cell.density(phase)
    if density is None:
        raise SaccadeError(next((row["error"] for row in cell.rows if row["error"]), "no sample was answered"))
    return density
