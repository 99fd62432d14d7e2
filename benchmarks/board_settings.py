"""The settings that boards measured on a model, and the bounds that each keeps there.

A bound is KL to dense attention, tokens that agree with it, or points of a score that answers lose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from saccade.eval.drift.recommend import BOUND
from saccade.eval.tune.study import BELOW_ROUNDING, ROUNDING

POINTS = 0.02  # of a score of 1, that answers may lose
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?")  # of an option, not in a name
UNKNOWN = "not measured"
Key = tuple[str, str, str]  # method, protocol, where its dial stands


@dataclass(frozen=True)
class Lost:
    """Score minus dense's with the other sign: mean and the ends of its 95 % interval, shares of 1."""

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, data: Mapping[str, Any] | None) -> Lost | None:
        if not data or data.get("difference") is None:
            return None
        return cls(-data["difference"], -data["difference_high"], -data["difference_low"], data["n"])

    @property
    def text(self) -> str:
        return f"{100 * self.mean + 0:.1f} [{100 * self.low + 0:.1f}, {100 * self.high + 0:.1f}], n = {self.n}"


@dataclass(frozen=True)
class Cell:
    """One setting on one model at one length. ``sparser``: the setting that was measured in the place of the one that
    is asked for."""

    method: str
    protocol: str
    phase: str
    budget: float | None
    length: int
    policy: str
    kl: float | None
    agree: float | None
    keys: float | None
    bytes: float | None
    time: float | None
    answers: Lost | None
    long: Lost | None
    sparser: bool = False

    def key(self, match: str) -> Key:
        if match == "setting":
            return self.method, self.protocol, self.policy
        if self.budget is None:
            return self.method, self.protocol, "its one setting"
        if match == "keys" and self.phase == "decode":
            return self.method, self.protocol, f"{round(self.budget * self.length)} keys"
        return self.method, self.protocol, f"{100 * self.budget:.3g} % of the keys"


@dataclass(frozen=True)
class Model:
    """``least``: share of the tokens that have to agree; ``said``: where its rows come from."""

    name: str
    cells: tuple[Cell, ...]
    weights: frozenset[str]
    least: float
    said: str

    def at(self, key: Key, match: str) -> list[Cell]:
        """The cells of a setting; where policies are matched, a setting that reads less in the place of one that was
        not measured."""
        found = [cell for cell in self.cells if cell.key(match) == key]
        if found or match != "setting":
            return found
        lengths = sorted({cell.length for cell in self.cells})
        near = (nearest_below(key, [cell for cell in self.cells if cell.length == length]) for length in lengths)
        return [cell for cell in near if cell is not None]


def nearest_below(key: Key, cells: Iterable[Cell]) -> Cell | None:
    """Of cells of the same method that differ from ``key`` in one number, the nearest that reads less; None where that
    cannot be said: fewer than two cells, or keys that do not rise or fall with the number all along."""
    method, protocol, policy = key
    found: list[tuple[float, float, Cell]] = []
    at: set[int] = set()
    numbers = NUMBER.findall(policy)
    for cell in cells:
        own = NUMBER.findall(cell.policy)
        if (cell.method, cell.protocol) != (method, protocol) or cell.keys is None or cell.kl is None:
            continue
        if NUMBER.sub("#", cell.policy) != NUMBER.sub("#", policy):
            continue
        differ = [place for place, (one, other) in enumerate(zip(own, numbers)) if one != other]
        if len(differ) == 1:
            at.add(differ[0])
            found.append((float(own[differ[0]]), cell.keys, cell))
    if len(found) < 2 or len(at) != 1:
        return None
    found.sort(key=lambda one: one[0])
    rising = found[-1][1] > found[0][1]
    if any((after[1] > before[1]) != rising for before, after in pairwise(found)):
        return None
    wanted = float(numbers[at.pop()])
    below = [one for one in found if (one[0] < wanted) == rising]
    if not below:
        return None
    return replace(max(below, key=lambda one: one[1])[2], sparser=True)


@dataclass(frozen=True)
class Held:
    """What a setting does to a model: the worst of its lengths and boards. ``broken``: the bounds that it does not
    keep; None where its KL was not measured."""

    cells: Sequence[Cell]
    least: float

    def _known(self, what: Callable[[Cell], Any]) -> list[Any]:
        return [value for cell in self.cells if (value := what(cell)) is not None]

    @property
    def kl(self) -> float | None:
        return max(self._known(lambda cell: cell.kl), default=None)

    @property
    def agree(self) -> float | None:
        return min(self._known(lambda cell: cell.agree), default=None)

    @property
    def answers(self) -> Lost | None:
        return max(self._known(lambda cell: cell.answers), key=lambda one: one.mean, default=None)

    @property
    def long(self) -> Lost | None:
        return max(self._known(lambda cell: cell.long), key=lambda one: one.mean, default=None)

    @property
    def losses(self) -> list[Lost]:
        return self._known(lambda cell: cell.answers) + self._known(lambda cell: cell.long)

    @property
    def broken(self) -> list[str] | None:
        if self.kl is None or self.agree is None:
            return None
        found = ["KL"] if self.kl > BOUND else []
        found += ["agreement"] if self.agree < self.least else []
        for name, what in (("answers", lambda cell: cell.answers), ("long answers", lambda cell: cell.long)):
            found += [name] if any(one.low > POINTS for one in self._known(what)) else []
        return found

    @property
    def verdict(self) -> str:
        if self.broken is None:
            return UNKNOWN
        if self.broken:
            return f"no: {', '.join(self.broken)}"
        if not self.losses:
            return "yes, by drift alone"
        wide = any(one.high > POINTS for one in self.losses)
        return "yes, though more than 2 points lost are not ruled out" if wide else "yes"

    def mean(self, what: str) -> float | None:
        """Over what was measured at this very setting."""
        values = [getattr(cell, what) for cell in self.cells if not cell.sparser]
        known = [value for value in values if value is not None]
        return fmean(known) if known else None


def cells_of(board: Mapping[str, Any]) -> list[Cell]:
    """The settings in the rows of a board.json."""
    found = []
    for row in board["rows"]:
        alone = {}  # boards from before cells had their own
        if len(row["lengths"]) == 1 and row.get("kl"):
            alone = {"kl": row["kl"][0], "agree": row["agree"]}
        for length, cell in row["lengths"].items():
            drift = alone | {name: cell[name] for name in ("kl", "agree") if name in cell}
            found.append(
                Cell(
                    *(row["method"], row["protocol"], row["phase"], row["budget"], int(length), cell["policy"]),
                    *(drift.get("kl"), drift.get("agree"), cell.get("keys"), cell.get("bytes"), row.get("time")),
                    Lost.of(cell),
                    Lost.of(row.get("families", {}).get("long")),
                )
            )
    return found


def load(given: str, rounding: Mapping[str, float], kinds: Sequence[str]) -> Model:
    """NAME=FILE[,FILE...] as a model. SystemExit, saying what is wrong with it."""
    name, equal, files = given.partition("=")
    if not equal or not files:
        raise SystemExit(f"{given!r} must be NAME=FILE[,FILE...], board.json files of one model")
    cells: list[Cell] = []
    said, weights = [], set()
    for text in files.split(","):
        file = Path(text) / "board.json" if Path(text).is_dir() else Path(text)
        try:
            board = json.loads(file.read_text(encoding="utf-8"))
            own = cells_of({"rows": [row for row in board["rows"] if row["kind"] in kinds]})
            about, grid = board["about"], board["grid"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise SystemExit(f"{file} is not the board.json of saccade eval board: {error!r}") from None
        weights.add(about["weights"])
        cells += own
        what = f"{len(about['tasks'])} tasks" if about["tasks"] else "drift alone"
        said.append(
            f"`{file.name if file.name != 'board.json' else file.parent.name}` ({', '.join(map(str, grid['lengths']))} "
            f"tokens, {what}, {about['dtype']}, weights {about['weights'][:12]})"
        )
    least = rounding.get(name, ROUNDING) - BELOW_ROUNDING
    known = "" if name in rounding else ", as rounding was not measured"
    line = f"{name}: {'; '.join(said)}; at least {100 * least:.1f} % of the tokens have to agree{known}."
    return Model(name, tuple(cells), frozenset(weights), least, line)
