"""Sampled rows: rows, shares and blocks by hand, chunks that begin anywhere, the dense limits, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import run_method

from saccade.errors import ModelError, PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.sampled_rows import SampledRows
from saccade.ops import cpu, cpu_sums
from saccade.ops.row_shares import _sums, row_shares, sampled_count, sampled_rows
from saccade.selection import Blocks, Dense, Shape

HEADS, KV_HEADS, D = 4, 2, 16
CALLS = [(300, 300), (130, 301), (65, 256), (1, 200), (97, 129), (64, 320)]  # rows, keys


def draw(rows: int, n: int, seed: int):
    """Queries of the last ``rows`` of ``n`` positions and keys, as views with gaps between their rows."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(h, n, D + 3, generator=generator)[..., 3:] for h in (HEADS, KV_HEADS, KV_HEADS))
    return 3 * q[:, n - rows :], k, v


def shares_by_hand(q, k, rows: int, n: int, count: int, size: int, head: int, softcap=None) -> list[list[float]]:
    """Row by row, in float64."""
    found = []
    for q_block in range((n - rows) // size, (n - 1) // size + 1):
        own = [p for p in range(q_block * size, (q_block + 1) * size) if n - rows <= p < n]
        taken = min(count, len(own))
        sums = torch.zeros(-(-n // size), dtype=torch.float64)
        for position in (own[int((i + 0.5) * len(own) / taken)] for i in range(taken)):
            scores = k[head // (HEADS // KV_HEADS), : position + 1].double() @ q[head, position - (n - rows)].double()
            scores = scores / math.sqrt(D)
            weights = torch.softmax(scores if softcap is None else softcap * torch.tanh(scores / softcap), 0)
            for block in range(position // size + 1):
                sums[block] += weights[block * size : (block + 1) * size].sum() / taken
        found.append(sums.tolist())
    return found


def test_rows_lie_in_the_middle_of_equal_stretches():
    rows, q_block = sampled_rows(Shape.suffix(1, 1, 70, 100), 4, 32)  # blocks of 2, 32, 32 and 4 rows
    assert rows.tolist() == [0, 1, 6, 14, 22, 30, 38, 46, 54, 62, 66, 67, 68, 69]
    assert q_block.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize(("q_len", "n"), [(70, 100), (1, 1), (3, 64), (64, 64), (65, 65), (200, 333), (31, 100)])
@pytest.mark.parametrize(("rows", "size"), [(4, 32), (32, 32), (8, 64), (1, 128)])
def test_they_are_counted_without_being_listed(q_len, n, rows, size):
    shape = Shape.suffix(1, 1, q_len, n)
    assert sampled_count(shape, rows, size) == sampled_rows(shape, rows, size)[0].numel()


@pytest.mark.parametrize(("rows", "n"), CALLS)
@pytest.mark.parametrize(("count", "size", "softcap"), [(3, 32, None), (8, 64, 2.0), (64, 128, None)])
def test_shares_are_those_by_hand_on_every_kernel(rows, n, count, size, softcap):
    q, k, v = draw(rows, n, seed=n + rows)
    view, shape = KVView.from_tensors(k, v, 16, shuffle_seed=2), Shape.suffix(HEADS, KV_HEADS, rows, n)
    at = q, view, shape, count, size, D**-0.5, softcap
    plain = _sums(*at[:3], *sampled_rows(shape, count, size), *at[4:])
    every = {"torch": plain / plain.sum(-1, keepdim=True)}
    try:
        for isa in cpu.supported_isas():
            cpu.set_isa(isa)
            every[isa] = row_shares(*at)
    finally:
        cpu.set_isa(None)
    expected = torch.tensor([shares_by_hand(q, k, rows, n, count, size, head, softcap) for head in range(HEADS)])
    for name, found in every.items():
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4, msg=lambda why, name=name: f"{name}: {why}")


@pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable() or "-")
def test_bfloat16_shares_on_every_kernel():
    """Heads that tiles of AMX serve, and more rows than the kernels take."""
    q, k, v = (torch.randn(h, 700, 64, generator=torch.Generator().manual_seed(h)).bfloat16() for h in (4, 2, 2))
    view, shape = KVView.from_tensors(k, v, 32, shuffle_seed=1), Shape.suffix(4, 2, 450, 700)
    at = q[:, 250:], view, shape, 8, 128, 0.2
    plain = _sums(*at[:3], *sampled_rows(shape, 8, 128), *at[4:], None)
    try:
        for isa in cpu.supported_isas():
            cpu.set_isa(isa)
            torch.testing.assert_close(row_shares(*at), plain / plain.sum(-1, keepdim=True), atol=1e-4, rtol=1e-3)
    finally:
        cpu.set_isa(None)
    assert cpu_sums.serves_row_shares(at[0], view, 65, 128) is not None
    assert torch.equal(row_shares(at[0], view, shape, 65, 128, 0.2).sum(-1).round(decimals=4), torch.ones(4, 5))


@pytest.mark.parametrize(("rows", "n"), [call for call in CALLS if call != (1, 200)])
@pytest.mark.parametrize(("gamma", "threshold"), [(0.9, 1.0), (0.0, 0.05), (0.6, 0.1), (0.0, 1.0)])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_blocks_are_the_fewest_that_reach_gamma_and_all_above_the_threshold(rows, n, gamma, threshold, window):
    q, k, v = draw(rows, n, seed=7 * n + rows)
    method = SampledRows(gamma=gamma, threshold=threshold, rows=5, block_size=32, window_blocks=window)
    found = method.select_prefill(Chunk.of(q, KVView.from_tensors(k, v)))
    assert isinstance(found, Blocks)
    mask = found.block_mask()
    for head in range(HEADS):
        for i, shares in enumerate(shares_by_hand(q, k, rows, n, 5, 32, head)):
            own = (n - rows) // 32 + i
            expected = {0, *range(max(0, own - window + 1), own + 1)}
            have = sum(shares[block] for block in expected)
            for block in sorted(range(own + 1), key=lambda b: -shares[b]):
                if block not in expected and have < gamma:
                    expected.add(block)
                    have += shares[block]
            expected |= {block for block in range(own + 1) if shares[block] >= threshold}
            assert set(mask[head, i].nonzero()[:, 0].tolist()) == expected, (head, i)


@pytest.mark.parametrize("back", [1, 3, 8, 20])
def test_a_head_that_looks_a_few_tokens_back_keeps_its_key_in_every_row(back):
    """At the beginning of a query block that key lies in the block before, and no sampled row may ask for it."""
    n, size, width = 320, 64, 512
    one_hot = 6 * torch.eye(n, width)  # a logit of 36 / sqrt(512) * 20 = 32 for the key asked for, 0 for others
    q = 20 * one_hot[(torch.arange(n) - back).clamp(min=0)].expand(KV_HEADS, n, width)
    k = one_hot.expand(KV_HEADS, n, width)

    def lost(**options) -> list[int]:
        found = SampledRows(threshold=0.01, gamma=0.5, block_size=size, rows=4, **options)
        found = found.select_prefill(Chunk.of(q, KVView.from_tensors(k, k)))
        return [row for row in range(back, n) if not bool(found.row_mask(0, row, row + 1)[0, row - back])]

    assert lost() == []
    edges = [row for row in range(2 * size, n) if row % size < back]  # block 0 is always read
    assert lost(window_blocks=1) == (edges if back <= size // 8 else [])  # the first sampled row is row 8


def test_a_chunk_reads_what_the_whole_would():
    q, k, v = draw(512, 512, seed=3)
    method = SampledRows(gamma=0.3, threshold=0.2, block_size=64)
    whole = method.select_prefill(Chunk.of(q, KVView.from_tensors(k, v)))
    part = method.select_prefill(Chunk.of(q[:, :320], KVView.from_tensors(k[:, :320], v[:, :320])))
    rest = method.select_prefill(Chunk.of(q[:, 320:], KVView.from_tensors(k, v)))
    assert torch.equal(whole.block_mask()[:, :5, :5], part.block_mask())
    assert torch.equal(whole.block_mask()[:, 5:], rest.block_mask())
    assert 0 < whole.density() < 0.8


def test_attention_over_its_blocks_is_what_the_mask_says():
    q, k, v = draw(400, 400, seed=11)
    method = SampledRows(gamma=0.3, threshold=0.1, rows=4, block_size=32)
    out, _, selection = run_method(method, "prefill", q, KVView.from_tensors(k, v), 400)
    for head in range(HEADS):
        mask = selection.row_mask(head, 0, 400)
        assert 400 < mask.sum() < 400 * 401 // 2
        scores = (q[head].double() @ k[head // 2].double().T) / math.sqrt(D)
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
        torch.testing.assert_close(out[head].double(), weights @ v[head // 2].double(), atol=1e-4, rtol=1e-4)


def test_less_is_read_as_gamma_falls_and_the_threshold_rises():
    q, k, v = draw(700, 700, seed=5)
    chunk, before = Chunk.of(q, KVView.from_tensors(k, v)), None
    for gamma, threshold in ((0.0, 1.0), (0.4, 1.0), (0.4, 0.1), (0.8, 0.1), (0.8, 0.02), (0.99, 0.001)):
        mask = SampledRows(gamma=gamma, threshold=threshold, block_size=32).select_prefill(chunk).mask()
        assert before is None or (not (before & ~mask).any() and (mask & ~before).any()), (gamma, threshold)
        before = mask
    for limit in ({"gamma": 1.0}, {"threshold": 0.0}, {"gamma": 1, "threshold": 1}):
        assert isinstance(SampledRows(block_size=32, **limit).select_prefill(chunk), Dense)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(value):
    q, k, v = draw(300, 300, seed=1)
    k = k.clone()
    k[0, 3] = value
    with pytest.raises(ModelError, match="not finite"):
        SampledRows(block_size=32).select_prefill(Chunk.of(q, KVView.from_tensors(k, v)))


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 1.5},
        {"gamma": math.nan},
        {"rows": 0},
        {"rows": 129},
        {"rows": 8.0},
        {"block_size": 256},
        {"window_blocks": 0},
    ],
)
def test_options_out_of_range(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        SampledRows(**options)
