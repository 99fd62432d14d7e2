"""What ``lossless`` may lose: batches of requests over a machine of made step times and acceptances, against plain
decoding and against the best that these times and acceptances allow."""

from __future__ import annotations

import itertools
import random

import pytest

from saccade.engine.pacing import Pace, Pacing, shared_length
from saccade.engine.step_times import Kind, tokens_of_round
from saccade.methods.verified import MOST

HORIZON = 1024  # tokens of a request over which it is promised

DRAFT = (0.1, 0.3, 0.6, 1.0)  # of a plain step's time
VERIFY = ((1.0, 0.0), (1.2, 0.05), (1.0, 0.3), (2.5, 0.1))  # of a plain step's time, and for each draft of a request
CHANCE = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98)
BATCH = ("one", "alike", "mixed", "short", "worse")  # "worse": from a third on nothing of the draft stays


def drive(draft, verify, chance, batch, seed, tokens=HORIZON):
    """Time over that of plain steps for the same tokens, and the pacing."""
    rng, pacing, count = random.Random(seed), Pacing(10**6), 1 if batch == "one" else 4
    chances = [0.2 if batch == "mixed" and number else chance for number in range(count)]
    paces, lengths = [Pace(pacing, "psa", 0) for _ in chances], [4000] * count
    seconds = worth = 0.0

    def noisy(value):
        return value * rng.uniform(0.97, 1.07) * (3.0 if rng.random() < 0.005 else 1.0)

    while worth < tokens:
        for number in range(count):
            if batch == "short" and lengths[number] > 4040:  # it ended, and another one comes
                paces[number], lengths[number] = Pace(pacing, "psa", 0), 4000
        kind = Kind.of("psa", lengths)
        times = pacing.times(kind)
        wanting = [number for number in range(count) if paces[number].wants(lengths[number], kind, 10**8)]
        most = 0
        if wanting and all(paces[number].is_timed(kind) for number in wanting):
            most = shared_length([paces[number] for number in wanting], count - len(wanting), kind)
        drafts = [0] * count
        for number in wanting if most else ():
            drafts[number] = min(most, paces[number].length(kind))
        made, mean = [1] * count, sum(drafts) / count
        if most:
            drafting, took = [noisy(draft) for _ in range(max(drafts))], noisy(verify[0] + verify[1] * mean)
            times.draft.extend(drafting)
            times.verify.append((mean, took))
            took += sum(drafting)
        else:
            took = noisy(1.0)
            times.plain.append(took)
        for number in wanting if most else ():
            stays = 0.0 if batch == "worse" and worth > tokens / 3 else chances[number]
            stayed = 0
            while stayed < drafts[number] and rng.random() < stays:
                stayed += 1
            paces[number].took(drafts[number], 0, stayed)
            made[number] = stayed + 1
        lengths = [length + more for length, more in zip(lengths, made)]
        seconds, worth = seconds + took, worth + sum(made) / count
        pacing.took(kind, took, sum(made) / count, mean)
    return seconds / (worth * 1.03), pacing  # plain steps with their noise take 1.03 on average


CASES = [case for number, case in enumerate(itertools.product(DRAFT, VERIFY, CHANCE, BATCH)) if number % 9 == 4]


def test_drafts_lose_at_most_three_percent_of_plain_decoding():
    """Whatever steps cost and however few tokens stay: in batches, beside requests whose drafts are no good, with
    requests that end before anything is known of them, and with drafts that turn bad."""
    lost = {case: drive(*case, seed=number)[0] - 1.0 for number, case in enumerate(CASES)}
    worst = max(lost, key=lost.get)
    assert lost[worst] < 0.03, (worst, lost[worst])


@pytest.mark.parametrize("batch", ["one", "alike", "short"])
def test_drafts_that_gain_are_used(batch):
    for number, (draft, verify, chance) in enumerate(itertools.product((0.1, 0.3), VERIFY[:3], (0.8, 0.9, 0.98))):
        best = max(tokens_of_round(chance, k) / (k * draft + verify[0] + verify[1] * k) for k in range(1, MOST + 1))
        speed = 1 / drive(draft, verify, chance, batch, number)[0]
        assert best < 1.2 or speed > 0.9 * best, (draft, verify, chance, best, speed)
