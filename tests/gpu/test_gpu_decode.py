"""The Triton decode kernels on a GPU against float64 and the reference loop, outputs poisoned first."""

from __future__ import annotations

import pytest
import torch
from gpu_helpers import agrees, data, random_blocks
from helpers import planted_heads

from saccade.kv.view import KVView
from saccade.methods.base import Query
from saccade.methods.psa import PSA
from saccade.ops import Call, attend, run
from saccade.ops.triton.common import arrivals, kept_zeros
from saccade.ops.triton.decode import attend_decode
from saccade.ops.triton.dispatch import key_lists, pages_of
from saccade.ops.triton.progressive import attend_progressive
from saccade.selection import Dense, Ranking, Tokens
from saccade.selection.forms import Rule


@pytest.mark.parametrize(("head_dim", "dtype"), [
    (64, torch.bfloat16), (80, torch.float16), (96, torch.bfloat16), (128, torch.bfloat16), (256, torch.bfloat16),
    (128, torch.float32),
])  # fmt: skip
@pytest.mark.parametrize("n", [5, 4001])
def test_dense_decode(head_dim, dtype, n):
    q, k, v, view, shape = data(8, 2, 1, n, head_dim, dtype)
    agrees(q, k, v, view, Dense(shape))


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize(("size", "units"), [(32, 2), (64, 2), (32, 8), (32, 1)])
def test_block_decode(size, units, structured):
    q, k, v, view, shape = data(8, 2, 1, 4001, 128, structured=structured)
    agrees(q, k, v, view, random_blocks(shape, size, units))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("units", [2, 8])
def test_token_decode(units, head_dim):
    q, k, v, view, shape = data(8, 2, 1, 4001, head_dim)
    lists = [torch.randperm(4001)[: 100 + 9 * unit] for unit in range(units)]
    agrees(q, k, v, view, Tokens.from_lists(shape, lists))


@pytest.mark.parametrize("splits", [1, 3, 16, 125])
def test_calls_in_a_row_wait_for_each_other(splits):
    """Calls in a row whose queries come from the call before: none may start to read before that has ended."""
    q, _, _, view, shape = data(8, 2, 1, 4001, 128)
    blocks = random_blocks(shape, 32, 2).to(q.device)
    pages, lists = pages_of([view]), key_lists(blocks)

    def chain():
        row, results = q[:, 0][None], []
        for _ in range(10):
            row = attend_decode(row, pages, lists, scale=1.0, splits=splits)[0]
            results.append(row)
        return torch.stack(results)

    first = chain()
    for row, got in zip([q[:, 0][None], *first[:-1]], first):
        expected = attend(row[0][:, None], view, blocks, backend="reference", scale=1.0)[0][:, 0]
        assert float((got[0] - expected).float().norm() / expected.float().norm()) < 2e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain()
    for _ in range(20):
        assert torch.equal(chain(), first)
        replayed.zero_()
        graph.replay()
        assert torch.equal(replayed, first)


@pytest.mark.parametrize("rest", ["min", "last_max"])
@pytest.mark.parametrize("epsilon", [0.5, 0.9, 0.999])
def test_the_progressive_kernel_stops_where_the_loop_stops(rest, epsilon):
    """float32 storage, so that both decide by the same numbers."""
    q, k, v = planted_heads(8, 2, 20000, 64, 0)
    view = KVView.from_tensors(k.cuda(), v.cuda(), shuffle_seed=0)
    q = q[:, -1:].cuda()
    ranking = PSA(epsilon=epsilon, rest=rest).select_decode(Query.of(q, view), None)
    assert isinstance(ranking, Ranking)
    expected = run(Call.of(q, view, ranking), "reference")
    for _ in range(20):
        got = run(Call.of(q, view, ranking))
        assert got.backend == "triton"
        torch.testing.assert_close(got.out, expected.out, atol=1e-4, rtol=1e-4)
        assert torch.equal(got.used.block_mask().cpu(), expected.used.block_mask().cpu())
    assert not kept_zeros(q.device, 1).any()
    assert not arrivals(q.device, 2).any()


@pytest.mark.parametrize(("readers", "heads"), [(1, 8), (3, 8), (32, 8), (64, 2), (16, 6)])
def test_any_number_of_readers_gives_the_same(readers, heads):
    q, k, v = planted_heads(heads, 2, 20000, 64, 1)
    view = KVView.from_tensors(k.cuda(), v.cuda(), shuffle_seed=0)
    q = q[:, -1:].cuda()
    ranking = PSA(epsilon=0.9, rank="cuboid").select_decode(Query.of(q, view), None)
    expected, _ = attend(q, view, ranking, backend="reference")
    rule = Rule(ranking.epsilon, ranking.microbatch, ranking.rest, ranking.stop)
    for _ in range(20):
        out, *_ = attend_progressive(
            q[:, 0][None], pages_of([view]), ranking.always, ranking.order, 32, rule, scale=64**-0.5, readers=readers
        )
        torch.testing.assert_close(out[0], expected[:, 0], atol=1e-4, rtol=1e-4)
