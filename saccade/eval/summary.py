"""Folding result folders into comparisons: scores beside measured cost, every sample paired with its dense twin."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from saccade.errors import RequestError
from saccade.eval.results import CONFIG, SCORES, TIMINGS, Log, read_json
from saccade.eval.samples import read_jsonl
from saccade.eval.stats import Interval, mcnemar, mean_interval, paired_difference

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_POSITION = re.compile(r"[_\-/:](begin|middle|end)$")
_RIGHT = 1 - 1e-9  # a score above it has every turn right
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One result folder. ``rows``: its scored samples, by id."""

    folder: Path
    config: dict[str, Any]
    rows: dict[str, Row]
    seconds: dict[str, float]

    @classmethod
    def load(cls, folder: Path) -> Run:
        """Raises RequestError for a folder without config or scores."""
        config = read_json(folder / CONFIG)
        if not (folder / SCORES).is_file():
            raise RequestError(f"{folder} has no {SCORES}; run saccade eval score {folder}")
        rows = {row["id"]: row for row in read_jsonl(folder / SCORES)}
        seconds = {}
        if (folder / TIMINGS).is_file():
            with Log(folder / TIMINGS) as log:
                seconds = {line["id"]: line["prefill"] + line["decode"] for line in log.records}
        return cls(folder, config, rows, seconds)

    @property
    def policy(self) -> str:
        return self.config["policy"]

    @property
    def protocol(self) -> str:
        return self.config["protocol"]

    @property
    def method(self) -> str:
        """The policy without its options: what several settings of one method have in common."""
        return re.sub(r"\([^)]*\)", "", self.policy)

    @property
    def comparable(self) -> tuple[str, ...]:
        """Runs are compared when these are equal: weights and their arithmetic, samples, history."""
        config = self.config
        return (
            config["model"]["weights_sha256"],
            config["model"]["dtype"],
            config["data"]["sha256"],
            config["history"],
        )

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(row["task"] for row in self.rows.values()))

    @property
    def lengths(self) -> list[int]:
        return sorted({row["length"] for row in self.rows.values()})


@dataclass(frozen=True)
class Cell:
    """Some of a run's samples, beside the same samples under dense attention. Scores are 0 to 1, None without any."""

    run: Run
    rows: list[Row]
    base: dict[str, Row] = field(repr=False)

    @property
    def n(self) -> int:
        return len(self._scored)

    @property
    def errors(self) -> int:
        return sum(row["error"] is not None for row in self.rows)

    @property
    def empty(self) -> int:
        return sum(row["empty"] for row in self.rows)

    @property
    def score(self) -> float | None:
        return _mean([row["score"] for row in self._scored])

    @cached_property
    def score_interval(self) -> Interval | None:
        """The score with its 95 % interval, not paired."""
        return mean_interval([row["score"] for row in self._scored]) if self._scored else None

    @property
    def percent(self) -> float | None:
        """Of the dense score over the same samples."""
        dense = _mean([other for _, other in self.pairs])
        return 100 * sum(own for own, _ in self.pairs) / len(self.pairs) / dense if dense else None

    @cached_property
    def difference(self) -> Interval | None:
        """Score minus dense over samples that both have, with its paired 95 % interval."""
        if not self.pairs:
            return None
        own, dense = zip(*self.pairs)
        return paired_difference(own, dense)

    @cached_property
    def chance(self) -> float | None:
        """McNemar's p over the samples that one of the two answered wholly right and the other not."""
        if not self.pairs:
            return None
        own, dense = ([float(score > _RIGHT) for score in side] for side in zip(*self.pairs))
        return mcnemar(own, dense)

    @property
    def prompt_tokens(self) -> float | None:
        """Mean length that samples reached, answers to the last question excluded."""
        return _mean([row["prompt_tokens"] for row in self._scored])

    @property
    def paired(self) -> int:
        return len(self.pairs)

    @property
    def seconds(self) -> float | None:
        known = [self.run.seconds[row["id"]] for row in self.rows if row["id"] in self.run.seconds]
        return sum(known) if known else None

    def total(self, phase: str, name: str) -> int | None:
        """A count of work summed over the samples, None if it was not recorded."""
        counts = [row["cost"][phase].get(name) for row in self.rows if row["cost"][phase]]
        return sum(counts) if counts and all(count is not None for count in counts) else None

    def density(self, phase: str) -> float | None:
        """Attended over causal (query, key) pairs."""
        return _ratio(self.total(phase, "keys_attended"), self.total(phase, "keys_causal"))

    def per_step(self, name: str, phase: str = "decode") -> float | None:
        """A count per row of one head of one layer."""
        tokens = self.total(phase, "tokens")
        return _ratio(self.total(phase, name), (tokens or 0) * self.run.config["model"]["shape"]["layers"])

    @property
    def retrieval_ratio(self) -> float | None:
        """Share of decode steps, over layers, that scored keys or summaries to choose anew; for methods that at times
        reuse what they found, over query heads too."""
        searchable = self.total("decode", "searchable")
        return _ratio(self.total("decode", "searches"), searchable) if searchable else self.per_step("retrievals")

    @property
    def kv_bytes(self) -> float | None:
        """KV read by one decode step, bytes: keys and values attended to and keys scored exactly to choose them, each
        read once for the query heads that share a KV head. Block summaries are not in it."""
        model = self.run.config["model"]
        tokens, attended = self.total("decode", "tokens"), self.total("decode", "keys_attended")
        if not tokens or attended is None:
            return None
        one = model["shape"]["kv_heads"] * model["shape"]["head_dim"] * _BYTES[model["dtype"]]
        return (2 * attended + (self.total("decode", "keys_scored") or 0)) * one / tokens

    @property
    def protocols(self) -> str:
        """The letters of the samples; a turn whose question cannot be decoded makes an A among B."""
        return "/".join(sorted({row["protocol"] for row in self.rows})) or self.run.protocol

    @cached_property
    def _scored(self) -> list[Row]:
        return [row for row in self.rows if row["score"] is not None]

    @cached_property
    def pairs(self) -> list[tuple[float, float]]:
        """(own, dense's) score of every sample that both have."""
        other = {row_id: row["score"] for row_id, row in self.base.items()}
        return [(row["score"], other[row["id"]]) for row in self._scored if other.get(row["id"]) is not None]


@dataclass(frozen=True)
class Group:
    """Runs of one model over one set of samples, dense first, then by method and density."""

    runs: list[Run]

    @property
    def head(self) -> Run:
        return self.runs[0]

    def baseline(self, run: Run) -> Run | None:
        """The dense run of the same protocol if there is one, else the one that prefills the same prompts (A, as B
        decodes the question), else any dense run."""
        dense = [one for one in self.runs if one.policy == "dense"]
        wanted = (run.protocol, "B" if run.protocol == "B" else "A")
        return min(dense, key=lambda one: wanted.index(one.protocol) if one.protocol in wanted else 2, default=None)

    def cell(self, run: Run, keep: Callable[[Row], bool] = lambda row: True) -> Cell:
        base = self.baseline(run)
        return Cell(run, [row for row in run.rows.values() if keep(row)], {} if base is None else base.rows)

    @cached_property
    def overall(self) -> list[Cell]:
        """All samples of each run."""
        return [self.cell(run) for run in self.runs]

    @cached_property
    def cells(self) -> list[tuple[str, int, Cell]]:
        """Every (task, length, run) that has samples, in the order of the data."""
        places = dict.fromkeys((row["task"], row["length"]) for run in self.runs for row in run.rows.values())
        order = {task: at for at, task in enumerate(dict.fromkeys(task for task, _ in places))}
        result = []
        for task, length in sorted(places, key=lambda place: (order[place[0]], place[1])):
            for run in self.runs:
                cell = self.cell(run, lambda row, t=task, n=length: (row["task"], row["length"]) == (t, n))  # type: ignore[misc]
                if cell.rows:
                    result.append((task, length, cell))
        return result


def load_groups(folders: Iterable[Path]) -> list[Group]:
    """Runs by model and data. Folders may be result folders or hold them at any depth."""
    found: list[Path] = []
    for folder in folders:
        inside = sorted(file.parent for file in folder.glob(f"**/{CONFIG}")) if folder.is_dir() else []
        if not inside:
            raise RequestError(f"{folder} holds no results (no {CONFIG}); make some with saccade eval predict")
        found += [one for one in inside if one not in found]
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in map(Run.load, found):
        groups.setdefault(run.comparable, []).append(run)
    return [Group(sorted(runs, key=_place)) for runs in groups.values()]


def _place(run: Run) -> tuple[Any, ...]:
    kind = {"dense": 0, "topk": 1}.get(run.method, 2)
    return (kind, run.method, run.protocol, run.policy)


def depth_table(run: Run, bins: int = 10) -> dict[tuple[int, int], float]:
    """Mean turn score by (length, depth bin), over turns whose answer lies in one known place."""
    scores: dict[tuple[int, int], list[float]] = {}
    for row in run.rows.values():
        for turn in row["turns"]:
            depth = _one_depth(turn["depth"])
            if depth is not None and turn["score"] is not None:
                place = (row["length"], min(bins - 1, int(depth * bins)))
                scores.setdefault(place, []).append(turn["score"])
    return {place: sum(values) / len(values) for place, values in scores.items()}


def _one_depth(depth: Any) -> float | None:
    """Where what is asked for lies, as samples have it: a number, or a list of them. None where it is unknown or in
    several places, of which the turn's one score says nothing."""
    places = depth if isinstance(depth, (list, tuple)) else [depth]
    return float(places[0]) if len(places) == 1 and places[0] is not None else None


def position_scores(run: Run) -> dict[str, float]:
    """Mean turn score by where the question stands, over tasks that come in more than one position."""
    scores: dict[str, dict[str, list[float]]] = {}
    for row in run.rows.values():
        family = scores.setdefault(_POSITION.sub("", row["task"]), {})
        for turn in row["turns"]:
            if turn["score"] is not None:
                family.setdefault(turn["position"], []).append(turn["score"])
    pooled: dict[str, list[float]] = {}
    for family in scores.values():
        if len(family) > 1:
            for position, values in family.items():
                pooled.setdefault(position, []).extend(values)
    return {name: sum(pooled[name]) / len(pooled[name]) for name in ("begin", "middle", "end") if name in pooled}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None
