"""What ``lossless`` may lose: batches of requests over a machine of made step times and acceptances, against plain
decoding and against the best that these times and acceptances allow."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from saccade.engine.drafts.pacing import Pace, Pacing, shared_length
from saccade.engine.drafts.step_times import Kind, tokens_of_round
from saccade.methods.verified import MOST

HORIZON = 1024  # tokens of a request over which it is promised

DRAFT = (0.1, 0.3, 0.6, 1.0)  # of a plain step's time
VERIFY = ((1.0, 0.0), (1.2, 0.05), (1.0, 0.3), (2.5, 0.1))  # of a plain step's time, and for each draft of a request
CHANCE = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98)
BATCH = ("one", "alike", "mixed", "short", "worse")  # "worse": from a third on nothing of the draft stays


def drive(
    draft,
    verify,
    chance,
    batch,
    seed,
    tokens=HORIZON,
    opening=0.0,
    weights=10**6,
    keys=10**8,
    answer=math.inf,
    rare=0.005,
    padded=False,
):
    """Time over that of plain steps for the same tokens, and the pacing. ``opening``: what a request's first draft step
    takes beyond another, in plain steps; an ``answer`` has so many tokens, and others follow it. ``padded``: on a
    device, where a verification has the rows of the one that has most."""
    rng, pacing, count = random.Random(seed), Pacing(weights, padded), 1 if batch == "one" else 4
    chances = [0.2 if batch == "mixed" and number else chance for number in range(count)]
    paces, lengths = [Pace(pacing, "psa", 0, answer) for _ in chances], [4000] * count
    seconds = worth = 0.0
    answer = 40 if batch == "short" else answer

    def noisy(value):
        return value * rng.uniform(0.97, 1.07) * (3.0 if rng.random() < rare else 1.0)

    while worth < tokens:
        for number in range(count):
            if lengths[number] > 4000 + answer:  # it ended, and another one comes
                paces[number], lengths[number] = Pace(pacing, "psa", 0, answer), 4000
        kind = Kind.of("psa", lengths)
        times = pacing.times(kind)
        wanting = [number for number in range(count) if paces[number].wants(lengths[number], kind, keys)]
        most: int | None = 0
        if wanting and all(paces[number].is_timed(kind) for number in wanting):
            most = shared_length([paces[number] for number in wanting], count - len(wanting), kind)
        drafts, opens, least = [0] * count, 0.0, 0.0
        for number in wanting if most != 0 else ():
            drafts[number] = paces[number].length(kind, most)
        made, mean = [1] * count, times.rounded(max(drafts)) if padded else sum(drafts) / count
        if most != 0:
            drafting, took = [noisy(draft) for _ in range(max(drafts))], noisy(verify[0] + verify[1] * mean)
            new = [number for number in wanting if not paces[number].opened]
            if new:
                length = sum(lengths[number] for number in new)
                opens = opening * len(new)
                pacing.opened("psa", length, drafting.pop() + opens)
                least = min(opens, pacing.opening_seconds(kind, length))
                took += draft
            for number in wanting:
                paces[number].opened = True
            times.draft.extend(drafting)
            times.verify.append((mean, took))
            took += sum(drafting)
        else:
            took = noisy(1.0)
            times.plain.append(took)
        for number in wanting if most != 0 else ():
            stays = 0.0 if batch == "worse" and worth > tokens / 3 else chances[number]
            stayed = 0
            while stayed < drafts[number] and rng.random() < stays:
                stayed += 1
            paces[number].took(drafts[number], 0, stayed)
            made[number] = stayed + 1
        gave = sum(made) / count
        lengths = [length + more for length, more in zip(lengths, made)]
        seconds, worth = seconds + took + opens, worth + gave
        steps = pacing.took(kind, took + opens - least, gave, mean)
        for pace in paces:
            pace.ledger.add(steps, gave)
    return seconds / (worth * 1.02 * (1 + 2 * rare)), pacing  # what plain steps with their noise take on average


CASES = [case for number, case in enumerate(itertools.product(DRAFT, VERIFY, CHANCE, BATCH)) if number % 9 == 4]


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_drafts_lose_at_most_three_percent_of_plain_decoding(half):
    """Whatever steps cost and however few tokens stay: in batches, beside requests whose drafts are no good, with
    requests that end before anything is known of them, and with drafts that turn bad."""
    for padded in (False, True):
        cases = CASES[half::2][padded :: 1 + padded]  # half of them on a device
        lost = {case: drive(*case, seed=number, padded=padded)[0] - 1.0 for number, case in enumerate(cases)}
        worst = max(lost, key=lost.get)
        assert lost[worst] < 0.03, (padded, worst, lost[worst])


@pytest.mark.parametrize(("batch", "padded"), [("one", False), ("alike", False), ("short", False), ("alike", True)])
def test_drafts_that_gain_are_used(batch, padded):
    for number, (draft, verify, chance) in enumerate(itertools.product((0.1, 0.3), VERIFY[:3], (0.8, 0.98))):
        rows = [2 ** math.ceil(math.log2(k + 1)) - 1 if padded else k for k in range(1, MOST + 1)]
        best = max(
            tokens_of_round(chance, k) / (k * draft + verify[0] + verify[1] * rows[k - 1]) for k in range(1, MOST + 1)
        )
        speed = 1 / drive(draft, verify, chance, batch, number, padded=padded)[0]
        assert best < 1.2 or speed > 0.88 * best, (draft, verify, chance, best, speed)


def drawn(seed):
    """A machine and a draft: weights' share of a plain step's bytes, and times that such a share lets one expect."""
    rng = random.Random(seed)
    share = rng.random()
    draft = (share + 0.1 * (1 - share)) * rng.uniform(1, 1.3)
    verify = rng.uniform(1, 1 + 1.5 * share), rng.uniform(0.0, 0.02 + 0.3 * share)
    return share, draft, verify, rng.choice(CHANCE), rng.uniform(0, 2) * (1 - share)


def test_short_answers_bear_little_of_what_is_tried():
    """The first answer of an engine that knows nothing, and many after it, whose first draft steps take long: these
    are taken once the answers so far outweigh what they may lose, so that drafts that gain come into use."""
    over = {}
    for seed in range(60):
        share, draft, verify, chance, opening = drawn(seed)
        for answer, tokens in ((64, 64), (64, 1024), (256, 256)):
            given = {"opening": opening, "weights": 10**8 * share, "keys": 10**8 * (1 - share), "rare": 0.0}
            lost = drive(draft, verify, chance, "one", seed, tokens, answer=answer, **given)[0] - 1.0
            over.setdefault((answer, tokens), []).append(lost)
    assert sum(lost < -0.1 for lost in over[64, 1024]) > 3
    for case, lost in over.items():
        assert max(lost) < 0.03, (case, max(lost))


def test_what_was_learnt_serves_the_next_answers():
    """A draft that gains does so in answers of 32 tokens each; where the first draft step of each answer takes longer
    than these can gain, none is taken any more."""
    assert drive(0.15, (1.05, 0.01), 0.95, "one", 3, tokens=1280, answer=32)[0] < 0.6
    time, pacing = drive(0.15, (1.05, 0.01), 0.95, "one", 3, tokens=640, answer=32, opening=20.0)
    assert time < 1.06
    assert pacing.opening(Kind.of("psa", [4000]), 4000, 10**8) > 15


def test_bytes_that_promise_little_are_no_reason_to_try():
    pace, kind = Pace(Pacing(25 * 10**7), "psa", 0), Kind.of("psa", [4096])
    assert not pace.wants(4096, kind, 5 * 10**7)  # a sixth of what a plain step reads
    assert "by bytes" in str(pace.off)
