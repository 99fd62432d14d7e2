"""The C++ kernels of decode by blocks against the reference, in both storage types: rankings and block summaries."""

from __future__ import annotations

import pytest
import torch
from covering import covered
from cpu_helpers import problem
from helpers import generator

from saccade.kv.summaries import summarize
from saccade.ops import Call, cpu, cpu_blocks, run
from saccade.ops.block_scores import ranked_blocks, top_blocks
from saccade.selection import Ranking, Shape

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C++ kernels here")
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(params=cpu.supported_isas(), autouse=True)
def isa(request):
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(None)


def ranking(shape: Shape, size: int, units: int, always: int, seed: int, **options) -> Ranking:
    """Random always blocks, the others in random order; the partial last block is wherever it falls."""
    blocks = -(-shape.k_len // size)
    order = torch.stack([torch.randperm(blocks, generator=generator(seed + u)) for u in range(units)]).int()
    made = Ranking(shape, size, order[:, :always], order[:, always:], **options)
    made.check()
    return made


@covered(
    {
        "dtype": DTYPES,
        ("heads", "kv_heads", "units", "head_dim"): [(8, 2, 2, 64), (6, 2, 1, 80), (8, 4, 2, 48), (10, 2, 10, 32)],
        ("size", "page"): [(8, 32), (16, 16), (32, 64), (64, 16), (128, 32)],
    }
)
def test_rankings_read_what_the_reference_reads(dtype, heads, kv_heads, units, head_dim, size, page):
    shape = Shape.suffix(heads, kv_heads, 1, 1000)
    q, view = problem(shape, head_dim, DTYPES[dtype], page=page, seed=size)
    softcap = 20.0 if size == 16 else None
    for options in (
        {"epsilon": 0.6, "microbatch": 3, "rest": "last_max"},
        {"epsilon": 0.8, "microbatch": 1, "rest": "min", "stop": "mean"},
        {"epsilon": 1.0, "microbatch": 1000},
    ):
        one = ranking(shape, size, units, 3, seed=head_dim, **options)
        ours, reference = (run(Call.of(q, view, one, softcap=softcap), name) for name in ("cpu", "reference"))
        assert torch.equal(ours.used.block_mask(), reference.used.block_mask())
        torch.testing.assert_close(ours.coverage, reference.coverage, atol=1e-4, rtol=1e-4)
        close = {"atol": 1e-5, "rtol": 1e-5} if dtype == "float32" else {"atol": 1e-2, "rtol": 2e-2}
        torch.testing.assert_close(ours.out, reference.out, **close)
        torch.testing.assert_close(ours.lse, reference.lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_nothing(dtype):
    shape = Shape.suffix(8, 4, 1, 3000)
    q, view = problem(shape, 64, DTYPES[dtype], seed=3)
    for units in (1, 4, 8):
        one = ranking(shape, 32, units, 2, seed=units, epsilon=0.7, rest="last_max")
        first, second = (run(Call.of(q, view, one, threads=threads), "cpu") for threads in (1, 5))
        assert torch.equal(first.out, second.out)
        assert torch.equal(first.lse, second.lse)
        assert torch.equal(first.used.indices, second.used.indices)
        assert torch.equal(first.coverage, second.coverage)


def criticality(q: torch.Tensor, summary: torch.Tensor, units: int) -> list[list[float]]:
    """sum_d max(q_d hi_d, q_d lo_d), one product at a time in float64, meaned over a unit's heads."""
    heads, group = q.shape[0], q.shape[0] // summary.shape[2]
    hi, lo = (summary[:, part].double().repeat_interleave(group, 1).transpose(0, 1) for part in (0, 1))
    q = q.double()[:, None]
    return torch.maximum(q * hi, q * lo).sum(-1).view(units, heads // units, -1).mean(1).tolist()


@covered({"stored": DTYPES, "dtype": DTYPES, "units": [1, 2, 4, 8], "blocks": [1, 7, 700]})
def test_blocks_are_ranked_by_criticality(dtype, stored, units, blocks):
    rng = generator(blocks)
    q = torch.randn(8, 80, generator=rng).to(DTYPES[dtype])
    keys = torch.randn(blocks + 1, 4, 16, 80, generator=rng)
    parts = summarize(keys, "minmax").transpose(0, 1).contiguous().to(DTYPES[stored])  # [blocks + 1, 2, 4, 80]
    summary, tail = parts[:blocks], parts[blocks].clone()
    scores = criticality(q, parts, units)
    for first in range(min(3, blocks)):
        got = ranked_blocks(q, summary, units, first, blocks)
        for unit, row in zip(scores, got.tolist()):
            order = sorted(range(first, blocks), key=lambda block: -unit[block])
            assert row == order or all(abs(unit[a] - unit[b]) < 1e-4 for a, b in zip(row, order))
        for count in {1, blocks // 2, blocks - first}:
            best = top_blocks(q, summary, units, count, first, blocks + 1, tail)
            for unit, row in zip(scores, best.tolist()):
                assert row == sorted(row)
                least = sorted(unit[first:], reverse=True)[count - 1] if count else 0
                assert all(unit[block] > least - 1e-4 for block in row)
                assert len(set(row)) == count


@pytest.mark.parametrize("units", [1, 4])
def test_equal_blocks_keep_their_order(units):
    """Five different summaries, repeated: nearly every place is decided by the number."""
    parts = torch.randn(5, 2, 2, 32, generator=generator(1)).sort(1, descending=True).values
    summary = parts[torch.arange(203) % 5].contiguous()
    q = torch.randn(4, 32, generator=generator(2))
    assert cpu_blocks.serves_summary(q, summary, units) is None
    ranked = ranked_blocks(q, summary, units, 2, 203)
    for unit, row in zip(criticality(q, parts, units), ranked.tolist()):
        kinds = sorted(range(5), key=lambda kind: -unit[kind])
        assert row == [block for kind in kinds for block in range(2, 203) if block % 5 == kind]
    for count in (1, 40, 41, 120):
        best = top_blocks(q, summary, units, count, 2, 203)
        assert best.tolist() == [sorted(row[:count]) for row in ranked.tolist()]


def test_scores_of_either_sign_and_zeros_are_sorted():
    """Channels of one sign at a time: scores below, at and above 0, over many powers of two."""
    values = torch.tensor([0.0, -0.0, 3.0, -1e-30, 1e-30, -3.0, 1e20, -1e20, 0.5, -0.0])
    summary = torch.zeros(10, 2, 1, 16)
    summary[:, 0, 0, 0] = summary[:, 1, 0, 0] = values
    q = torch.zeros(1, 16)
    q[0, 0] = 1.0
    order = sorted(range(10), key=lambda i: -float(values[i]))  # a stable sort for which 0 and -0 are equal
    assert ranked_blocks(q, summary, 1, 0, 10).tolist() == [order]
