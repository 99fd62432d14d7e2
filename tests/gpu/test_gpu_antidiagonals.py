"""XAttention's choice on a GPU, against the same sums in float64 and the same rule in torch."""

from __future__ import annotations

import pytest
import torch
from helpers import planted_heads

from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.xattention import XAttention, _reach
from saccade.ops.scores import antidiagonal_shares
from saccade.ops.triton import antidiagonals
from saccade.selection import Blocks


def draw(n: int, head_dim: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    return tuple(part.to("cuda", dtype) for part in planted_heads(8, 2, n, head_dim, seed))


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float16, 96), (torch.float32, 64)])
@pytest.mark.parametrize(
    ("q_len", "n", "stride", "size"), [(3000, 3000, 8, 128), (1000, 5013, 16, 64), (77, 2000, 4, 32)]
)
@pytest.mark.parametrize("copied", [False, True])
def test_shares_and_lists(q_len, n, stride, size, dtype, head_dim, copied, monkeypatch):
    if copied:
        monkeypatch.setattr(antidiagonals, "LONG", 1)
    q, k, v = draw(n, head_dim, dtype, int(torch.randint(1 << 20, ())))
    given = torch.cat([q, q], -1)[:, -q_len:, head_dim:]  # rows that lie apart
    chunk = Chunk.of(given, KVView.from_tensors(k, v, block_size=32, shuffle_seed=1))
    at = chunk.kv, chunk.shape, stride, size
    shares = antidiagonals.shares(given, *at, chunk.scale)
    exact = Chunk.of(q[:, -q_len:].double().cpu(), KVView.from_tensors(k.float().cpu(), v.float().cpu(), block_size=32))
    expected = antidiagonal_shares(exact.q.float(), exact.kv, exact.shape, stride, size, exact.scale)
    assert (shares.cpu() - expected).abs().max() < (2e-2 if dtype == torch.bfloat16 else 3e-3)
    for threshold, lagging in ((0.9, 0), (0.95, 8)):
        want = Blocks.from_block_mask(
            chunk.shape, size, _reach(shares, chunk.shape.q_start // size, threshold, lagging)
        )
        got = antidiagonals.choose(given, *at, threshold, lagging, chunk.scale)
        differ = (got.offsets - want.offsets).diff().abs()
        assert differ.max() <= 1  # a sum that is as close to the threshold as rounding
        assert (differ > 0).float().mean() < 0.01
        again = antidiagonals.choose(given, *at, threshold, lagging, chunk.scale)
        assert torch.equal(again.offsets, got.offsets)


def test_the_method_chooses_on_the_device():
    q, k, v = draw(4096, 64, torch.bfloat16, 3)
    chunk = Chunk.of(q, KVView.from_tensors(k, v, block_size=32, shuffle_seed=1))
    chosen = XAttention(threshold=0.8).select_prefill(chunk)
    assert chosen.indices.numel() > int(chosen.offsets[-1])  # room that only the device knows the use of
    chosen.check()
