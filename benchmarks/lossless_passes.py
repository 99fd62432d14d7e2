"""What ``benchmarks/lossless.py`` measures with: the worker's passes by kind, and replayed acceptances."""

from __future__ import annotations

import logging
import random
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from saccade import LLM
from saccade.engine.drafts.step_times import tokens_of_round


@dataclass
class Passes:
    """Seconds of the worker's passes, by kind. ``first``: seconds of the steps before those that are counted."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"draft": [], "verify": [], "plain": []})
    verified: dict[int, list[float]] = field(default_factory=dict)  # of verifications, by the most drafts of a request
    counted: bool = False
    first: float = 0.0
    fresh: int = 0  # passes, of those counted, that compiled or recorded something
    replayed: Any = None

    def median(self, kind: str) -> float:
        return statistics.median(self.seconds[kind]) if self.seconds[kind] else 0.0

    def ideal(self) -> float:
        return sum(len(times) * self.median(kind) for kind, times in self.seconds.items())


Replay = Callable[[Any, Any, bool], None] | None  # step, result, whether it counts


@contextmanager
def passes_of(llm: LLM, replay: Replay, batch: int):
    worker, made = llm.engine.worker, Passes()
    real = worker.run

    def run(step, times=1, **options):
        began = time.perf_counter()
        result = real(step, times, **options)
        seconds = time.perf_counter() - began
        for request, one in result.requests.items():
            if one.error is not None or one.undone:
                raise SystemExit(f"request {request}: {one.error or 'a pass broke'}")
        if made.counted:
            kind = "verify" if any(one.drafts for one in step.scheduled) else "draft"
            if kind == "draft" and any(one.policy.decode.name in ("dense", "lossless") for one in step.scheduled):
                kind = "plain"
            if kind != "draft" and len(step) != batch:
                raise SystemExit(f"a step of {len(step)} of {batch} requests: the others do not fit, or one failed")
            made.fresh += result.fresh
            made.seconds[kind] += [seconds / times] * times
            if kind == "verify":
                made.verified.setdefault(max(len(one.drafts) for one in step.scheduled), []).append(seconds)
        if replay is not None:
            replay(step, result, made.counted)
        return result

    worker.run = run
    try:
        yield made
    finally:
        del worker.run


class Coins:
    """Which of a request's drafted tokens stay: of every ``DECK`` put to the test the share ``chance``."""

    DECK = 50

    def __init__(self, chance: float, seed: int) -> None:
        self.chance, self.rng = chance, random.Random(seed)
        self.ahead: list[bool] = []  # those that were not put to the test yet
        self.first: int | None = None  # place of the round's first draft

    def stays(self, place: int) -> bool:
        """Whether the token drafted for ``place`` does, if those of its round before it do."""
        self.first = place if self.first is None else self.first
        while len(self.ahead) <= place - self.first:
            stay = round(self.chance * self.DECK)
            self.ahead += self.rng.sample([True] * stay + [False] * (self.DECK - stay), self.DECK)
        return self.ahead[place - self.first]

    def test(self, drafts: int) -> tuple[int, int]:
        """A round of so many drafts is verified: how many stay, and how many were put to the test."""
        stay = next((at for at, stays in enumerate(self.ahead[:drafts]) if not stays), drafts)
        tests = min(drafts, stay + 1)
        del self.ahead[:tests]
        self.first = None
        return stay, tests


class Replaying:
    """Has draft steps give ``known`` tokens (by request's order, ``numbers``) with ``chance``, and every other row its
    own. ``stayed`` of ``tests`` tokens that were put to the test did."""

    def __init__(self, known: dict[int, list[int]], numbers: dict[int, int], chance: float) -> None:
        self.known, self.numbers = known, numbers
        self.coins = {request: Coins(chance, number) for request, number in numbers.items()}
        self.stayed = self.tests = 0

    def __call__(self, step: Any, result: Any, counted: bool) -> None:
        for one in step.scheduled:
            if one.phase == "decode" and not one.wants_logits:
                continue
            tokens, done = self.known[self.numbers[one.request_id]], result.requests[one.request_id]
            drafts = one.phase == "decode" and one.policy.decode.name not in ("dense", "lossless")
            coins = self.coins[one.request_id]
            if one.drafts:
                for at, row in enumerate(done.rows):
                    row.tokens, row.logits = [tokens[one.start + at + 1]], None
                stayed, tests = coins.test(len(one.drafts))
                if counted:
                    self.stayed, self.tests = self.stayed + stayed, self.tests + tests
                continue
            made = range(one.stop, one.stop + len(done.tokens or [0]))
            done.logits = None
            done.tokens = [tokens[at] if not drafts or coins.stays(at) else (tokens[at] + 1) % 200 for at in made]


@contextmanager
def steps_that_fail():
    """What the engine logs of steps that failed and were run again in another way."""
    found: list[str] = []

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "failed" in record.msg:
                found.append(f"{record.getMessage()}: {record.exc_info[1] if record.exc_info else ''}")

    logger, seen = logging.getLogger("saccade"), Seen()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(seen)
    try:
        yield found
    finally:
        logger.setLevel(level)
        logger.removeHandler(seen)


def best_of(chance: float, draft: float, verified: dict[int, float], plain: float) -> str:
    """What rounds of a fixed length give at most: seconds of a ``draft`` step, of verifications by drafts, of a plain
    step. A length that was not measured takes what the next longer one does."""
    found = [(0.0, 0)]
    for drafts in range(1, max(verified, default=0) + 1):
        took = verified[min(length for length in verified if length >= drafts)]
        found.append((plain * tokens_of_round(chance, drafts) / (drafts * draft + took), drafts))
    speed, drafts = max(found)
    known = ", ".join(f"{length}: {1000 * took:.2f}" for length, took in sorted(verified.items()))
    return f"best {speed:.2f} x dense with {drafts} drafts (verifications by drafts, ms: {known})"
