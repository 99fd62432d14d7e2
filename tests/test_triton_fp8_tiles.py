"""XAttention's FP8 products under Triton's interpreter: tiles as torch quantizes them, shares of the same tiles as the
reference has, and the whole choice. (Its e4m3 loses a carry into the exponent and rounds ties away from 0.)"""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from covering import spread
from fp8_helpers import same
from helpers import planted_heads

from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.xattention import _reach
from saccade.ops import fp8, fp8_tiles
from saccade.ops.scores import antidiagonal_shares
from saccade.ops.triton import antidiagonals, reach
from saccade.ops.triton import fp8_tiles as packing
from saccade.selection import Blocks

SMALL = antidiagonals.Config(rows=32, keys=64, channels=64, warps=4, stages=2, copy=True, band=2, fp8=True)
SIZES = [(300, 300, 8, 64), (40, 300, 4, 32), (129, 515, 16, 128), (77, 333, 32, 32), (1, 130, 1, 32)]


def chunk_of(q_len: int, n: int, head_dim: int = 32, dtype: torch.dtype = torch.float32) -> Chunk:
    """Rows that lie apart, keys in scattered pages and far from 0."""
    q, k, v = planted_heads(4, 2, n, head_dim, seed=n)
    k = k + 9 * torch.randn(2, 1, head_dim, generator=torch.Generator().manual_seed(n))
    given = torch.cat([q, q], -1)[:, -q_len:, head_dim:].to(dtype)
    return Chunk.of(given, KVView.from_tensors(k.to(dtype), v.to(dtype), block_size=32, shuffle_seed=1))


def tiled(x: torch.Tensor, ahead: int, stride: int) -> torch.Tensor:
    """[heads, tiles, stride, head_dim], zeros for rows that are not there."""
    padded = torch.nn.functional.pad(x.float(), (0, 0, ahead, -(ahead + x.shape[1]) % stride))
    return padded.unflatten(1, (-1, stride))


def plain_queries(q, shape, stride) -> packing.Tiles:
    rows = fp8.quantize(tiled(q, shape.q_start % stride, stride).flip(2).reshape(-1, stride * q.shape[-1]))
    return filled(rows, stride * q.shape[-1])


def plain_keys(kv, k_len, stride, centred) -> packing.Tiles:
    keys = kv.keys(0, k_len).float()
    keys = keys - fp8_tiles.centre(kv, k_len)[:, None] if centred else keys
    return filled(fp8.quantize(tiled(keys, 0, stride).reshape(-1, stride * kv.head_dim)), stride * kv.head_dim)


def filled(rows: fp8.QuantizedRows, channels: int) -> packing.Tiles:
    values = torch.zeros(len(rows.values), -(-channels // 128) * 128, dtype=fp8.E4M3)
    values[:, :channels] = rows.values
    return packing.Tiles(values, rows.scale[:, 0])


@pytest.mark.parametrize(("q_len", "n", "stride", "size"), SIZES)
@pytest.mark.parametrize(("head_dim", "dtype"), [(32, torch.float32), (48, torch.float16)])
def test_tiles_are_quantized_rows_side_by_side(q_len, n, stride, size, head_dim, dtype, monkeypatch):
    monkeypatch.setattr(packing, "centre", fp8_tiles.centre)  # the same to the last bit
    chunk = chunk_of(q_len, n, head_dim, dtype)
    for ours, theirs in (
        (packing.pack_queries(chunk.q, chunk.shape, stride), plain_queries(chunk.q, chunk.shape, stride)),
        *(
            (packing.pack_keys(chunk.kv, n, stride, centred), plain_keys(chunk.kv, n, stride, centred))
            for centred in (True, False)
        ),
    ):
        assert ours.values.shape == theirs.values.shape
        same(fp8.QuantizedRows(ours.values, ours.scale), fp8.QuantizedRows(theirs.values, theirs.scale))


@pytest.mark.parametrize("n", [5, 700, 3000])
def test_the_centre_is_the_mean_of_spread_keys(n):
    chunk = chunk_of(2, n)
    found = packing.centre(chunk.kv, n)
    torch.testing.assert_close(found, fp8_tiles.centre(chunk.kv, n), atol=1e-5, rtol=1e-5)
    keys = chunk.kv.keys().float()
    torch.testing.assert_close(found, keys.mean(1), atol=1e-5 if n <= 1024 else 0.2, rtol=1e-5)
    keys[1, 0, 3], keys[0, 0, 5] = torch.inf, torch.nan
    broken = KVView.from_tensors(keys, keys)
    for one in (packing.centre(broken, n), fp8_tiles.centre(broken, n)):
        assert one[1, 3] == one[0, 5] == 0
        assert one.isfinite().all()


@pytest.mark.parametrize(("sizes", "softcap"), spread(SIZES, [None, 5.0]))
def test_shares_and_lists_are_the_reference_s(sizes, softcap, monkeypatch):
    """Of the same e4m3 rows; two heads at once."""
    q_len, n, stride, size = sizes
    chunk = chunk_of(q_len, n)
    at = chunk.kv, chunk.shape, stride, size
    tiles = (n - 1) // stride - (n - q_len) // stride + 1
    monkeypatch.setattr(reach, "MOST_BYTES", 2 * 4 * tiles * -(-n // size))
    monkeypatch.setattr(antidiagonals, "pack_queries", plain_queries)
    monkeypatch.setattr(antidiagonals, "pack_keys", plain_keys)
    monkeypatch.setattr(antidiagonals, "config_for", lambda q, each, fp8: SMALL)
    shares = antidiagonals.shares(chunk.q, *at, chunk.scale, softcap, fp8=True)
    expected = antidiagonal_shares(chunk.q, *at, chunk.scale, softcap, fp8=True)
    torch.testing.assert_close(shares, expected, atol=2e-5, rtol=1e-4)
    if n > 256:
        full = antidiagonal_shares(chunk.q, *at, chunk.scale, softcap)
        assert (full - shares).abs().max() > 1e-3  # rows were rounded
    for threshold, lagging in ((0.9, 0), (0.97, 3)):
        want = Blocks.from_block_mask(
            chunk.shape, size, _reach(shares, chunk.shape.q_start // size, threshold, lagging)
        )
        got = antidiagonals.choose(chunk.q, *at, threshold, lagging, chunk.scale, softcap, fp8=True)
        assert torch.equal(got.offsets, want.offsets)
        assert torch.equal(got.indices[: int(got.offsets[-1])], want.indices)


@pytest.mark.parametrize(("q_len", "n"), [(300, 300), (131, 514)])
def test_the_whole_way_over_values_that_e4m3_has(q_len, n):
    """Whole numbers up to 14 in every row, keys in pairs around their centre."""
    draw = torch.Generator().manual_seed(n)
    q, k = (torch.randint(-14, 15, (heads, n, 32), generator=draw).float() for heads in (4, 2))
    q[..., 3] = k[..., 3] = 14.0
    k[:, 1::2] = -k[:, ::2]
    centre = torch.randint(-99, 100, (2, 1, 32), generator=draw).float()
    k += centre
    chunk = Chunk.of(q[:, -q_len:], KVView.from_tensors(k, k, shuffle_seed=1))
    assert torch.equal(packing.centre(chunk.kv, n), centre[:, 0])
    at = chunk.kv, chunk.shape, 8, 64, 0.01
    shares = antidiagonals.shares(chunk.q, *at, fp8=True)
    torch.testing.assert_close(shares, antidiagonal_shares(chunk.q, *at, fp8=True), atol=2e-5, rtol=1e-4)
    full = antidiagonal_shares(chunk.q, *at)
    torch.testing.assert_close(shares[:, :-1], full[:, :-1], atol=2e-5, rtol=1e-4)
