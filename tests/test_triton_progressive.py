"""PSA's progressive kernel against the reference loop, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from helpers import Planted, planted_heads

from saccade.kv.view import KVView
from saccade.methods.base import Query
from saccade.methods.psa import PSA
from saccade.ops import Call, attend, run
from saccade.ops.triton.common import arrivals, kept_zeros
from saccade.ops.triton.dispatch import pages_of
from saccade.ops.triton.progressive import attend_progressive
from saccade.selection import Ranking, Shape
from saccade.selection.forms import Rule


def problem(heads=4, kv_heads=2, n=700, head_dim=32, seed=0):
    q, k, v = planted_heads(heads, kv_heads, n, head_dim, seed, Planted(columns=(7, 201), slashes=(13,), blocks=(3,)))
    return q[:, -1:], KVView.from_tensors(k, v, block_size=32, shuffle_seed=seed)


def both(q, view, ranking, **options):
    got, expected = (run(Call.of(q, view, ranking, **options), name) for name in ("triton", "reference"))
    assert got.backend == "triton"
    torch.testing.assert_close(got.out, expected.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.lse, expected.lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.coverage, expected.coverage, atol=1e-5, rtol=1e-5)
    masks = [done.used.block_mask() for done in (got, expected)]
    assert torch.equal(*masks)
    return int(masks[0].sum()), masks[0].numel()


@pytest.mark.parametrize(
    ("size", "microbatch", "n", "rest", "stop"),
    [
        (32, 4, 700, "last_max", "all"),
        (32, 4, 700, "min", "all"),
        (16, 1, 200, "min", "mean"),
        (16, 3, 200, "last_max", "mean"),
        (64, 2, 705, "min", "all"),
    ],
)
def test_the_kernel_stops_where_the_loop_stops(rest, stop, size, microbatch, n):
    q, view = problem(n=n)
    read = []
    for epsilon in (0.5, 0.9, 1.0):
        method = PSA(epsilon=epsilon, block_size=size, microbatch=microbatch, rest=rest, stop=stop, rank="cuboid")
        ranking = method.select_decode(Query.of(q, view), None)
        assert isinstance(ranking, Ranking)
        read.append(both(q, view, ranking)[0])
    assert read == sorted(read)
    assert read[0] < read[-1] == 2 * -(-n // size)  # epsilon=1 reads everything


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_any_number_of_readers_gives_the_same(readers):
    q, view = problem()
    ranking = PSA(epsilon=0.9, rank="cuboid").select_decode(Query.of(q, view), None)
    expected, expected_lse = attend(q, view, ranking, backend="reference")
    rule = Rule(ranking.epsilon, ranking.microbatch, ranking.rest, ranking.stop)
    scale = q.shape[-1] ** -0.5
    out, lse, *_ = attend_progressive(
        q[:, 0][None],
        pages_of([view]),
        ranking.always,
        ranking.order,
        32,
        rule,
        scale=scale,
        readers=readers,
        held_back=2,
    )
    torch.testing.assert_close(out[0], expected[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[0], expected_lse[:, 0], atol=1e-5, rtol=1e-5)
    assert not kept_zeros(q.device, 1).any()
    assert not arrivals(q.device, 2).any()


def test_what_the_last_step_needed_changes_no_result():
    """Whether nobody knows, it is right, too little, too much, or beyond all there is; and the next step knows."""
    q, view = problem(n=400)
    ranking = PSA(epsilon=0.8, block_size=16, microbatch=2, rank="cuboid").select_decode(Query.of(q, view), None)
    rule = Rule(ranking.epsilon, 2, ranking.rest, ranking.stop)
    call = (q[:, 0][None], pages_of([view]), ranking.always, ranking.order, 16, rule)
    wanted = attend_progressive(*call, scale=0.2, readers=3)
    ahead = -(-ranking.always.shape[1] // 2)
    right = wanted.used + ahead
    for before in (torch.zeros(2), right, right // 2, right + 9, torch.full((2,), 10**6)):
        known = before.to(torch.int32)
        got = attend_progressive(*call, scale=0.2, readers=3, before=known)
        assert torch.equal(known, right)
        assert torch.equal(got.used, wanted.used)
        assert bool((got.read >= right).all())
        torch.testing.assert_close((got.out, got.lse, got.coverage), (wanted.out, wanted.lse, wanted.coverage))
    assert not kept_zeros(q.device, 1).any()


def test_more_microbatches_than_one_window_and_a_softcap():
    q, view = problem(2, 1, 700, 32)
    ranking = PSA(epsilon=0.9999, block_size=16, microbatch=1, rest="min", rank="cuboid").select_decode(
        Query.of(q, view), None
    )
    assert ranking.order.shape[1] > 32
    both(q, view, ranking)
    both(q, view, ranking, softcap=3.0)


def test_nothing_always_read():
    q, view = problem(2, 1, 300, 32)
    order = torch.tensor([[3, 1, 0, 2, 8, 9]], dtype=torch.int32)
    ranking = Ranking(Shape.suffix(2, 1, 1, 300), 32, torch.empty(1, 0, dtype=torch.int32), order, 0.9, 2)
    both(q, view, ranking)
