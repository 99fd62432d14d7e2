"""MInference's choices on the device against the host's, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from helpers import planted_heads

from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.minference import MInference, _heaviest
from saccade.ops.scores import mean_keys
from saccade.ops.triton.heaviest import best_blocks, heaviest_lines
from saccade.selection import Lines, Shape


def assert_same_lines(found: Lines, expected: Lines) -> None:
    found.check()
    for name in ("v_offsets", "columns", "s_offsets", "distances"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("n", [37, 700, 5000])
@pytest.mark.parametrize(("vertical", "slash", "kept"), [(20, 7, (3, 1)), (5, 36, (5, 36)), (0, 1, (0, 1))])
def test_lines_are_the_host_s_ties_and_all(n, vertical, slash, kept):
    rng = torch.Generator().manual_seed(n)
    sums = torch.rand(3, 2 * n, 2, generator=rng).permute(2, 0, 1)[..., ::2]  # nothing lies together
    sums[:, 0] = (sums[:, 0] * 4).round() / 4  # many are equal
    sums[:, 1, n // 3 :] = 0.0  # most are nothing
    shape = Shape.suffix(3, 1, 20, n)
    columns, slashes = sums
    found = heaviest_lines(shape, columns, slashes, vertical, slash, *kept)
    expected = Lines.from_lists(shape, _heaviest(columns, vertical, kept[0]), _heaviest(slashes, slash, kept[1]))
    assert_same_lines(found, expected)


@pytest.mark.parametrize(
    ("q_len", "n", "size", "count", "dtype"),
    [
        (600, 600, 32, 3, torch.float32),  # more query blocks than a program takes
        (1, 515, 32, 4, torch.bfloat16),
        (129, 515, 128, 1, torch.float32),
        (77, 333, 32, 9, torch.float32),  # the first query blocks see fewer
        (300, 300, 64, 4, torch.float16),
    ],
)
def test_blocks_are_the_host_s(q_len, n, size, count, dtype, monkeypatch):
    q, k, v = (part.to(dtype) for part in planted_heads(4, 2, n, 24, seed=n, noise=0.8))
    apart = torch.cat([q, q], -1)[:, -q_len:, 24:]  # rows that lie apart
    chunk = Chunk.of(apart, KVView.from_tensors(k, v, block_size=32, shuffle_seed=1))
    expected = MInference(pattern="block_sparse", blocks=count, block_size=size).select_prefill(chunk)
    monkeypatch.setattr("saccade.ops.triton.heaviest.MOST_BYTES", 3 * 4 * 40 * 40)  # not all heads at once
    found = best_blocks(apart, mean_keys(chunk.kv, size), chunk.shape, size, count)
    found.check()
    assert torch.equal(found.offsets, expected.offsets)
    assert torch.equal(found.indices, expected.indices)


def test_equal_blocks_go_to_the_lower_ones():
    q, k = torch.ones(2, 200, 16), torch.ones(1, 200, 16)
    chunk = Chunk.of(q, KVView.from_tensors(k, k))
    found = best_blocks(q, mean_keys(chunk.kv, 32), chunk.shape, 32, 2)
    assert found.block_mask()[:, 1:, :2].all()
    assert found.block_mask().sum() == 2 * (1 + 2 * 6)
