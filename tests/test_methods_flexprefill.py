"""FlexPrefill: what gamma promises, planted lines are found, budgets and the query-aware test mean what they say."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from covering import covered
from helpers import Planted, mass_of, planted_heads, run_method

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.flexprefill import FlexPrefill
from saccade.ops.scores import block_sums, slash_sums
from saccade.selection import Blocks, Dense, Shape

PATTERNS = {
    "lines": Planted(columns=(7, 301), slashes=(13, 190), blocks=()),
    "blocks": Planted(columns=(), slashes=(), blocks=(3, 9)),
    "flat": Planted(sink=0.0, columns=(), slashes=(), blocks=(), strength=0.0),
    "sink": Planted(sink=12.0, columns=(), slashes=(), blocks=()),
}


def chunk_of(rows: int, n: int, pattern: str = "lines", seed: int = 0, heads: int = 4, kv_heads: int = 2):
    q, k, v = planted_heads(heads, kv_heads, n, seed=seed, pattern=PATTERNS[pattern])
    return q, k, KVView.from_tensors(k, v), Chunk.of(q[:, n - rows :], KVView.from_tensors(k, v))


def exact(gamma: float = 0.9, **options) -> FlexPrefill:
    """Without a floor, by blocks and all vertical-slash unless ``options`` say otherwise."""
    return FlexPrefill(gamma=gamma, **{"tau": 0.0, "block_size": 64, "min_budget": 0, "lines": "block", **options})


@covered(
    {
        "pattern": PATTERNS,
        "gamma": [0.3, 0.6, 0.9, 0.95, 0.99],
        ("rows", "n"): [(700, 700), (200, 700), (65, 640), (5, 700), (1, 700), (130, 450)],
        "options": [{"lines": "block"}, {"lines": "token"}, {"tau": 1.0}],
    }
)
def test_every_head_keeps_gamma_of_the_representative_rows(pattern, gamma, rows, n, options):
    """Eq. 3 on the rows that were looked at, the last block of rows of the chunk, on average over them; query-aware
    heads (tau=1) too."""
    q, k, view, _ = chunk_of(rows, n, pattern, seed=rows)
    for size in (64, 128):
        used = run_method(exact(gamma, block_size=size, **options), "prefill", q, view, rows)[2]
        looked_at = min(rows, size)
        mass = mass_of(q[:, -looked_at:], k, used.mask()[:, -looked_at:]).mean(1)
        assert (mass >= gamma - 1e-5).all()


@pytest.mark.parametrize("gamma", [0.5, 0.9])
def test_query_aware_heads_keep_gamma_where_pooling_is_exact(gamma):
    """Keys and queries constant inside blocks: the pooled estimate is the attention, so the rows keep gamma overall."""
    rng = torch.Generator().manual_seed(1)
    q = torch.randn(4, 8, 1, 32, generator=rng).expand(4, 8, 64, 32).flatten(1, 2)
    k = 2 * torch.randn(2, 8, 1, 32, generator=rng).expand(2, 8, 64, 32).flatten(1, 2)
    view = KVView.from_tensors(k.contiguous(), torch.randn(2, 512, 32, generator=rng))
    method = exact(gamma, tau=1.0)
    assert method.head_kinds(Chunk.of(q, view)).all()
    used = run_method(method, "prefill", q, view, 512)[2].mask()
    # The diagonal block is half causal, which pooling cannot see: weigh blocks as the method does, by the last row.
    last_rows = torch.arange(63, 512, 64)
    mass = mass_of(q, k, used)[:, last_rows]
    assert (mass.mean(1) >= gamma - 1e-5).all()


@pytest.mark.parametrize("rows", [1, 5, 64, 200, 700])
def test_the_diagonal_and_the_first_block_are_always_read(rows):
    for tau in (0.0, 1.0):
        q, _, view, _ = chunk_of(rows, 700)
        used = run_method(exact(0.1, tau=tau), "prefill", q, view, rows)[2]
        assert isinstance(used, Blocks)
        mask = used.block_mask()
        for j in range(used.q_blocks):
            assert mask[:, j, used.first_q_block + j].all()
            assert mask[:, j, 0].all()


def test_a_planted_column_and_slash_are_covered_on_every_row():
    columns, slashes = (7, 301), (13, 190)
    q, _, view, _ = chunk_of(700, 700, "lines", seed=3)
    for options in ({"block_size": 64}, {"block_size": 128}, {"lines": "token"}):
        mask = run_method(exact(0.9, **options), "prefill", q, view, 700)[2].mask()
        for column in columns:
            assert mask[:, column:, column].all()
        for slash in slashes:
            assert torch.diagonal(mask, -slash, 1, 2).all()


def test_a_slash_on_a_block_border_is_covered():
    for slash in (63, 64, 65, 127, 128, 129):
        q, k, v = planted_heads(
            2, 2, 640, seed=slash, pattern=Planted(sink=0.0, columns=(), slashes=(slash,), blocks=())
        )
        mask = run_method(exact(0.8), "prefill", q, KVView.from_tensors(k, v), 640)[2].mask()
        assert torch.diagonal(mask, -slash, 1, 2).all()


@covered(
    {("tau", "lines"): [(0.0, "block"), (0.0, "token"), (1.0, "block")], "pattern": PATTERNS, "min_budget": [0, 256]}
)
def test_monotone_in_gamma(tau, lines, pattern, min_budget):
    """More weight asked for never drops a key, with or without a floor."""
    for rows in (460, 130):
        q, _, view, _ = chunk_of(rows, 460, pattern, seed=5)
        before = None
        for gamma in (0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 1.0):
            mask = run_method(exact(gamma, tau=tau, lines=lines, min_budget=min_budget), "prefill", q, view, rows)[
                2
            ].mask()
            assert before is None or not (before & ~mask).any(), gamma
            before = mask


def test_a_floor_does_not_trade_one_kind_of_line_for_another():
    """One heavy and one middling slash beside many light columns: at a small gamma the floor must not admit a block
    that a larger gamma, whose columns fill the floor, leaves out again."""
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        n = 640
        weights = torch.full((64, n), 1e-4)
        weights += torch.rand(10, generator=rng).repeat_interleave(64)[None] * 0.02
        rows = torch.arange(64)
        for slash, share in ((100, 3.0), (260, 1.5)):
            weights[rows, n - 64 + rows - slash] += share
        shape = Shape.suffix(1, 1, n, n)
        weights = weights * shape.causal_mask()[-64:]
        before = None
        for gamma in (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
            method = exact(gamma, min_budget=256)
            columns = block_sums(weights.sum(0), 64)
            slashes = block_sums(slash_sums(weights[None], n - 64)[0], 64)
            mask = method._keep(method._vertical_slash(columns, slashes, 0, 10), 0)
            assert before is None or not (before & ~mask).any(), gamma
            before = mask


def test_monotone_in_the_minimum_budget():
    q, _, view, _ = chunk_of(700, 700, "lines", seed=6)
    for tau in (0.0, 1.0):
        before = None
        for least in (0, 64, 128, 256, 512):
            mask = run_method(exact(0.5, tau=tau, min_budget=least), "prefill", q, view, 700)[2].mask()
            assert before is None or not (before & ~mask).any(), least
            before = mask


@pytest.mark.parametrize("tau", [0.0, 1.0])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_query_block_meets_the_minimum_budget(tau, pattern):
    """At least ceil(min_budget / block) blocks a query block, or all that are causal."""
    for least in (100, 256, 500):
        for rows in (700, 130, 1):
            q, _, view, _ = chunk_of(rows, 700, pattern, seed=7)
            used = run_method(exact(0.05, tau=tau, min_budget=least), "prefill", q, view, rows)[2]
            assert isinstance(used, Blocks)
            counts = used.block_mask().sum(-1)
            causal = used.first_q_block + 1 + torch.arange(used.q_blocks)
            assert (counts >= causal.clamp(max=-(-least // 64))).all(), (least, rows)


@pytest.mark.parametrize("tau", [0.0, 1.0])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("most", [64, 128, 256, 320])
def test_no_query_block_exceeds_the_maximum_budget(tau, pattern, most):
    """At most max_budget // block blocks a query block; the two forced blocks win."""
    for rows in (700, 130, 1):
        q, _, view, _ = chunk_of(rows, 700, pattern, seed=8)
        used = run_method(exact(0.99, tau=tau, max_budget=most), "prefill", q, view, rows)[2]
        assert isinstance(used, Blocks)
        mask = used.block_mask()
        assert (mask.sum(-1) <= max(most // 64, 2)).all()
        for j in range(used.q_blocks):
            assert mask[:, j, used.first_q_block + j].all()
            assert mask[:, j, 0].all()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_tau_decides_the_kind_of_head(pattern):
    _, _, _, chunk = chunk_of(200, 700, pattern, seed=9)
    assert not FlexPrefill(tau=0.0).head_kinds(chunk).any()
    assert FlexPrefill(tau=1.0).head_kinds(chunk).all()
    kinds = [FlexPrefill(tau=tau, block_size=64).head_kinds(chunk) for tau in (0.05, 0.1, 0.2, 0.4, 0.83)]
    for narrow, wide in pairwise(kinds):
        assert not (narrow & ~wide).any()


@pytest.mark.parametrize(("rows", "n"), [(200, 700), (5, 130), (64, 192)])
def test_the_divergence_is_the_root_jsd_by_hand(rows, n):
    q, k, view, chunk = chunk_of(rows, n, "lines", seed=10)
    looked_at = min(64, rows)
    distances = []
    for head in range(4):
        keys, tail = k[head // 2].double(), q[head, n - looked_at : n].double()
        scores = tail @ keys.T / math.sqrt(32)
        for row in range(looked_at):
            scores[row, n - looked_at + row + 1 :] = -math.inf
        weights = torch.softmax(scores, -1).mean(0)
        true = [float(part.sum()) for part in weights.split(64)]
        pooled = torch.stack([part.mean(0) for part in keys.split(64)])
        guess = torch.softmax(pooled @ tail.mean(0) / math.sqrt(32), -1).tolist()
        total = 0.0
        for p, r in zip(guess, true):
            middle = (p + r) / 2
            total += 0.5 * sum(x * math.log(x / middle) for x in (p, r) if x > 0)
        distances.append(math.sqrt(total))
    assert 0 <= min(distances) <= max(distances) <= math.sqrt(math.log(2))
    for tau in sorted(distances):  # the measured divergence lies between tau's that tell it apart
        low = FlexPrefill(tau=max(0.0, tau - 1e-4), block_size=64).head_kinds(chunk)
        high = FlexPrefill(tau=tau + 1e-4, block_size=64).head_kinds(chunk)
        at = distances.index(tau)
        assert not low[at]
        assert high[at]
        assert view.length == n


@pytest.mark.parametrize(("n", "dense"), [(127, True), (128, True), (129, False), (256, False)])
def test_short_contexts_are_dense(n, dense):
    _, _, _, chunk = chunk_of(n, n)
    assert isinstance(exact(0.5).select_prefill(chunk), Dense) == dense


@pytest.mark.parametrize(("n", "dense"), [(300, True), (320, True), (321, False)])
def test_contexts_within_the_minimum_budget_are_dense(n, dense):
    _, _, _, chunk = chunk_of(50, n)
    assert isinstance(exact(0.5, min_budget=300).select_prefill(chunk), Dense) == dense


def test_each_head_decides_for_itself():
    """Rewriting one query head leaves the other heads' blocks alone."""
    q, k, v = planted_heads(4, 2, 700, seed=11)
    other = q.clone()
    other[2] = planted_heads(4, 2, 700, seed=99)[0][2]
    view = KVView.from_tensors(k, v)
    a, b = (run_method(exact(0.7, tau=0.1), "prefill", one, view, 300)[2].mask() for one in (q, other))
    assert torch.equal(a[[0, 1, 3]], b[[0, 1, 3]])
    assert not torch.equal(a[2], b[2])


@pytest.mark.parametrize(
    "options",
    [
        {"gamma": -0.1},
        {"gamma": 1.1},
        {"gamma": True},
        {"tau": 2.0},
        {"tau": "x"},
        {"block_size": 32},
        {"block_size": 64.0},
        {"min_budget": -1},
        {"min_budget": 1.5},
        {"max_budget": 64},
        {"max_budget": 512, "min_budget": 1024},
        {"lines": "row"},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        FlexPrefill(**options)


def test_lines_are_tokens_unless_blocks_are_asked_for():
    assert FlexPrefill() == FlexPrefill(lines="token")
    q, k, v = planted_heads(4, 2, 700, noise=0.6)
    chunk, options = Chunk.of(q, KVView.from_tensors(k, v)), {"min_budget": 128, "gamma": 0.8}
    assert isinstance(FlexPrefill(**options, lines="block").select_prefill(chunk), Blocks)
    assert not isinstance(FlexPrefill(**options).select_prefill(chunk), Blocks)
