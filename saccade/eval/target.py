"""Target mode: the smallest budget or threshold of a method that keeps a share of dense's score (PSA's measure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saccade.engine.settings.config import EngineConfig
from saccade.errors import RequestError
from saccade.eval.predict import predict
from saccade.eval.runner import Note, say_weak
from saccade.eval.score import Metric, score_folder
from saccade.eval.setting import Setting, sparse_in
from saccade.eval.summary import Cell, Group, Run
from saccade.llm import LLM
from saccade.methods.policy import Policy


@dataclass(frozen=True)
class Probe:
    """One setting as measured. ``density`` is that of the phases in which the policy is sparse; ``percent`` of dense's
    score over the same samples."""

    value: str
    policy: str
    density: float
    score: float
    percent: float
    folder: str


@dataclass(frozen=True)
class Target:
    """``best``: the sparsest probe that keeps ``keep`` of dense, or None where no value does. ``monotone``: whether no
    denser probe failed where a sparser one kept it; if False, a sparser value that was not probed might do."""

    keep: float
    best: Probe | None
    probes: list[Probe] = field(default_factory=list)
    monotone: bool = True

    def as_dict(self) -> dict[str, Any]:
        return {
            "keep": self.keep,
            "best": vars(self.best) if self.best else None,
            "monotone": self.monotone,
            "probes": [vars(probe) for probe in self.probes],
        }

    def said(self, option: str) -> str:
        """What was found about ``option``, in a sentence or two, a line each."""
        if self.best is None:
            best = max(self.probes, key=lambda probe: probe.percent)
            found = (
                f"no value of {option} keeps {100 * self.keep:g} % of dense: the best is {best.policy} with "
                f"{best.percent:.1f} % at density {best.density:.4f}"
            )
        else:
            one = self.best
            found = f"{one.policy} keeps {one.percent:.1f} % of dense at density {one.density:.4f}"
        if self.monotone:
            return found
        return f"{found}\nthe score does not rise with density along the probes; a value between them may do better"


def find_target(
    data: Path,
    llm: LLM,
    model: EngineConfig,
    method: str,
    option: str,
    values: Sequence[str],
    results: Path,
    *,
    keep: float = 0.98,
    protocol: str = "A",
    history: str = "self",
    limit: int | None = None,
    mix: bool = False,
    workers: int = 1,
    together: int = 1,
    metrics: Mapping[str, Metric] | None = None,
    note: Note = lambda text: None,
) -> Target:
    """Bisect ``values`` of ``option`` (in order, rising or falling) for the sparsest that keeps ``keep`` of dense.

    ``method``: a policy text, ``psa`` or ``psa(block_size=16)``; the option is set on its last method. Which end is
    sparse is measured. Every probe's rows stay in ``results`` and are used again. Raises RequestError for a ``keep``
    outside 0..1 and fewer than two values, PolicyError for a value that the method refuses, before anything runs.
    """
    if not isinstance(keep, (int, float)) or not 0 < keep <= 1:
        raise RequestError(f"keep={keep!r} must be above 0 and at most 1, a share of dense's score")
    if len(set(values)) < 2:
        raise RequestError(f"values={','.join(values)!r} must be at least two different settings of '{option}'")
    settings = {
        value: Setting(Policy.parse(with_option(method, option, value)), protocol, history)
        for value in ordered(dict.fromkeys(values))
    }

    def measure(setting: Setting) -> Run:
        folder = predict(data, llm, model, setting, results, limit=limit, mix=mix, workers=workers, together=together)
        score_folder(folder, data, metrics)
        return Run.load(folder)

    base = Setting(Policy(), protocol, history)
    note(f"dense (protocol {base.letter})")
    dense = measure(base)
    say_weak(dense.folder, note)

    def probe(value: str) -> Probe:
        setting = settings[value]
        run = measure(setting)
        cell = Group([dense, run]).cell(run)
        if cell.score is None or cell.percent is None:
            raise RequestError("dense scores 0 on these samples, so there is nothing to keep; take other tasks")
        found = Probe(
            value, setting.policy.text, sparse_density(cell, setting), cell.score, cell.percent, run.folder.name
        )
        note(f"{found.policy}: {found.percent:.1f} % of dense at density {found.density:.4f}")
        return found

    return bisect(list(settings), probe, keep)


def bisect(values: Sequence[str], probe: Callable[[str], Probe], keep: float) -> Target:
    """The search alone: both ends, then halves. ``values`` ordered so that density rises or falls along them."""
    line = list(values)
    done = {line[at]: probe(line[at]) for at in (0, -1)}
    if done[line[0]].density > done[line[-1]].density:
        line.reverse()

    def keeps(value: str) -> bool:
        if value not in done:
            done[value] = probe(value)
        return done[value].percent >= 100 * keep - 1e-9

    low, high = 0, len(line) - 1
    best: Probe | None = None
    if keeps(line[low]):
        best = done[line[low]]
    elif keeps(line[high]):
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if keeps(line[middle]) else (middle, high)
        best = done[line[high]]
    probes = sorted(done.values(), key=lambda one: one.density)
    kept = [one.percent >= 100 * keep - 1e-9 for one in probes]
    return Target(keep, best, probes, kept == sorted(kept))


def sparse_density(cell: Cell, setting: Setting) -> float:
    """Attended over causal pairs of the phases in which the policy leaves anything out."""
    phases = [phase for phase in ("prefill", "decode") if sparse_in(phase, setting.policy)] or ["decode"]
    causal = sum(cell.total(phase, "keys_causal") or 0 for phase in phases)
    return sum(cell.total(phase, "keys_attended") or 0 for phase in phases) / causal if causal else 1.0


def with_option(method: str, option: str, value: str) -> str:
    """``psa(block_size=16)`` with ``epsilon=0.9`` -> ``psa(block_size=16, epsilon=0.9)``."""
    text = method.strip()
    return f"{text[:-1]}, {option}={value})" if text.endswith(")") else f"{text}({option}={value})"


def ordered(values: Sequence[str] | dict[str, None]) -> list[str]:
    """Numbers by size, anything else as given."""
    try:
        return sorted(values, key=float)
    except ValueError:
        return list(values)


def grid(text: str) -> list[str]:
    """``0.5,0.9,0.98``, or ``low:high:count`` for evenly spaced values (whole numbers if both ends are)."""
    if ":" not in text:
        return [part.strip() for part in text.split(",") if part.strip()]
    parts = text.split(":")
    try:
        low, high, count = float(parts[0]), float(parts[1]), int(parts[2])
        if len(parts) != 3 or count < 2 or low >= high:
            raise ValueError
    except (ValueError, IndexError):
        raise RequestError(
            f"values={text!r} is neither a list (0.5,0.9) nor a range low:high:count (0.5:1:9)"
        ) from None
    whole = low.is_integer() and high.is_integer() and "." not in text
    points = [low + (high - low) * at / (count - 1) for at in range(count)]
    return list(dict.fromkeys(str(round(point)) if whole else f"{point:.6g}" for point in points))
