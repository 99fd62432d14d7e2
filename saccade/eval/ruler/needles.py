"""Needles in a haystack, as RULER's eight niah tasks set them, in our wording."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from saccade import prose
from saccade.eval.haystack import split_sentences
from saccade.eval.ruler.drafts import REPEATED, Draft, Plan, halves, place
from saccade.eval.ruler.words import ADJECTIVES, NOUNS
from saccade.eval.suite.rng import Rng

Units = Callable[[int], Sequence[str]]
_NAMES = {"number": "access number", "uuid": "security code"}


@dataclass(frozen=True)
class Niah:
    """``haystack``: repeat, text or needle (all of it other needles). ``values``: for each of ``keys`` keys."""

    haystack: str
    key: str = "words"
    value: str = "number"
    keys: int = 1
    values: int = 1
    asked: int = 1


class Items:
    """Keys and values that never repeat within a sample."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._used: set[str] = set()

    def new(self, kind: str) -> str:
        while (item := self._draw(kind)) in self._used:
            pass
        self._used.add(item)
        return item

    def _draw(self, kind: str) -> str:
        if kind == "words":
            return f"{self._rng.choice(ADJECTIVES)}-{self._rng.choice(NOUNS)}"
        if kind == "number":
            return str(self._rng.between(10**6, 10**7 - 1))
        return str(uuid.UUID(bytes=bytes(self._rng.below(256) for _ in range(16)), version=4))


def plan(niah: Niah, rng: Rng, lines_rng: Rng, index: int, text: Sequence[str] | None) -> Plan:
    """One sample. ``text``: the sentences of a text haystack, else prose is made up.

    If one needle is asked for, its depth is drawn from the tenth of the text that ``index`` names, modulo ten, and
    others lie anywhere; several that are asked for take one equal share of the text each.
    """
    items = Items(rng)
    name = _NAMES[niah.value]
    keys = [items.new(niah.key) for _ in range(niah.keys)]
    planted = [(key, items.new(niah.value)) for key in keys for _ in range(niah.values)]
    asked = [keys[number] for number in rng.distinct(len(keys), niah.asked)]
    answers = tuple(value for key in asked for owner, value in planted if owner == key)
    if len(answers) == 1:
        depths = [(index % 10 + rng.random()) / 10 if key in asked else rng.random() for key, _ in planted]
    else:
        depths = [(share + rng.random()) / len(planted) for share in rng.distinct(len(planted), len(planted))]
    meta = {"depth": [round(depth, 4) for depth, (key, _) in zip(depths, planted) if key in asked]}
    head, question, prefix = _frame(name, asked, len(answers))
    needles = [_needle(name, *pair) for pair in planted]
    units, joint = _units(niah, name, items, lines_rng, text)

    def render(size: int) -> Draft:
        context = halves(head, place(units(size), needles, depths), joint)
        return Draft(context, question, prefix, answers, meta, joint)

    return Plan(render, 1, len(text) if niah.haystack == "text" and text is not None else None)


def _needle(name: str, key: str, value: str) -> str:
    return f"Note: the {name} of {key} is {value}."


def _frame(name: str, asked: Sequence[str], answers: int) -> tuple[str, str, str]:
    """What stands before the haystack, the question and the answer cue."""
    listed = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + ", and " + asked[-1]
    start = "The following text has notes in it that give"
    if answers == 1:
        question = f"\n\nWhich {name} does the text note for {listed}?"
        return f"{start} the {name} of something. You will be asked for it.\n\n", question, f"The {name} of {listed} is"
    question = f"\n\nWhich {name}s does the text note for {listed}? Give all of them."
    return f"{start} {name}s. You will be asked for some of them.\n\n", question, f"The {name}s of {listed} are"


def _units(niah: Niah, name: str, items: Items, rng: Rng, text: Sequence[str] | None) -> tuple[Units, str]:
    """The first ``size`` lines or sentences of the haystack as a function of size, and what joins them."""
    if niah.haystack == "repeat":
        return (lambda size: [REPEATED] * size), "\n"
    if niah.haystack == "text":
        return _turned(text, rng) if text is not None else _made_up(rng), " "
    lines: list[str] = []

    def others(size: int) -> Sequence[str]:
        while len(lines) < size:
            lines.append(_needle(name, items.new(niah.key), items.new(niah.value)))
        return lines[:size]

    return others, "\n"


def _made_up(rng: Rng) -> Units:
    seed = rng.below(2**32)
    found: list[str] = []

    def units(size: int) -> Sequence[str]:
        nonlocal found
        chars = 100 * size
        while len(found) < size:
            found = split_sentences(prose.generate(chars, seed))
            chars *= 2
        return found[:size]

    return units


def _turned(text: Sequence[str], rng: Rng) -> Units:
    """From a sentence drawn at random, around the text's end: samples do not share one beginning."""
    start = rng.below(len(text))
    around = [*text[start:], *text[:start]]
    return lambda size: around[:size]
