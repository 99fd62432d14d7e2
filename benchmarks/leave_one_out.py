"""Choose a policy on all models but one by their boards, and hold it on the one left out, each in turn.

    python benchmarks/leave_one_out.py S=s4k/board.json,s8k/board.json Q=q16k/board.json G=g16k --rounding S=0.969

A model is NAME=FILE[,FILE...], board.json files or folders that hold one. Chosen is the setting that reads fewest keys
(`--by bytes`, `--by time`) of those that keep the bounds on every other model: KL to dense attention of at most 0.02
nats, at least as many tokens that agree as bfloat16's rounding leaves less 3 points (`--rounding`; 98 % where it is not
given, as `saccade tune` takes), and answers whose interval of points lost begins at 2 or below.

`--match` says what is the same setting on two models: `keys`, a method whose dial was turned to as many keys (of
prefill: as large a share); `share`, to as large a share; `setting`, the same policy text. With `setting` a model that
was not measured at a dial's value counts with its nearest measured setting that reads less: an upper bound of KL, where
more keys never drift more.

Prints Markdown. The first choice that was measured on the model left out decides; what would come before it is shown.
Exits with 1 where it breaks a bound there, where none was measured there, or where no model has a choice.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from saccade.eval.drift.recommend import BOUND
from saccade.eval.tune.trial import BELOW_ROUNDING, ROUNDING

POINTS = 0.02  # of a score of 1, that answers may lose
DENSE = 0.99  # share of the keys from which on a setting is no choice beside dense attention
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


@dataclass(frozen=True)
class Choice:
    """A setting that keeps the bounds on each of ``on``, by name what it does there; ``cost``: the mean of what is to
    be least; ``policies``: as it was written on each."""

    key: Key
    on: Mapping[str, Held]
    cost: float
    policies: tuple[str, ...]


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


def choices(models: Sequence[Model], match: str, by: str, phase: str) -> list[Choice]:
    """The settings that keep the bounds on all of ``models`` and read less than dense attention, cheapest first."""
    keys = dict.fromkeys(cell.key(match) for model in models for cell in model.cells if cell.phase == phase)
    found = []
    for key in keys:
        on = {model.name: Held(model.at(key, match), model.least) for model in models}
        if any(held.broken is None or held.broken for held in on.values()):
            continue
        costs = [cost for held in on.values() if (cost := held.mean(by)) is not None]
        read = [keys for held in on.values() if (keys := held.mean("keys")) is not None]
        if costs and read and fmean(read) < DENSE:
            policies = dict.fromkeys(cell.policy for held in on.values() for cell in held.cells if not cell.sparser)
            found.append(Choice(key, on, fmean(costs), tuple(policies)))
    return sorted(found, key=lambda one: (one.cost, max(held.kl or 0.0 for held in one.on.values())))


HEAD = (
    *("left out", "chosen on the others", "their KL, at most", "keys read there", "KL", "agree", "keys read"),
    *("points lost [95 %]", "long answers", "within the bounds"),
)


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def line(left: Model, choice: Choice, match: str) -> tuple[list[str], bool]:
    """A row of the table, and whether the bounds are kept."""
    held = Held(left.at(choice.key, match), left.least)
    method, _, place = choice.key
    below = dict.fromkeys(f"`{cell.policy}`" for cell in held.cells if cell.sparser)
    name = f"`{place}`" if match == "setting" else f"`{method}` at {place}"
    name += "" if match == "setting" else f" ({', '.join(f'`{policy}`' for policy in choice.policies)})"
    kl = "–" if held.kl is None else f"{held.kl:.2g}" + (f", as {', '.join(below)}" if below else "")
    worst = max(one.kl or 0.0 for one in choice.on.values())
    there = fmean(read for one in choice.on.values() if (read := one.mean("keys")) is not None)
    cells = [left.name, name, f"{worst:.2g}", share(there), kl, share(held.agree), share(held.mean("keys"))]
    cells += ["–" if lost is None else lost.text for lost in (held.answers, held.long)]
    return [*cells, held.verdict], held.broken == []


def table(models: Sequence[Model], match: str, by: str, phase: str, more: int) -> tuple[list[list[str]], list[bool]]:
    """Rows, and of each first choice that was measured whether the bounds are kept."""
    rows, kept = [], []
    for left in models:
        found = choices([model for model in models if model is not left], match, by, phase)
        if not found:
            rows.append([left.name, "none keeps the bounds: `dense`", *["–"] * (len(HEAD) - 3), "dense"])
        own = [line(left, choice, match) for choice in found]
        first = next((at for at, (cells, _) in enumerate(own) if cells[-1] != UNKNOWN), 0)
        rows += [cells if at == 0 else ["", *cells[1:]] for at, (cells, _) in enumerate(own[: first + 1 + more])]
        kept += [own[first][1]] if own else []
    return rows, kept


def pairs(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise SystemExit(f"--rounding {text!r} must be NAME=SHARE, as in S=0.969") from None
        if not 0 < found[name] <= 1:
            raise SystemExit(f"--rounding {text!r}: the share must be above 0 and at most 1")
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=FILE[,FILE...]")
    parser.add_argument("--match", choices=("keys", "share", "setting"), default="keys")
    parser.add_argument("--by", choices=("keys", "bytes", "time"), default="keys")
    parser.add_argument("--rounding", action="append", default=[], metavar="NAME=SHARE", help="tokens that agree")
    parser.add_argument("--kind", action="append", default=["method"], help="also choose among rows of this kind")
    parser.add_argument("--more", type=int, default=0, help="show so many next choices, which decide nothing")
    given = parser.parse_args(words)
    rounding = pairs(given.rounding)
    models = [load(text, rounding, given.kind) for text in given.models]
    names = [model.name for model in models]
    if len(set(names)) != len(names) or len(models) < 2:
        raise SystemExit("give two models or more, each with a name of its own")
    if unknown := rounding.keys() - set(names):
        raise SystemExit(f"--rounding names {', '.join(sorted(unknown))}; the models are {', '.join(names)}")
    for at, model in enumerate(models):
        for other in models[at + 1 :]:
            if model.weights & other.weights:
                raise SystemExit(f"{model.name} and {other.name} have the same weights; none of them is left out then")
    command = shlex.join(["python", "benchmarks/leave_one_out.py", *(sys.argv[1:] if words is None else words)])
    print(f"Made by `{command}`.\n")
    print("\n".join(f"* {model.said}" for model in models))
    kept = []
    for phase, what in (("decode", "Decode"), ("prefill", "Prefill")):
        if not any(cell.phase == phase for model in models for cell in model.cells):
            continue
        rows, own = table(models, given.match, given.by, phase, given.more)
        kept += own
        print(f"\n{what}, fewest {given.by} first:\n" if given.by != "time" else f"\n{what}, least time first:\n")
        lines = [list(HEAD), ["---", "---", *["---:"] * (len(HEAD) - 3), "---"], *rows]
        print("\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in one) + " |" for one in lines))
    broken = kept.count(False)
    print(f"\n{len(kept) - broken} of {len(kept)} first choices keep the bounds on the model left out.")
    return 1 if broken or not kept else 0


if __name__ == "__main__":
    sys.exit(main())
