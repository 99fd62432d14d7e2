"""Draws on a GPU, in a kernel and by torch: those of the host, bit for bit."""

from __future__ import annotations

import torch
from test_randomness import places
from triton_draws import draws, one_draw

from saccade.randomness import uniform


def test_a_gpu_draws_what_the_host_draws():
    there = places(100_000)
    expected = uniform(*there)
    on_gpu = tuple(part.cuda() for part in there)
    assert torch.equal(draws(*on_gpu).cpu(), expected)
    assert torch.equal(uniform(*on_gpu).cpu(), expected)


def test_a_gpu_draws_the_same_from_plain_numbers():
    for place in ((0, 0, 0), (1, 2, 3), (2**63 - 1, 127, 2**31 - 1), (2**32, 2**32 + 1, 2**40)):
        assert one_draw(*place, device="cuda") == uniform(*place)
