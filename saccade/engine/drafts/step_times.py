"""How long the steps and rounds of drafts take: as they were timed, and by bytes before that."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from saccade.methods.verified import MOST

HOPE, SHARE = 0.95, 0.1  # by bytes: the chance that a token stays, the part of the keys that a draft step reads
PLAIN = 2  # plain steps that are timed before drafts; the first warms caches
ROWS = 2.0  # rows that a verification's fixed cost counts for


class Kind(NamedTuple):
    """Steps that take about the same time: the ``draft``'s text, and the ``keys`` and ``rows`` of all decoding requests
    together, in quarters of powers of two."""

    draft: str
    keys: int
    rows: int

    @classmethod
    def of(cls, draft: str, lengths: Iterable[int]) -> Kind:
        lengths = list(lengths)
        return cls(draft, round(4 * math.log2(max(1, sum(lengths)))), round(4 * math.log2(max(1, len(lengths)))))


def typical(seconds: Collection[float]) -> float:
    """The lower quartile: other programs make steps longer, never shorter."""
    return sorted(seconds)[len(seconds) // 4]


def tokens_of_round(chance: float, drafts: int) -> float:
    """Expected tokens of a round, the one that verification adds among them."""
    return drafts + 1.0 if chance >= 1.0 else (1.0 - chance ** (drafts + 1)) / (1.0 - chance)


def forecast(weights: int, keys: int) -> float:
    """The best round's speed over plain steps by bytes alone: ``weights`` of the model, ``keys`` that a step reads."""
    step = share_of_step(weights, keys)
    return max(tokens_of_round(HOPE, drafts) / (drafts * step + 1.0) for drafts in range(1, MOST + 1))


def share_of_step(weights: int, keys: int) -> float:
    """A draft step's time over a plain step's, by bytes."""
    return (weights + SHARE * keys) / max(1, weights + keys)


@dataclass
class Times:
    """Seconds of the last plain steps, draft steps and verifications of one kind, these with their drafts a request.
    ``padded``: a verification has as many rows as the next power of two. ``bytes`` of keys that plain steps read."""

    padded: bool = False
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    draft: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    verify: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=15))
    bytes: float = 0.0
    _rounds: tuple[object, list[float]] = (None, [])  # with the times that they were made of

    @property
    def known(self) -> bool:
        """Whether rounds were timed."""
        return len(self.plain) >= PLAIN and bool(self.draft) and len(self.verify) >= 2

    @property
    def alike(self) -> bool:
        """Whether all verifications had one number of rows, so that others' times are a guess."""
        return len(self.verify) == self.verify.maxlen and len({count for count, _ in self.verify}) == 1

    def rounded(self, drafts: float) -> float:
        """The drafts that a verification of ``drafts`` has room for."""
        return 2.0 ** math.ceil(math.log2(drafts + 1)) - 1 if self.padded else drafts

    def rounds(self) -> list[float]:
        """Seconds of rounds of 1 to ``MOST`` drafts; kept until a time changes: requests ask in every step."""
        known = tuple(self.plain), tuple(self.draft), tuple(self.verify)
        if self._rounds[0] == known:
            return self._rounds[1]
        plain, draft, made = typical(self.plain), typical(self.draft), []
        level, had, row = self._verification(plain)
        for drafts in range(1, MOST + 1):
            took = level + row * (self.rounded(drafts) - had)
            if self.padded:
                took = typical([seconds for count, seconds in self.verify if count == self.rounded(drafts)] or [took])
            made.append(drafts * draft + max(plain, took))
        self._rounds = known, made
        return made

    def _verification(self, plain: float) -> tuple[float, float, float]:
        """A ridge line through verifications: seconds at the mean number of drafts, that number, seconds a draft."""
        counts, times = zip(*self.verify)
        had, middle = sum(counts) / len(counts), sum(times) / len(times)
        guess = max(0.0, typical(times) - plain) / (had + ROWS)
        spread = sum((count - had) ** 2 for count in counts) + ROWS
        row = sum((count - had) * (took - middle) for count, took in zip(counts, times)) + ROWS * guess
        row = max(0.0, row / spread)
        return typical([took - row * (count - had) for count, took in zip(counts, times)]), had, row

    def best(self, chances: Sequence[float], others: int = 0) -> tuple[int, float]:
        """The drafts of most tokens a second, and their speed over plain steps, where requests with such ``chances``
        draft and ``others`` wait for one token each. Unless rows are padded none drafts more than is best for it
        alone."""
        plain, rounds, count = typical(self.plain), self.rounds(), len(chances) + others
        most = [MOST if self.padded or count == 1 else self.best([chance])[0] for chance in chances]
        best, speed = 1, 0.0
        for drafts in range(1, max(most) + 1):
            tokens = others + sum(tokens_of_round(chance, min(drafts, own)) for chance, own in zip(chances, most))
            if tokens * plain > speed * count * rounds[drafts - 1]:
                best, speed = drafts, tokens * plain / (count * rounds[drafts - 1])
        return best, speed
