"""What drafts may be worth, and what they may lose: how often their tokens stay, what bytes alone let one hope for,
and a ledger of what rounds have cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from saccade.engine.step_times import tokens_of_round
from saccade.methods.verified import MOST

HOPE = 0.95  # the chance that a token stays, in the forecast by bytes
SHARE = 0.1  # of the keys that a draft step reads, likewise
FORGET = 0.99  # of each earlier count, by test
SPEND = 0.015  # of the time of plain steps that drafts may lose in all
TRY = 0.02  # of the time of a request's tokens, or of all so far, that a first round of a draft not known may lose
HORIZON = 86  # tokens whose share of that may be lost at once
SURE = 6  # times as many, where all that was measured speaks for the draft
KEEP = 4  # times that, of what was gained before


@dataclass
class Chance:
    """How often tokens stayed of those that were put to the test; those behind a rejected one were not."""

    stayed: float = 0.0
    tests: float = 0.0

    def add(self, stayed: int, rejected: bool) -> None:
        for kept in [1.0] * stayed + [0.0] * rejected:
            self.stayed, self.tests = self.stayed * FORGET + kept, self.tests * FORGET + 1.0

    def mean(self, prior: float, weight: float) -> float:
        """With a prior of so many tests."""
        return (self.stayed + prior * weight) / (self.tests + weight)


def share_of_step(weights: int, keys: int) -> float:
    """What part of a plain step a draft step takes, by bytes."""
    return (weights + SHARE * keys) / max(1, weights + keys)


def forecast(weights: int, keys: int) -> float:
    """How many times the speed of plain steps the best round could have by bytes alone, ``weights`` those of the model
    and ``keys`` those of the keys and values that the step reads."""
    step = share_of_step(weights, keys)
    return max(tokens_of_round(HOPE, drafts) / (drafts * step + 1.0) for drafts in range(1, MOST + 1))


@dataclass
class Ledger:
    """What rounds have cost so far, in plain steps: ``lost`` more than what they gave was worth, of ``worth`` steps in
    all; of one draft, or of one request, whose answer has ``most`` tokens. It holds whatever estimates say: at most
    ``SPEND`` is lost of ``HORIZON`` tokens and more, and one round. Of what was gained only some is kept to lose again,
    for a draft that turns bad."""

    lost: float = 0.0
    worth: float = 0.0
    most: float = math.inf

    def room(self, horizon: float = HORIZON) -> float:
        """Plain steps that may be lost, of ``horizon`` tokens before there were as many."""
        return SPEND * max(min(horizon, self.most), self.worth)

    def add(self, took: float, gave: float) -> None:
        """A round took as long as ``took`` plain steps and gave what ``gave`` of them do."""
        self.worth += gave
        self.lost = max(-KEEP * self.room(), self.lost + took - gave)

    def allows(self, risk: float, horizon: float = HORIZON) -> bool:
        """Whether ``risk`` plain steps may be lost."""
        return self.lost + risk <= self.room(horizon)

    def until(self, risk: float) -> float:
        """After how many plain steps it will allow that."""
        return (self.lost + risk) / SPEND - self.worth
