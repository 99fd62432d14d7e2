"""The choice by sampled rows on a GPU, against the same sums in float32 and the same rule in torch."""

from __future__ import annotations

import pytest
import torch
from helpers import planted_heads

from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.sampled_rows import SampledRows
from saccade.ops.row_shares import row_shares
from saccade.ops.triton import row_shares as on_device
from saccade.selection import Blocks


def draw(n: int, head_dim: int, dtype: torch.dtype, seed: int, heads: int = 8) -> tuple[torch.Tensor, ...]:
    return tuple(part.to("cuda", dtype) for part in planted_heads(heads, 2, n, head_dim, seed))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads"),
    [
        (torch.bfloat16, 128, 8),
        (torch.bfloat16, 64, 6),
        (torch.bfloat16, 256, 14),
        (torch.float16, 96, 2),
        (torch.float32, 64, 8),
    ],
)
@pytest.mark.parametrize(
    ("q_len", "n", "rows", "size"),
    [(3000, 3000, 8, 128), (9000, 11003, 8, 128), (1000, 5013, 16, 64), (77, 2000, 3, 32)],
)
@pytest.mark.parametrize("copied", [False, True])
def test_shares_and_lists(q_len, n, rows, size, dtype, head_dim, heads, copied, monkeypatch):
    if copied:
        monkeypatch.setattr(on_device, "LONG", 1)
    q, k, v = draw(n, head_dim, dtype, n + head_dim, heads)
    given = torch.cat([q, q], -1)[:, -q_len:, head_dim:]  # rows that lie apart
    chunk = Chunk.of(given, KVView.from_tensors(k, v, block_size=32, shuffle_seed=1))
    at = chunk.kv, chunk.shape, rows, size
    shares = on_device.shares(given, *at, chunk.scale)
    exact = Chunk.of(q[:, -q_len:].float().cpu(), KVView.from_tensors(k.float().cpu(), v.float().cpu(), block_size=32))
    expected = row_shares(exact.q, exact.kv, exact.shape, rows, size, exact.scale)
    assert (shares.cpu() - expected).abs().max() < (2e-2 if dtype == torch.bfloat16 else 3e-3)
    for gamma, threshold, window in ((0.8, 0.01, 2), (0.95, 1.0, 1), (0.0, 0.02, 3)):
        mask = SampledRows(threshold, gamma, rows, size, window)._taken(shares, chunk.shape.q_start // size)
        want = Blocks.from_block_mask(chunk.shape, size, mask)
        got = on_device.choose(given, *at, gamma, threshold, window, chunk.scale)
        differ = (got.offsets - want.offsets).diff().abs()
        assert differ.max() <= 1  # a sum that is as close to gamma as rounding
        assert (differ > 0).float().mean() < 0.01
        again = on_device.choose(given, *at, gamma, threshold, window, chunk.scale)
        assert torch.equal(again.offsets, got.offsets)


def test_the_method_chooses_on_the_device():
    q, k, v = draw(4096, 64, torch.bfloat16, 3)
    chunk = Chunk.of(q, KVView.from_tensors(k, v, block_size=32, shuffle_seed=1))
    chosen = SampledRows(threshold=0.02, gamma=0.5).select_prefill(chunk)
    assert chosen.indices.numel() > int(chosen.offsets[-1])  # room that only the device knows the use of
    chosen.check()
