"""The invariants of every method (docs/algorithms.md 0), run over the matrix in helpers.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from covering import spread
from helpers import Planted, generator, mass_of, phases_and_rows, planted_heads, run_method
from method_matrix import MATRIX, MethodCase

from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.registry import METHODS
from saccade.ops import attend
from saccade.selection import Band, Dense, Shape, Tokens, Tri

BY_NAME = {case.name: case for case in MATRIX}
SPARSE = [pytest.param(case, method, id=method.text) for case in MATRIX for method in case.methods()]
PURE = [one for one in SPARSE if not one.values[0].reweights]  # those that read sets of keys
GROUPS = ((2, 2), (4, 2), (4, 1))


def data(heads: int, kv_heads: int, n: int, seed: int = 0, **options) -> tuple[torch.Tensor, torch.Tensor, KVView]:
    q, k, v = planted_heads(heads, kv_heads, n, seed=seed, **options)
    return q, k, KVView.from_tensors(k, v, shuffle_seed=seed)


def assert_dense(method, phase, q, view, rows):
    out, lse, _ = run_method(method, phase, q, view, rows)
    expected, expected_lse = attend(q[:, -rows:], view, backend="reference")
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


def test_the_matrix_covers_the_registry():
    assert set(BY_NAME) == set(METHODS)


@pytest.mark.parametrize("case", [case for case in MATRIX if case.dense is not None], ids=lambda case: case.name)
@pytest.mark.parametrize("n", [1, 63, 64, 65, 129, 333])
def test_dense_limit(case: MethodCase, n: int):
    """Contract 7: every method has a setting that equals dense attention, at any length."""
    method = case.type(**case.dense)
    heads, kv_heads = GROUPS[n % len(GROUPS)]
    q, _, view = data(heads, kv_heads, n, seed=n)
    for phase, rows in phases_and_rows(method, (1, min(n, 50))):
        assert_dense(method, phase, q, view, rows)


@pytest.mark.parametrize(
    ("case", "m", "n"),
    [
        pytest.param(case, m, m + delta, id=f"{case.name}-{m}{delta:+d}")
        for case in MATRIX
        if case.budget is not None
        for m in (32, 64, 128, 320)
        for delta in (-1, 0)
    ],
)
def test_i1_a_budget_of_all_keys_is_dense(case: MethodCase, m: int, n: int):
    method = case.type(**case.budget(m))
    q, _, view = data(4, 2, n, seed=m)
    for phase, rows in phases_and_rows(method, (1, 5, n)):
        assert_dense(method, phase, q, view, rows)


@pytest.mark.parametrize(("case", "method"), SPARSE)
def test_the_sparse_settings_leave_keys_out(case: MethodCase, method):
    """Without this the tests below would prove nothing."""
    if case.name == "dense":
        return
    q, _, view = data(4, 2, 700, pattern=Planted(sink=3.0, columns=(7, 401), slashes=(5,), blocks=()))
    densities = [run_method(method, phase, q, view, rows)[2].density() for phase, rows in phases_and_rows(method)]
    assert min(densities) < 0.9, densities


@pytest.mark.parametrize(("case", "method"), SPARSE)
def test_i2_indices_are_sorted_unique_causal_at_every_boundary(case: MethodCase, method):
    """run_method checks each selection and what was really read; every row must have a key and no NaN may come out."""
    lengths = {m + delta for m in case.boundary for delta in (-1, 0, 1)} | {1, 2, 5, 300}
    for n, (heads, kv_heads) in zip(sorted(lengths), itertools.cycle(GROUPS)):
        q, _, view = data(heads, kv_heads, n, seed=n)
        for phase, rows in phases_and_rows(method, {1, min(5, n), n}):
            out, lse, used = run_method(method, phase, q, view, rows)
            assert used.shape == Shape.suffix(heads, kv_heads, rows, n)
            assert torch.isfinite(out).all()
            assert torch.isfinite(lse).all(), "a row without keys"
            assert (used.mask() & ~used.shape.causal_mask()).sum() == 0


@pytest.mark.parametrize(("case", "method"), PURE)
def test_any_appended_chunk_equals_attention_over_its_own_mask(case: MethodCase, method):
    """What a method selects for 1, 5 or 200 of 700 rows is what the op computes, and nothing else of q matters."""
    q, _, view = data(8, 2, 700, seed=7)
    for phase, rows in phases_and_rows(method):
        out, lse, used = run_method(method, phase, q, view, rows)
        spelt = Tokens.from_mask(used.shape, used.mask())
        again, again_lse = attend(q[:, -rows:], view, spelt, backend="reference")
        torch.testing.assert_close(out, again, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse, again_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("case", "method"), SPARSE)
def test_selection_is_deterministic_and_blind_to_block_layout(case: MethodCase, method):
    q, k, v = planted_heads(4, 2, 500, seed=8)
    results = []
    for block_size, shuffle in ((32, None), (16, 5), (128, 1)):
        view = KVView.from_tensors(k, v, block_size, shuffle_seed=shuffle)
        results.append([run_method(method, phase, q, view, rows) for phase, rows in phases_and_rows(method)])
    for other in results[1:]:
        for (out, _, used), (out_b, _, used_b) in zip(results[0], other):
            assert torch.equal(used.mask(), used_b.mask())
            torch.testing.assert_close(out, out_b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("case", "method"), SPARSE)
def test_later_keys_do_not_change_what_rows_may_read(case: MethodCase, method):
    """A view cut at n must behave as a store that holds n tokens: chunked prefill sees the past alone."""
    q, k, v = planted_heads(4, 2, 500, seed=9)
    whole, cut = KVView.from_tensors(k, v), KVView.from_tensors(k[:, :450], v[:, :450])
    for phase, rows in phases_and_rows(method, (1, 60)):
        a = run_method(method, phase, q[:, :450], whole.upto(450), rows)
        b = run_method(method, phase, q[:, :450], cut, rows)
        assert torch.equal(a[2].mask(), b[2].mask())
        torch.testing.assert_close(a[0], b[0])


@pytest.mark.parametrize(
    ("name", "settings"), [pytest.param(case.name, case.units, id=case.name) for case in MATRIX if case.units]
)
def test_i5_equal_heads_make_granularity_immaterial(name, settings):
    q, _, view = data(8, 2, 300, seed=10, equal_heads=True)
    masks = {}
    for unit, options in settings.items():
        method = BY_NAME[name].type(**options)
        masks[unit] = [run_method(method, phase, q, view, rows)[2].mask() for phase, rows in phases_and_rows(method)]
    first, *others = masks.values()
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other))


@pytest.mark.parametrize(("case", "method"), SPARSE)
def test_equal_heads_of_a_group_read_equal_keys(case: MethodCase, method):
    q, _, view = data(8, 2, 300, seed=10, equal_heads=True)
    for phase, rows in phases_and_rows(method):
        mask = run_method(method, phase, q, view, rows)[2].mask().unflatten(0, (2, 4))
        assert torch.equal(mask, mask[:, :1].expand_as(mask))


@pytest.mark.parametrize(("case", "method"), SPARSE)
def test_i6_no_selector_beats_exact_top_k(case: MethodCase, method):
    """With as many keys, row by row, the oracle retains at least as much softmax mass."""
    q, k, view = data(4, 2, 400, seed=11)
    for phase, rows in phases_and_rows(method, (1, 20)):
        used = run_method(method, phase, q, view, rows)[2].mask()
        scores = (q[:, -rows:] @ k.repeat_interleave(2, 0).transpose(1, 2)) / q.shape[-1] ** 0.5
        shape = Shape.suffix(4, 2, rows, 400)
        order = scores.masked_fill(~shape.causal_mask(), -torch.inf).argsort(dim=-1, descending=True)
        oracle = torch.zeros_like(used)
        for head, row in itertools.product(range(4), range(rows)):
            oracle[head, row, order[head, row, : int(used[head, row].sum())]] = True
        assert (mass_of(q[:, -rows:], k, used) <= mass_of(q[:, -rows:], k, oracle) + 1e-6).all()


@pytest.mark.parametrize("sinks_local", [(0, 0), (4, 16)])
def test_i6_topk_is_that_oracle_given_its_forced_keys(sinks_local):
    """Random competitors with the same number of keys and the same forced keys never hold more mass."""
    sinks, local = sinks_local
    q, k, view = data(4, 2, 400, seed=12)
    method = METHODS["topk"](k=40, sinks=sinks, local=local)
    used = run_method(method, "decode", q, view, 1)[2].mask()
    assert used.sum(-1).eq(40).all()
    assert used[..., :sinks].all()
    assert used[..., 400 - local :].all()
    best = mass_of(q[:, -1:], k, used)
    rng = generator(0)
    for _ in range(20):
        rival = torch.zeros_like(used)
        rival[..., :sinks] = rival[..., 400 - local :] = True
        for head in range(4):  # swap a few of the oracle's own keys for others: the hardest rivals
            free = (used[head, 0] & ~rival[head, 0]).nonzero()[:, 0]
            kept = free[torch.randperm(free.numel(), generator=rng)[: free.numel() - 3]]
            rival[head, 0, kept] = True
            rest = (~rival[head, 0]).nonzero()[:, 0]
            rival[head, 0, rest[torch.randperm(rest.numel(), generator=rng)[:3]]] = True
        assert rival.sum(-1).eq(40).all()
        assert (mass_of(q[:, -1:], k, rival) <= best + 1e-9).all()


@pytest.mark.parametrize(("one", "strength"), spread([one.values for one in PURE], [1.0, 8.0]))
def test_i7_the_error_obeys_the_truncation_bound(one, strength):
    """|o_sparse - o_dense| <= 2 (1 - mass) max |v|, per row."""
    _, method = one
    pattern = Planted(sink=strength, columns=(11, 333), slashes=(3,), blocks=(4,), strength=strength)
    q, k, view = data(4, 2, 600, seed=13, pattern=pattern)
    for phase, rows in phases_and_rows(method, (1, 40)):
        out, _, used = run_method(method, phase, q, view, rows)
        dense, _ = attend(q[:, -rows:], view, backend="reference")
        bound = 2 * (1 - mass_of(q[:, -rows:], k, used.mask())) * view.values().abs().max()
        assert ((out - dense).abs().amax(-1) <= bound + 1e-4).all()


@pytest.mark.parametrize(("case", "method"), PURE)
def test_bfloat16_storage_works(case: MethodCase, method):
    q, k, v = (part.bfloat16() for part in planted_heads(4, 2, 300, seed=14))
    view = KVView.from_tensors(k, v)
    for phase, rows in phases_and_rows(method, (1, 30)):
        out, lse, used = run_method(method, phase, q, view, rows)
        exact, _ = attend(q[:, -rows:].float(), (k.float(), v.float()), Tokens.from_mask(used.shape, used.mask()))
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), exact, atol=3e-2, rtol=2e-2)
        assert torch.isfinite(lse).all()


@pytest.mark.parametrize(("case", "method"), SPARSE)
def test_scale_and_softcap_reach_the_selection(case: MethodCase, method):
    """With a tiny scale attention is flat: an exact selector must see the softmax that the op computes."""
    q, _, view = data(4, 2, 300, seed=15)
    for phase, rows in phases_and_rows(method, (1, 30)):
        if phase != "prefill":
            continue
        chunk = Chunk.of(q[:, -rows:], view, scale=1e-6, softcap=2.0)
        selection = method.select_prefill(chunk)
        selection.check()
        assert selection.shape == chunk.shape


@pytest.mark.parametrize(("case", "method"), SPARSE)
def test_cost_is_counted_and_dense_costs_nothing(case: MethodCase, method):
    q, _, view = data(4, 2, 700, seed=16)
    for phase, rows in phases_and_rows(method):
        chunk = Chunk.of(q[:, -rows:], view)
        if phase == "prefill":
            selection = method.select_prefill(chunk)
        else:
            state = method.begin(chunk)
            chunk = Query.of(q[:, -rows:], view)
            selection = method.select_decode(chunk, state)
        assert min(chunk.cost.scored, chunk.cost.estimated) >= 0
        if isinstance(selection, (Dense, Band, Tri)) or case.free:
            assert chunk.cost.scored == chunk.cost.estimated == 0
        else:
            assert 0 < chunk.cost.scored + chunk.cost.estimated <= selection.shape.causal_pairs * 1.5
