"""Draws inside a kernel, under Triton's interpreter: those of the host, bit for bit."""

from __future__ import annotations

import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from test_randomness import places
from triton_draws import draws, one_draw

from saccade.randomness import uniform


def test_a_kernel_draws_what_the_host_draws():
    seeds, samples, positions = places(300)
    assert torch.equal(draws(seeds, samples, positions), uniform(seeds, samples, positions))


def test_a_kernel_draws_the_same_from_plain_numbers():
    for place in ((0, 0, 0), (1, 2, 3), (2**63 - 1, 127, 2**31 - 1), (2**32, 2**32 + 1, 2**40)):
        assert one_draw(*place) == uniform(*place)
