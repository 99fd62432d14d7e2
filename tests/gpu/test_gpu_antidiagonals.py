"""XAttention's choice on a GPU, against the same sums in float64 and the same rule in torch; by FP8 products, against
the reference's rounding."""

from __future__ import annotations

import pytest
import torch
from helpers import planted_heads

from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.xattention import NOTE, XAttention, _reach
from saccade.ops import fp8_tiles
from saccade.ops.fp8 import why_no_products
from saccade.ops.scores import antidiagonal_shares
from saccade.ops.triton import antidiagonals
from saccade.ops.triton import fp8_tiles as packing
from saccade.selection import Blocks

in_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and why_no_products(torch.device("cuda")) is not None, reason="needs FP8 products"
)


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


@in_fp8
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float16, 96), (torch.float32, 64)])
@pytest.mark.parametrize(
    ("q_len", "n", "stride", "size"), [(3000, 3000, 8, 128), (1000, 5013, 16, 64), (77, 2000, 4, 32), (1, 700, 32, 128)]
)
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_fp8_products_are_those_of_the_rounded_rows(q_len, n, stride, size, softcap, dtype, head_dim):
    """Keys far from 0, which the centre takes off unless logits have a cap."""
    q, k, v = draw(n, head_dim, dtype, n)
    k += (10 if softcap is None else 0) * torch.randn(2, 1, head_dim, device="cuda").to(dtype)
    given = torch.cat([q, q], -1)[:, -q_len:, head_dim:]  # rows that lie apart
    chunk = Chunk.of(given, KVView.from_tensors(k, v, block_size=32, shuffle_seed=1))
    at = chunk.kv, chunk.shape, stride, size
    rounded = fp8_tiles.rounded(given.cpu(), KVView.from_tensors(k.cpu(), v.cpu()), chunk.shape, stride, softcap)
    expected = antidiagonal_shares(*rounded, chunk.shape, stride, size, chunk.scale, softcap)
    shares = antidiagonals.shares(given, *at, chunk.scale, softcap, fp8=True)
    error = (shares.cpu() - expected).abs()
    assert error.max() < 2e-2
    assert error.mean() < 1e-3
    want = Blocks.from_block_mask(chunk.shape, size, _reach(shares, chunk.shape.q_start // size, 0.9))
    got = antidiagonals.choose(given, *at, 0.9, 0, chunk.scale, softcap, fp8=True)
    differ = (got.offsets - want.offsets).diff().abs()
    assert differ.max() <= 1  # a sum that is as close to the threshold as rounding
    assert (differ > 0).float().mean() < 0.01
    again = antidiagonals.choose(given, *at, 0.9, 0, chunk.scale, softcap, fp8=True)
    assert torch.equal(again.offsets, got.offsets)
    used = int(got.offsets[-1])
    assert torch.equal(again.indices[:used], got.indices[:used])


@in_fp8
@pytest.mark.parametrize("stride", [1, 8, 128])
@pytest.mark.parametrize("head_dim", [128, 96])
def test_tiles_in_fp8_are_rows_rounded(stride, head_dim):
    q, k, v = draw(3001, head_dim, torch.bfloat16, 5)
    view = KVView.from_tensors(k, v, block_size=32, shuffle_seed=1)
    torch.testing.assert_close(packing.centre(view, 3001), fp8_tiles.centre(view, 3001), atol=1e-5, rtol=1e-5)
    wanted = k.float() - packing.centre(view, 3001)[:, None]
    packed = packing.pack_keys(view, 3001, stride, centred=True)
    tiles = -(-3001 // stride)
    rows = packed.values.float() * packed.scale[:, None]
    assert not rows[:, stride * head_dim :].any()
    got = rows[:, : stride * head_dim].reshape(2, tiles * stride, head_dim)
    assert not got[:, 3001:].any()
    least = packed.scale.view(2, tiles).repeat_interleave(stride, 1)[:, :3001, None] * 2.0**-9
    assert ((got[:, :3001] - wanted).abs() <= wanted.abs() / 15 + least).all()
    chunk = Chunk.of(q[:, 2:], view)  # its first tile lacks rows
    packed = packing.pack_queries(chunk.q, chunk.shape, stride)
    first = 2 // stride
    rows = (packed.values.float() * packed.scale[:, None])[:, : stride * head_dim].reshape(8, -1, stride, head_dim)
    got = rows.flip(2).flatten(1, 2)[:, 2 - first * stride :][:, :2999]
    least = packed.scale.view(8, -1).repeat_interleave(stride, 1)[:, 2 - first * stride :][:, :2999, None] * 2.0**-9
    assert ((got - chunk.q.float()).abs() <= chunk.q.float().abs() / 15 + least).all()


@in_fp8
def test_products_are_full_on_hopper_too_unless_fp8_is_asked_for():
    q, k, v = draw(32768, 64, torch.bfloat16, 3)
    view = KVView.from_tensors(k, v, block_size=32, shuffle_seed=1)
    chosen = {}
    for named in ({}, {"products": "full"}, {"products": "fp8"}):
        chunk, products = Chunk.of(q, view), named.get("products")
        chosen[products] = XAttention(threshold=0.8, **named).select_prefill(chunk)
        chosen[products].check()
        assert (NOTE in chunk.cost.notes) == (products == "fp8")
    assert torch.equal(chosen[None].offsets, chosen["full"].offsets)
    assert abs(chosen["fp8"].density() - chosen["full"].density()) < 0.01
    short = Chunk.of(q[:, :4096], view.upto(4096))
    XAttention(threshold=0.8).select_prefill(short)
    assert not short.cost.notes
