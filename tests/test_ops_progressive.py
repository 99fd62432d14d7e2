"""The progressive op against Alg. 1 of PSA written out with plain sums."""

from __future__ import annotations

import math

import pytest
import torch
from covering import covered
from helpers import Planted, arkvale_scores, brute_force, call, planted_heads

from saccade.kv.view import KVView
from saccade.ops import Call, attend, cpu, run
from saccade.selection import Blocks, Dense, Ranking, Shape

CLOSE = {"atol": 3e-5, "rtol": 1e-5}  # float32 against float64, where planted logits reach 20


@pytest.fixture(params=["reference", *cpu.supported_isas()])
def backend(request):
    """Every way the call may run: the reference, and each instruction set's kernels."""
    if request.param == "reference":
        yield "reference"
        return
    cpu.set_isa(request.param)
    yield "cpu"
    cpu.set_isa(None)


def alg1(q, k, v, ranking: Ranking, unit: int) -> tuple[torch.Tensor, int, float]:
    """PSA's Algorithm 1 as printed, with plain sums of exponentials in float64, for the query heads of one unit: the
    attention, ranked blocks read, and the coverage at the end."""
    shape, size, n = ranking.shape, ranking.block_size, k.shape[1]
    per_unit = shape.heads // ranking.units
    heads = torch.arange(unit * per_unit, (unit + 1) * per_unit)
    of = heads // shape.group
    terms = torch.exp((k[of].double() @ q[heads, 0, :, None].double())[..., 0] / math.sqrt(q.shape[-1]))  # [h, n]
    sums = torch.nn.functional.pad(terms, (0, -n % size)).unflatten(1, (-1, size)).sum(-1)  # [h, blocks]
    read = ranking.always[unit].tolist()
    as_acc = sums[:, read].sum(1)
    as_min = torch.full_like(as_acc, math.inf)
    order, used, enough = ranking.order[unit].tolist(), 0, 1.0
    while used < len(order):
        batch = order[used : used + ranking.microbatch]
        used += len(batch)
        read += batch
        as_acc = as_acc + sums[:, batch].sum(1)
        least = sums[:, batch].amin(1)
        as_min = torch.minimum(as_min, least) if ranking.rest == "min" else sums[:, batch].amax(1)
        coverage = as_acc / (as_acc + as_min * (len(order) - used))
        enough = float(coverage.min() if ranking.stop == "all" else coverage.mean())
        if enough > ranking.epsilon:
            break
    kept = torch.isin(torch.arange(n) // size, torch.tensor(read))
    weights = terms * kept / as_acc[:, None]
    return (weights[:, None] @ v[of].double())[:, 0], used, enough


def psa_ranking(q, view, size, units, *, always=(0, 1), **options) -> Ranking:
    """Order by ArkVale's score over everything but ``always``, the last full and the partial block."""
    heads, n = q.shape[0], view.length
    full, partial = divmod(n, size)
    fixed = [*always, full - 1, *([full] if partial else [])]
    scores = arkvale_scores(q[:, 0], view.keys(), size).unflatten(0, (units, -1)).mean(1)
    rest = [block for block in range(full) if block not in fixed]
    order = torch.tensor(rest)[scores[:, rest].argsort(dim=1, descending=True, stable=True)]
    shape = Shape.suffix(heads, view.kv_heads, 1, n)
    return Ranking(shape, size, torch.tensor(fixed).expand(units, -1).int(), order.int(), **options)


@covered({"rest": ["min", "last_max"], "stop": ["all", "mean"], "units": [1, 2, 8], "n": [640, 671]})
def test_the_progressive_op_is_alg_1(backend, rest, stop, units, n):
    q, k, v, view = call(8, 2, 1, n, 32, seed=n)
    for epsilon, microbatch in ((0.5, 4), (0.9, 3), (0.95, 1)):
        ranking = psa_ranking(q, view, 32, units, epsilon=epsilon, microbatch=microbatch, rest=rest, stop=stop)
        ranking.check()
        ran = run(Call.of(q, view, ranking), backend)
        out, lse = ran.out, ran.lse
        assert ran.backend.startswith(backend)
        used = ran.used
        assert isinstance(used, Blocks)
        used.check()
        counts = used.block_mask()[:, 0].sum(1) - ranking.always.shape[1]
        for unit in range(units):
            expected, read, coverage = alg1(q, k, v, ranking, unit)
            assert int(counts[unit]) == read
            assert float(ran.coverage[unit]) == pytest.approx(coverage, abs=1e-4)
            heads = slice(unit * 8 // units, (unit + 1) * 8 // units)
            torch.testing.assert_close(out[heads, 0].double(), expected, **CLOSE)
        # what was read, attended as plain blocks, is the same attention
        again, again_lse = attend(q, view, used, backend="reference")
        torch.testing.assert_close(out, again, **CLOSE)
        torch.testing.assert_close(lse, again_lse, **CLOSE)


def test_epsilon_one_reads_all_and_zero_one_microbatch(backend):
    q, _, _, view = call(8, 2, 1, 700, 32, seed=20)
    for microbatch in (1, 4, 7):
        for epsilon, expected in ((1.0, 18), (0.0, microbatch)):
            ranking = psa_ranking(q, view, 32, 2, epsilon=epsilon, microbatch=microbatch)
            ran = run(Call.of(q, view, ranking), backend)
            out = ran.out
            assert ran.used.block_mask()[:, 0].sum(1).tolist() == [4 + expected] * 2
            if epsilon == 1.0:
                torch.testing.assert_close(out, attend(q, view)[0], **CLOSE)


def test_epsilon_one_reads_all_even_where_the_unread_underflow(backend):
    """A dominant sink makes the estimate exactly 1.0 in float32; the comparison is strict, so reading goes on."""
    q, k, v = planted_heads(2, 1, 400, pattern=Planted(sink=200.0), seed=1)
    view = KVView.from_tensors(k, v)
    ran = run(Call.of(q[:, -1:], view, psa_ranking(q[:, -1:], view, 32, 1, epsilon=1.0, microbatch=1)), backend)
    assert int(ran.used.block_mask().sum()) == 13


def test_used_blocks_never_fall_as_epsilon_rises(backend):
    for seed in range(2):
        q, _, _, view = call(8, 2, 1, 900, 32, seed=seed)
        for rest in ("min", "last_max"):
            before = torch.zeros(2, 1, 29, dtype=torch.bool)
            for epsilon in (0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.99, 1.0):
                ran = run(
                    Call.of(q, view, psa_ranking(q, view, 32, 2, epsilon=epsilon, microbatch=1, rest=rest)), backend
                )
                now = ran.used.block_mask()
                assert not (before & ~now).any()
                before = now


def test_a_one_token_last_block_does_not_stop_the_reading(backend):
    """It is always read and stays out of the estimate, so 640 and 641 tokens read as many ranked blocks (P2)."""
    q, k, v = planted_heads(4, 2, 641, seed=6)
    counts = []
    for n in (640, 641):
        view = KVView.from_tensors(k[:, :n], v[:, :n])
        ran = run(
            Call.of(q[:, 600:601], view, psa_ranking(q[:, 600:601], view, 32, 2, epsilon=0.9, microbatch=1)), backend
        )
        counts.append(ran.used.block_mask()[:, 0].sum(1) - int(n > 640))
    assert torch.equal(*counts)


def test_an_oracle_ranking_gives_a_lower_bound_of_coverage(backend):
    q, k, _, view = call(4, 4, 1, 640, 32, seed=21)
    logits = (q @ k.transpose(1, 2))[:, 0] / math.sqrt(32)
    block_lse = torch.logsumexp(logits.unflatten(1, (-1, 32)), -1)
    order = block_lse[:, :-1].argsort(dim=1, descending=True, stable=True)
    shape = Shape.suffix(4, 4, 1, 640)
    for epsilon in (0.5, 0.9, 0.95, 0.99):
        ranking = Ranking(shape, 32, torch.full((4, 1), 19).int(), order.int(), epsilon=epsilon, microbatch=1)
        ran = run(Call.of(q, view, ranking), backend)
        lse = ran.lse
        coverage = torch.exp(lse[:, 0] - torch.logsumexp(logits, -1))
        assert (coverage >= epsilon).all()


def test_ranking_with_empty_always_and_with_empty_order(backend):
    q, k, v, view = call(4, 2, 1, 96, 32, seed=22)
    shape = Shape.suffix(4, 2, 1, 96)
    none = torch.empty(2, 0, dtype=torch.int32)
    every = torch.arange(3).int().expand(2, -1)
    dense = brute_force(q, k, v, Dense(shape).mask())[0]
    for always, order in ((none, every), (every, none)):
        out, _ = attend(q, view, Ranking(shape, 32, always, order, epsilon=1.0), backend=backend)
        torch.testing.assert_close(out.double(), dense, **CLOSE)
    out, lse = attend(q, view, Ranking(shape, 32, none, none, epsilon=1.0), backend=backend)
    assert (out == 0).all()
    assert torch.isneginf(lse).all()
