"""What is not finite: the C++ kernels and the reference agree on it. A NaN or +inf logit makes its row NaN, one of
-inf weighs nothing, and every finite logit counts, however low."""

from __future__ import annotations

import pytest
import torch
from cpu_helpers import random_blocks

from saccade.kv.view import KVView
from saccade.ops import Call, cpu, merge_state, run
from saccade.selection import Band, Candidates, Dense, Lines, Ranking, Sampled, Shape, Tokens

pytestmark = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable() or "-")

HEADS, KV_HEADS, DIM, KEYS = 4, 2, 32, 300
SPOILT = 250  # the key that is spoilt: rows before it do not see it


@pytest.fixture(params=cpu.supported_isas(), autouse=True)
def isa(request):
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(None)


def selections(rows: int) -> dict:
    shape = Shape.suffix(HEADS, KV_HEADS, rows, KEYS)
    every = torch.arange(KEYS, dtype=torch.int32)
    made = {
        "dense": Dense(shape),
        "band": Band(shape, 60, 4),
        "blocks": random_blocks(shape, 16, 2, 0.7),
        "lines": Lines.from_lists(shape, [every[::10]] * 2, [every[::7]] * 2),
    }
    if rows == 1:
        lists = [every[::2], every[::3]]
        tokens = Tokens.from_lists(shape, lists)
        order = torch.arange(-(-KEYS // 16), dtype=torch.int32).repeat(2, 1)
        made |= {
            "tokens": tokens,
            "candidates": Candidates.all_keys(shape, 2, 40, sinks=4, local=64),
            "ranking": Ranking(shape, 16, order[:, :2].contiguous(), order[:, 2:].contiguous(), epsilon=1.0),
            "sampled": Sampled(
                Tokens.from_lists(shape, [every[::2], every[::3]] * 2),
                torch.rand(500, generator=torch.Generator().manual_seed(5)),
            ),
        }
    return made


def plant(kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Spoil channels of one key, or all logits, so that each logit is what it is in whatever order it is added up."""
    if kind == "nan key":
        k[:, SPOILT, 3] = torch.nan
    elif kind == "infinite key":  # +inf or -inf by the sign of the query's channel
        k[:, SPOILT, 3] = torch.inf
    elif kind == "infinite value":
        v[:, SPOILT, 3] = torch.inf
    elif kind == "overflow":
        k[:, SPOILT] = 0
        k[:, SPOILT, 3] = 3e38
        q[:, :, 3] = 1000 * q[:, :, 3].sign()
    elif kind == "far below":  # all logits of most rows are below -1e30
        k[:, :, 3] = -3e33 * 1.02 ** (torch.arange(KEYS) * 37 % KEYS)  # no two alike
        q[:, :, 3] = 4
    elif kind == "nan query":
        q[1, -1, 5] = torch.nan


PLANTED = ("nan key", "infinite key", "infinite value", "overflow", "far below", "nan query")


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 200])
def test_kernels_and_reference_agree_on_what_is_not_finite(rows, dtype, kind):
    generator = torch.Generator().manual_seed(7)
    q, k, v = (
        torch.randn(heads, count, DIM, generator=generator)
        for heads, count in ((HEADS, rows), (KV_HEADS, KEYS), (KV_HEADS, KEYS))
    )
    plant(kind, q, k, v)
    q, kv = q.to(dtype), KVView.from_tensors(k.to(dtype), v.to(dtype), block_size=32, shuffle_seed=3)
    spoilt = 0
    for name, selection in selections(rows).items():
        selection.check()
        ours, theirs = (
            run(Call.of(q, kv, selection, scale=0.25, threads=2), backend) for backend in ("cpu", "reference")
        )
        here = torch.ones(HEADS, rows, dtype=torch.bool)
        if kind == "infinite value" and rows > 1:  # 0 * inf: rows that share a tile with a reader may be NaN as well
            here = selection.mask()[:, :, SPOILT]
        assert torch.equal(ours.out[here].isnan(), theirs.out[here].isnan()), name
        assert torch.equal(ours.out[here].isinf(), theirs.out[here].isinf()), name
        assert torch.equal(ours.lse.isfinite(), theirs.lse.isfinite()), name
        assert torch.equal(ours.lse == -torch.inf, theirs.lse == -torch.inf), name
        fine = theirs.out.isfinite() & ours.out.isfinite()
        torch.testing.assert_close(ours.out[fine].float(), theirs.out[fine].float(), atol=2e-2, rtol=2e-2)
        spoilt += int((~theirs.out.isfinite()).sum())
    assert (spoilt > 0) == (kind != "far below")


def test_a_merge_keeps_what_is_not_finite():
    out, lse = torch.ones(2, 4), torch.zeros(2)
    broken, unknown = torch.full((2, 4), torch.nan), torch.tensor([torch.nan, torch.inf])
    merged, _ = merge_state(out, lse, broken, unknown)
    assert merged.isnan().all()
