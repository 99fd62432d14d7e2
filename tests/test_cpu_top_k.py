"""Exact top-k over contexts that are scored and ranked in parts: the reference's keys, whoever computes which part."""

from __future__ import annotations

import random

import pytest
import torch

from saccade.kv.view import KVView
from saccade.ops import Call, cpu, run
from saccade.selection import Candidates, Shape

pytestmark = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable() or "-")


@pytest.fixture(autouse=True)
def _default_isa():
    yield
    cpu.set_isa(None)


@pytest.mark.parametrize("n", [4096, 4097, 12345])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_long_context_pick_the_best_of_all(n, dtype):
    draw = random.Random(n)
    kv_heads, group, head_dim = draw.choice([1, 2]), draw.choice([1, 3, 4]), draw.choice([32, 80])
    heads = kv_heads * group
    rng = torch.Generator().manual_seed(n)
    q, k, v = (
        torch.randn(rows, m, head_dim, generator=rng).to(dtype) for rows, m in ((heads, 1), *[(kv_heads, n)] * 2)
    )
    k[:, n // 2 :] = k[:, : n - n // 2].clone()  # ties, across parts
    view = KVView.from_tensors(k, v, 32, shuffle_seed=1)
    shape = Shape.suffix(heads, kv_heads, 1, n, "cpu")
    for units in {kv_heads, heads}:
        selection = Candidates.all_keys(
            shape, units, draw.choice([1, 60, 900]), draw.choice([0, 3]), draw.choice([0, 7])
        )
        want = run(Call(q, view, selection, 0.2, 9.0, 1), "reference")
        for isa in cpu.supported_isas():
            cpu.set_isa(isa)
            got = [run(Call(q, view, selection, 0.2, 9.0, threads), "cpu") for threads in (1, 2, 9)]
            for one in got:
                assert torch.equal(one.used.indices.long(), want.used.indices.long())
                bound = 1e-5 if dtype == torch.float32 else 2e-2 * want.out.abs().max().item()
                assert (one.out.float() - want.out.float()).abs().max() <= bound
                assert torch.equal(one.out, got[0].out)
                assert torch.equal(one.lse, got[0].lse)
