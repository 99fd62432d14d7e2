"""MInference: planted lines are found, the forced ones are there, sizes mean what they say, blocks follow pooling."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Planted, planted_heads, run_method

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.minference import MInference
from saccade.selection import Blocks, Dense, Lines

PLANTED = Planted(columns=(207, 301), slashes=(130, 190), blocks=())
SMALL = {"vertical": 40, "slash": 30, "keep_columns": 10, "keep_diagonals": 12}


def select(method: MInference, rows: int, n: int, seed: int = 0, pattern: Planted = PLANTED, noise: float = 0.3):
    q, k, v = planted_heads(4, 2, n, seed=seed, pattern=pattern, noise=noise)
    used = run_method(method, "prefill", q, KVView.from_tensors(k, v), rows)[2]
    return q, k, used


@pytest.mark.parametrize("rows", [700, 200, 64, 10])
def test_planted_columns_and_slashes_are_found(rows):
    _, _, used = select(MInference(**SMALL), rows, 700)
    assert isinstance(used, Lines)
    for head in range(4):
        columns, distances = used.unit_lines(head)
        assert {207, 301} <= set(columns.tolist())
        assert {130, 190} <= set(distances.tolist())


@pytest.mark.parametrize("rows", [700, 70, 3, 1])
def test_the_lines_are_the_heaviest_by_hand(rows):
    n, looked_at = 400, min(rows, 64)
    rows = min(rows, n)
    q, k, used = select(MInference(**SMALL), rows, n, seed=3, noise=1.0)
    assert isinstance(used, Lines)
    for head in range(4):
        vertical, slash = [0.0] * n, [0.0] * n
        for position in range(n - looked_at, n):
            scores = (k[head // 2, : position + 1].double() @ q[head, position].double()) / math.sqrt(32)
            for key, weight in enumerate(torch.softmax(scores, 0).tolist()):
                vertical[key] += weight
                slash[position - key] += weight
        columns, distances = used.unit_lines(head)
        for found, sums, size, forced in ((columns, vertical, 40, 10), (distances, slash, 30, 12)):
            chosen = set(found.tolist())
            assert len(chosen) == size
            assert set(range(forced)) <= chosen
            least = min(sums[line] for line in chosen if line >= forced)
            assert max(sums[line] for line in range(n) if line not in chosen) <= least + 1e-5


def test_forced_lines_win_over_a_smaller_size():
    _, _, used = select(MInference(vertical=3, slash=2, keep_columns=30, keep_diagonals=100), 300, 700)
    assert isinstance(used, Lines)
    assert used.unit_lines(0)[0].tolist() == list(range(30))
    assert used.unit_lines(0)[1].tolist() == list(range(100))


def test_larger_sizes_hold_smaller_ones():
    small = select(MInference(**SMALL), 300, 700, noise=1.0)[2].mask()
    large = select(MInference(**{**SMALL, "vertical": 90, "slash": 70}), 300, 700, noise=1.0)[2].mask()
    assert not (small & ~large).any()
    assert large.sum() > small.sum()


@pytest.mark.parametrize(
    ("options", "n", "dense"),
    [
        ({}, 6096, True),
        ({"slash": 100}, 1000, True),
        ({"slash": 100}, 1001, False),
        ({"pattern": "block_sparse", "blocks": 5}, 320, True),
        ({"pattern": "block_sparse", "blocks": 5}, 321, False),
    ],
)
def test_sizes_of_all_lines_or_blocks_are_dense(options, n, dense):
    q, k, v = planted_heads(2, 1, n, head_dim=16)
    chunk = Chunk.of(q[:, -20:], KVView.from_tensors(k, v))
    assert isinstance(MInference(**options).select_prefill(chunk), Dense) == dense
    assert (chunk.cost.scored + chunk.cost.estimated > 0) != dense


@pytest.mark.parametrize(("rows", "n"), [(640, 640), (200, 700), (65, 450), (1, 450)])
def test_blocks_are_those_of_highest_pooled_product(rows, n):
    method = MInference(pattern="block_sparse", blocks=3)
    q, k, used = select(method, rows, n, seed=5, noise=1.0)
    assert isinstance(used, Blocks)
    assert used.units == 4
    mask = used.block_mask()
    for head in range(4):
        for j in range(used.q_blocks):
            block = used.first_q_block + j
            mean = q[head, max(n - rows, block * 64) : min(n, (block + 1) * 64)].mean(0)
            scores = [float(k[head // 2, b * 64 : min(n, (b + 1) * 64)].mean(0) @ mean) for b in range(block + 1)]
            best = sorted(range(block + 1), key=lambda b: -scores[b])[:3]
            assert mask[head, j].nonzero()[:, 0].tolist() == sorted(best)


@pytest.mark.parametrize(
    "options",
    [
        {"pattern": "a_shape"},
        {"vertical": -1},
        {"slash": 1.5},
        {"last_rows": 0},
        {"keep_columns": -1},
        {"keep_diagonals": 0},
        {"blocks": 0},
        {"block_size": 48},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        MInference(**options)
