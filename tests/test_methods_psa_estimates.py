"""Blocks guessed by their moments, and progressive attention that stops by the guesses."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Planted, call, generator, planted_heads, run_method

from saccade.errors import PolicyError, SaccadeError
from saccade.kv.summaries import summarize
from saccade.kv.view import KVView
from saccade.methods.base import Query
from saccade.methods.psa import PSA
from saccade.methods.psa.estimates import block_estimates, ranked_by_estimate
from saccade.ops import Call, attend, cpu, run
from saccade.selection import Cone, Dense, Ranking, Shape, cut

CLOSE = {"atol": 3e-5, "rtol": 1e-5}


@pytest.fixture(params=["reference", *cpu.supported_isas()])
def backend(request, monkeypatch):
    """Every way the calls may run: the reference, and each instruction set's kernels."""
    if request.param == "reference":
        monkeypatch.setattr(cpu, "available", lambda: False)
        yield "reference"
        return
    cpu.set_isa(request.param)
    yield "cpu"
    cpu.set_isa(None)


def moments(keys: torch.Tensor) -> torch.Tensor:
    """``keys`` [blocks, kv_heads, size, d] -> [blocks, 2, kv_heads, d]."""
    return summarize(keys, "moments").transpose(0, 1).contiguous()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(8, 2, 64), (6, 2, 80), (1, 1, 16)])
def test_guesses_are_the_formula(backend, dtype, stored, heads, kv_heads, d):
    rng = generator(heads)
    keys = torch.randn(300, kv_heads, 8, d, generator=rng) * torch.rand(300, 1, 1, 1, generator=rng) * 3
    q, summary = torch.randn(heads, d, generator=rng).to(dtype), moments(keys).to(stored)
    got = block_estimates(q, summary, 8, 0.2)
    assert got.shape == (heads, 300)
    log, wide = math.log(8), 0
    for head in range(heads):
        row = q[head].double()
        mean, variance = summary[:, :, head * kv_heads // heads].double().unbind(1)
        for block in range(0, 300, 7):
            sigma = 0.2 * math.sqrt(float((row * row * variance[block]).sum()))
            above = log + sigma**2 / 2 if sigma < math.sqrt(2 * log) else sigma * math.sqrt(2 * log)
            wide += sigma > math.sqrt(2 * log)
            assert float(got[head, block]) == pytest.approx(0.2 * float(row @ mean[block]) + above, abs=1e-4)
    assert heads == 1 or wide > 0


def test_moments_are_mean_and_population_variance():
    keys = torch.tensor([[1.0, -2.0], [3.0, -2.0], [5.0, 4.0]])
    torch.testing.assert_close(summarize(keys, "moments"), torch.tensor([[3.0, 0.0], [8.0 / 3, 8.0]]))


@pytest.mark.parametrize(("sigma", "off"), [(0.5, 0.1), (1.0, 0.1), (2.0, 0.5), (5.0, 3.5)])
def test_guesses_of_normal_logits_come_near(sigma, off):
    """Up to the width where the largest logit takes over; there the guess is too high by less than sigma."""
    keys = torch.randn(500, 1, 64, 64, generator=generator(1)) * sigma
    q = torch.ones(1, 64) / 8
    true = torch.logsumexp(keys[:, 0] @ q[0], -1)
    guess = block_estimates(q, moments(keys), 64, 1.0)[0]
    assert -0.1 < float((guess - true).mean()) < off
    assert off < 1 or float((math.log(64) + sigma**2 / 2 - true).mean()) > off  # what the sum's formula would promise


def test_a_cap_bends_the_guess():
    """A far cap changes nothing; one that all logits exceed leaves all blocks alike."""
    q, summary = torch.randn(4, 32, generator=generator(2)), moments(torch.randn(9, 2, 16, 32, generator=generator(3)))
    torch.testing.assert_close(
        block_estimates(q, summary, 16, 0.3, softcap=1e5), block_estimates(q, summary, 16, 0.3), **CLOSE
    )
    near = block_estimates(q.abs() * 1e3, summary.abs(), 16, 1.0, softcap=2.0)
    torch.testing.assert_close(near, torch.full_like(near, 2.0 + math.log(16)), atol=1e-3, rtol=0)


@pytest.mark.parametrize("units", [1, 2, 6])
def test_blocks_go_by_their_largest_share(backend, units):
    estimates = torch.randn(6, 40, generator=generator(4)) * 5 + torch.arange(6)[:, None] * 100
    estimates[:, 20] = estimates[:, 7]
    order, sorted_ = ranked_by_estimate(estimates, units)
    shares = torch.softmax(estimates.double(), 1)
    for unit in range(units):
        heads = range(unit * 6 // units, (unit + 1) * 6 // units)
        best = [max(float(shares[h, b]) for h in heads) for b in range(40)]
        assert order[unit].tolist() == sorted(range(40), key=lambda b: (-best[b], b))
        for h in heads:
            assert torch.equal(sorted_[h], estimates[h, order[unit].long()])


def by_hand(q, k, v, ranking: Ranking, unit: int):
    """The attention of one unit, ranked blocks read and the coverage at the end: plain sums in float64."""
    shape, size, n = ranking.shape, ranking.block_size, k.shape[1]
    per_unit = shape.heads // ranking.units
    heads = list(range(unit * per_unit, (unit + 1) * per_unit))
    of = [h // shape.group for h in heads]
    logits = (k[of].double() @ q[heads, 0, :, None].double())[..., 0] / math.sqrt(q.shape[-1])
    sums = torch.nn.functional.pad(torch.exp(logits), (0, -n % size)).unflatten(1, (-1, size)).sum(-1)
    order, always = ranking.order[unit].tolist(), ranking.always[unit].tolist()
    used, enough = 0, 1.0
    while used < len(order):
        used = min(used + ranking.microbatch, len(order))
        coverages = []
        for row, h in enumerate(heads):
            guess = ranking.estimates[h].tolist()
            above = [math.log(float(sums[row, b])) - guess[i] for i, b in enumerate(order[:used])]
            mean = sum(above) / used
            sd = math.sqrt(sum((x - mean) ** 2 for x in above) / used)
            rest = sum(math.exp(g) for g in guess[used:]) * math.exp(mean + ranking.margin * sd)
            read = float(sums[row, always + order[:used]].sum())
            coverages.append(1.0 if used == len(order) else 0.0 if used == 1 else read / (read + rest))
        enough = min(coverages) if ranking.stop == "all" else sum(coverages) / len(coverages)
        if enough > ranking.epsilon:
            break
    kept = torch.isin(torch.arange(n) // size, torch.tensor(always + order[:used]))
    weights = torch.softmax(logits.masked_fill(~kept, -torch.inf), -1)
    return (weights[:, None] @ v[of].double())[:, 0], used, enough


def guessed(q, view: KVView, size: int, units: int, noise: float, seed: int = 0, **options) -> Ranking:
    """True block log-sum-exps off by ``noise`` as estimates; blocks 0, 1, the last full and the partial one always."""
    heads, n = q.shape[0], view.length
    full, partial = divmod(n, size)
    logits = (view.keys().repeat_interleave(heads // view.kv_heads, 0) @ q[:, 0, :, None])[..., 0]
    blocks = torch.logsumexp(logits[:, : full * size].unflatten(1, (full, size)) / math.sqrt(q.shape[-1]), -1)
    guess = blocks[:, 2 : full - 1] + noise * torch.randn(heads, full - 3, generator=generator(seed)) - 0.7
    order, estimates = ranked_by_estimate(guess, units)
    always = torch.tensor([0, 1, full - 1, *([full] if partial else [])]).expand(units, -1).int()
    shape = Shape.suffix(heads, view.kv_heads, 1, n)
    made = Ranking(shape, size, always, order + 2, rest="estimate", estimates=estimates, **options)
    made.check()
    return made


@pytest.mark.parametrize("stop", ["all", "mean"])
@pytest.mark.parametrize(("units", "n", "size"), [(1, 671, 16), (2, 640, 32), (8, 671, 32)])
def test_the_op_stops_by_the_estimates(backend, stop, units, n, size):
    q, k, v, view = call(8, 2, 1, n, 32, seed=n)
    seen = set()
    for epsilon, microbatch, margin in ((0.5, 4, 3.0), (0.9, 3, 1.0), (0.7, 1, 0.0), (0.3, 1000, 2.0)):
        options = {"epsilon": epsilon, "microbatch": microbatch, "margin": margin, "stop": stop}
        ranking = guessed(q, view, size, units, noise=0.6, **options)
        ran = run(Call.of(q, view, ranking), backend)
        out = ran.out
        assert ran.backend.startswith(backend)
        counts = ran.used.block_mask()[:, 0].sum(1) - ranking.always.shape[1]
        for unit in range(units):
            expected, read, coverage = by_hand(q, k, v, ranking, unit)
            assert int(counts[unit]) == read
            assert float(ran.coverage[unit]) == pytest.approx(coverage, abs=1e-4)
            heads = slice(unit * 8 // units, (unit + 1) * 8 // units)
            torch.testing.assert_close(out[heads, 0].double(), expected, **CLOSE)
            seen.add(read)
    assert len(seen) > 2


def test_epsilon_one_reads_all_and_one_block_alone_never_stops(backend):
    q, _, _, view = call(8, 2, 1, 700, 32, seed=20)
    for microbatch, least in ((1, 2), (2, 2), (5, 5)):
        for epsilon, expected in ((1.0, 18), (0.0, least)):
            ranking = guessed(q, view, 32, 2, noise=0.1, epsilon=epsilon, microbatch=microbatch)
            ran = run(Call.of(q, view, ranking), backend)
            out = ran.out
            assert ran.used.block_mask()[:, 0].sum(1).tolist() == [4 + expected] * 2
            if epsilon == 1.0:
                torch.testing.assert_close(out, attend(q, view)[0], **CLOSE)


def test_more_epsilon_or_margin_never_reads_less(backend):
    q, _, _, view = call(8, 2, 1, 900, 32, seed=3)
    for name, values in (("epsilon", (0.0, 0.3, 0.6, 0.9, 0.99, 1.0)), ("margin", (0.0, 0.5, 1.0, 3.0, 9.0))):
        before = torch.zeros(2, 1, 29, dtype=torch.bool)
        for value in values:
            options = {"epsilon": 0.6, "microbatch": 1, name: value}
            ran = run(Call.of(q, view, guessed(q, view, 32, 2, noise=0.5, **options)), backend)
            assert not (before & ~ran.used.block_mask()).any()
            before = ran.used.block_mask()


def test_with_true_estimates_the_coverage_is_the_true_one(backend):
    q, k, _, view = call(4, 4, 1, 640, 32, seed=21)
    whole = torch.logsumexp((q @ k.transpose(1, 2))[:, 0] / math.sqrt(32), -1)
    for epsilon in (0.3, 0.6, 0.9, 0.97):
        ranking = guessed(q, view, 32, 4, noise=0.0, epsilon=epsilon, microbatch=2, margin=3.0)
        ran = run(Call.of(q, view, ranking), backend)
        lse = ran.lse
        torch.testing.assert_close(ran.coverage, torch.exp(lse[:, 0] - whole), atol=1e-3, rtol=1e-3)
        assert (ran.coverage > epsilon).all()


def test_a_one_token_last_block_does_not_stop_the_reading(backend):
    q, k, v = planted_heads(4, 2, 641, seed=6)
    counts = []
    for n in (640, 641):
        method = PSA(epsilon=0.8, microbatch=1, rank="moments", rest="estimate")
        view = KVView.from_tensors(k[:, :n], v[:, :n])
        chosen = method.select_decode(Query.of(q[:, 600:601], view), None)
        ran = run(Call.of(q[:, 600:601], view, chosen), backend)
        counts.append(ran.used.block_mask()[:, 0].sum(1) - int(n > 640))
    assert torch.equal(*counts)


def test_a_window_cuts_estimates_with_their_blocks():
    q, _, _, view = call(8, 2, 1, 900, 32, seed=5)
    ranking = guessed(q, view, 32, 2, noise=1.0, epsilon=0.9)
    seen = cut(ranking, Cone(0.5, 32, block_size=32))
    assert isinstance(seen, Ranking)
    seen.check()
    assert 0 < seen.order.shape[1] < ranking.order.shape[1]
    for h in range(8):
        known = dict(zip(ranking.order[h // 4].tolist(), ranking.estimates[h].tolist()))
        assert seen.estimates[h].tolist() == [known[b] for b in seen.order[h // 4].tolist()]


@pytest.mark.parametrize("unit", ["kv_head", "layer"])
def test_psa_by_moments_finds_a_heavy_block_and_is_dense_at_one(unit):
    q, k, v = planted_heads(4, 2, 900, seed=7, pattern=Planted(sink=2.0, columns=(), slashes=(), blocks=(9,)))
    view, before = KVView.from_tensors(k, v, shuffle_seed=7), None
    for epsilon in (0.0, 0.5, 0.9, 0.99, 1.0):
        method = PSA(epsilon=epsilon, microbatch=1, rank="moments", rest="estimate", unit=unit)
        mask = run_method(method, "decode", q, view, 1)[2].mask()
        assert mask[:, 0, 9 * 32 : 10 * 32].all()
        assert before is None or not (before & ~mask).any()
        before = mask
    assert before is not None
    assert before.all()


def test_psa_by_moments_ranks_what_the_op_guesses():
    q, _, _, view = call(4, 2, 1, 450, 16, seed=9)
    ranking = PSA(block_size=16, rank="moments", rest="estimate").select_decode(Query.of(q, view), None)
    assert isinstance(ranking, Ranking)
    ranking.check()
    guess = block_estimates(q[:, 0], view.summary("moments", 16)[2:27], 16, 1 / math.sqrt(16))
    order, estimates = ranked_by_estimate(guess, 2)
    assert torch.equal(ranking.order, order + 2)
    assert torch.equal(ranking.estimates, estimates)
    assert isinstance(PSA(rank="moments", rest="last_max").select_decode(Query.of(q, view.upto(200)), None), Dense)
    assert PSA(rank="moments", rest="last_max").select_decode(Query.of(q, view), None).estimates is None


@pytest.mark.parametrize(("rank", "unit"), [("minmax", "kv_head"), ("mean", "layer"), ("cuboid", "kv_head")])
def test_blocks_are_ranked_by_the_metadata_that_is_asked_for(backend, rank, unit):
    q, k, _, view = call(4, 2, 1, 450, 16, seed=9)
    ranking = PSA(block_size=16, rank=rank, unit=unit).select_decode(Query.of(q, view), None)
    keys = k[:, 32 : 27 * 16].unflatten(1, (25, 16))  # [kv_heads, blocks, 16, d]
    low, high = keys.amin(2), keys.amax(2)
    center = (low + high) / 2
    spread = (keys - center.unsqueeze(2)).abs().mean(2)
    low, high = {"minmax": (low, high), "mean": (keys.mean(2),) * 2, "cuboid": (center - spread, center + spread)}[rank]
    rows = q[:, 0].unflatten(0, (2, 2))
    best = torch.maximum(rows[:, :, None] * low[:, None], rows[:, :, None] * high[:, None]).sum(-1)  # [2, 2, blocks]
    scores = best.mean(1) if unit == "kv_head" else best.mean((0, 1))[None]
    assert torch.equal(ranking.order.long(), scores.sort(dim=1, descending=True, stable=True).indices + 2)


def test_what_cannot_be_estimated_is_refused():
    with pytest.raises(PolicyError, match="rank=cuboid; give one of these"):
        PSA(rest="estimate", rank="cuboid")
    for options in ({"rank": "median"}, {"margin": -1.0}):
        with pytest.raises(PolicyError, match=next(iter(options))):
            PSA(**options)
    q, _, _, view = call(4, 2, 1, 450, 16, seed=9)
    ranking = PSA(rank="moments", rest="last_max").select_decode(Query.of(q, view), None)
    with pytest.raises(SaccadeError, match="needs estimates"):
        Ranking(ranking.shape, 32, ranking.always, ranking.order, 0.9, rest="estimate").check()
