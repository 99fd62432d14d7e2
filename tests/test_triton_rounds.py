"""LoopServe's cover in rounds: it keeps the share, reads little more than line by line, and the device chooses the
host's lines (under Triton's interpreter)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from helpers import planted_heads
from test_triton_line_cover import causal_weights

from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.loopserve.device import select_lines
from saccade.methods.loopserve.line_cover import cover_lines, cover_rows
from saccade.methods.loopserve.rounds import UNIT, cover_rounds
from saccade.methods.loopserve.triton_rounds import cover
from saccade.ops.scores import row_weights
from saccade.ops.triton.row_weights import row_weights as device_weights
from saccade.selection import Lines, Shape


def held(weights, positions, columns, distances) -> np.ndarray:
    """Which entries lines hold, by hand: bool like ``weights``."""
    distance = positions[:, None].numpy() - np.arange(weights.shape[1])
    return np.isin(np.arange(weights.shape[1]), columns)[None, :] | np.isin(distance, distances)


def made(m: int, n: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads with planted lines, with sharper ones, without any, and with the same weight everywhere."""
    weights, positions = causal_weights(m, n, first, seed=n)
    sharp = weights.square() / weights.square().sum(-1, keepdim=True)
    noise = torch.rand(m, n, generator=torch.Generator().manual_seed(1)) * (weights > 0)
    even = (weights > 0).float()
    parts = (weights, sharp, *(part / part.sum(-1, keepdim=True) for part in (noise, even)))
    return torch.stack(parts), positions


@pytest.mark.parametrize(("m", "n", "first"), [(12, 60, 0), (20, 300, 270), (9, 4200, 4150)])
@pytest.mark.parametrize(("share", "near"), [(0.0, 3), (0.7, 1), (0.97, 2)])
def test_rounds_keep_the_share_and_the_device_chooses_the_same(m, n, first, share, near):
    heads, positions = made(m, n, first)
    heads = heads[1:2] if n > 4096 else heads  # more lines than a program looks at at once
    marks = cover(heads.clone(), positions, first, share, near)
    for head, weights in enumerate(heads):
        columns, distances = cover_rounds(weights.numpy(), positions.numpy(), first, share, near)
        assert columns[0] == 0
        assert distances[:near].tolist() == list(range(near))
        units = (weights.double().numpy() * UNIT).astype(np.int64)
        assert units[held(weights, positions, columns, distances)].sum() >= share * units.sum()
        assert marks[0, head].nonzero()[:, 0].tolist() == columns.tolist()
        assert marks[1, head].nonzero()[:, 0].tolist() == distances.tolist()


def test_rounds_read_little_more_than_line_by_line():
    heads, positions = made(60, 700, 0)
    shape = Shape.suffix(1, 1, 700, 700)
    read = []
    for weights in heads:
        one = cover_lines(weights.clone(), positions, 0, 0.9)
        greedy = Lines.from_lists(shape, [one.columns], [one.distances]).unit_pairs()
        found = cover_rounds(weights.numpy(), positions.numpy(), 0, 0.9)
        columns, distances = (torch.from_numpy(part) for part in found)
        read.append((Lines.from_lists(shape, [columns], [distances]).unit_pairs().item(), greedy.item()))
    assert sum(rounds for rounds, _ in read) <= 1.1 * sum(greedy for _, greedy in read)
    assert all(rounds <= 1.4 * greedy for rounds, greedy in read)  # most where no line is better than another


def test_a_share_of_all_ends_with_all_that_holds_weight():
    heads, positions = made(4, 25, 0)
    heads = heads[1:3]
    marks = cover(heads.clone(), positions, 0, 1.0).bool().numpy()
    for head, weights in enumerate(heads):
        left = ~held(weights, positions, marks[0, head].nonzero()[0], marks[1, head].nonzero()[0])
        assert weights.numpy()[left].max(initial=0.0) < 2 / UNIT


def test_a_head_whose_weights_are_no_numbers_reads_everything():
    heads, positions = made(4, 25, 0)
    spoilt = heads.clone()
    spoilt[1, 2, 3] = torch.nan
    marks = cover(spoilt, positions, 0, 0.8)
    assert marks[0, 1].all()
    assert torch.equal(marks[:, 0], cover(heads.clone(), positions, 0, 0.8)[:, 0])


@pytest.mark.parametrize(("q_len", "n", "every", "dim", "softcap"), [(333, 333, 3, 24, None), (70, 515, 1, 32, 5.0)])
def test_weights_of_some_rows_are_the_host_s(q_len, n, every, dim, softcap):
    q, k, v = planted_heads(4, 2, n, dim, 0)
    apart = torch.cat([q, q], -1)[:, -q_len:, dim:]  # rows that lie apart
    view, shape = KVView.from_tensors(k, v, block_size=32, shuffle_seed=1), Shape.suffix(4, 2, q_len, n)
    rows = torch.arange(0, q_len, every)
    expected = torch.cat([row_weights(q[:, -q_len:], view, shape, g, rows, 0.2, softcap) for g in range(2)])
    for heads in (range(4), range(1, 3)):
        found = device_weights(apart, view, shape, heads, rows, 0.2, softcap)
        torch.testing.assert_close(found, expected[heads.start : heads.stop], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rounds", [True, False])
def test_a_chunk_s_lines_from_its_queries_and_keys_a_few_heads_at_a_time(rounds, monkeypatch):
    q, k, v = planted_heads(4, 2, 150, 16, 0, noise=0.4)
    chunk = Chunk.of(q[:, -60:], KVView.from_tensors(k, v, block_size=32, shuffle_seed=1))
    rows = torch.arange(0, 60, 5)
    monkeypatch.setattr("saccade.methods.loopserve.device.MOST_BYTES", 3 * 4 * 12 * 150)
    found = select_lines(chunk, rows, 0.8, rounds)
    found.check()
    expected = cover_rows(chunk.q, chunk.kv, chunk.shape, rows, 0.8, chunk.scale, rounds=rounds)
    for head, (columns, distances) in enumerate(expected):
        for got, wanted in zip(found.unit_lines(head), (columns, distances)):
            assert got.tolist() == sorted(wanted.tolist())
