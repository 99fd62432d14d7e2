"""FlexPrefill beside its paper, as printed and as published: lines and pooled blocks derived by hand, and what both
lose."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Planted, mass_of, planted_heads, run_method
from oracles.flexprefill import distance_sums, fewest, pooled_pairs, published_blocks, weights_of

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.flexprefill import FlexPrefill
from saccade.methods.policy import Policy
from saccade.selection import Blocks, Dense, Lines, Mixed

LINES = Planted(columns=(7, 301), slashes=(13, 190), blocks=())
FLAT = Planted(sink=1.0, columns=(), slashes=(), blocks=(3,), strength=1.0)


def setup(rows: int, n: int, pattern: Planted = LINES, seed: int = 0, noise: float = 0.3):
    q, k, v = planted_heads(4, 2, n, seed=seed, pattern=pattern, noise=noise)
    view = KVView.from_tensors(k, v)
    return q, k, view, Chunk.of(q[:, n - rows :], view)


@pytest.mark.parametrize("gamma", [0.5, 0.9])
@pytest.mark.parametrize("rows", [450, 100, 20])
def test_lines_are_algorithm_3_by_hand(gamma, rows):
    n, size = 450, 64
    q, k, view, _ = setup(rows, n, seed=rows, noise=0.6)
    method = FlexPrefill(gamma=gamma, tau=0.0, block_size=size, min_budget=0)
    used = run_method(method, "prefill", q, view, rows)[2]
    assert isinstance(used, Lines)
    for head in range(4):
        weights = weights_of(q, k, head, min(rows, size))
        near = set(range(size))
        columns, distances = used.unit_lines(head)
        assert set(columns.tolist()) == near | set(fewest(weights.sum(0).tolist(), gamma))
        assert set(distances.tolist()) == near | set(fewest(distance_sums(weights), gamma))


@pytest.mark.parametrize("gamma", [0.3, 0.8, 0.95])
@pytest.mark.parametrize("rows", [700, 130, 1])
def test_lines_keep_gamma_and_find_planted_lines(gamma, rows):
    q, k, view, _ = setup(rows, 700)
    method = FlexPrefill(gamma=gamma, tau=0.0, min_budget=0, block_size=64)
    used = run_method(method, "prefill", q, view, rows)[2]
    assert isinstance(used, Lines)
    looked_at = min(rows, 64)
    assert (mass_of(q[:, -looked_at:], k, used.mask()[:, -looked_at:]).mean(1) >= gamma - 1e-5).all()
    if gamma == 0.95 and rows >= 64:
        for head in range(4):
            assert {7, 301} <= set(used.unit_lines(head)[0].tolist())
            assert {13, 190} <= set(used.unit_lines(head)[1].tolist())


@pytest.mark.parametrize(("least", "most"), [(0, 128), (200, None), (200, 200), (150, 300), (0, None)])
def test_budgets_hold_for_the_lines_of_a_head_together(least, most):
    for gamma in (0.1, 0.99):
        q, _, view, _ = setup(300, 700, noise=0.8)
        method = FlexPrefill(gamma=gamma, tau=0.0, block_size=64, min_budget=least, max_budget=most)
        used = run_method(method, "prefill", q, view, 300)[2]
        assert isinstance(used, Lines)
        for head in range(4):
            count = sum(part.numel() for part in used.unit_lines(head))
            assert count >= max(least, 128)
            assert most is None or count <= max(most, 128)


def test_lines_are_monotone_in_gamma():
    q, _, view, _ = setup(300, 700, noise=0.8)
    for tau in (0.0, 1.0):
        before = None
        for gamma in (0.0, 0.3, 0.6, 0.9, 0.99, 1.0):
            method = FlexPrefill(gamma=gamma, tau=tau, block_size=64, min_budget=200)
            mask = run_method(method, "prefill", q, view, 300)[2].mask()
            assert before is None or not (before & ~mask).any()
            before = mask


def test_query_aware_heads_are_algorithm_4_but_where_true_weights_are_known():
    """The heaviest pooled pairs of the chunk; in the query blocks of the representative rows the fewest key blocks that
    hold gamma of those rows' true weight."""
    q, k, view, _ = setup(300, 690, FLAT)
    used = run_method(FlexPrefill(gamma=0.6, tau=1.0, block_size=64, min_budget=0), "prefill", q, view, 300)[2]
    assert isinstance(used, Blocks)
    first, last = used.first_q_block, (9, 10)  # rows 626 .. 689 lie in blocks 9 and 10
    for head in range(4):
        pairs = pooled_pairs(q, k, head, 300, 64)
        wanted = {pairs[at][1:] for at in fewest([share for share, _, _ in pairs], 0.6)}
        weights = weights_of(q, k, head, 64).sum(0)
        true = fewest([float(part.sum()) for part in weights.split(64)], 0.6)
        wanted = {(i, j) for i, j in wanted if i not in last} | {(i, j) for i in last for j in true if j <= i}
        wanted |= {(i, j) for i in range(first, 11) for j in (0, i)}
        assert {(first + i, j) for i, j in used.block_mask()[head].nonzero().tolist()} == wanted


def test_heads_of_both_kinds_stand_side_by_side():
    q, k, v = planted_heads(4, 2, 700, pattern=LINES)
    flat = planted_heads(4, 2, 700, pattern=FLAT, noise=0.05)
    q[2:], k[1], v[1] = flat[0][2:], flat[1][1], flat[2][1]
    view = KVView.from_tensors(k, v)
    options = {"gamma": 0.8, "tau": 0.25, "block_size": 64, "min_budget": 0}
    kinds = FlexPrefill(**options).head_kinds(Chunk.of(q, view))
    assert kinds.tolist() == [False, False, True, True]
    used = run_method(FlexPrefill(**options), "prefill", q, view, 700)[2]
    assert isinstance(used, Mixed)
    blocks = run_method(FlexPrefill(**{**options, "tau": 1.0}), "prefill", q, view, 700)[2]
    lines = run_method(FlexPrefill(**{**options, "tau": 0.0}), "prefill", q, view, 700)[2]
    assert isinstance(blocks, Blocks)
    assert torch.equal(used.mask()[2:], blocks.mask()[2:])
    assert torch.equal(used.mask()[:2], lines.mask()[:2])


def test_without_flatten_every_query_block_reaches_gamma():
    """Keys and queries constant inside blocks: pooling is exact and the last row of a block sees its blocks whole."""
    rng = torch.Generator().manual_seed(1)
    q = 2 * torch.randn(4, 8, 1, 32, generator=rng).expand(4, 8, 64, 32).flatten(1, 2)
    k = 2 * torch.randn(2, 8, 1, 32, generator=rng).expand(2, 8, 64, 32).flatten(1, 2)
    view = KVView.from_tensors(k.contiguous(), torch.randn(2, 512, 32, generator=rng))
    least = {}
    for flatten in (True, False):
        method = FlexPrefill(gamma=0.8, tau=1.0, block_size=64, min_budget=0, flatten=flatten)
        used = run_method(method, "prefill", q, view, 512)[2]
        assert isinstance(used, Blocks)
        least[flatten] = float(mass_of(q, k, used.mask())[:, 63::64].min())
    assert least[False] >= 0.8 - 1e-5
    assert least[True] < 0.8  # the promise that the flat choice does not make


def test_without_flatten_query_blocks_choose_by_hand():
    q, k, view, _ = setup(300, 700, FLAT)
    method = FlexPrefill(gamma=0.6, tau=1.0, block_size=64, min_budget=0, flatten=False)
    used = run_method(method, "prefill", q, view, 300)[2]
    assert isinstance(used, Blocks)
    for head in range(4):
        for j in range(used.q_blocks - 1):  # the last one's true weights are known
            block = used.first_q_block + j
            mean = q[head, max(400, block * 64) : (block + 1) * 64].double().mean(0)
            keys = torch.stack([part.mean(0) for part in k[head // 2].double().split(64)])[: block + 1]
            shares = torch.softmax(keys @ mean / math.sqrt(32), 0).tolist()
            expected = {0, block} | set(fewest(shares, 0.6))
            assert set(used.block_mask()[head, j].nonzero()[:, 0].tolist()) == expected


def test_the_published_code_may_miss_gamma_where_ours_does_not():
    """Columns that lie scattered, one a block: T tokens become T // 128 + 1 blocks, which hold few of them."""
    columns = tuple(range(40, 640, 64))
    q, k, view, _ = setup(700, 700, Planted(sink=0.0, columns=columns, slashes=(), blocks=(), strength=10.0))
    method = FlexPrefill(gamma=0.9, tau=0.0, block_size=64, min_budget=0, lines="block")
    ours = run_method(method, "prefill", q, view, 700)[2].mask()
    theirs = torch.zeros(4, 11, 11, dtype=torch.bool)
    for head in range(4):
        aware, chosen = published_blocks(q, k, head, 700, 0.9, 0.0, 64, 1, 11)
        assert not aware
        theirs[head][tuple(torch.tensor(sorted(chosen)).T)] = True
    theirs = theirs.repeat_interleave(64, 1).repeat_interleave(64, 2)[:, :700, :700].tril()
    kept = [mass_of(q[:, -64:], k, mask[:, -64:]).mean(1) for mask in (ours, theirs)]
    assert (kept[0] >= 0.9 - 1e-5).all()
    assert (kept[1] < 0.6).all()


def test_gamma_one_is_dense_and_not_in_the_published_code():
    """The constant 128: with blocks of 64 all columns become half of the blocks."""
    q, k, _, chunk = setup(1280, 1280, FLAT)
    assert isinstance(FlexPrefill(gamma=1.0, tau=0.0, block_size=64, min_budget=0).select_prefill(chunk), Dense)
    assert len(published_blocks(q, k, 0, 1280, 1.0, 0.0, 64, 1, 20)[1]) < 0.9 * 20 * 21 / 2


@pytest.mark.parametrize("options", [{"mode": "literal"}, {"mode": "paper"}, {"mode": "reference"}, {"flatten": 1}])
def test_bad_options_are_refused(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        FlexPrefill(**options)
    if options.get("mode") in ("paper", "reference"):
        with pytest.raises(PolicyError, match=r"Leave mode out: mode=fixed is the only one"):
            Policy.parse(f"flexprefill(mode={options['mode']})")
