"""LoopServe's lines of blocks: sums and covers by hand, what alpha promises, chunks that cut blocks, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import Planted, mass_of, planted_heads, run_method

from saccade.errors import ModelError, PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.loopserve import LoopServe
from saccade.methods.loopserve.blocks import query_blocks
from saccade.methods.loopserve.method import AnsweringState
from saccade.methods.loopserve.rounds import cover_rounds
from saccade.ops import cpu, row_shares
from saccade.ops.row_shares import _sums, row_sums
from saccade.selection import Blocks, Dense, Lines, Shape

HEADS, KV_HEADS, D = 4, 2, 16
CALLS = [(333, 333), (70, 515), (96, 256), (1, 200), (33, 161)]  # rows of a call, and its keys
PLANTED = Planted(columns=(7, 301), slashes=(13, 190), blocks=(), strength=12.0)


def weights_by_hand(q, k, head: int, row: int, n: int, softcap: float | None) -> np.ndarray:
    """Softmax weights of one row of a call, the last one of which sees ``n`` keys: float64 [n]."""
    position = n - q.shape[1] + row
    keys = k[head // (HEADS // KV_HEADS), : position + 1].double().numpy()
    scores = keys @ q[head, row].double().numpy() / D**0.5
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    weights = np.exp(scores - scores.max())
    return np.pad(weights / weights.sum(), (0, n - position - 1))


def by_hand(q, k, rows, n: int, size: int, head: int, softcap: float | None = None) -> dict[int, np.ndarray]:
    """For every query block of the grid with sampled rows, what they give to each key block."""
    sums: dict[int, np.ndarray] = {}
    for row in rows.tolist():
        weights = np.pad(weights_by_hand(q, k, head, row, n, softcap), (0, -n % size))
        own = (n - q.shape[1] + row) // size
        sums[own] = sums.get(own, 0.0) + weights.reshape(-1, size).sum(1)
    return sums


def draw(q_len: int, n: int, **options) -> tuple[torch.Tensor, torch.Tensor, Chunk]:
    """Queries of the call that do not lie together, keys, and the chunk of them."""
    q, k, v = planted_heads(HEADS, KV_HEADS, n, D, 0, **options)
    apart = torch.cat([q, q], -1)[:, -q_len:, D:]
    view = KVView.from_tensors(k, v, block_size=16, shuffle_seed=1)
    return apart, k, Chunk.of(apart, view)


@pytest.mark.parametrize(("q_len", "n"), CALLS)
@pytest.mark.parametrize(("every", "size", "softcap"), [(1, 64, None), (7, 32, 2.0), (11, 128, None)])
def test_sums_of_rows_by_query_block(q_len, n, every, size, softcap, monkeypatch):
    q, k, chunk = draw(q_len, n, noise=0.4)
    rows = torch.arange(q_len - 1, -1, -every).flip(0)
    blocks, places = query_blocks(chunk.shape, rows, size)
    at = q, chunk.kv, chunk.shape, rows, places, size, chunk.scale, softcap
    found = {"torch": _sums(*at)}
    monkeypatch.setattr(row_shares, "MOST", 5 * 2 * n)  # five rows at once cut query blocks
    found["torch, a few rows at once"] = _sums(*at)
    try:
        for isa in cpu.supported_isas():
            cpu.set_isa(isa)
            found[isa] = row_sums(*at)
    finally:
        cpu.set_isa(None)
    for head in range(HEADS):
        expected = by_hand(q, k, rows, n, size, head, softcap)
        assert blocks.tolist() == list(expected)
        sums = torch.from_numpy(np.stack(list(expected.values()))).float()
        for name, one in found.items():
            torch.testing.assert_close(
                one[head], sums, atol=1e-5, rtol=1e-4, msg=lambda why, name=name: f"{name}: {why}"
            )


@pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable() or "-")
def test_bfloat16_sums_on_every_kernel():
    """Heads that tiles of AMX serve, and query blocks with more rows than a tile holds."""
    q, k, v = (torch.randn(h, 700, 64, generator=torch.Generator().manual_seed(h)).bfloat16() for h in (4, 2, 2))
    view, shape = KVView.from_tensors(k, v, 32, shuffle_seed=1), Shape.suffix(4, 2, 450, 700)
    rows = torch.arange(0, 450)
    at = q[:, 250:], view, shape, rows, query_blocks(shape, rows, 128)[1], 128, 0.2
    try:
        for isa in cpu.supported_isas():
            cpu.set_isa(isa)
            torch.testing.assert_close(row_sums(*at), _sums(*at, None), atol=1e-2, rtol=1e-3)  # of up to 128 rows
    finally:
        cpu.set_isa(None)


@pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable() or "-")
def test_the_kernels_refuse_rows_and_places_that_are_not_there():
    q, _, chunk = draw(40, 100)
    for rows, places, why in (
        ([0, 40], [0, 1], "row 40 is not a later one of the 40"),
        ([5, 5], [0, 1], "row 5 is not a later one"),
        ([0, 1, 2], [0, 7, 1], "place 7 is not among the 2"),
    ):
        with pytest.raises(ValueError, match=why):
            row_sums(q, chunk.kv, chunk.shape, torch.tensor(rows), torch.tensor(places), 32, chunk.scale)


@pytest.mark.parametrize(("q_len", "n"), [call for call in CALLS if call[0] > 1])
@pytest.mark.parametrize(("alpha", "size", "window"), [(0.0, 32, 2), (0.6, 32, 1), (0.9, 64, 1), (0.97, 32, 3)])
def test_blocks_on_the_lines_of_the_cover(q_len, n, alpha, size, window):
    q, k, chunk = draw(q_len, n, noise=0.4)
    sampled = {"samples": 20, "last_rows": 5, "min_rows": 1}
    method = LoopServe(alpha=alpha, lines="block", block_size=size, window_blocks=window, **sampled)
    rows = method.sample(chunk)
    found = method.select_prefill(chunk)
    assert isinstance(found, Blocks)
    found.check()
    first, last = (n - q_len) // size, (n - 1) // size
    mask = found.block_mask()
    assert mask.shape == (HEADS, last - first + 1, last + 1)
    for head in range(HEADS):
        sums = by_hand(q, k, rows, n, size, head)
        weights = np.stack(list(sums.values())).astype(np.float32)
        columns, distances = cover_rounds(weights, np.array(list(sums)), first, alpha, window)
        for own in range(first, last + 1):
            expected = {b for b in range(own + 1) if b in columns or own - b in distances}
            assert set(mask[head, own - first].nonzero()[:, 0].tolist()) == expected
            assert {0, *range(max(0, own - window + 1), own + 1)} <= expected
    assert chunk.cost.scored == rows.numel() * n


@pytest.mark.parametrize("back", [1, 3])
def test_a_head_that_looks_a_few_tokens_back_keeps_its_key_in_every_row(back):
    """Of the rows that ask for the block before their own hardly one is sampled, and a column serves it alone."""
    n, size, width = 512, 64, 512
    one_hot = 6 * torch.eye(n, width)  # a logit of 36 / sqrt(512) * 20 = 32 for the key asked for, 0 for others
    q = 20 * one_hot[(torch.arange(n) - back).clamp(min=0)].expand(2, n, width)
    k = one_hot.expand(2, n, width)

    def lost(**options) -> list[int]:
        method = LoopServe(alpha=0.9, lines="block", block_size=size, samples=40, last_rows=10, **options)
        found = method.select_prefill(Chunk.of(q, KVView.from_tensors(k, k)))
        return [row for row in range(back, n) if not bool(found.row_mask(0, row, row + 1)[0, row - back])]

    assert lost() == []
    assert lost(window_blocks=1) == [row for row in range(2 * size, n) if row % size < back]  # block 0 is always read


@pytest.mark.parametrize("alpha", [0.5, 0.9, 0.955, 0.995])
@pytest.mark.parametrize(("rows", "samples", "last"), [(700, 64, 0), (700, 40, 24), (200, 256, 64), (65, 30, 40)])
def test_alpha_of_the_sampled_rows_is_kept(alpha, rows, samples, last):
    q, k, v = planted_heads(4, 2, 700, seed=rows, pattern=PLANTED)
    view = KVView.from_tensors(k, v)
    method = LoopServe(alpha=alpha, samples=samples, last_rows=last, min_rows=1, lines="block", block_size=32)
    used = run_method(method, "prefill", q, view, rows)[2]
    looked_at = method.sample(Chunk.of(q[:, 700 - rows :], view))
    assert (mass_of(q[:, -rows:], k, used.mask())[:, looked_at].mean(1) >= alpha - 1e-5).all()


def test_planted_lines_are_found_and_little_else():
    """Column 301 lies in key block 9; slash 16 lies half at distance 0 and half at 1, slash 176 at 5 and at 6."""
    pattern = Planted(columns=(7, 301), slashes=(16, 176), blocks=(), strength=12.0)
    q, k, v = planted_heads(4, 2, 1400, seed=1, pattern=pattern, noise=0.1)
    method = LoopServe(alpha=0.9, lines="block", block_size=32)
    used = run_method(method, "prefill", q, KVView.from_tensors(k, v), 1400)[2]
    assert isinstance(used, Blocks)
    mask, own = used.block_mask(), torch.arange(44)
    assert mask[:, own >= 9, 9].all()
    for distance in (1, 5, 6):
        assert mask[:, own[distance:], own[: 44 - distance]].all()
    assert used.density() < 0.35


def test_answer_rows_count_as_rows_of_the_chunk():
    """Queries of the last answer alone look at column 300: the turn after it reads its block, and lists are of its own
    rows."""
    q, k, v = planted_heads(HEADS, KV_HEADS, 700, D, 3, pattern=Planted(columns=(), slashes=(), blocks=()))
    k[:, 300], q[:, :, 2] = 0.0, 0.0
    k[:, 300, 2], q[:, 590:600, 2] = 30.0, 5.0
    method = LoopServe(alpha=0.3, answer_rows=10, lines="block", block_size=32, samples=6, last_rows=4)
    found = {}
    for remembered in (True, False):
        state = AnsweringState(q[:, 595:600], answer=q[:, 590:600], end=600 if remembered else 599)
        chunk = Chunk.of(q[:, 600:], KVView.from_tensors(k, v), states=[state])
        used = method.select_prefill(chunk)
        assert isinstance(used, Blocks)
        assert used.shape == chunk.shape
        used.check()
        found[remembered] = used.block_mask()[:, :, 300 // 32]
    assert found[True].all()
    assert not found[False].all()


@pytest.mark.parametrize(("rows", "n", "kind"), [(63, 300, Dense), (64, 300, Blocks), (100, 128, Dense)])
def test_short_turns_and_two_blocks_are_dense(rows, n, kind):
    q, k, v = planted_heads(4, 2, n)
    chunk = Chunk.of(q[:, -rows:], KVView.from_tensors(k, v))
    assert isinstance(LoopServe(lines="block", block_size=64).select_prefill(chunk), kind)
    assert isinstance(LoopServe(lines="block", alpha=1.0, block_size=64).select_prefill(chunk), Dense)


def test_a_key_that_is_no_number_is_an_error():
    q, k, v = planted_heads(4, 2, 300, seed=3)
    k[1, 150, 4] = torch.nan
    method = LoopServe(alpha=0.9, lines="block", block_size=32)
    with pytest.raises(ModelError, match="attention weights are not finite"):
        method.select_prefill(Chunk.of(q[:, -150:], KVView.from_tensors(k, v)))


def test_lines_are_tokens_unless_blocks_are_asked_for():
    assert LoopServe() == LoopServe(lines="token")
    q, k, v = planted_heads(4, 2, 700, noise=0.6)
    chunk = Chunk.of(q, KVView.from_tensors(k, v))
    assert isinstance(LoopServe(alpha=0.8, lines="block").select_prefill(chunk), Blocks)
    lines, one_by_one = (LoopServe(alpha=0.8, take=take).select_prefill(chunk) for take in ("auto", "line"))
    assert isinstance(lines, Lines)
    assert torch.equal(lines.mask(), one_by_one.mask())


def test_query_blocks_of_the_grid():
    blocks, places = query_blocks(Shape.suffix(1, 1, 70, 100), torch.tensor([0, 1, 2, 40, 69]), 32)  # from 30 on
    assert blocks.tolist() == [0, 1, 2, 3]
    assert places.tolist() == [0, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lines": "row"}, "lines"),
        ({"block_size": 48}, "block_size"),
        ({"lines": "block", "overlap": "paper"}, "lines=block does not go with overlap=paper.*lines=token"),
        ({"lines": "block", "take": "line"}, "lines=block does not go with take=line.*lines=token"),
    ],
)
def test_bad_options_are_refused(options, why):
    with pytest.raises(PolicyError, match=why):
        LoopServe(**options)
