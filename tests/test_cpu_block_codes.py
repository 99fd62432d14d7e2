"""Block summaries in 4 bits: they save time and change nothing."""

from __future__ import annotations

import pytest
import torch
from covering import covered
from helpers import generator

from saccade.kv.block_codes import TILE, BlockCodes
from saccade.kv.kept_summaries import KeptSummaries
from saccade.kv.summaries import summarize
from saccade.kv.view import KVView
from saccade.methods.base import Query
from saccade.methods.psa import PSA
from saccade.ops import Call, block_scores, cpu, cpu_blocks, run
from saccade.selection import Ranking

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C++ kernels here")
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(params=cpu.supported_isas(), autouse=True)
def isa(request):
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(None)


def keys(case: str, blocks: int, kv_heads: int, size: int, head_dim: int) -> torch.Tensor:
    """[kv_heads, blocks, size, head_dim]."""
    rng = generator(7)
    made = torch.randn(kv_heads, blocks, size, head_dim, generator=rng)
    if case == "walk":  # a topic for a while, then another one; a few channels far from zero
        topics = torch.randn(9, kv_heads, 1, head_dim, generator=rng)
        which = torch.randint(9, (blocks // 20 + 1,), generator=rng).repeat_interleave(20)[:blocks]
        made = 0.5 * made + topics[which].transpose(0, 1)
        made[..., ::13] += 30
    elif case == "alike":
        made = made[:, torch.arange(blocks) % 7]
    elif case == "drift":  # far from what the frame was made of
        made *= torch.logspace(-3, 3, blocks)[:, None, None]
    elif case == "heavy":
        made[:, 5::97] *= 1e6
    elif case == "infinite":
        made[:, 300, 0, 0] = torch.inf
    elif case == "constant":
        made = torch.ones_like(made)
    return made


CASES = ["random", "walk", "alike", "drift", "heavy", "infinite", "constant"]


@covered({"case": CASES, "stored": DTYPES, "dtype": DTYPES, "units": [1, 2, 4, 8], "kind": ["minmax", "cuboid"]})
def test_the_best_are_those_of_the_summaries(case, stored, dtype, units, kind):
    blocks, size, head_dim = 900, 8, 48
    rng = generator(units)
    q = torch.randn(8, head_dim, generator=rng).to(DTYPES[dtype])
    parts = summarize(keys(case, blocks + 1, 2 if units == 2 else 4, size, head_dim), kind)
    parts = parts.permute(2, 0, 1, 3).contiguous().to(DTYPES[stored])
    summary, tail = parts[:blocks], parts[blocks].clone()
    codes = BlockCodes()
    for upto in (250, 700, 899):  # as blocks fill; the last few are in no tile
        codes.follow(summary[:upto])
    assert codes.blocks == 899 // TILE * TILE
    for first, count in ((0, 1), (2, 30), (1, 200)):
        for end in (None, tail):
            given = q, summary, units, first, blocks + (end is not None), count, end
            plain, coded = cpu_blocks.rank_blocks(*given), cpu_blocks.rank_blocks(*given, codes)
            assert torch.equal(plain, coded)
        ranked = cpu_blocks.rank_blocks(q, summary, units, first, blocks, 0)
        begun = cpu_blocks.rank_blocks(q, summary, units, first, blocks, count, None, codes, falling=True)
        if case != "infinite":  # NaN has no place among scores
            assert torch.equal(begun, ranked[:, :count])


def test_blocks_that_codes_rule_out_are_not_read():
    """Summaries that are passed over are NaN by then; they lie below by more than rounding can hide, for every head."""
    parts = summarize(keys("walk", 3200, 2, 8, 64), "minmax").permute(2, 0, 1, 3).contiguous()
    q = parts[100, 0].repeat_interleave(4, 0) + torch.randn(8, 64, generator=generator(3))
    codes = BlockCodes()
    codes.follow(parts)
    best = cpu_blocks.rank_blocks(q, parts, 2, 2, 3200, 64, None, codes)
    own = codes.range[..., 1, :].flatten(1)[:, :3200] / 2  # how far off a value may be
    frame = codes.frame
    pairs = torch.stack([codes.codes & 15, codes.codes >> 4], 3)  # [G, tiles, channels / 8, 2, 16, 4]
    pairs = pairs.transpose(4, 5).flatten(2, 4)  # [G, tiles, channels, 16]
    rounded = codes.range[:, :, 0, None] + pairs * codes.range[:, :, 1, None]
    rounded = rounded.transpose(2, 3).flatten(1, 2)[:, :3200] * frame[1][:, None] + frame[0][:, None]
    true = parts.permute(2, 0, 1, 3).flatten(2)
    assert ((rounded - true).abs() <= own[..., None] * frame[1][:, None] * 1.001 + 1e-5).all()
    weights = torch.cat([q.clamp(min=0).view(2, 4, -1).mean(1), q.clamp(max=0).view(2, 4, -1).mean(1)], -1)
    off = own * (weights.abs() * frame[1]).sum(-1, keepdim=True)
    above = torch.einsum("gc,gnc->gn", weights, rounded) + off
    scores = torch.einsum("gc,gnc->gn", weights, true)
    least = scores.gather(1, best.long()).amin(1, keepdim=True)
    unread = (above < least - 2 * off.amax(1, keepdim=True)).all(0)  # the best by rounded scores may be so far below
    assert unread.float().mean() > 0.25
    spoilt = parts.clone()
    spoilt[unread] = torch.nan
    assert torch.equal(cpu_blocks.rank_blocks(q, spoilt, 2, 2, 3200, 64, None, codes), best)


def test_codes_follow_what_is_cut_off_and_filled_again():
    parts = summarize(keys("random", 4000, 1, 4, 16), "minmax").permute(2, 0, 1, 3).contiguous()
    kept = KeptSummaries("minmax", 4, parts[:2500].clone(), 2500)
    assert kept.codes() is not None
    other = kept.fork(2400 * 4)
    kept.truncate(2100 * 4)
    kept.extend(parts[1000:1900])
    for one, whole in ((kept, torch.cat([parts[:2100], parts[1000:1900]])), (other, parts[:2400])):
        codes = one.codes()
        assert codes is not None
        assert torch.equal(one.made, whole)
        q = torch.randn(2, 16, generator=generator(1))
        plain = cpu_blocks.rank_blocks(q, one.made, 1, 0, len(whole), 50)
        assert torch.equal(cpu_blocks.rank_blocks(q, one.made, 1, 0, len(whole), 50, None, codes), plain)


@pytest.mark.parametrize(("epsilon", "rest"), [(0.5, "last_max"), (0.999, "last_max"), (1.0, "min")])
def test_a_ranking_that_is_begun_ends_as_the_whole(epsilon, rest, monkeypatch):
    monkeypatch.setattr(block_scores, "RARELY", 8)
    size = 8
    rng = generator(5)
    k, v = torch.randn(2, 2, 24000, 32, generator=rng).unbind()
    q = 2 * torch.randn(4, 1, 32, generator=rng)
    view = KVView.from_tensors(k, v, 32)
    kept = KeptSummaries("cuboid", size)
    kept.upto(view)
    known = KVView(view.paged(), lambda kind, block: kept)
    method = PSA(epsilon=epsilon, block_size=size, rest=rest, microbatch=3, rank="cuboid")
    begun, whole = (method.select_decode(Query.of(q, one), None) for one in (known, view))
    assert isinstance(begun, Ranking)
    assert begun.order.shape[1] < whole.order.shape[1] == begun.total
    for name in ("cpu", "reference") if epsilon < 0.9 else ("cpu",):
        a, b = (run(Call.of(q, view, one), name) for one in (begun, whole))
        assert torch.equal(a.used.indices, b.used.indices)
        assert torch.equal(a.out, b.out)
        assert torch.equal(a.coverage, b.coverage)
