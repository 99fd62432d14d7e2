"""Token lines on a GPU: what is chosen, and attention to it inside a window and outside."""

from __future__ import annotations

import pytest
import torch
from gpu_helpers import agrees, data
from helpers import planted_heads

from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.flexprefill import FlexPrefill
from saccade.ops.scores import line_sums, row_weights, slash_sums
from saccade.ops.triton import line_blocks
from saccade.selection import Band, Blocks, Cone, Dense, Lines, Mixed, Shape, Tri, Windowed


def lines_of(shape: Shape, units: int, columns: int) -> Lines:
    rng, last = torch.Generator().manual_seed(columns), shape.q_start + shape.q_len
    runs = (torch.arange(3, last, 190)[:, None] + torch.arange(20)).flatten()
    far = torch.arange(40, last, 350)
    return Lines.from_lists(
        shape,
        [torch.randperm(last, generator=rng)[:columns] for _ in range(units)],
        [(runs[runs < last], far)[unit % 2] for unit in range(units)],
    )


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("q_len", "n"), [(1000, 1000), (333, 1500)])
def test_lines_in_bf16_agree_with_float64(head_dim, q_len, n):
    q, k, v, view, shape = data(8, 2, q_len, n, head_dim)
    lines = lines_of(shape, 8, 60)
    agrees(q, k, v, view, lines)
    for cone in (Cone(0.6, sinks=70, local=40), Cone(0.9, sinks=0, local=7, block_size=128)):
        agrees(q, k, v, view, Windowed(lines, cone))
    empty = Lines.from_lists(shape, [torch.tensor([40])] * 8, [torch.empty(0, dtype=torch.int32)] * 8)
    if q_len == n:
        own = Windowed(lines_of(shape, 8, 0), Cone(0.5, sinks=0))
        assert int(own.emptied(1).numel()) > 0
        agrees(q, k, v, view, own, softcap=20.0)
    else:
        agrees(q, k, v, view, empty)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float16, 96), (torch.bfloat16, 64)])
@pytest.mark.parametrize(("q_len", "n", "softcap"), [(1000, 1000, None), (333, 1500, 20.0), (700, 1333, None)])
@pytest.mark.parametrize("steps", [0.0, 2.0])
def test_tiles_of_many_lines_read_masked_blocks(q_len, n, softcap, steps, dtype, head_dim, monkeypatch):
    """All tiles, or those for which it is less; half of the heads have many lines."""
    q, k, v, view, shape = data(8, 2, q_len, n, head_dim, dtype)
    rng = torch.Generator().manual_seed(n)
    many = [torch.randperm(n, generator=rng)[: n // 6] for _ in range(8)]
    few = torch.tensor([0, 131])
    columns = [(many[unit][:: unit + 1], few)[unit % 2] for unit in range(8)]
    lines = Lines.from_lists(shape, columns, [(many[7 - unit], few)[unit % 2] for unit in range(8)])
    monkeypatch.setattr("saccade.ops.triton.lines.LONG", 1)
    monkeypatch.setattr(line_blocks, "STEPS", steps)
    agrees(q, k, v, view, lines, **({} if softcap is None else {"softcap": softcap}))


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_sums_by_key_and_by_distance(rows):
    q, _, _, view, shape = data(8, 2, 700, 3000, 128, structured=True)
    found = [line_sums(q, view, shape, rows, 0.1) for _ in range(5)]
    host = KVView.from_tensors(view.keys().cpu(), view.values().cpu())
    for g in range(2):
        weights = row_weights(q.cpu(), host, shape, g, torch.arange(700 - rows, 700), 0.1)
        heads = slice(4 * g, 4 * g + 4)
        torch.testing.assert_close(found[0][0][heads].cpu(), weights.sum(1), atol=1e-3, rtol=1e-2)
        torch.testing.assert_close(found[0][1][heads].cpu(), slash_sums(weights, 3000 - rows), atol=1e-3, rtol=1e-2)
    assert all(torch.equal(one[0], found[0][0]) and torch.equal(one[1], found[0][1]) for one in found)


@pytest.mark.parametrize("q_len", [2048, 600])
@pytest.mark.parametrize("options", [{}, {"tau": 0.15}, {"max_budget": 512, "min_budget": 64}])
def test_token_lines_are_chosen_as_on_the_host(q_len, options):
    q, k, v = planted_heads(8, 2, 2048, 64, 0, noise=0.6)
    method = FlexPrefill(**{"lines": "token", "min_budget": 256, "gamma": 0.8, "block_size": 64, **options})
    on_host = method.select_prefill(Chunk.of(q[:, -q_len:], KVView.from_tensors(k, v)))
    chunk = Chunk.of(q[:, -q_len:].cuda(), KVView.from_tensors(k.cuda(), v.cuda()))
    found = method.select_prefill(chunk)
    assert isinstance(found, Mixed)
    assert torch.equal(found.pairs().cpu(), found.to(torch.device("cpu")).mask().flatten(1).sum(1))
    differs = found.to(torch.device("cpu")).mask() ^ on_host.mask()
    assert differs.sum() <= 0.01 * on_host.mask().sum()
    agrees(chunk.q, k, v, chunk.kv, found.to(torch.device("cpu")))
    for _ in range(10):
        again = method.select_prefill(chunk)
        assert torch.equal(again.pairs(), found.pairs())


def test_bands_tri_shapes_and_everything_inside_a_window():
    q, k, v, view, shape = data(8, 2, 700, 2000, 128)
    tri = Tri(shape, window=300, sinks=70, dense_rows=90)
    agrees(q, k, v, view, tri)
    for cone in (Cone(0.6, sinks=70, local=40), Cone(0.9, sinks=0, local=7, block_size=128)):
        for inner in (tri, Band(shape, window=1500, sinks=3), Dense(shape)):
            agrees(q, k, v, view, Windowed(inner, cone))


def test_lines_are_tokens_on_a_gpu_too_unless_blocks_are_asked_for():
    q, k, v = planted_heads(8, 2, 2048, 64, 0, noise=0.6)
    options = {"min_budget": 256, "gamma": 0.8, "block_size": 64}
    found = {}
    for named in ({}, {"lines": "token"}, {"lines": "block"}):
        chunk = Chunk.of(q.cuda(), KVView.from_tensors(k.cuda(), v.cuda()))
        found[named.get("lines")] = FlexPrefill(**options, **named).select_prefill(chunk)
    assert torch.equal(found[None].mask(), found["token"].mask())
    assert isinstance(found[None], Mixed)
    assert isinstance(found["block"], Blocks)
