"""Tokens chosen for many rows at once are those that each row's own sampler chooses."""

from __future__ import annotations

import random

import pytest
import torch

from saccade import SamplingParams
from saccade.engine.sampling.choosing import LEFT, choose_tokens
from saccade.engine.sampling.sampler import Sampler, top_logprobs
from saccade.engine.sampling.steering import Steering
from saccade.engine.steps.row_sampling import TokenCounts
from saccade.errors import RequestError

VOCAB = 97


class Row:
    """A request's sampler, its tokens so far, and its logits, of which some are equal."""

    def __init__(self, rng: random.Random, prompt: int = 12, **fields) -> None:
        params = SamplingParams(max_tokens=99, **{"seed": rng.randrange(2**63), **fields})
        self.ids = [rng.randrange(VOCAB) for _ in range(prompt + rng.randrange(9))]
        words = [(self.ids[-1], 5), (7,)] if rng.random() < 0.3 else []
        self.sampler = Sampler(params, Steering(params, prompt, ends=[3, 4], words=words))
        self.logits = torch.tensor([rng.choice((rng.gauss(0, 3), 1.0, 4.0)) for _ in range(VOCAB)])

    def choose(self) -> int:
        return self.sampler.sample(self.ids, self.logits, len(self.ids))


def some(rng: random.Random) -> dict:
    """Fields of SamplingParams, most of them left alone."""
    drawn = {
        "temperature": rng.choice((0, 0.3, 1.0, 1.7)),
        "top_k": rng.choice((0, 1, 5, VOCAB, 500)),
        "top_p": rng.choice((0.05, 0.6, 0.95, 1.0)),
        "min_p": rng.choice((0.0, 0.1, 1.0)),
        "repetition_penalty": rng.choice((1.0, 0.7, 1.4)),
        "frequency_penalty": rng.choice((0.0, 0.5, -1.0)),
        "presence_penalty": rng.choice((0.0, 1.5)),
        "logit_bias": rng.choice((None, {5: 4, 9: -2.5})),
        "min_tokens": rng.choice((0, 4)),
        "logprobs": rng.choice((None, 0, 3)),
        "n": 1,
    }
    return {name: drawn[name] for name in rng.sample(sorted(drawn), rng.randint(0, 6))}


def chosen(rows: list[Row]):
    logits = torch.stack([row.logits for row in rows])
    padded = torch.cat([logits, torch.full((len(rows), 3), 99.0)], 1)[:, :VOCAB]  # rows that are not side by side
    return choose_tokens(padded, [row.sampler.row(row.ids) for row in rows], [len(row.ids) for row in rows])


@pytest.mark.parametrize("crowd", [1, 2, 60])
def test_any_mixture_chooses_what_each_row_chooses_alone(crowd):
    rng = random.Random(torch.seed() % 2**32)
    rows = [Row(rng, **some(rng)) for _ in range(crowd)]
    for _ in range(6):  # penalties see the tokens that were chosen
        tokens, logprobs = chosen(rows)
        assert tokens == [row.choose() for row in rows]
        for row, token, entries in zip(rows, tokens, logprobs):
            count = row.sampler.params.logprobs
            if count is None:
                assert entries is None
            else:
                expected = top_logprobs(row.logits, token, count)
                assert list(entries) == list(expected)
                assert [rank for _, rank in entries.values()] == [rank for _, rank in expected.values()]
                assert [one for one, _ in entries.values()] == pytest.approx([one for one, _ in expected.values()])
            row.ids.append(token)


def test_a_row_does_not_depend_on_those_beside_it():
    rng = random.Random(3)
    rows = [Row(rng, temperature=1.0, **({"top_p": 0.9} if at % 2 else {})) for at in range(20)]
    together, _ = chosen(rows)
    assert together == [chosen([row])[0][0] for row in rows]


def test_draws_have_the_distribution():
    """Over 4,000 places, the counts of five tokens: chi-square with four degrees of freedom, beyond 23.5 once in 10,000
    runs, and the places are always the same."""
    logits = torch.full((VOCAB,), -torch.inf)
    logits[:5] = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.1]).log()
    asked = Sampler(SamplingParams(seed=11)).row([])
    tokens, _ = choose_tokens(logits.expand(4000, -1), [asked] * 4000, range(4000))
    counts = torch.bincount(torch.tensor(tokens), minlength=5).double()
    expected = 4000 * torch.tensor([0.1, 0.2, 0.3, 0.3, 0.1]).double()
    assert len(counts) == 5
    assert float(((counts - expected) ** 2 / expected).sum()) < 23.5


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_left_to_the_rows_own_sampler(broken):
    rng = random.Random(5)
    rows = [Row(rng, temperature=temperature, logprobs=1) for temperature in (0, 1.0, 1.0, 0)]
    for row in rows[1:3]:
        row.logits[:] = broken
    tokens, logprobs = chosen(rows)
    assert tokens == [rows[0].choose(), LEFT, LEFT, rows[3].choose()]
    assert [entries is None for entries in logprobs] == [False, True, True, False]


def test_logits_that_parameters_make_infinite_are_left_too():
    rng = random.Random(6)
    rows = [Row(rng, temperature=0.01), Row(rng, temperature=0, repetition_penalty=1e-3), Row(rng)]
    for row in rows[:2]:
        row.logits[row.ids[0]] = 1e38
    tokens, _ = chosen(rows)
    assert tokens == [LEFT, LEFT, rows[2].choose()]
    for row in rows[:2]:
        with pytest.raises(RequestError, match="not finite"):
            row.choose()


def test_counts_of_a_growing_list():
    counts, ids, rng = TokenCounts(), [], random.Random(1)
    for _ in range(30):
        ids += [rng.randrange(300) for _ in range(rng.randrange(20))]
        tokens, times = counts.of(ids)
        assert tokens.tolist() == list(dict.fromkeys(ids))
        assert times.tolist() == [ids.count(token) for token in tokens.tolist()]
