"""Attention over keys in two places equals attention over all of them in one."""

from __future__ import annotations

import pytest
import torch
from helpers import generator

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.ops import Call, attend, run
from saccade.ops.hybrid import attend_hybrid
from saccade.selection import Candidates, Dense, Shape, Tokens
from saccade.selection.candidates import split_forced

HEADS, KV_HEADS, N, DIM, SINKS, LOCAL = 4, 2, 300, 32, 4, 9


def problem():
    rng = generator(0)
    q = torch.randn(HEADS, 1, DIM, generator=rng)
    k, v = torch.randn(2, KV_HEADS, N, DIM, generator=rng)
    inside = torch.zeros(N, dtype=torch.bool)
    inside[:SINKS] = inside[N - LOCAL :] = True

    def holding(mask):  # what a place does not hold is NaN there
        return KVView.from_tensors(*(part.masked_fill(~mask[:, None], torch.nan) for part in (k, v)), shuffle_seed=1)

    return q, KVView.from_tensors(k, v), holding(inside), holding(~inside), Shape.suffix(HEADS, KV_HEADS, 1, N)


def lists(per_head: int):
    rng = generator(1)
    parts = [torch.randperm(N - SINKS - LOCAL, generator=rng)[:per_head].sort().values + SINKS for _ in range(HEADS)]
    return torch.arange(HEADS + 1) * per_head, torch.cat(parts).to(torch.int32)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("kind", ["listed", "full", "idle"])
def test_forced_keys_near_and_candidates_far(kind, softcap):
    q, whole, near, far, shape = problem()
    offsets, indices = lists(40)
    budgets = torch.tensor([7, 40, 0, 12])
    selection = Candidates(shape, offsets, indices, budgets, SINKS, LOCAL)
    if kind == "full":
        selection = Candidates.all_keys(shape, HEADS, 25, SINKS, LOCAL)
    if kind == "idle":
        idle = torch.tensor([True, False, False, True])
        selection = Candidates(shape, offsets, indices, budgets, SINKS, LOCAL, None, idle, SINKS)
    expected = run(Call.of(q, whole, selection, softcap=softcap))
    both = attend_hybrid(q, near, far, *split_forced(selection), softcap=softcap)
    torch.testing.assert_close(both.out, expected.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(both.lse, expected.lse, atol=1e-5, rtol=1e-5)
    chosen = expected.used.unit_mask()[:, 0, SINKS : N - LOCAL]
    assert torch.equal(both.used.unit_mask()[:, 0, SINKS : N - LOCAL], chosen)


def test_any_two_selections_without_a_common_key():
    q, whole, near, far, shape = problem()
    ends = torch.cat([torch.arange(SINKS), torch.arange(N - LOCAL, N)])
    middle = torch.arange(SINKS, N - LOCAL)
    two = Tokens.from_lists(shape, [ends] * KV_HEADS), Tokens.from_lists(shape, [middle] * KV_HEADS)
    expected, expected_lse = attend(q, whole, Dense(shape))
    both = attend_hybrid(q, near, far, *two)
    torch.testing.assert_close(both.out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(both.lse, expected_lse, atol=1e-5, rtol=1e-5)


def test_heads_that_choose_together_cannot_be_split():
    shape = Shape.suffix(HEADS, KV_HEADS, 1, N)
    with pytest.raises(SaccadeError, match="unit='q_head'"):
        split_forced(Candidates.all_keys(shape, KV_HEADS, 5, SINKS, LOCAL))
