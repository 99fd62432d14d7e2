"""LoopServe's lines of blocks under Triton's interpreter: sums of listed rows, lists, and the whole choice are the
host's."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from helpers import planted_heads

from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.loopserve import LoopServe
from saccade.methods.loopserve.blocks import on_lines, query_blocks, select_blocks
from saccade.methods.loopserve.rounds import cover_rounds
from saccade.methods.loopserve.triton_blocks import _listed, lists_on_lines, select_on_device
from saccade.methods.loopserve.triton_rounds import cover
from saccade.ops.row_shares import row_sums
from saccade.ops.triton import row_shares as on_device
from saccade.selection import Blocks, Shape


def chunk_of(q_len: int, n: int, dim: int = 32, noise: float = 0.4) -> Chunk:
    """Two query heads a KV head, queries that do not lie together, keys all over the pool."""
    q, k, v = planted_heads(4, 2, n, dim, 0, noise=noise)
    apart = torch.cat([q, q], -1)[:, -q_len:, dim:]
    return Chunk.of(apart, KVView.from_tensors(k, v, block_size=32, shuffle_seed=1))


def sums_of(chunk: Chunk, rows: torch.Tensor, size: int, scale: float, softcap: float | None) -> torch.Tensor:
    listed = _listed(chunk.shape, rows, size, chunk.q.device)
    return on_device.sums(chunk.q, chunk.kv, chunk.shape, *listed, size, scale, softcap)


@pytest.mark.parametrize(
    ("q_len", "n", "every", "size", "softcap", "scale"),
    [
        (333, 333, 3, 64, None, 0.2),  # more rows than a tile has
        (70, 515, 1, 128, 5.0, 0.2),  # both ends within a block
        (129, 301, 40, 32, None, -0.1),  # query blocks without rows between those with some
        (1, 97, 1, 32, None, 0.2),
    ],
)
@pytest.mark.parametrize("copied", [False, True])
def test_sums_of_listed_rows_are_the_host_s(q_len, n, every, size, softcap, scale, copied, monkeypatch):
    chunk = chunk_of(q_len, n)
    rows = torch.arange(q_len - 1, -1, -every).flip(0)
    if copied:  # keys laid out in one piece first, spans of a few blocks, one head at a time
        tiles = on_device.Config(rows=32, span=3, warps=4, copy=True)
        monkeypatch.setattr(on_device, "config_for", lambda q: tiles)
        monkeypatch.setattr(on_device, "MOST_BYTES", 1)
    _, places = query_blocks(chunk.shape, rows, size)
    expected = row_sums(chunk.q, chunk.kv, chunk.shape, rows, places, size, scale, softcap)
    torch.testing.assert_close(sums_of(chunk, rows, size, scale, softcap), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("key", [5, 140])  # in a block that all rows see whole, and in one that some see a part of
def test_a_logit_that_is_no_number_shows_in_its_heads_sums_and_has_them_read_everything(key, value):
    chunk = chunk_of(90, 200)
    keys, values = (part.clone() for part in (chunk.kv.keys(), chunk.kv.values()))
    keys[1, key] = value
    chunk = Chunk.of(chunk.q, KVView.from_tensors(keys, values))
    rows = torch.arange(0, 90, 4)
    found = sums_of(chunk, rows, 32, chunk.scale, None)
    _, places = query_blocks(chunk.shape, rows, 32)
    expected = row_sums(chunk.q, chunk.kv, chunk.shape, rows, places, 32, chunk.scale)
    assert torch.equal(found.isnan(), expected.isnan())
    assert found[2:].isnan().any()
    assert not found[:2].isnan().any()
    mask = select_on_device(chunk, rows, 0.5, 32, chunk.shape, 1).block_mask()
    everything = on_lines(chunk.shape, 32, torch.ones(2, 4, 7, dtype=torch.bool))
    assert torch.equal(mask[2:], everything[2:])
    assert (mask[:2].sum((1, 2)) < everything[:2].sum((1, 2))).all()


@pytest.mark.parametrize(("q_len", "n", "size"), [(200, 200, 32), (70, 515, 64), (3, 131, 32)])
def test_lists_of_what_lies_on_lines(q_len, n, size):
    shape, k_blocks = Shape.suffix(4, 2, q_len, n), -(-n // size)
    marks = torch.rand(2, 4, k_blocks, generator=torch.Generator().manual_seed(n)) < 0.3
    got = lists_on_lines(shape, size, marks.to(torch.int8))
    want = Blocks.from_block_mask(shape, size, on_lines(shape, size, marks))
    assert torch.equal(got.offsets, want.offsets)
    assert torch.equal(got.indices[: int(got.offsets[-1])], want.indices)


@pytest.mark.parametrize(
    ("q_len", "n", "size", "softcap"), [(300, 300, 32, None), (100, 515, 64, 5.0), (129, 400, 128, None)]
)
@pytest.mark.parametrize(("alpha", "near"), [(0.0, 2), (0.7, 1), (0.95, 2)])
def test_the_device_chooses_what_the_host_chooses(q_len, n, size, softcap, alpha, near):
    """Exactly so where both have the same sums; their own differ in the last bits, by which a line may win or lose."""
    given = chunk_of(q_len, n)
    chunk = Chunk.of(given.q, given.kv, softcap=softcap)
    rows = LoopServe(samples=30, last_rows=10).sample(chunk)
    weights, blocks = sums_of(chunk, rows, size, chunk.scale, softcap), query_blocks(chunk.shape, rows, size)[0]
    marks = cover(weights.clone(), blocks, chunk.shape.q_start // size, alpha, near)
    for head in range(4):
        lines = cover_rounds(weights[head].numpy(), blocks.numpy(), chunk.shape.q_start // size, alpha, near)
        assert [mark.nonzero()[:, 0].tolist() for mark in marks[:, head]] == [line.tolist() for line in lines]
    got = select_on_device(chunk, rows, alpha, size, chunk.shape, near)
    got.check()
    want = select_blocks(chunk, rows, alpha, size, chunk.shape, near)
    differs = got.block_mask() ^ want.block_mask()
    assert differs.sum() <= 0.01 * want.block_mask().sum()


def test_lists_are_of_the_rows_that_they_are_asked_for():
    """Rows ahead of the chunk count in the choice alone."""
    chunk = chunk_of(150, 400)
    rows = torch.arange(0, 150, 3)
    shape = Shape.suffix(4, 2, 70, 400)
    got, want = (select(chunk, rows, 0.8, 32, shape, 2) for select in (select_on_device, select_blocks))
    assert got.shape == shape
    assert torch.equal(got.block_mask(), want.block_mask())
