"""Methods choose the same with the C++ kernels as with torch.

The two add in different orders, so sums differ by a few parts in a million. Where two candidates, or a sum and its
threshold, lie closer than that, the choice may flip; nothing else may. In float32 on these inputs nothing flips, except
where a long greedy choice meets near-ties by the hundred.
"""

from __future__ import annotations

import pytest
import torch
from covering import covered, spread
from helpers import Planted, generator, planted_heads

from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.flexprefill import FlexPrefill
from saccade.methods.loopserve import LoopServe
from saccade.methods.minference import MInference
from saccade.methods.sampled_rows import SampledRows
from saccade.methods.xattention import XAttention
from saccade.ops import cpu, scores

pytestmark = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable() or "-")

METHODS = {
    "flexprefill": FlexPrefill(gamma=0.9, tau=0.0, block_size=64, min_budget=128, lines="block"),
    "flexprefill query-aware": FlexPrefill(gamma=0.8, tau=1.0, block_size=64, min_budget=0),
    "flexprefill 128": FlexPrefill(gamma=0.8, tau=0.2, block_size=128, min_budget=0),
    "minference": MInference(vertical=60, slash=50, keep_columns=4, keep_diagonals=8),
    "loopserve": LoopServe(alpha=0.9, samples=100),
    "loopserve blocks": LoopServe(alpha=0.8, samples=100, lines="block", block_size=64),
    "sampled_rows": SampledRows(threshold=0.05, gamma=0.6, block_size=64),
    "xattention": XAttention(threshold=0.8, block_size=64),
    "xattention 16": XAttention(threshold=0.9, stride=16, block_size=128),
}
PATTERNS = {
    "lines": Planted(columns=(7, 301), slashes=(13, 190), blocks=()),
    "blocks": Planted(columns=(), slashes=(), blocks=(3, 9)),
    "random": None,
}


def chunk_of(pattern: str, rows: int, dtype: torch.dtype, n: int = 900) -> Chunk:
    if PATTERNS[pattern] is None:
        rng = generator(rows)
        q, k, v = (torch.randn(heads, n, 32, generator=rng) for heads in (4, 2, 2))
    else:
        q, k, v = planted_heads(4, 2, n, seed=rows, pattern=PATTERNS[pattern])
    return Chunk.of(q[:, n - rows :].to(dtype), KVView.from_tensors(k.to(dtype), v.to(dtype), 16, shuffle_seed=1))


def both(method, chunk, monkeypatch, isa):
    """What is read after a choice by the kernels and by torch: two bool [heads, rows, n]."""
    cpu.set_isa(isa)
    try:
        fast = method.select_prefill(chunk).mask()
    finally:
        cpu.set_isa(None)
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "serves", lambda *_: "patched")
        patch.setattr(cpu, "available", lambda: False)
        return fast, method.select_prefill(chunk).mask()


@covered({"isa": cpu.supported_isas(), "name": METHODS, "pattern": PATTERNS, "rows": [900, 250]})
def test_float32_choices_are_torchs(name, pattern, rows, isa, monkeypatch):
    fast, slow = both(METHODS[name], chunk_of(pattern, rows, torch.float32), monkeypatch, isa)
    if name == "loopserve":
        assert float((fast ^ slow).sum() / slow.sum()) < 0.01
    else:
        assert torch.equal(fast, slow)


@pytest.mark.parametrize(("name", "isa"), spread(METHODS, cpu.supported_isas()))
def test_bfloat16_choices_are_nearly_torchs(name, isa, monkeypatch):
    """Products of bfloat16 are exact in both; only sums and the exponential round differently."""
    for pattern in PATTERNS:
        fast, slow = both(METHODS[name], chunk_of(pattern, 900, torch.bfloat16), monkeypatch, isa)
        assert float((fast ^ slow).sum() / slow.sum()) < 0.01


@pytest.mark.parametrize("size", [(1, 1), (3, 7), (2, 5, 700), (4, 5000), (3, 0)])
@pytest.mark.parametrize("kind", ["spread", "equal", "zeros", "signed", "infinite", "absent"])
def test_needed_shares_agree_with_a_sort(size, kind):
    mass = torch.randn(size, generator=torch.Generator().manual_seed(0)).exp()
    if kind == "equal":
        mass = (2 * mass).round()
    elif kind == "zeros":
        mass = torch.zeros(size)
    elif kind == "signed":
        mass = torch.where(mass < 0.2, -0.0, mass - 0.4)
    elif kind in ("infinite", "absent") and mass.numel():
        mass[..., 0] = torch.inf if kind == "infinite" else torch.nan
    ours = scores.needed_shares(mass)
    values, order = torch.sort(mass.double(), dim=-1, descending=True, stable=True)
    total = values.sum(-1, keepdim=True)
    before = torch.where(total.isfinite() & (total > 0), values.cumsum(-1) / total - values / total, 0.0)
    torch.testing.assert_close(ours, torch.zeros_like(before).scatter_(-1, order, before), rtol=1e-9, atol=1e-9)
    assert ours.dtype == torch.float64
