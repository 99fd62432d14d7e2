"""RULER's variable tracking (vt) and word counting (cwe, fwe), in our wording.

Unlike RULER's, lists are shuffled afresh in every sample.
"""

from __future__ import annotations

import math
import string
from dataclasses import replace
from itertools import pairwise

from saccade.errors import RequestError
from saccade.eval.ruler.drafts import REPEATED, Draft, Plan, halves, place
from saccade.eval.ruler.words import ADJECTIVES, NOUNS
from saccade.eval.suite.rng import Rng

_VARIABLES = 5
_COMMON = 10


def tracking(rng: Rng, length: int) -> Plan:
    """vt: one chain of five variables in order among repeated lines, after one worked example with shorter names."""
    example_names, example_value = _chain(rng, 3)
    example = _tracked(example_names, example_value, [rng.random() for _ in range(_VARIABLES)], 10)
    names, value = _chain(rng, 5)
    while value == example_value:
        names, value = _chain(rng, 5)
    depths = sorted(rng.random() for _ in range(_VARIABLES))
    shown = "".join(example.context) + f"{example.question}\n{example.prefix} {', '.join(example_names)}.\n\n"

    def render(size: int) -> Draft:
        draft = _tracked(names, value, depths, size)
        return replace(draft, context=(shown + draft.context[0], draft.context[1]))

    return Plan(render, _VARIABLES)


def _chain(rng: Rng, letters: int) -> tuple[list[str], str]:
    names: list[str] = []
    while len(names) < _VARIABLES:
        name = "".join(rng.choice(string.ascii_uppercase) for _ in range(letters))
        if name not in names:
            names.append(name)
    return names, str(rng.between(10_000, 99_999))


def _tracked(names: list[str], value: str, depths: list[float], size: int) -> Draft:
    statements = [f"Let {names[0]} = {value}.", *(f"Let {new} = {old}." for old, new in pairwise(names))]
    lines = place([REPEATED] * size, statements, sorted(depths))
    head = "The text below sets variables, each to a number or to what another one holds. Follow them.\n\n"
    question = f"\n\nWhich variables hold {value}? Name all {_VARIABLES}."
    meta = {"depth": [round(depth, 4) for depth in sorted(depths)]}
    prefix = f"The {_VARIABLES} variables that hold {value} are"
    return Draft(halves(head, lines, "\n"), question, prefix, tuple(names), meta, "\n")


def common_words(rng: Rng, length: int) -> Plan:
    """cwe: a numbered list in which 10 words stand 30 times and all others 3 times, after a worked example.

    Below 8192 tokens 6 times and once; in RULER below 4096, where 30 times our longer words do not fit. Words are
    adjective-noun pairs, of which there are enough for any length; the size is the number of different words.
    """
    small = length < 8192
    pairs = rng.distinct(len(ADJECTIVES) * len(NOUNS), len(ADJECTIVES) * len(NOUNS))
    words = [f"{ADJECTIVES[pair // len(NOUNS)]}-{NOUNS[pair % len(NOUNS)]}" for pair in pairs]
    spare = words[-40:]
    example = _listed(rng, spare[: 20 if small else 40], *((3, 1) if small else (10, 3)))
    order = rng.below(2**32)
    shown = "".join(example.context) + f"{example.question}\n{example.prefix} {', '.join(example.answers)}.\n\n"

    def render(size: int) -> Draft:
        draft = _listed(Rng("order", order), words[:size], *((6, 1) if small else (30, 3)))
        return replace(draft, context=(shown + draft.context[0], draft.context[1]))

    return Plan(render, 2 * _COMMON, len(words) - len(spare))


def _listed(rng: Rng, words: list[str], often: int, seldom: int) -> Draft:
    repeated = words[:_COMMON] * often + words[_COMMON:] * seldom
    rng.shuffle(repeated)
    head = "In the numbered list below some words stand more often than others. Keep count.\n\n"
    lines = [f"{number}. {word}" for number, word in enumerate(repeated, 1)]
    question = f"\n\nWhich {_COMMON} words stand most often in the list?"
    return Draft(halves(head, lines, " "), question, f"The {_COMMON} most frequent words are", tuple(words[:_COMMON]))


def coded_words(rng: Rng, length: int) -> Plan:
    """fwe: code words of six letters, the i-th floor(size / (zeta(2) i^2)) times; the first is shown as dots.

    There are length / 50 code words; the three most frequent after the dots are asked for. The size is the number of
    words of the untruncated distribution.
    """
    vocabulary = length // 50
    if vocabulary < 8:
        raise RequestError(f"length={length} must be at least 400 for fwe, which has length / 50 code words")
    words: dict[str, None] = {}
    while len(words) < vocabulary:
        words["".join(rng.choice(string.ascii_lowercase) for _ in range(6))] = None
    ranked = ["...", *list(words)[1:]]
    order = rng.below(2**32)
    head = "The text below is made of code words and of dots, which mean nothing. Count the code words.\n\n"
    question = "\n\nWithout the dots '...', which three code words occur most often?"

    def render(size: int) -> Draft:
        counts = [int(6 * size / (math.pi * rank) ** 2) for rank in range(1, vocabulary + 1)]
        text = [word for word, count in zip(ranked, counts) for _ in range(count)]
        Rng("order", order).shuffle(text)
        return Draft(halves(head, text, " "), question, "The three most frequent code words are", tuple(ranked[1:4]))

    return Plan(render, 100)  # from which on the fourth and the fifth differ in count
