"""What the four tasks say: their material, the request, the opening of the answer, and the lines that it should have.

Every answer is numbered lines. The first ``SHOWN`` of them open the answer (``Turn.prefix``): they show the format, and
a model without a chat template goes on from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from saccade.eval import prose
from saccade.eval.ruler.needles import split_sentences
from saccade.eval.ruler.words import ADJECTIVES, GIVEN_NAMES, NOUNS
from saccade.eval.suite.rng import Rng

SHOWN = 4  # lines of the answer that are given
_PARTS = 4  # stretches of the context that a list is spread over


@dataclass(frozen=True)
class Draft:
    """``blocks``: pieces of the material, each at its share of the context in ``depths``; ``lines``: the answer's."""

    head: str
    blocks: tuple[str, ...]
    depths: tuple[float, ...]
    question: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """``drawn(rng, index)`` is a function of the number of lines, up to ``most``: more lines leave the first alone."""

    metric: str
    drawn: Callable[[Rng, int], Callable[[int], Draft]]
    most: int


def _arithmetic(rng: Rng, index: int) -> Callable[[int], Draft]:
    start = rng.between(100, 199)
    names = [NOUNS[number] for number in rng.distinct(len(NOUNS), TASKS["arithmetic"].most)]
    steps = [rng.between(1, 9) for _ in names]
    totals = [start + sum(steps[:number]) for number in range(len(steps) + 1)]
    within = [rng.random() for _ in range(_PARTS)]

    def draft(count: int) -> Draft:
        entries = [f"{number}. {name}: {step}" for number, (name, step) in enumerate(zip(names, steps), 1)]
        lines = [
            f"{number}. {name}: {before} + {step} = {after}"
            for number, (name, before, step, after) in enumerate(zip(names, totals, steps, totals[1:]), 1)
        ]
        question = (
            f"The ledger in the text above has {count} entries. Its total is {start} before the first entry, and every "
            "entry adds to it. Go through all entries in order and write one line for each: its number, its name, and "
            f"the total before it plus its amount, which makes the total after it. Stop after entry {count}."
        )
        blocks = _parts("Ledger, entries", entries[:count])
        return Draft(_head("the entries of a ledger"), blocks, _spread(within), question, tuple(lines[:count]))

    return draft


_VARIABLES = "abc"
_PROGRAM = """state = {"a": 10, "b": 20, "c": 30}
for number, (target, source) in sorted(steps.items()):
    state[target] = state.get(source, source)
    print(f"{number}. {target} = {source}:", state["a"], state["b"], state["c"])"""


def _tracing(rng: Rng, index: int) -> Callable[[int], Draft]:
    state = {"a": "10", "b": "20", "c": "30"}
    steps: list[str] = []
    printed: list[str] = []
    for number in range(1, TASKS["tracing"].most + 1):
        target = rng.choice(_VARIABLES)
        source = rng.choice(_VARIABLES.replace(target, "")) if rng.random() < 0.25 else str(rng.between(10, 99))
        state[target] = state.get(source, source)
        steps.append(f"{number}. {target} = {source}")
        printed.append(f"{steps[-1]}: {' '.join(state.values())}")
    within = [rng.random() for _ in range(_PARTS)]

    def draft(count: int) -> Draft:
        question = (
            f"The text above has {count} steps. This program reads them:\n\n{_PROGRAM}\n\n"
            f"Write what it prints, line by line, for all {count} steps."
        )
        blocks = _parts("Steps", steps[:count])
        return Draft(_head("the steps of a program"), blocks, _spread(within), question, tuple(printed[:count]))

    return draft


def _sorting(rng: Rng, index: int) -> Callable[[int], Draft]:
    most = TASKS["sorting"].most
    people = [GIVEN_NAMES[number] for number in rng.distinct(len(GIVEN_NAMES), len(GIVEN_NAMES))]
    things = [
        f"{ADJECTIVES[number // len(NOUNS)]} {NOUNS[number % len(NOUNS)]}"
        for number in rng.distinct(len(ADJECTIVES) * len(NOUNS), most)
    ]
    held = [f"{people[number % len(people)]}, {thing}" for number, thing in enumerate(things)]
    keys = [rng.random() for _ in held]
    within = [rng.random() for _ in held]

    def draft(count: int) -> Draft:
        order = sorted(range(count), key=keys.__getitem__)
        blocks = tuple(f"Card {number + 1}: {held[number]}" for number in order)
        question = (
            f"The text above has {count} cards in it, in no order. Write the cards in the order of their numbers, from "
            f"1 to {count}, one in a line: the number, the name and the thing."
        )
        lines = tuple(f"{number}. {text}" for number, text in enumerate(held[:count], 1))
        return Draft(_head("numbered cards"), blocks, _spread(within[:count]), question, lines)

    return draft


_LONGEST = 16  # words of a line to copy
_THING = re.compile(
    r"(?<!\ban )\b(?:barrel|ladder|ledger|clock|basket|rope|hammer|cart|letter|kettle|violin|mirror|chest|bell|"
    r"blanket|map|wheel|candle|book|boat|table|bucket|compass|curtain|drum|flute|gate|hat|jar|key|loaf|net)\b"
)


def _copying(rng: Rng, index: int) -> Callable[[int], Draft]:
    most = TASKS["copying"].most
    sentences = split_sentences(prose.generate(120 * 8 * most, rng.below(2**32)))
    short = [sentence for sentence in sentences if len(sentence.split()) <= _LONGEST]
    source = [
        _THING.sub("lantern", sentence, count=1) if number % 2 else sentence
        for number, sentence in enumerate(sentence for sentence in short if _THING.search(sentence))
    ][:most]
    copy = [sentence.replace("lantern", "teapot") for sentence in source]
    depth = (index % 10 + rng.random()) / 10

    def draft(count: int) -> Draft:
        block = "Record:\n" + "\n".join(source[:count]) + "\nEnd of the record."
        question = (
            f"The text above has a record of {count} lines in it. Copy the record word for word with two changes: "
            'begin every line with its number, and write "teapot" wherever the record says "lantern". Stop after '
            f"line {count}."
        )
        lines = tuple(f"{number}. {text}" for number, text in enumerate(copy[:count], 1))
        return Draft(_head("a record"), (block,), (depth,), question, lines)

    return draft


TASKS: dict[str, Task] = {
    "arithmetic": Task("running_lines", _arithmetic, 100),
    "tracing": Task("numbered_lines", _tracing, 100),
    "sorting": Task("numbered_lines", _sorting, 100),
    "copying": Task("copied_lines", _copying, 48),
}


def _head(what: str) -> str:
    return f"The text below has {what} in it, among other things. You will be asked to work with them at its end."


def _parts(title: str, entries: Sequence[str]) -> tuple[str, ...]:
    """The entries in ``_PARTS`` stretches of equal length, each under a title that says which they are."""
    cuts = [len(entries) * part // _PARTS for part in range(_PARTS + 1)]
    return tuple(
        f"{title} {low + 1} to {high}:\n" + "\n".join(entries[low:high])
        for low, high in zip(cuts, cuts[1:])
        if low < high
    )


def _spread(within: Sequence[float]) -> tuple[float, ...]:
    """One depth in each of equal shares of the context."""
    return tuple((number + share) / len(within) for number, share in enumerate(within))
