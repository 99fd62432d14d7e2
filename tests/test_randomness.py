"""Draws keyed by (seed, sample, position): the published words of Philox, and what a draw must not depend on."""

from __future__ import annotations

import pytest
import torch

from saccade.randomness import WORD, fresh_seed, philox, place_words, uniform

# counter, key -> words: Random123's known answers (kat_vectors, philox4x32 with 10 rounds)
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = torch.tensor([0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 0x299F31D0A4093822])
LARGEST = 2**63 - 1


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_words_are_the_published_ones(counter, key, words):
    assert philox(counter, key) == words
    as_tensors = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(int(word) for word in as_tensors) == words


def places(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seeds, samples and positions int64 [count]; the first ones at the ends of their ranges."""
    rng = torch.Generator().manual_seed(seed)
    parts = torch.randint(0, LARGEST, (3, count), generator=rng) >> torch.randint(0, 62, (3, count), generator=rng)
    parts[0, : len(SEEDS)] = SEEDS
    parts[1:, :4] = torch.tensor([[0, LARGEST, 2**32, 5], [LARGEST, 0, 5, 2**32]])
    return parts[0], parts[1], parts[2]


def test_many_at_once_are_one_by_one():
    seeds, samples, positions = places(500)
    drawn = uniform(seeds, samples, positions)
    assert drawn.dtype == torch.float64
    one_by_one = [uniform(*place) for place in zip(seeds.tolist(), samples.tolist(), positions.tolist())]
    assert drawn.tolist() == one_by_one
    assert 0.0 <= min(one_by_one) < max(one_by_one) < 1.0


def test_seed_sample_and_position_each_make_another_draw():
    """Also where they differ in their upper halves alone, and where they trade values."""
    ends = (0, 1, 2, 2**32, 2**33)
    grid = [(seed, sample, position) for seed in ends for sample in ends for position in ends]
    assert len({place_words(*place) for place in grid}) == len(grid)


def test_draws_are_uniform_along_each_axis():
    count, bins = 20_000, 50
    zeros, running = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    for axis in range(3):
        place = [zeros, zeros, zeros]
        place[axis] = running
        drawn = uniform(*place)
        found = torch.bincount((drawn * bins).long(), minlength=bins).double()
        assert float(((found - count / bins) ** 2 / (count / bins)).sum()) < 85.4  # 49 degrees of freedom, 1 in 1000
        neighbours = torch.corrcoef(torch.stack([drawn[1:], drawn[:-1]]))[0, 1]
        assert abs(float(neighbours)) < 0.025


def test_fresh_seeds_differ_and_fit():
    seeds = {fresh_seed() for _ in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed <= LARGEST for seed in seeds)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_a_draw_is_the_first_53_bits_of_its_words(counter, key, words):
    position, sample, seed = (low | high << 32 for low, high in (counter[:2], counter[2:], key))
    assert uniform(seed, sample, position) == int(f"{words[0]:032b}{words[1]:032b}"[:53], 2) / 2**53
