"""MagicPIG against its definition, and its promise: over hash draws, the sums of all keys."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import planted_heads

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.ops import Call, attend, run
from saccade.selection import Cone, Dense, Sampled, cut, without
from saccade_contrib.magicpig import MagicPIG


def problem(n: int = 90, seed: int = 1, heads: int = 4, kv_heads: int = 2, spread: float = 1.0):
    rng = torch.Generator().manual_seed(seed)
    q = spread * torch.randn(heads, 1, 16, generator=rng)
    k = spread * torch.randn(kv_heads, n, 16, generator=rng) + torch.randn(kv_heads, 1, 16, generator=rng)
    return q, k, KVView.from_tensors(k, torch.randn(kv_heads, n, 16, generator=rng), shuffle_seed=seed)


def select(method: MagicPIG, q, view, layer: int = 1):
    query = Query.of(q, view, layer=layer, layers=layer + 1)
    return method.select_decode(query, method.begin(Chunk.of(q, view, layer=layer, layers=layer + 1))), query


def signs(vector: list[float], planes: np.ndarray) -> list[bool]:
    return [float(np.dot(np.float32(vector), plane)) > 0 for plane in planes.T]


@pytest.mark.parametrize(("bits", "tables", "sinks", "local"), [(2, 4, 4, 8), (3, 12, 0, 1), (1, 2, 5, 20)])
def test_keys_that_agree_in_two_tables_are_drawn_and_corrected(bits, tables, sinks, local):
    n, layer = 90, 17
    q, k, view = problem(n)
    method = MagicPIG(dense_upto=0, bits=bits, tables=tables, sinks=sinks, local=local, seed=3)
    selection, query = select(method, q, view, layer)
    assert isinstance(selection, Sampled)
    selection.check()
    drawn = 0
    for head, got in enumerate(selection.tokens.lists()):
        g = head // 2
        # one draw for the run of 16 layers that layer 17 is in
        planes = np.random.default_rng([3, 1, g]).standard_normal((16, tables * bits), dtype=np.float32)
        mean = k[g, sinks : n - local].mean(0)
        asked = signs(q[head, 0].tolist(), planes)
        expected = dict.fromkeys((*range(sinks), *range(n - local, n)), 0.0)
        for i in range(sinks, n - local):
            code = signs((k[g, i] - mean).tolist(), planes)
            agreed = sum(code[t * bits : (t + 1) * bits] == asked[t * bits : (t + 1) * bits] for t in range(tables))
            if agreed >= 2:
                a, b = q[head, 0].double(), (k[g, i] - mean).double()
                p = (1 - math.acos(float(a @ b / a.norm() / b.norm())) / math.pi) ** bits
                chance = 1 - sum(math.comb(tables, m) * p**m * (1 - p) ** (tables - m) for m in (0, 1))
                expected[i] = -math.log(chance + 1e-4)
                drawn += 1
        assert got.tolist() == sorted(expected)
        first, last = selection.tokens.offsets[head : head + 2].tolist()
        assert selection.bias[first:last].tolist() == pytest.approx([expected[i] for i in sorted(expected)], abs=1e-4)
    assert drawn > 0
    assert (query.cost.estimated, query.cost.scored) == (n - local - sinks, -(-drawn // 4))


def test_over_hash_draws_the_sums_are_those_of_all_keys():
    """Numerator and denominator: exp(lse) and exp(lse) * out, means over 400 draws against dense ones."""
    q, _, view = problem(60, heads=2, kv_heads=1, spread=0.5)
    dense, dense_lse = attend(q, view, backend="reference")
    sums, totals, plain = [], [], []
    for seed in range(400):
        selection, _ = select(MagicPIG(dense_upto=0, bits=2, tables=6, sinks=2, local=4, seed=seed), q, view)
        out, lse = attend(q, view, selection)
        totals.append(torch.exp(lse))
        plain.append(torch.exp(attend(q, view, selection.tokens)[1]))
        sums.append(torch.exp(lse)[..., None] * out)
    for draws, exact in (
        (torch.stack(totals), torch.exp(dense_lse)),
        (torch.stack(sums), torch.exp(dense_lse)[..., None] * dense),
    ):
        error = (draws.mean(0) - exact).abs()
        assert (error <= 4 * draws.std(0) / math.sqrt(400) + 2e-3 * exact.abs().max()).all()
    assert (torch.stack(plain).mean(0) < 0.97 * torch.exp(dense_lse)).all()  # what the bias mends


def test_many_tables_are_dense():
    q, _, view = problem(90)
    selection, _ = select(MagicPIG(dense_upto=0, bits=1, tables=600), q, view)
    assert selection.density() == 1.0
    out, lse = attend(q, view, selection)
    dense, dense_lse = attend(q, view, backend="reference")
    torch.testing.assert_close(out, dense, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(lse, dense_lse, atol=1e-3, rtol=1e-3)


def test_layers_and_contexts_that_are_dense():
    q, _, view = problem(90)
    kinds = {layer: type(select(MagicPIG(dense_upto=0), q, view, layer)[0]) for layer in (0, 1, 15, 16, 17, 32)}
    assert kinds == {0: Dense, 1: Sampled, 15: Sampled, 16: Dense, 17: Sampled, 32: Dense}
    assert isinstance(select(MagicPIG(dense_upto=0, sinks=4, local=86), q, view)[0], Dense)


def test_generated_keys_are_read_exactly():
    q, k, v = planted_heads(2, 1, 90, seed=2)
    method = MagicPIG(dense_upto=0, bits=3, tables=10, sinks=1, local=5)
    state = method.begin(Chunk.of(q[:, 69:70], KVView.from_tensors(k[:, :70], v[:, :70]), layer=1))
    selection = method.select_decode(Query.of(q[:, 89:90], KVView.from_tensors(k, v), layer=1), state)
    for head, got in enumerate(selection.tokens.lists()):
        assert set(range(65, 90)) <= set(got.tolist())
        bias = selection.row_bias(head, 0, 1)[0]
        assert not bias[65:].any()
        assert not bias[:1].any()


def test_windows_and_evictions_leave_the_correction_of_what_stays():
    q, _, view = problem(200)
    selection, _ = select(MagicPIG(dense_upto=0, bits=2, tables=10, local=8), q, view)
    gone = torch.zeros(1, 100, dtype=torch.bool)
    gone[0, 50:70] = True
    for less, hidden in (
        (cut(selection, Cone(0.5, 4)), slice(4, 99)),
        (without(selection, gone), slice(50, 70)),
    ):
        assert not less.mask()[..., hidden].any()
        assert less.mask().sum() < selection.mask().sum()
        ran = run(Call.of(q, view, less))
        lse = ran.lse
        assert ran.backend == "reference"
        for head in range(4):
            seen = less.mask()[head, 0]
            logits = q[head, 0] @ view.keys()[head // 2].T / 4 + selection.row_bias(head, 0, 1)[0]
            assert float(lse[head, 0]) == pytest.approx(float(torch.logsumexp(logits[seen], 0)), abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"bits": 0}, {"bits": 16}, {"tables": 1}, {"sinks": -1}, {"local": 0}, {"dense_every": -1}, {"seed": 0.5}],
)
def test_bad_options(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        MagicPIG(**options)
