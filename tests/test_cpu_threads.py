"""Long decode rows, cut into parts that threads share: what they read and what comes out hang on no number of threads,
and are the reference's."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_helpers import problem
from helpers import generator

from saccade.ops import Call, cpu, reference, run
from saccade.selection import Candidates, Ranking, Shape

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C++ kernels here")
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
THREADS = (1, 2, 3, 7, 32) * 2  # twice: which thread reads which part is another matter each time


def alike(q, view, selection, want_weights=False):
    """What one thread makes of a call, and so do others; close to the reference, which reads the same keys."""
    softcap = 20.0 if view.kv_heads == 2 else None
    one, *others = (
        run(Call.of(q, view, selection, softcap=softcap, threads=threads, want_weights=want_weights), "cpu")
        for threads in THREADS
    )
    for other in others:
        for name in ("out", "lse", "coverage", "weights"):
            if getattr(one, name) is not None:
                assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert torch.equal(one.used.offsets, other.used.offsets)
        assert torch.equal(one.used.indices, other.used.indices)
    scale = 1 / math.sqrt(q.shape[-1])
    out, lse = reference.attend(q.double(), view, one.used, scale=scale, softcap=softcap)
    bound = 1e-5 if q.dtype == torch.float32 else 2e-2
    assert float((one.out - out).abs().max()) < bound * max(1.0, float(out.abs().max()))
    assert float((one.lse - lse).abs().max()) < bound
    return one


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "units"), [(4, 2, 2), (6, 2, 6), (4, 1, 1), (8, 4, 1)])
def test_a_rule_stops_where_it_stops_for_one_thread(dtype, heads, kv_heads, units):
    """Within the first part of the blocks, at the end of one, somewhere behind, and nowhere."""
    shape, rng = Shape.suffix(heads, kv_heads, 1, 9001), generator(units)
    q, view = problem(shape, 32, DTYPES[dtype], seed=heads)
    blocks = -(-shape.k_len // 16)
    seen = set()
    for epsilon, microbatch, rest, stop in (
        (0.02, 3, "last_max", "all"),
        (0.3, 8, "last_max", "mean"),
        (0.5, 64, "min", "all"),
        (0.6, 100, "last_max", "all"),
        (0.8, 1, "min", "mean"),
        (1.0, 32, "last_max", "all"),
    ):
        order = torch.stack([torch.randperm(blocks, generator=rng) for _ in range(units)]).int()
        ranked = Ranking(shape, 16, order[:, :2], order[:, 2:], epsilon, microbatch, rest, stop)
        ran = alike(q, view, ranked)
        seen |= {int(count) // 64 for count in ran.used.offsets.diff()}
        counts = ran.used.offsets.diff() - 2
        assert bool(((counts % microbatch == 0) | (counts == blocks - 2)).all())
    assert len(seen) > 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "units"), [(4, 2, 2), (6, 2, 6), (4, 1, 2)])
def test_the_best_of_many_keys_are_those_of_one_thread(dtype, heads, kv_heads, units):
    shape, rng = Shape.suffix(heads, kv_heads, 1, 40_003), generator(units)
    q, view = problem(shape, 32, DTYPES[dtype], seed=heads)
    ran = alike(q, view, Candidates.all_keys(shape, units, 1100, sinks=3, local=70), want_weights=True)
    assert ran.used.offsets.diff().tolist() == [1173] * units
    if units == heads:
        logits = (q.float()[:, 0] * 32**-0.5)[:, None] @ view.keys(0, shape.k_len).float().repeat_interleave(
            shape.group, 0
        ).transpose(1, 2)
        for unit in range(units):
            best = torch.topk(logits[unit, 0, 3:-70], 1100).values
            read = ran.used.indices[ran.used.offsets[unit] + 3 : ran.used.offsets[unit + 1] - 70].long()
            assert torch.allclose(logits[unit, 0, read].sort(descending=True).values, best, atol=1e-2)
    lists = [torch.randperm(40_003 - 73, generator=rng)[: 700 + 1900 * unit].sort().values + 3 for unit in range(units)]
    offsets = torch.tensor([0, *[one.numel() for one in lists]]).cumsum(0)
    k = torch.tensor([2000] * units)
    idle = torch.arange(heads) == 1 if units < heads else None
    listed = Candidates(shape, offsets, torch.cat(lists).int(), k, 3, 70, idle=idle, idle_keys=2)
    alike(q, view, listed, want_weights=True)
