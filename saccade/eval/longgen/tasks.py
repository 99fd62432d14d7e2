"""What the four tasks say: their material, the request, the opening of the answer, and the lines that it should have.

Every answer is numbered lines. The first ``SHOWN`` of them open the answer (``Turn.prefix``): they show the format, and
a model without a chat template goes on from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from saccade import prose
from saccade.eval.ruler.needles import split_sentences
from saccade.eval.ruler.words import ADJECTIVES, GIVEN_NAMES, NOUNS
from saccade.eval.suite.rng import Rng

SHOWN = 4  # lines of the answer that are given


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
    start = rng.between(10, 29)
    names = _nouns(rng, TASKS["arithmetic"].most)
    steps = [rng.between(1, 9) for _ in names]
    totals = list(accumulate(steps, initial=start))
    depth = _depth(rng, index)

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
        block = _listed(f"Ledger, entries 1 to {count}", entries[:count])
        return Draft(_head("a ledger"), (block,), (depth,), question, tuple(lines[:count]))

    return draft


_PROGRAM = """x = {start}
for number, (name, kind, n) in enumerate(data, 1):
    before = x
    if kind == "plus":
        x = before + n
        print(f"{{number}}. {{name}} plus: {{before}} + {{n}} = {{x}}")
    else:
        x = before - n
        print(f"{{number}}. {{name}} minus: {{before}} - {{n}} = {{x}}")"""


def _tracing(rng: Rng, index: int) -> Callable[[int], Draft]:
    start = x = rng.between(40, 60)
    data: list[str] = []
    printed: list[str] = []
    for number, name in enumerate(_nouns(rng, TASKS["tracing"].most), 1):
        down = bool(rng.below(2)) if number > SHOWN else number % 2 == 0  # both are shown
        step = rng.between(1, 9)
        down = x > 90 or (down and x >= 20)  # x keeps two digits
        kind, sign = ("minus", -1) if down else ("plus", 1)
        before, x = x, x + sign * step
        data.append(f"{number}. {name} {kind} {step}")
        printed.append(f"{number}. {name} {kind}: {before} {'+' if sign > 0 else '-'} {step} = {x}")
    depth = _depth(rng, index)

    def draft(count: int) -> Draft:
        question = (
            f"The data in the text above has {count} items: name, kind, n. This program reads them:\n\n"
            f"{_PROGRAM.format(start=start)}\n\nWrite what it prints, line by line, for all {count} items."
        )
        block = _listed(f"Data, items 1 to {count}", data[:count])
        return Draft(_head("the data of a program"), (block,), (depth,), question, tuple(printed[:count]))

    return draft


def _sorting(rng: Rng, index: int) -> Callable[[int], Draft]:
    most = TASKS["sorting"].most
    nouns = _nouns(rng, 3 * most)
    given = [GIVEN_NAMES[number] for number in rng.distinct(len(GIVEN_NAMES), most)]
    people = [f"{name} {noun.title()}" for name, noun in zip(given, nouns)]
    adjectives = [ADJECTIVES[number] for number in rng.distinct(len(ADJECTIVES), 2 * most)]
    things = [f"{adjective} {noun}" for adjective, noun in zip(adjectives, nouns[most:])]
    cards = [f"{who}: {one}, {other}" for who, one, other in zip(people, things, things[most:])]
    keys = [rng.random() for _ in cards]
    within = [rng.random() for _ in cards]

    def draft(count: int) -> Draft:
        order = sorted(range(count), key=keys.__getitem__)
        roll = "\n".join(f"{number}. {who}" for number, who in enumerate(people[:count], 1))
        question = (
            f"The text above has the cards of {count} people in it, in no order. A card says whose it is and what that "
            f"person brings. This is the order of the people.\n\n{roll}\n\nSort the cards: write them in this order, "
            "one in a line, with its number: who, and what that person brings."
        )
        lines = tuple(f"{number}. {card}" for number, card in enumerate(cards[:count], 1))
        blocks = tuple(cards[number] for number in order)
        depths = tuple((number + share) / count for number, share in enumerate(within[:count]))
        return Draft(_head("the cards of some people"), blocks, depths, question, lines)

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
    depth = _depth(rng, index)

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
    "tracing": Task("running_lines", _tracing, 100),
    "sorting": Task("aligned_lines", _sorting, len(GIVEN_NAMES)),
    "copying": Task("aligned_lines", _copying, 48),
}


def _head(what: str) -> str:
    return f"The text below has {what} in it, among other things. You will be asked to work with them at its end."


def _listed(title: str, entries: Sequence[str]) -> str:
    return "\n".join([f"{title}:", *entries])


def _nouns(rng: Rng, count: int) -> list[str]:
    return [NOUNS[number] for number in rng.distinct(len(NOUNS), count)]


def _depth(rng: Rng, index: int) -> float:
    """In the tenth of the context that ``index`` names, modulo ten."""
    return (index % 10 + rng.random()) / 10
