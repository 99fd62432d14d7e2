"""The choice among candidates on the device against the reference's, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)

from saccade.kv.view import KVView
from saccade.ops import Call, attend, run
from saccade.ops.candidates import choose as reference_choose
from saccade.ops.triton.candidates import choose
from saccade.ops.triton.weights import read_weights
from saccade.ops.weights import selected_weights
from saccade.selection import Candidates, Shape

SCALE = 0.2


def data(heads=4, kv_heads=2, n=300, head_dim=32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(heads, 1, head_dim, generator=rng)
    k, v = torch.randn(2, kv_heads, n, head_dim, generator=rng)
    return q, KVView.from_tensors(k, v, shuffle_seed=seed), Shape.suffix(heads, kv_heads, 1, n)


def lists(units, n, sinks, local, seed=1):
    rng = torch.Generator().manual_seed(seed)
    parts = [
        torch.randperm(n - sinks - local, generator=rng)[: 30 + 20 * u].sort().values + sinks for u in range(units)
    ]
    counts = torch.tensor([len(part) for part in parts])
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)), torch.cat(parts).to(torch.int32)


def same(got, expected):
    assert torch.equal(got.offsets, expected.offsets)
    assert torch.equal(got.indices[: expected.indices.numel()], expected.indices)


@pytest.mark.parametrize("units", [4, 2, 1])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_best_of_listed_candidates(units, softcap):
    """Several heads of a unit rank by their mean weights; a unit with fewer candidates than it may read takes all."""
    q, view, shape = data()
    offsets, indices = lists(units, 300, 4, 6)
    budgets = torch.tensor([17, 60, 5, 0])[:units]
    selection = Candidates(shape, offsets, indices, budgets, sinks=4, local=6)
    expected = reference_choose(q, view, selection, scale=SCALE, softcap=softcap)
    same(choose(q, view, selection, scale=SCALE, softcap=softcap), expected)
    same(choose(q, view, selection, scale=SCALE, softcap=softcap, room=200), expected)


@pytest.mark.parametrize("units", [4, 2])
@pytest.mark.parametrize("hidden", [(0, 0), (64, 160)])
def test_units_with_every_key_for_a_candidate_beside_lists(units, hidden):
    q, view, shape = data()
    offsets, indices = lists(units, 64, 4, 6)
    full = torch.arange(units) % 2 == 0
    spelt = torch.where(full, 0, offsets.diff())
    kept = torch.cat([indices[offsets[u] : offsets[u + 1]] for u in range(units) if not full[u]])
    offsets = torch.nn.functional.pad(spelt.cumsum(0), (1, 0))
    selection = Candidates(shape, offsets, kept, torch.full((units,), 21), sinks=4, local=6, full=full, hidden=hidden)
    same(choose(q, view, selection, scale=SCALE), reference_choose(q, view, selection, scale=SCALE))


def test_idle_heads_read_their_sinks_and_have_no_say():
    q, view, shape = data()
    offsets, indices = lists(2, 300, 4, 6)
    idle = torch.tensor([False, True, False, False])
    selection = Candidates(shape, offsets, indices, torch.tensor([9, 9]), 4, 6, None, idle, 4)
    same(choose(q, view, selection, scale=SCALE), reference_choose(q, view, selection, scale=SCALE))


def test_ties_go_to_the_lower_index():
    q, view, shape = data(heads=2, kv_heads=2)
    q = q.mul(4).round().div(4)  # sums of quarters are exact in any order, so that equal keys score alike
    keys = view.paged().k
    keys[:] = torch.where(torch.isnan(keys), keys, 1.0)
    selection = Candidates.all_keys(shape, 2, 10, sinks=2, local=3)
    got = choose(q, view, selection, scale=SCALE)
    expected = [0, 1, *range(2, 12), 297, 298, 299]
    assert got.indices.tolist() == expected * 2


def test_half_precision_storage_of_all_keys():
    q, view, shape = data(heads=4, kv_heads=1, n=200, head_dim=80)
    q, view = q.half(), KVView.from_tensors(view.keys().half(), view.values().half())
    selection = Candidates.all_keys(shape, 4, 31, sinks=2, local=8)
    got, expected = (fn(q, view, selection, scale=SCALE) for fn in (choose, reference_choose))
    assert torch.equal(got.offsets, expected.offsets)
    alike = torch.isin(got.indices, expected.indices)  # the last bits of a sum of products differ
    assert alike.float().mean() > 0.95


@pytest.mark.parametrize("units", [4, 2, 1])
def test_the_weights_of_what_was_read(units):
    q, view, shape = data()
    offsets, indices = lists(units, 300, 4, 6)
    selection = Candidates(shape, offsets, indices, torch.full((units,), 20), sinks=4, local=6)
    read = choose(q, view, selection, scale=SCALE)
    _, lse = attend(q, view, read, scale=SCALE, backend="reference")
    got = read_weights(q, view, read, lse, scale=SCALE)
    torch.testing.assert_close(got, selected_weights(q, view, read, lse, scale=SCALE), atol=1e-5, rtol=1e-5)


def test_the_front_door_chooses_on_the_kernels_and_gives_the_weights():
    q, view, shape = data()
    offsets, indices = lists(4, 300, 4, 6)
    idle = torch.tensor([False, True, False, False])
    rest = torch.where(idle, 0.3, -torch.inf), torch.ones(4, 32)
    selection = Candidates(shape, offsets, indices, torch.full((4,), 20), 4, 6, None, idle, 4, rest)
    call = Call.of(q, view, selection, scale=SCALE, want_weights=True)
    got, expected = run(call, "triton"), run(call, "reference")
    assert got.backend == "triton"
    torch.testing.assert_close(got.out, expected.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.lse, expected.lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.weights, expected.weights, atol=1e-5, rtol=1e-5)
