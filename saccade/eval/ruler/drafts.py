"""What a task is as a function of its haystack's size, and what fills it up where its units are too coarse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

SENTENCES = ("The road is long.", "The river is wide.", "The wind is cold.", "On we walk.", "Night comes and goes.")
REPEATED = " ".join(SENTENCES)


@dataclass(frozen=True)
class Draft:
    """What a task says at one size of its haystack. ``context``: two segments, cut in the middle of the haystack.
    ``joint``: what stands between the haystack and sentences that fill it up; None where nothing may be added."""

    context: tuple[str, str]
    question: str
    prefix: str
    answers: tuple[str, ...]
    meta: dict[str, Any] = field(default_factory=dict)
    joint: str | None = None

    def filled(self, count: int) -> Draft:
        """With ``count`` short sentences after the haystack, which say nothing that is asked."""
        if not count:
            return self
        assert self.joint is not None
        more = " ".join(SENTENCES[at % len(SENTENCES)] for at in range(count))
        return replace(self, context=(self.context[0], self.context[1] + self.joint + more))


@dataclass(frozen=True)
class Plan:
    """``render(size)`` draws nothing: all sizes show the same sample. Sizes begin at ``least`` and may end."""

    render: Callable[[int], Draft]
    least: int = 1
    most: int | None = None


def halves(head: str, units: Sequence[str], joint: str) -> tuple[str, str]:
    """``head`` and the units joined, as two segments with the same number of units."""
    middle = len(units) // 2
    return head + "".join(unit + joint for unit in units[:middle]), joint.join(units[middle:])


def place(units: Sequence[str], extra: Sequence[str], depths: Sequence[float]) -> list[str]:
    """``units`` with ``extra[i]`` put in at the share ``depths[i]`` of them (0: before all, below 1).

    What falls on one place keeps its order in ``extra``.
    """
    found: list[str] = []
    done = 0
    for depth, text in sorted(zip(depths, extra), key=lambda pair: pair[0]):
        cut = int(depth * (len(units) + 1))
        found += [*units[done:cut], text]
        done = cut
    return [*found, *units[done:]]
