"""Selection on the device against the same selection in plain torch, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from helpers import Planted, planted_heads
from launches import Launches

from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.flexprefill import FlexPrefill
from saccade.methods.flexprefill.device import select_lines
from saccade.methods.flexprefill.method import token_lines
from saccade.methods.sampled_rows import SampledRows
from saccade.methods.xattention import _reach
from saccade.ops import attend
from saccade.ops.block_energies import block_energies
from saccade.ops.row_shares import row_shares
from saccade.ops.scores import (
    antidiagonal_shares,
    block_sums,
    needed_shares,
    row_logits,
    row_weights,
    slash_sums,
)
from saccade.ops.triton import antidiagonals, block_pairs, reach
from saccade.ops.triton import line_sums as sums
from saccade.ops.triton import row_shares as on_device
from saccade.ops.triton.block_energies import energies
from saccade.ops.triton.block_sums import line_sums
from saccade.ops.triton.choose import compact, kept_lines
from saccade.ops.triton.line_sums import token_sums
from saccade.selection import Blocks, Shape


def chunk_of(heads, kv_heads, q_len, n, head_dim=32, seed=0, **pattern) -> Chunk:
    q, k, v = planted_heads(heads, kv_heads, n, head_dim, seed, **pattern)
    return Chunk.of(q[:, -q_len:], KVView.from_tensors(k, v, block_size=32, shuffle_seed=seed))


@pytest.mark.parametrize(("q_len", "n"), [(300, 300), (40, 300), (129, 515), (64, 64)])
@pytest.mark.parametrize(("size", "softcap"), [(64, None), (128, None), (64, 5.0)])
def test_line_sums_equal_those_of_the_weights_themselves(q_len, n, size, softcap):
    chunk = chunk_of(4, 2, q_len, n)
    shape = chunk.shape
    columns, slashes = line_sums(chunk.q, chunk.kv, shape, size, chunk.scale, softcap)
    rows = min(size, q_len)
    for g in range(2):
        logits = row_logits(chunk.q, chunk.kv, shape, g, q_len - rows, q_len, chunk.scale, softcap)
        weights = torch.softmax(logits, -1)
        heads = slice(2 * g, 2 * g + 2)
        torch.testing.assert_close(columns[heads], block_sums(weights.sum(1), size), atol=1e-4, rtol=1e-4)
        expected = block_sums(slash_sums(weights, n - rows), size)
        torch.testing.assert_close(slashes[heads], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("q_len", "n"), [(300, 300), (40, 300), (129, 515), (1, 127)])
@pytest.mark.parametrize(("size", "softcap", "head_dim"), [(64, None, 32), (128, None, 24), (64, 5.0, 32)])
def test_block_energies_are_the_host_s(q_len, n, size, softcap, head_dim):
    chunk = chunk_of(4, 2, q_len, n, head_dim)
    given = torch.cat([chunk.q, chunk.q], -1)[..., head_dim:]  # rows that lie apart
    arguments = (chunk.kv, chunk.shape, size, chunk.scale, softcap)
    torch.testing.assert_close(energies(given, *arguments), block_energies(chunk.q, *arguments), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("q_len", "n", "stride", "size", "softcap"),
    [
        (300, 300, 8, 64, None),
        (40, 300, 4, 32, None),
        (129, 515, 16, 128, 5.0),
        pytest.param(200, 400, 1, 32, None, marks=pytest.mark.thorough),
        (77, 333, 32, 32, None),
    ],
)
def test_antidiagonals_choose_as_the_host_does(q_len, n, stride, size, softcap, monkeypatch):
    chunk = chunk_of(4, 2, q_len, n)
    given = torch.cat([chunk.q, chunk.q], -1)[..., 32:]  # rows that lie apart
    if stride == 8:  # one head at a time
        monkeypatch.setattr(reach, "MOST_BYTES", 1)
    at = chunk.kv, chunk.shape, stride, size
    shares = antidiagonals.shares(given, *at, chunk.scale, softcap)
    expected = antidiagonal_shares(chunk.q, *at, chunk.scale, softcap)
    torch.testing.assert_close(shares, expected, atol=1e-5, rtol=1e-5)
    for threshold, lagging, window in ((0.0, 9, 1), (0.9, 0, 1), (0.97, 3, 1), (0.6, 0, 2), (0.5, 3, 3)):
        mask = _reach(shares, chunk.shape.q_start // size, threshold, lagging, window)
        want = Blocks.from_block_mask(chunk.shape, size, mask)
        got = antidiagonals.choose(given, *at, threshold, lagging, chunk.scale, softcap, window=window)
        assert torch.equal(got.offsets, want.offsets)
        assert torch.equal(got.indices[: int(got.offsets[-1])], want.indices)


@pytest.mark.parametrize(
    ("q_len", "n", "rows", "size", "softcap"),
    [(150, 150, 5, 64, None), (40, 300, 3, 32, None), (129, 515, 8, 128, 5.0)],
)
def test_sampled_rows_choose_as_the_host_does(q_len, n, rows, size, softcap, monkeypatch):
    chunk = chunk_of(4 if rows == 3 else 2, 2 if rows == 3 else 1, q_len, n)
    given = torch.cat([chunk.q, chunk.q], -1)[..., 32:]  # rows that lie apart
    if rows == 3:  # one head at a time
        monkeypatch.setattr(reach, "MOST_BYTES", 1)
    at = chunk.kv, chunk.shape, rows, size
    shares = on_device.shares(given, *at, chunk.scale, softcap)
    torch.testing.assert_close(shares, row_shares(chunk.q, *at, chunk.scale, softcap), atol=1e-5, rtol=1e-5)
    for gamma, threshold, window in ((0.0, 0.05, 1), (0.6, 0.1, 1), (0.6, 0.1, 2), (0.0, 1.0, 3)):
        mask = SampledRows(threshold, gamma, rows, size, window)._taken(shares, chunk.shape.q_start // size)
        want = Blocks.from_block_mask(chunk.shape, size, mask)
        got = on_device.choose(given, *at, gamma, threshold, window, chunk.scale, softcap)
        assert torch.equal(got.offsets, want.offsets)
        assert torch.equal(got.indices[: int(got.offsets[-1])], want.indices)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 128), (4, 256), (7, 64)])
@pytest.mark.parametrize("copied", [False, True])
def test_sampled_rows_of_many_query_blocks(group, head_dim, copied, monkeypatch):
    """Groups and heads of other sizes, ragged appended chunks, more query blocks than a program adds up."""
    chunk = chunk_of(2 * group, 2, 301, 523, head_dim, seed=group)
    tiles = on_device.Config(rows=64, span=5, warps=4, copy=copied)
    monkeypatch.setattr(on_device, "config_for", lambda q: tiles)
    for rows, size in ((8, 32), (5, 64)):
        at = chunk.kv, chunk.shape, rows, size
        shares = on_device.shares(chunk.q, *at, chunk.scale)
        torch.testing.assert_close(shares, row_shares(chunk.q, *at, chunk.scale), atol=1e-5, rtol=1e-5)
        mask = SampledRows(0.02, 0.7, rows, size, 2)._taken(shares, chunk.shape.q_start // size)
        want = Blocks.from_block_mask(chunk.shape, size, mask)
        got = on_device.choose(chunk.q, *at, 0.7, 0.02, 2, chunk.scale)
        assert torch.equal(got.offsets, want.offsets)
        assert torch.equal(got.indices[: int(got.offsets[-1])], want.indices)


@pytest.mark.parametrize(("q_len", "n"), [(72, 200), (51, 97)])
def test_keys_laid_out_in_one_piece_first(q_len, n, monkeypatch):
    """Rows of tiles that begin and end with one, or are cut at both ends; shares as those over pages."""
    chunk = chunk_of(4, 2, q_len, n)
    given = torch.cat([chunk.q, chunk.q], -1)[..., 32:]
    at = chunk.kv, chunk.shape, 8, 32
    tiles = antidiagonals.Config(rows=32, keys=64, channels=16, warps=4, stages=2, copy=True)
    monkeypatch.setattr(antidiagonals, "config_for", lambda q, each, fp8: tiles)
    shares = antidiagonals.shares(given, *at, chunk.scale)
    torch.testing.assert_close(shares, antidiagonal_shares(chunk.q, *at, chunk.scale), atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(on_device, "config_for", lambda q: on_device.Config(rows=32, span=3, warps=4, copy=True))
    for scale in (chunk.scale, -0.1):
        shares = on_device.shares(given, *at, scale)
        torch.testing.assert_close(shares, row_shares(chunk.q, *at, scale), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("q_len", "n"), [(200, 200), (131, 301)])
def test_bands_of_programs(q_len, n, monkeypatch):
    """Many bands of tiles, whole tiles and cut ones."""
    chunk = chunk_of(4, 2, q_len, n)
    given = torch.cat([chunk.q, chunk.q], -1)[..., 32:]
    tiles = antidiagonals.Config(16, 32, 16, warps=4, stages=2, copy=True, band=2)
    monkeypatch.setattr(antidiagonals, "config_for", lambda q, each, fp8: tiles)
    at = chunk.kv, chunk.shape, 2, 32, chunk.scale
    torch.testing.assert_close(
        antidiagonals.shares(given, *at), antidiagonal_shares(chunk.q, *at), atol=1e-5, rtol=1e-4
    )


def test_blocks_of_equal_shares_are_taken_in_their_order():
    """Keys that are all alike: every block has the same share, and so many of the lowest are taken."""
    q, k = torch.randn(2, 256, 32), torch.ones(1, 256, 32)
    chunk = Chunk.of(q, KVView.from_tensors(k, k, block_size=32))
    at = q, chunk.kv, chunk.shape, 8, 32
    shares = antidiagonals.shares(*at, chunk.scale)
    got = antidiagonals.choose(*at, 0.55, 0, chunk.scale)
    want = Blocks.from_block_mask(chunk.shape, 32, _reach(shares, 0, 0.55))
    assert torch.equal(got.offsets, want.offsets)
    assert torch.equal(got.indices[: int(got.offsets[-1])], want.indices)


@pytest.mark.parametrize(("q_len", "n", "rows"), [(300, 300, 64), (40, 300, 40), (129, 515, 100), (7, 7, 5)])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_token_sums_are_those_of_the_weights_themselves(q_len, n, rows, softcap, monkeypatch):
    chunk = chunk_of(4, 2, q_len, n)
    if softcap is not None:
        monkeypatch.setattr(sums, "MOST_BYTES", 4 * rows * n * 3)  # three heads at once, then one
    columns, slashes = token_sums(chunk.q, chunk.kv, chunk.shape, rows, chunk.scale, softcap)
    which = torch.arange(q_len - rows, q_len)
    for g in range(2):
        weights = row_weights(chunk.q, chunk.kv, chunk.shape, g, which, chunk.scale, softcap)
        heads = slice(2 * g, 2 * g + 2)
        torch.testing.assert_close(columns[heads], weights.sum(1), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(slashes[heads], slash_sums(weights, n - rows), atol=1e-5, rtol=1e-4)
        weights[..., :6] = 0.0  # of the keys from the seventh on; the first rows of the shortest case see none of them
        weights /= weights.sum(-1, keepdim=True).clamp(min=1e-38)
        late = token_sums(chunk.q, chunk.kv, chunk.shape, rows, chunk.scale, softcap, 6)
        torch.testing.assert_close(late[0][heads], weights.sum(1), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(late[1][heads], slash_sums(weights, n - rows), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.95])
@pytest.mark.parametrize(("least", "most"), [(0, None), (40, None), (150, 170), (0, 64), (70, 5000), (700, None)])
def test_kept_lines_are_the_host_s(gamma, least, most):
    """Ties, a kind without weight, more of one kind than of the other."""
    mass = torch.rand(2, 3, 330, generator=torch.Generator().manual_seed(least)) ** 9
    mass[0, 0, 50:90], mass[1, 1] = 0.25, 0.0
    mass[1, 2] = mass[1, 2] ** 0.1
    got = kept_lines(mass, gamma, 32, least, most)
    expected = token_lines(needed_shares(mass[0]), needed_shares(mass[1]), gamma, 32, least, most)
    for marks, wanted in zip(got, expected):
        assert torch.equal(marks, wanted)


def test_compaction_gives_the_lists_of_the_mask():
    shape = Shape.suffix(3, 1, 500, 700)
    taken = torch.rand(3, 8, 11, generator=torch.Generator().manual_seed(0)) < 0.3
    taken &= torch.arange(11)[None, :] <= (200 // 64 + torch.arange(8))[:, None]
    got = compact(shape, 64, taken.to(torch.int8))
    expected = Blocks.from_block_mask(shape, 64, taken)
    assert torch.equal(got.offsets, expected.offsets)
    assert torch.equal(got.indices[: expected.indices.numel()], expected.indices)
    assert torch.equal(got.block_mask(), taken)
    assert torch.equal(got.unit_pairs(), expected.unit_pairs())


@pytest.mark.parametrize(("q_len", "n", "units"), [(500, 700, 4), (700, 700, 2), (40, 333, 1), (1, 129, 2), (9, 60, 4)])
def test_pairs_of_blocks_are_counted_in_one_launch(q_len, n, units, monkeypatch):
    """Query blocks that the call cuts at either end; empty lists; lists without their diagonal block."""
    monkeypatch.setattr(block_pairs, "SPAN", 4)
    shape, k_blocks = Shape.suffix(4, 2, q_len, n), -(-n // 64)
    rng = torch.Generator().manual_seed(n)
    mask = torch.rand(units, k_blocks - shape.q_start // 64, k_blocks, generator=rng) < 0.4
    mask[0, 0] = False
    lists = Blocks.from_block_mask(shape, 64, mask)
    roomy = replace(lists, indices=torch.cat([lists.indices, torch.full((9,), 999, dtype=torch.int32)]))
    with Launches() as launches:
        counted = block_pairs.pairs(roomy)
    assert launches.total == 1
    assert torch.equal(counted, lists.mask().flatten(1).sum(1))


TOKEN = [
    FlexPrefill(block_size=64, min_budget=64, gamma=0.7),
    FlexPrefill(block_size=64, min_budget=200, gamma=0.5, tau=0.15),
    FlexPrefill(block_size=64, min_budget=0, max_budget=192, gamma=0.9, tau=0.15),
    FlexPrefill(block_size=64, min_budget=64, gamma=0.6, tau=1.0),
]


@pytest.mark.parametrize(("method", "q_len"), [(method, 576) for method in TOKEN] + [(TOKEN[1], 150)])
def test_token_lines_on_the_device_are_those_of_the_host(method, q_len):
    chunk = chunk_of(4, 2, q_len, 576, pattern=Planted(columns=(7, 201), slashes=(13, 200), blocks=(3,)), noise=0.6)
    expected = method.select_prefill(chunk)
    got = select_lines(method, chunk)
    got.check()
    assert torch.equal(got.choice.bool(), method.head_kinds(chunk))
    if method.tau == 0.15:
        assert 0 < int(got.choice.sum()) < 4
    assert torch.equal(got.pairs(), got.mask().flatten(1).sum(1))
    differs = got.mask() ^ expected.mask()
    assert differs.sum() <= 0.005 * expected.mask().sum()
    out, _ = attend(chunk.q, chunk.kv, got, backend="triton")
    reference, _ = attend(chunk.q, chunk.kv, got, backend="reference")
    torch.testing.assert_close(out, reference, atol=1e-5, rtol=1e-5)
