"""FlexPrefill's choice of blocks on a device: each kernel, and what comes out, against plain torch, under Triton's
interpreter."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from helpers import Planted, planted_heads
from launches import Launches

from saccade.kv.kept_summaries import KeptSummaries
from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.flexprefill import FlexPrefill, triton_threshold
from saccade.methods.flexprefill.device import select_blocks
from saccade.methods.flexprefill.triton_blocks import choose_blocks
from saccade.methods.flexprefill.triton_pooled import pooled_shares
from saccade.methods.flexprefill.triton_shares import decide
from saccade.methods.flexprefill.triton_threshold import mass_threshold
from saccade.ops import attend
from saccade.ops.scores import among_least, mean_keys, mean_queries, needed_shares, root_jsd
from saccade.ops.triton.common import arrivals
from saccade.selection import Shape

PLANTED = Planted(columns=(7, 201), slashes=(13, 200), blocks=(3,))


def chunk_of(heads, kv_heads, q_len, n, head_dim=32, dtype=torch.float32, **more) -> Chunk:
    q, k, v = (part.to(dtype) for part in planted_heads(heads, kv_heads, n, head_dim, 0, PLANTED, **more))
    return Chunk.of(q[:, -q_len:], KVView.from_tensors(k, v, block_size=32, shuffle_seed=0))


def adversarial(rows: int, m: int, seed: int = 0) -> torch.Tensor:
    """Weights within 0 .. 1 of a sum of 1: skewed ones, ties, all alike, one heavy entry, one alone, tiny ones."""
    mass = torch.rand(rows, m, generator=torch.Generator().manual_seed(seed)) ** 8
    for row, kind in zip(mass, range(rows)):
        if kind % 6 == 1:
            row[: m // 2] = 0.25
        elif kind % 6 == 2:
            row.fill_(1.0)
        elif kind % 6 == 3:
            row[m // 3] = 1e4
        elif kind % 6 == 4:
            row.zero_()[m // 2] = 1.0
        elif kind % 6 == 5:
            row[1:] *= 1e-30
    return mass / mass.sum(1, keepdim=True)


@pytest.mark.parametrize(("q_len", "n"), [(128, 320), (100, 333), (1, 130)])
def test_a_choice_is_a_handful_of_launches(q_len, n):
    """Nothing of torch's, and each kernel once, whole blocks or not; summaries are kept by the sequence."""
    chunk = chunk_of(4, 2, q_len, n)
    arrivals(chunk.q.device, 1)  # made once
    kept = KeptSummaries("mean", 64)
    kept.upto(chunk.kv)
    view = KVView(chunk.kv.paged(), lambda kind, size: kept)
    method = FlexPrefill(lines="block", block_size=64, min_budget=64, max_budget=128, gamma=0.8)
    kernels = ["_read_blocks", "_weigh_blocks", "_decide", "_pool", "_choose", "_compact"]
    for flatten in (True, False):
        with Launches() as launches:
            select_blocks(replace(method, flatten=flatten), replace(chunk, kv=view))
        assert not launches.torch
        assert launches.triton == Counter(kernels + ["_threshold"] * flatten)


@pytest.mark.parametrize(
    ("q_len", "n", "size", "kv_heads", "head_dim"),
    [(192, 320, 64, 2, 32), (150, 333, 64, 6, 24), (256, 256, 128, 1, 32), (20, 300, 128, 2, 32), (1, 64, 64, 2, 32)],
)
def test_pooled_shares_are_the_softmax_of_mean_logits(q_len, n, size, kv_heads, head_dim):
    """Grids that begin and end within a block, more query blocks than a program takes; heads left out stay so."""
    chunk = chunk_of(6, kv_heads, q_len, n, head_dim)
    given = torch.cat([chunk.q, chunk.q], -1)[..., head_dim:]  # rows that lie apart
    active = torch.tensor([True, False, True, True, False, True])
    means = chunk.kv.summary("mean", size)
    got = pooled_shares(given, chunk.kv, means, chunk.shape, size, chunk.scale, active)
    keys = mean_keys(chunk.kv, size).repeat_interleave(6 // kv_heads, 0)
    scores = mean_queries(chunk.q, chunk.shape, size) @ keys.transpose(1, 2) * chunk.scale
    first = chunk.shape.q_start // size
    acausal = torch.arange(scores.shape[2]) > first + torch.arange(scores.shape[1])[:, None]
    expected = torch.softmax(scores.masked_fill(acausal, -torch.inf), -1)
    assert got.shape == expected.shape
    torch.testing.assert_close(got[active], expected[active], atol=1e-6, rtol=1e-5)


def test_many_query_blocks():
    chunk = chunk_of(2, 1, 20 * 64 - 7, 1300, 16)
    shape, means = chunk.shape, chunk.kv.summary("mean", 64)
    got = pooled_shares(chunk.q, chunk.kv, means, shape, 64, chunk.scale, torch.tensor([False, True]))
    scores = mean_queries(chunk.q, shape, 64) @ mean_keys(chunk.kv, 64).transpose(1, 2) * chunk.scale
    acausal = torch.arange(scores.shape[2]) > shape.q_start // 64 + torch.arange(scores.shape[1])[:, None]
    expected = torch.softmax(scores.masked_fill(acausal, -torch.inf), -1)
    torch.testing.assert_close(got[1], expected[1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("q_len", "n", "kv_heads"), [(128, 640, 2), (30, 650, 6), (200, 200, 1)])
def test_heads_and_lines_are_decided_as_in_torch(q_len, n, kv_heads):
    """Ties, a row without any weight, one heavy line; pooled attention near what the rows weigh and far from it."""
    chunk = chunk_of(6, kv_heads, q_len, n)
    rows, means = min(64, q_len), chunk.kv.summary("mean", 64)
    keys = mean_keys(chunk.kv, 64).repeat_interleave(6 // kv_heads, 0)
    estimate = chunk.q[:, -rows:].mean(1, keepdim=True) @ keys.transpose(1, 2) * chunk.scale
    estimate = torch.softmax(estimate, -1)[:, 0]
    columns = torch.softmax(estimate.log() + torch.arange(6)[:, None] * torch.rand(estimate.shape[1]), -1) * rows
    slashes = adversarial(6, columns.shape[1], 1)
    slashes[0] = 0.0
    roots = root_jsd(estimate, columns / rows)
    tau = float(roots.sort().values[2:4].mean())
    by_pooled, vertical, groups = decide(chunk.q, chunk.kv, means, 64, chunk.scale, tau, columns, slashes)
    assert int(by_pooled.sum()) == 3
    assert torch.equal(by_pooled, roots < tau)
    torch.testing.assert_close(vertical, needed_shares(columns).float(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(groups, needed_shares(slashes).float(), atol=1e-6, rtol=1e-6)
    alone = decide(chunk.q, chunk.kv, means, 64, chunk.scale, tau, columns)
    assert torch.equal(alone[0], by_pooled)
    assert alone[1:] == (None, None)


@pytest.mark.parametrize("m", [5, 9000])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
@pytest.mark.parametrize("many_programs", [False, True])
def test_the_threshold_is_the_greatest_that_holds_the_share(m, share, many_programs, monkeypatch):
    if many_programs:
        monkeypatch.setattr(triton_threshold, "ONE_PROGRAM", 1)
    mass = adversarial(7, m, m)
    mass[1] *= 1e-20
    found = mass_threshold(mass, share, torch.tensor([True] * 6 + [False]))
    for row in range(6):
        whole = mass[row].double().sum()
        assert mass[row][mass[row] >= found[row]].double().sum() >= share * whole * (1 - 1e-5)
        assert mass[row][mass[row] > found[row]].double().sum() < max(share, 1e-9) * whole * (1 + 1e-5)
        assert (mass[row] == found[row]).any()
    assert float(found[6]) == 0


def wanted_by_torch(method, first, needed, shares, by_pooled, threshold, columns, known) -> torch.Tensor:
    """``choose_blocks`` spelt out: bool [heads, q_blocks, k_blocks]."""
    heads, q_blocks, k_blocks = shares.shape
    least, most = method.budget_blocks
    most = k_blocks if most is None else most
    masks = []
    for head in range(heads):
        own = needed[head]
        wanted = own < max(method.gamma, 1e-9)
        if by_pooled[head]:
            weights = shares[head].clone()
            if known:
                weights[-known:] = columns[head]
            bound = threshold[head].expand(q_blocks).clone() if threshold is not None else torch.zeros(q_blocks)
            each = range(q_blocks) if threshold is None else range(q_blocks - known, q_blocks)
            for row in each:
                values = weights[row].sort(descending=True).values
                reached = values.cumsum(0) >= max(method.gamma, 1e-9) * values.sum()
                bound[row] = values[min(int((~reached).sum()), k_blocks - 1)]
            wanted, own = weights >= bound[:, None], -weights
        distance = (first + torch.arange(q_blocks))[:, None] - torch.arange(k_blocks)
        forced = (distance == 0) | ((torch.arange(k_blocks) == 0) & (distance >= 0))
        order = own.masked_fill(forced, -2.0).masked_fill(distance < 0, torch.inf)
        kept = forced | (wanted & among_least(order, most)) | among_least(order, least)
        masks.append(kept & (distance >= 0))
    return torch.stack(masks)


EDGES = [(0.6, least, most) for least, most in ((0, None), (3, 5), (0, 1), (7, 7), (30, None))]
EDGES += [(gamma, least, most) for gamma in (0.0, 0.95) for least, most in ((0, None), (3, 5))]


@pytest.mark.parametrize(("gamma", "least", "most"), EDGES)
@pytest.mark.parametrize(("q_len", "flatten", "known"), [(200, True, 2), (64, False, 1)])
def test_blocks_are_chosen_as_in_torch(gamma, least, most, q_len, flatten, known):
    """Heads of both kinds, with ties at every edge; a single query block; budgets beyond what there is."""
    n, size, heads, m = 64 * 13, 64, 6, 13
    shape = Shape.suffix(heads, 2, q_len, n)
    method = FlexPrefill(
        lines="block", block_size=size, gamma=gamma, min_budget=least * size, max_budget=most and most * size
    )
    first, q_blocks = shape.q_start // size, m - shape.q_start // size
    shares = adversarial(heads * q_blocks, m, 2).view(heads, q_blocks, m)
    acausal = torch.arange(m) > first + torch.arange(q_blocks)[:, None]
    shares = shares.masked_fill(acausal, 0.0)
    by_pooled = torch.arange(heads) % 2 == 0
    columns, slashes = adversarial(heads, m, 3), adversarial(heads, m, 4)
    vertical, groups = (needed_shares(one).float() for one in (columns, slashes))
    diagonals = torch.minimum(groups, torch.cat([groups[:, :1], groups[:, :-1]], 1))
    distance = (first + torch.arange(q_blocks))[:, None] - torch.arange(m)
    needed = torch.minimum(vertical[:, None], diagonals[:, distance.clamp(min=0)])
    threshold = mass_threshold(shares.flatten(1), gamma, by_pooled) if flatten else None
    rows = min(size, q_len)
    at = shares, by_pooled, threshold, columns * rows, known, gamma, *method.budget_blocks
    got = choose_blocks(shape, size, vertical, groups, *at)
    got.check()
    expected = wanted_by_torch(method, first, needed, shares, by_pooled, threshold, columns, known)
    assert torch.equal(got.block_mask(), expected)
    alone = choose_blocks(shape, size, None, None, *at)  # lists of query-aware heads alone
    assert torch.equal(alone.block_mask(), expected & by_pooled[:, None, None])


FLEX = [
    FlexPrefill(lines="block", block_size=64, min_budget=64, gamma=0.7),
    FlexPrefill(lines="block", block_size=64, min_budget=256, gamma=0.6),
    FlexPrefill(lines="block", block_size=64, min_budget=0, max_budget=192, gamma=0.9),
    FlexPrefill(lines="block", block_size=128, min_budget=128, gamma=0.4),
    FlexPrefill(lines="block", block_size=64, min_budget=64, tau=1.0, gamma=0.8),
    FlexPrefill(lines="block", block_size=64, min_budget=64, tau=1.0, gamma=0.8, flatten=False),
    FlexPrefill(lines="block", block_size=64, min_budget=64, tau=0.0, gamma=0.9),
    FlexPrefill(lines="block", block_size=64, min_budget=0, tau=0.2, gamma=0.0),
]
SHAPES = [(method, 576, 576, 1, None) for method in FLEX]
SHAPES += [(FLEX[1], 150, 577, 1, None), (FLEX[5], 150, 540, 2, None), (FLEX[4], 40, 333, 2, 5.0)]
SHAPES += [(FLEX[3], 300, 555, 2, None), (FLEX[2], 1, 500, 1, None)]


@pytest.mark.parametrize(("method", "q_len", "n", "kv_heads", "softcap"), SHAPES)
def test_the_device_selects_what_the_host_selects(method, q_len, n, kv_heads, softcap):
    """Block pairs may differ only where float32 cannot tell which of two weighs more: at the edge of gamma."""
    chunk = replace(chunk_of(2, kv_heads, q_len, n, noise=0.6), softcap=softcap)
    expected = method.select_prefill(chunk)
    got = select_blocks(method, chunk)
    got.check()
    assert 0 < expected.density() < 0.999
    differs = got.block_mask() ^ expected.block_mask()
    assert differs.sum() <= 0.005 * expected.block_mask().sum()
    out, _ = attend(chunk.q, chunk.kv, got, backend="triton")
    reference, _ = attend(chunk.q, chunk.kv, got, backend="reference")
    torch.testing.assert_close(out, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_half_precision_selects_what_its_rounded_rows_select(tau):
    method = FlexPrefill(lines="block", block_size=64, min_budget=64, gamma=0.8, tau=tau)
    chunk = chunk_of(2, 1, 200, 450, dtype=torch.float16, noise=0.6)
    kv = chunk.kv
    wide = replace(chunk, q=chunk.q.float(), kv=KVView.from_tensors(kv.keys().float(), kv.values().float()))
    expected = method.select_prefill(wide).block_mask()
    differs = select_blocks(method, chunk).block_mask() ^ expected
    assert differs.sum() <= 0.01 * expected.sum()


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_weights_that_underflow(tau):
    """Rows that give a single key all their weight: every other block weighs exactly 0."""
    q, k = torch.zeros(2, 300, 32), torch.zeros(1, 300, 32)
    q[..., 0], k[0, 70, 0] = 1e3, 1e3
    method = FlexPrefill(lines="block", block_size=64, min_budget=0, gamma=0.9, tau=tau)
    chunk = Chunk.of(q, KVView.from_tensors(k, k, block_size=32))
    got, expected = select_blocks(method, chunk).block_mask(), method.select_prefill(chunk).block_mask()
    if tau == 0.0:
        assert torch.equal(got, expected)
    assert got[:, 2:, 1].all()
    assert got.sum() < 2 * 15
