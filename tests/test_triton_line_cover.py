"""The greedy cover's kernel against the host's, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from helpers import Planted, planted_heads

from saccade.kv.view import KVView
from saccade.methods.loopserve.line_cover import cover_lines, cover_rows
from saccade.methods.loopserve.triton_line_cover import cover
from saccade.ops.triton.row_weights import row_weights
from saccade.selection import Shape


def causal_weights(m: int, n: int, first: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random softmax rows with a heavy column and a heavy diagonal, at ``m`` of the last positions."""
    rng = torch.Generator().manual_seed(seed)
    positions = (torch.randperm(n - first, generator=rng)[:m] + first).sort().values
    scores = 2.0 * torch.randn(m, n, generator=rng)
    scores[:, 7] += 4.0
    scores[torch.arange(m), (positions - 5).clamp(min=0)] += 5.0
    scores.masked_fill_(torch.arange(n) > positions[:, None], -torch.inf)
    return torch.softmax(scores, -1), positions


@pytest.mark.parametrize(("n", "first"), [(60, 0), (90, 55)])
@pytest.mark.parametrize("share", [0.0, 0.6, 0.95])
def test_the_lines_are_those_of_the_host(n, first, share):
    weights, positions = causal_weights(12, n, first, seed=3)
    made = [weights, weights.square() / weights.square().sum(-1, keepdim=True)]
    columns, distances = cover(torch.stack(made).clone(), positions, first, share)
    for head, weights in enumerate(made):
        expected = cover_lines(weights.clone(), positions, first, share)
        assert columns[head].nonzero()[:, 0].tolist() == sorted(expected.columns.tolist())
        assert distances[head].nonzero()[:, 0].tolist() == sorted(expected.distances.tolist())


def test_a_share_of_all_takes_lines_until_all_is_recovered():
    weights, positions = causal_weights(5, 40, 0, seed=1)
    columns, distances = cover(weights[None].clone(), positions, 0, 1.0)
    left = weights.masked_fill(columns[0].bool()[None, :], 0.0)
    distance = positions[:, None] - torch.arange(40)
    left[distances[0].bool()[distance.clamp(min=0)] & (distance >= 0)] = 0.0
    assert left.sum() < 1e-5


def test_a_head_whose_weights_are_no_numbers_reads_everything():
    """Then its output is NaN as well, and the request ends; the other head's lines are its own."""
    weights, positions = causal_weights(5, 40, 0, seed=1)
    spoilt = weights.clone()
    spoilt[2, 3] = torch.nan
    columns, distances = cover(torch.stack([spoilt, weights]), positions, 0, 0.8)
    assert columns[0].all()
    expected = cover_lines(weights.clone(), positions, 0, 0.8)
    assert columns[1].nonzero()[:, 0].tolist() == sorted(expected.columns.tolist())
    assert distances[1].nonzero()[:, 0].tolist() == sorted(expected.distances.tolist())


def test_heads_of_a_chunk():
    q, k, v = planted_heads(2, 1, 150, 16, 0, Planted(columns=(7,), slashes=(13,), blocks=()))
    q, view, shape = q[:, -60:], KVView.from_tensors(k, v), Shape.suffix(2, 1, 60, 150)
    rows = torch.arange(0, 60, 5)
    weights = row_weights(q, view, shape, range(2), rows, 0.25)
    columns, distances = cover(weights, shape.q_start + rows, shape.q_start, 0.8)
    for head, (expected_columns, expected_distances) in enumerate(cover_rows(q, view, shape, rows, 0.8, 0.25)):
        assert columns[head].nonzero()[:, 0].tolist() == expected_columns.sort().values.tolist()
        assert distances[head].nonzero()[:, 0].tolist() == expected_distances.sort().values.tolist()
