"""vAttention: an unbiased estimate whose sample is as large as its variance asks for; and certificates that hold where
sample variances do not show what is missing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from certified_pairs import MADE, Count, check, recorded, true_output
from engine_helpers import make
from tiny_models import random_ids

from saccade import SamplingParams
from saccade.errors import PolicyError, RequestError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.vattention import VAttention
from saccade.methods.vattention.certified import ValueNorms, draws_needed
from saccade.methods.vattention.places import Middle, upper_bounds
from saccade.selection import Dense, Sampled

SMALL = {"sinks": 16, "local": 32, "heavy": 32, "block_size": 16}


def step(method, pair, softcap=None):
    q, k, v = pair
    kv = KVView.from_tensors(k, v, 32, shuffle_seed=2)
    query = Query.of(q, kv, softcap=softcap)
    return query, method.select_decode(query, method.begin(Chunk.of(q, kv)))


@pytest.mark.parametrize("certify", [False, True])
def test_sums_over_what_is_read_are_those_of_all_keys_on_average(certify):
    pair = MADE["topics" if certify else "flat"](torch.Generator().manual_seed(3), 2048)
    q, k, _ = pair
    scores = (q[:, 0].unflatten(0, (2, -1)) @ k.mT / math.sqrt(32)).flatten(0, 1).double()
    totals, sizes = [], []
    for seed in range(120):
        _, selection = step(VAttention(**SMALL, epsilon=0.2, certify=certify, seed=seed), pair)
        assert isinstance(selection, Sampled)
        offsets, at = selection.tokens.offsets.tolist(), selection.tokens.indices.long()
        lists = [slice(a, b) for a, b in itertools.pairwise(offsets)]
        totals.append([float(torch.exp(scores[h, at[own]] + selection.bias[own]).sum()) for h, own in enumerate(lists)])
        sizes.append([own.stop - own.start for own in lists])
    totals, true = torch.tensor(totals), torch.exp(scores).sum(1)
    spread = totals.std(0) / math.sqrt(len(totals))
    assert ((totals.mean(0) - true).abs() <= 4 * spread + 1e-4 * true).all()
    assert torch.tensor(sizes).double().mean() < 0.6 * 2048
    if certify:  # by weights: the sum itself errs nothing
        assert ((totals - true).abs() <= 1e-3 * true).all()


def test_a_sample_spread_over_the_order_of_bounds_errs_less_than_free_draws(monkeypatch):
    pair = MADE["topics"](torch.Generator().manual_seed(5), 2048)
    q, k, _ = pair
    scores = (q[:, 0].unflatten(0, (2, -1)) @ k.mT / math.sqrt(32)).flatten(0, 1).double()
    errors, drawn = {}, VAttention._drawn
    for spread in (True, False):
        monkeypatch.setattr(VAttention, "_drawn", lambda *a, spread=False, own=spread: drawn(*a, spread=spread and own))
        found = []
        for seed in range(60):
            _, selection = step(VAttention(**SMALL, epsilon=0.3, seed=seed), pair)
            mask = selection.tokens.offsets.tolist()
            at = selection.tokens.indices.long()
            lists = [slice(a, b) for a, b in itertools.pairwise(mask)]
            sums = [float(torch.exp(scores[h, at[own]] + selection.bias[own]).sum()) for h, own in enumerate(lists)]
            found.append(torch.tensor(sums) / torch.exp(scores).sum(1) - 1)
        errors[spread] = torch.stack(found).square().mean().sqrt()
    assert 0 < errors[True] < 0.8 * errors[False]


def test_the_heaviest_keys_of_a_step_and_those_after_them_are_read_in_the_next():
    """In blocks that their bounds alone would not have chosen; not by another step, and not after the prompt."""
    method = VAttention(**{**SMALL, "heavy": 64}, epsilon=0.9, follow=2)
    rng = torch.Generator().manual_seed(6)
    k, v = torch.randn(2, 2, 1024, 32, generator=rng) / 4
    q = torch.randn(4, 1, 32, generator=rng)
    k[0, 415] = 3 * q[0, 0]  # the last of its block
    k[1, 200] = 3 * q[2, 0]
    kv = KVView.from_tensors(k[:, :1000], v[:, :1000], 32)
    state = method.begin(Chunk.of(q, kv))
    assert state.keys.tolist() == [[-1, -1], [-1, -1]]
    for length, other in ((1000, q), (1001, -q), (1003, -q)):
        kv = KVView.from_tensors(k[:, :length], v[:, :length], 32)
        selection = method.select_decode(Query.of(other, kv), state)
        offsets, at = selection.tokens.offsets.tolist(), selection.tokens.indices
        read = [set(at[a:b].tolist()) for a, b in itertools.pairwise(offsets)]
        if length == 1000:
            assert 415 in state.keys[0]
            assert 200 in state.keys[1]
            assert state.length == 1000
        else:
            blocks = [set(range(400, 432)) <= read[0], set(range(192, 208)) <= read[2]]
            assert all(blocks) == (length == 1001)
    with pytest.raises(PolicyError, match="follow=2"):
        VAttention(certify=True, follow=2)
    assert method.certified(0.1, 0.1).follow == 0


def test_the_sample_keeps_its_promise_where_sums_are_normal():
    count, rng = Count(), torch.Generator().manual_seed(4)
    for seed in range(40):
        check(VAttention(**SMALL, epsilon=0.15, delta=0.1, seed=seed), MADE["flat"](rng, 2048), count)
    assert count.holds(0.12)
    assert count.read / count.pairs < 0.5
    loose = Count()
    check(VAttention(**SMALL, epsilon=0.4), MADE["flat"](rng, 2048), loose)
    assert loose.read / loose.pairs < count.read / count.pairs / 2  # a looser bound takes fewer keys


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_no_logit_exceeds_its_blocks_bound(softcap):
    for name, made in MADE.items():
        q, k, v = made(torch.Generator().manual_seed(5), 512)
        for dtype in (torch.float32, torch.bfloat16):
            kv = KVView.from_tensors(k.to(dtype), v.to(dtype), 32)
            query = Query.of(q.to(dtype), kv, softcap=softcap)
            for g in range(2):
                bound = upper_bounds(query, kv.summary("minmax", 16), g)
                scores = query.q[4 * g : 4 * g + 4, 0].double() @ kv.keys()[g].double().T / math.sqrt(32)
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                assert (scores.unflatten(1, (-1, 16)).amax(-1) <= bound + 1e-6).all(), name


def test_values_norms_follow_the_keys_and_are_cut_with_them():
    k, v = torch.randn(2, 2, 100, 32)
    norms = ValueNorms.of(KVView.from_tensors(k[:, :70], v[:, :70]), 16)
    norms.follow(KVView.from_tensors(k, v))
    each = v[:, :96].norm(dim=-1).unflatten(1, (-1, 16))
    torch.testing.assert_close(norms.bounds, torch.stack([each.amin(-1), each.amax(-1)]))
    norms.truncate(80)
    assert norms.bounds.shape[2] == 5


def test_so_many_draws_and_not_one_less():
    for ceiling, second in ((3.0, 1.0), (0.2, 0.01), (50.0, 90.0)):
        count = draws_needed(ceiling, second, 3.7)

        def bound(b, c=ceiling, s=second):
            return 2 * c * 3.7 / b + math.sqrt(2 * s * 3.7 / b)

        assert bound(count) <= 1 + 1e-9
        assert count == 1 or bound(count - 1) > 1
    assert draws_needed(math.inf, 1.0, 3.7) > 2**60
    assert draws_needed(1.0, math.nan, 3.7) > 2**60


@pytest.mark.parametrize("name", MADE)
def test_certificates_hold_on_made_keys(name):
    count, rng = Count(), torch.Generator().manual_seed(6)
    for seed in range(15):
        check(VAttention(epsilon=0.2, delta=0.2, certify=True, **SMALL, seed=seed), MADE[name](rng, 2048), count)
    assert count.holds(0.2), (count.broken, count.pairs)
    assert sum(count.kinds.values()) == count.pairs
    assert count.read < 0.95 * count.pairs


def test_where_a_sample_sees_nothing_the_normal_law_fails_and_the_certificate_does_not():
    """The heavy key lies in a block that others push out of the heavy ones, and a base sample hardly ever meets it."""
    rng = torch.Generator().manual_seed(7)
    certified, normal = Count(), Count()
    for seed in range(12):
        pair = MADE["heavy_key"](rng, 2048)
        settings = {**SMALL, "epsilon": 0.2, "delta": 0.1, "seed": seed}
        check(VAttention(**settings), pair, normal)
        check(VAttention(**settings, certify=True), pair, certified)
    assert not normal.holds(0.1)
    assert certified.holds(0.1)
    assert certified.read < 0.9 * certified.pairs


def test_bounds_alone_never_break():
    """One block has all the weight and the extremes of the others say so: nothing is drawn, nothing can fail."""
    count = Count()
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        k, v = 0.05 * torch.randn(2, 2, 2048, 32, generator=rng)
        q = torch.ones(8, 1, 32)
        k[:, 512:528] += 3.0
        check(VAttention(epsilon=0.05, delta=0.01, certify=True, **SMALL), (q, k, v + 1.0), count)
    assert count.kinds == {"bounds": 40}
    assert count.broken == 0
    assert count.read < 0.1 * count.pairs


def test_certificates_hold_on_a_models_own_queries(tiny_llama):
    count = Count()
    for seed, (pair, scale) in enumerate(recorded(make(tiny_llama), random_ids(600, 1), 8)):
        method = VAttention(epsilon=0.2, delta=0.2, certify=True, sinks=4, local=16, heavy=16, block_size=8, seed=seed)
        check(method, pair, count, scale)
    assert count.pairs == 8 * 3 * 4
    assert count.holds(0.2)


def test_a_request_is_told_what_was_certified(tiny_llama):
    llm = make(tiny_llama)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, certify=(0.2, 0.1), audit=1.0, seed=1)
    policy = "vattention(sinks=4, local=16, heavy=16, block_size=8)"
    report = llm.generate(random_ids(300, 2), params, policy=policy)[0].report
    got = report["decode"]["certified"]
    assert got["heads"] == got["bounds"] + got["sample"] + got["exact"] == 8 * 3 * 4
    assert "certify=true" in report["policy"]
    assert "epsilon=0.2" in report["policy"]
    assert report["audit"]["output_error_scaled"]["mean"] < 0.2
    dense = llm.generate(random_ids(300, 2), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))[0].report
    assert dense["decode"]["certified"] is None
    with pytest.raises(RequestError, match="'psa' has no certificate; use policy='vattention'"):
        llm.generate(random_ids(300, 2), params, policy="psa")
    with pytest.raises(RequestError, match="in a window has no certificate"):
        llm.generate(random_ids(300, 2), params, policy="vattention+psaw")
    for bad in ((0.1,), (0.0, 0.5), 0.1, (0.1, 1.0), "ab"):
        with pytest.raises(RequestError, match="two numbers between 0 and 1"):
            SamplingParams(certify=bad)


def test_short_contexts_and_an_error_of_nothing_are_dense():
    pair = MADE["flat"](torch.Generator().manual_seed(8), 600)
    query, selection = step(VAttention(epsilon=0.0, certify=True), pair)
    assert isinstance(selection, Dense)
    assert query.cost.certified == {"exact": 8}
    assert isinstance(step(VAttention(local=600), pair)[1], Dense)
    middle = Middle.of(600, 16, 5, 7)
    kept = torch.cat([middle.exact(torch.tensor([3])), middle.keys(middle.others(torch.tensor([3])))])
    assert kept.sort().values.equal(torch.arange(600))


def test_true_output_is_attention():
    q, k, v = MADE["flat"](torch.Generator().manual_seed(9), 64)
    out, norm = true_output(q, k, v, 0.2)
    weights = torch.softmax(q[5, 0] @ k[1].T * 0.2, -1)
    torch.testing.assert_close(out[5].float(), weights @ v[1])
    torch.testing.assert_close(norm[5].float(), weights @ v[1].norm(dim=-1))
