"""Draws on a GPU, by torch: those of the host, bit for bit."""

from __future__ import annotations

import torch
from test_randomness import places

from saccade.randomness import uniform


def test_a_gpu_draws_what_the_host_draws():
    there = places(100_000)
    expected = uniform(*there)
    on_gpu = tuple(part.cuda() for part in there)
    assert torch.equal(uniform(*on_gpu).cpu(), expected)
