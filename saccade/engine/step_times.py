"""What steps of an engine took of late, and what rounds of drafts would make of it (``engine/pace.py`` decides)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from saccade.methods.verified import MOST

PLAIN = 2  # plain steps that are timed first; the first of all warms caches
FIRST = 2.0  # rows that the fixed cost of a verification is taken to be worth, beside those that were measured
UNLIKE = 8.0  # likewise, before unlike numbers of rows were: in favour of more


class Kind(NamedTuple):
    """Steps that take about the same time: ``draft`` the draft's text, ``keys`` and ``rows`` of the decoding requests
    together, in quarters of powers of two."""

    draft: str
    keys: int
    rows: int

    @classmethod
    def of(cls, draft: str, lengths: Iterable[int]) -> Kind:
        lengths = list(lengths)
        return cls(draft, round(4 * math.log2(max(1, sum(lengths)))), round(4 * math.log2(max(1, len(lengths)))))


@dataclass
class Times:
    """Seconds of the last plain steps, of draft steps, and of verifications, each with its drafts a request. With
    ``padded`` a verification takes as many rows as the next power of two, and is put down so."""

    padded: bool = False
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    draft: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    verify: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=15))
    bytes: float = 0.0  # of keys and values that plain steps read
    _made: tuple[Any, list[float]] | None = None  # rounds(), and the times that they were made of
    best: dict[tuple[float, int], tuple[int, float]] = field(default_factory=dict)  # of these, by chance and most

    @property
    def alike(self) -> bool:
        """Whether all verifications that are remembered had the same number of rows: what another would take is only
        guessed."""
        return len(self.verify) == self.verify.maxlen and len({count for count, _ in self.verify}) == 1

    @property
    def known(self) -> bool:
        return len(self.plain) >= PLAIN and bool(self.draft) and len(self.verify) >= 2

    def of_round(self, drafts: int) -> float:
        """Of drafting and verifying so many tokens, at most ``MOST``."""
        return self.rounds()[drafts - 1]

    def rounds(self) -> list[float]:
        """Of rounds of 1 to ``MOST`` drafts. Every request asks in every step: made anew where times have changed."""
        known = tuple(self.plain), tuple(self.draft), tuple(self.verify)
        if self._made is not None and self._made[0] == known:
            return self._made[1]
        level, had, row = self._verification
        plain, draft = typical(self.plain), typical(self.draft)
        made = []
        for drafts in range(1, MOST + 1):
            verified = self.rounded(drafts)
            took = level + row * (verified - had)
            if self.padded:
                took = typical([seconds for count, seconds in self.verify if count == verified] or [took])
            made.append(drafts * draft + max(plain, took))
        self._made = known, made
        self.best.clear()
        return made

    def rounded(self, drafts: float) -> float:
        """The drafts that a verification of ``drafts`` has room for."""
        return 2.0 ** math.ceil(math.log2(drafts + 1)) - 1 if self.padded else drafts

    @property
    def _verification(self) -> tuple[float, float, float]:
        """Seconds of a verification, of how many drafts, and of one draft more: a line through the times. Before there
        were unlike numbers, what it takes beyond a plain step is thought of as some rows' worth that come first, and
        the rows that it had."""
        counts, times = zip(*self.verify)
        first = FIRST if len(set(counts)) > 1 else UNLIKE
        had, middle = sum(counts) / len(counts), sum(times) / len(times)
        guess = max(0.0, typical(times) - typical(self.plain)) / (had + first)
        spread = sum((count - had) ** 2 for count in counts) + first
        row = sum((count - had) * (took - middle) for count, took in zip(counts, times)) + first * guess
        row = max(0.0, row / spread)
        return typical([took - row * (count - had) for count, took in zip(counts, times)]), had, row


def typical(seconds: Collection[float]) -> float:
    """The lower quartile: what others do on the machine makes steps longer, never shorter."""
    return sorted(seconds)[len(seconds) // 4]


def tokens_of_round(chance: float, drafts: int) -> float:
    """Expected tokens of a round with so many drafts, the one that verification adds among them."""
    return drafts + 1.0 if chance >= 1.0 else (1.0 - chance ** (drafts + 1)) / (1.0 - chance)


def best_length(chance: float, times: Times, most: int) -> tuple[int, float]:
    """The number of drafts, from 1 to ``most``, of most tokens a second, and how many times the speed of plain steps
    that is."""
    rounds, asked = times.rounds(), (round(chance, 3), most)  # every request asks several times in every step
    if asked in times.best:
        return times.best[asked]
    chance, plain = asked[0], typical(times.plain)
    best, speed, tokens, stays = 1, 0.0, 1.0, 1.0
    for drafts in range(1, most + 1):
        stays *= chance  # that all drafts up to here do
        tokens += stays  # tokens_of_round
        if tokens * plain > speed * rounds[drafts - 1]:
            best, speed = drafts, tokens * plain / rounds[drafts - 1]
    times.best[asked] = best, speed
    return best, speed


def best_shared(chances: Sequence[float], others: int, times: Times) -> tuple[int, float]:
    """As :func:`best_length`, of a batch: requests with such ``chances`` draft, each at most the number that is best
    for it alone, and ``others`` decode beside them, who get one token a round however long that is. Where rows are
    ``padded`` all draft as many: a step takes as long for some as for all."""
    plain, rounds, count = typical(times.plain), times.rounds(), len(chances) + others
    most = [MOST if times.padded else best_length(chance, times, MOST)[0] for chance in chances]
    best, speed = 1, 0.0
    for drafts in range(1, max(most) + 1):
        tokens = others + sum(tokens_of_round(chance, min(drafts, own)) for chance, own in zip(chances, most))
        if tokens * plain > speed * count * rounds[drafts - 1]:
            best, speed = drafts, tokens * plain / (count * rounds[drafts - 1])
    return best, speed
