"""FlashPrefill: energies and blocks by hand, chunks that begin anywhere, a lone block, what is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import run_method

from saccade.errors import ModelError, PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.flashprefill import FlashPrefill
from saccade.ops.block_energies import block_energies
from saccade.selection import Blocks, Dense, Shape

HEADS, KV_HEADS, D = 4, 2, 16
CALLS = [(300, 300), (130, 301), (65, 256), (1, 200), (97, 129), (64, 320)]  # rows, keys


def draw(rows: int, n: int, seed: int):
    """Queries of the last ``rows`` of ``n`` positions and keys, as views with gaps between their rows."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(h, n, D + 3, generator=generator)[..., 3:] for h in (HEADS, KV_HEADS, KV_HEADS))
    return 3 * q[:, n - rows :], k, v


def energy_by_hand(q, k, rows: int, n: int, size: int, head: int, q_block: int, block: int, softcap=None) -> float:
    """Row by row, in float64; the score of a row that does not see the whole block does not count."""
    mean = k[head // (HEADS // KV_HEADS), block * size : (block + 1) * size].double().mean(0)
    total = 0.0
    for position in range(max(q_block * size, n - rows), min((q_block + 1) * size, n)):
        if position >= (block + 1) * size - 1 and (block + 1) * size <= n:
            score = float(q[head, position - (n - rows)].double() @ mean) / math.sqrt(D)
            total += math.exp(score if softcap is None else softcap * math.tanh(score / softcap))
    return math.log(total) if total else -math.inf


@pytest.mark.parametrize(("rows", "n"), CALLS)
@pytest.mark.parametrize(("size", "softcap"), [(32, None), (64, 2.0)])
def test_energies_are_those_by_hand(rows, n, size, softcap):
    q, k, v = draw(rows, n, seed=n + rows)
    found = block_energies(q, KVView.from_tensors(k, v), Shape.suffix(HEADS, KV_HEADS, rows, n), size, D**-0.5, softcap)
    first = (n - rows) // size
    expected = [
        [
            [energy_by_hand(q, k, rows, n, size, head, first + i, b, softcap) for b in range(-(-n // size))]
            for i in range(found.shape[1])
        ]
        for head in range(HEADS)
    ]
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("unit", ["q_head", "kv_head"])
@pytest.mark.parametrize(("rows", "n"), CALLS)
def test_blocks_are_those_near_the_heaviest(rows, n, unit):
    q, k, v = draw(rows, n, seed=7 * n + rows)
    method = FlashPrefill(alpha=0.3, sink_blocks=1, window_blocks=2, last_blocks=1, block_size=32, unit=unit)
    chunk = Chunk.of(q, KVView.from_tensors(k, v))
    found = method.select_prefill(chunk)
    q_blocks = (n - 1) // 32 - (n - rows) // 32 + 1
    if q_blocks == 1:  # the last of the call
        assert isinstance(found, Dense)
        return
    assert isinstance(found, Blocks)
    mask = found.block_mask()
    each = HEADS // mask.shape[0]
    for one in range(mask.shape[0]):
        for i in range(q_blocks):
            own = (n - rows) // 32 + i
            sums = [
                sum(
                    math.exp(energy_by_hand(q, k, rows, n, 32, head, own, b))
                    for head in range(one * each, (one + 1) * each)
                )
                for b in range(own + 1)
            ]
            expected = [
                b == 0 or b > own - 2 or i == q_blocks - 1 or sums[b] >= 0.3 * max(sums) for b in range(own + 1)
            ]
            assert mask[one, i, : own + 1].tolist() == expected, (one, i)
            assert not mask[one, i, own + 1 :].any()


def test_a_chunk_reads_what_the_whole_would():
    """But for the last blocks of a call, which read everything."""
    q, k, v = draw(512, 512, seed=3)
    method = FlashPrefill(alpha=0.5, block_size=64, sink_blocks=1, window_blocks=1, last_blocks=0)
    whole = method.select_prefill(Chunk.of(q, KVView.from_tensors(k, v)))
    part = method.select_prefill(Chunk.of(q[:, :320], KVView.from_tensors(k[:, :320], v[:, :320])))
    rest = method.select_prefill(Chunk.of(q[:, 320:], KVView.from_tensors(k, v)))
    assert torch.equal(whole.block_mask()[:, :5, :5], part.block_mask())
    assert torch.equal(whole.block_mask()[:, 5:], rest.block_mask())


def test_a_heavy_block_is_found_and_light_ones_are_not():
    n, size = 1024, 64
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, n, D, generator=generator) * 0.1
    k, v = (torch.randn(1, n, D, generator=generator) * 0.1 for _ in range(2))
    direction = torch.nn.functional.normalize(torch.randn(D, generator=generator), dim=0)
    k[0, 5 * size : 6 * size] += 6 * direction
    q += 6 * direction
    method = FlashPrefill(block_size=size, sink_blocks=0, window_blocks=1, last_blocks=0)
    mask = method.select_prefill(Chunk.of(q, KVView.from_tensors(k, v))).block_mask()
    assert mask[:, 7:, 5].all()
    others = [b for b in range(16) if b != 5]
    assert all(mask[:, i, others].sum() == 2 for i in range(7, 16))  # each head reads its own block beside it


def test_attention_over_its_blocks_is_what_the_mask_says():
    q, k, v = draw(400, 400, seed=11)
    method = FlashPrefill(alpha=0.8, block_size=32, sink_blocks=1, window_blocks=1, last_blocks=0)
    out, _, selection = run_method(method, "prefill", q, KVView.from_tensors(k, v), 400)
    for head in range(HEADS):
        mask = selection.row_mask(head, 0, 400)
        assert 400 < mask.sum() < 400 * 401 // 2
        scores = (q[head].double() @ k[head // 2].double().T) / math.sqrt(D)
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
        torch.testing.assert_close(out[head].double(), weights @ v[head // 2].double(), atol=1e-4, rtol=1e-4)


def test_what_is_not_finite_is_refused():
    q, k, v = draw(300, 300, seed=1)
    k = k.clone()
    k[0, 3, 0] = math.nan
    with pytest.raises(ModelError, match="not finite"):
        FlashPrefill(block_size=32, last_blocks=0).select_prefill(Chunk.of(q, KVView.from_tensors(k, v)))


@pytest.mark.parametrize(
    "options", [{"alpha": 1.5}, {"alpha": math.nan}, {"window_blocks": 0}, {"last_blocks": -1}, {"unit": "layer"}]
)
def test_options_out_of_range(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        FlashPrefill(**options)
