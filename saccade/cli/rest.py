"""How long the rest of a prompt takes, while it is read.

A row costs what a model's matrices take, the same for each, and what attention takes, which grows with the keys before
it: the first n tokens cost a n + b n^2. How a and b go together is guessed from the model's shape, and corrected by
what the tokens read so far have taken.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

SPARSE = 0.3  # of dense attention's cost: what a sparse prefill is guessed to take until it has shown
STEPS = [2 ** (at / 4) for at in range(-24, 17)]  # of b / a over what the shape says
DOUBT = 0.0002  # how much a factor e away from the guess counts, beside mean squares of relative errors
KEPT = 64  # observations


class Read(NamedTuple):
    """How far a prompt is: ``tokens`` of ``total`` are read, and ``share`` of the next ``chunk``."""

    tokens: int
    chunk: int
    share: float
    total: int

    @property
    def about(self) -> int:
        """Tokens read, those of a part of a chunk with them."""
        return min(self.total, self.tokens + int(self.share * self.chunk))


def square_per_row(config: Any, heads: int, head_dim: int, kv_heads: int, layers: int) -> float:
    """b / a of a model: what a key costs a row, over what the row's products cost it, halved for the triangle."""
    hidden = config.hidden_size
    experts = getattr(config, "num_experts_per_tok", None) or 1
    inner = (getattr(config, "moe_intermediate_size", None) if experts > 1 else None) or config.intermediate_size
    products = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner * experts
    return layers * heads * head_dim / (layers * products)


class RestTime:
    """``square``: b / a as the shape says, ``guess``: what of it this prefill is guessed to take."""

    def __init__(self, square: float, guess: float = 1.0) -> None:
        self.square, self.guess = square, guess
        self._begun: tuple[float, float, float] | None = None  # tokens, their squares, seconds
        self._seen: list[tuple[float, float, float]] = []
        self._factor = guess

    def see(self, read: Read, now: float) -> None:
        """So far it is at ``now`` (seconds)."""
        at = self._work(read)
        if self._begun is None:
            self._begun = (*at, now)
            return
        tokens, squares, since = self._begun
        seen = at[0] - tokens, at[1] - squares, now - since
        if seen[0] <= 0 or (self._seen and seen[0] - self._seen[-1][0] < read.total / KEPT):
            return
        self._seen.append(seen)
        self._factor = min(STEPS, key=lambda step: self._error(step * self.guess)) * self.guess

    def share(self, read: Read) -> float:
        """Of the work, from where it began: from 0 to 1."""
        tokens, squares, _ = self._begun or (0.0, 0.0, 0.0)
        done = self._cost(*(now - then for now, then in zip(self._work(read), (tokens, squares))))
        whole = self._cost(read.total - tokens, read.total**2 - squares)
        return min(1.0, done / whole) if whole > 0 else 1.0

    def left(self, read: Read, now: float) -> float | None:
        """Seconds, at the pace of the latter half of the time so far: others may have begun to use the machine, or
        ended. None where nothing is known yet."""
        share = self.share(read)
        if self._begun is None or share <= 0:
            return None
        tokens, squares, since = self._begun
        passed, done = now - since, self._cost(*(now - then for now, then in zip(self._work(read), (tokens, squares))))
        half = next((one for one in reversed(self._seen) if one[2] <= passed / 2), None)
        begun, before = (0.0, 0.0) if half is None else (half[2], self._cost(half[0], half[1]))
        if done <= before:  # it stands still: a step waits for the machine
            begun, before = 0.0, 0.0
        return (passed - begun) / (done - before) * done * (1 - share) / share

    def _work(self, read: Read) -> tuple[float, float]:
        """Tokens and their squares; a part of a chunk is that part of its layers, of all its rows."""
        stop = read.tokens + read.chunk
        return read.tokens + read.share * read.chunk, read.tokens**2 + read.share * (stop**2 - read.tokens**2)

    def _cost(self, tokens: float, squares: float, factor: float | None = None) -> float:
        return tokens + (self._factor if factor is None else factor) * self.square * squares

    def _error(self, factor: float) -> float:
        costs = [self._cost(tokens, squares, factor) for tokens, squares, _ in self._seen]
        seconds = [one[2] for one in self._seen]
        row = sum(c * s for c, s in zip(costs, seconds)) / sum(c * c for c in costs)  # a, by least squares
        misses = sum(((row * c - s) / seconds[-1]) ** 2 for c, s in zip(costs, seconds)) / len(costs)
        return misses + DOUBT * math.log(factor / self.guess) ** 2
