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
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from board_settings import UNKNOWN, Held, Key, Model, load
from named_numbers import named_numbers

DENSE = 0.99  # share of the keys from which on a setting is no choice beside dense attention


@dataclass(frozen=True)
class Choice:
    """A setting that keeps the bounds on each of ``on``, by name what it does there; ``cost``: the mean of what is to
    be least; ``policies``: as it was written on each."""

    key: Key
    on: Mapping[str, Held]
    cost: float
    policies: tuple[str, ...]


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


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=FILE[,FILE...]")
    parser.add_argument("--match", choices=("keys", "share", "setting"), default="keys")
    parser.add_argument("--by", choices=("keys", "bytes", "time"), default="keys")
    parser.add_argument("--rounding", action="append", default=[], metavar="NAME=SHARE", help="tokens that agree")
    parser.add_argument("--kind", action="append", default=["method"], help="also choose among rows of this kind")
    parser.add_argument("--more", type=int, default=0, help="show so many next choices, which decide nothing")
    given = parser.parse_args(words)
    rounding = named_numbers("--rounding", given.rounding, "NAME=SHARE", "S=0.969", most=1)
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
