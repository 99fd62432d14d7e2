"""Scorers of long answers in numbered lines: how far a model got, ``(prediction, references) -> 0..1``.

References are the lines that the answer should have, each with its number ("12. ..."). Only lines that begin with a
number count, so what stands around them (a preamble, a fence, remarks) neither helps nor hurts. Words are compared
without case and punctuation. No line counts twice, and what counts stands in the references' order: a loop earns its
first round at most.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence

_NUMBERED = re.compile(r"^[\s>*`#|-]*(\d+)[*`]*[.):|](?!\d)(.*)$")
_WORD = re.compile(r"[^\W_]+")
_SUM = re.compile(r"[\s*`]*(-?\d+)\s*([+-])\s*(\d+)\s*=\s*(-?\d+)")


def running_lines(prediction: str, references: Sequence[str]) -> float:
    """Share of the steps that are right, in order. A line is "NUMBER. LABEL: BEFORE + STEP = AFTER" (or BEFORE - STEP).

    A step is right if its label and step are the reference's, the sum is right, and it begins with the total that the
    prediction wrote under the number before: one slip costs one step, not all that build on it. ``last_line`` says
    whether the end is right. Without a line before it a step begins with the reference's own total.
    """
    written = _firsts(prediction)
    wanted = dict(_parsed(references))
    right = []
    for number, text in written.items():
        sums, gold = _sum(text), _sum(wanted.get(number, ""))
        if sums is None or gold is None or _label(text) != _label(wanted[number]):
            continue
        earlier = _sum(written.get(number - 1, ""))
        begins = gold[0] if earlier is None else earlier[2]
        if sums == (begins, gold[1], begins + gold[1]):
            right.append(number)
    return _rising(right) / len(references)


def aligned_lines(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that are written, in order: the longest common subsequence of whole lines.

    A line's number must follow that of the numbered line before it (the first one's is the first reference's), not be
    the reference's own: a line that was left out costs one line, not all after it.
    """
    numbers = [number for number, _ in _parsed(references)]
    wanted = [_words(text) for _, text in _parsed(references)]
    before = numbers[0] - 1
    kept: list[list[str]] = []
    for number, text in _lines(prediction):
        if number == before + 1:
            kept.append(_words(text))
        before = number
    row = [0] * (len(wanted) + 1)
    for line in kept:
        new = [0]
        for at, reference in enumerate(wanted):
            new.append(max(new[at], row[at + 1], row[at] + 1 if line == reference else 0))
        row = new
    return row[-1] / len(references)


LINE_METRICS = tuple(scorer.__name__ for scorer in (running_lines, aligned_lines))


def last_line(prediction: str, references: Sequence[str]) -> float:
    """1 if the last reference is written under its own number: whether the end of the task is right."""
    number, text = _parsed(references)[-1]
    return float(_words(_firsts(prediction).get(number, "")) == _words(text))


def _lines(prediction: str) -> list[tuple[int, str]]:
    """The numbered lines: (number, what stands after it)."""
    return [(int(match[1]), match[2]) for line in prediction.splitlines() if (match := _NUMBERED.match(line))]


def _firsts(prediction: str) -> dict[int, str]:
    """What stands under each number where it comes first."""
    found: dict[int, str] = {}
    for number, text in _lines(prediction):
        found.setdefault(number, text)
    return found


def _parsed(references: Sequence[str]) -> list[tuple[int, str]]:
    """Number and text of every reference; one that has no number is taken by its place, from 1."""
    return [(_lines(reference) or [(place, reference)])[0] for place, reference in enumerate(references, 1)]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _label(text: str) -> list[str]:
    return _words(text.partition(":")[0])


def _sum(text: str) -> tuple[int, int, int] | None:
    """(before, signed step, after) of "LABEL: BEFORE + STEP = AFTER"; None for other text."""
    match = _SUM.match(text.partition(":")[2])
    return None if match is None else (int(match[1]), int(match[2] + match[3]), int(match[4]))


def _rising(numbers: Iterable[int]) -> int:
    """Length of the longest rising subsequence."""
    ends: list[int] = []
    for number in numbers:
        place = bisect_left(ends, number)
        ends[place : place + 1] = [number]
    return len(ends)
