"""XAttention: shares by hand, planted lines are found, thresholds are reached and monotone, 1 is dense."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Planted, planted_heads, run_method

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods import xattention
from saccade.methods.base import Chunk
from saccade.methods.xattention import NOTE, XAttention
from saccade.ops.scores import antidiagonal_shares
from saccade.selection import Blocks, Dense, Shape

PLANTED = Planted(columns=(207, 401), slashes=(130, 190), blocks=())


def chunk_of(rows: int, n: int, seed: int = 0, pattern: Planted = PLANTED, noise: float = 0.3):
    q, k, v = planted_heads(4, 2, n, seed=seed, pattern=pattern, noise=noise)
    return q, k, KVView.from_tensors(k, v)


def shares_by_hand(q, keys, n: int, rows: int, stride: int, size: int) -> list[list[float]]:
    """Pair by pair: the mean antidiagonal logit of each tile, a softmax per row of tiles, sums per block."""
    first, scale = n - rows, 1 / math.sqrt(q.shape[-1])
    totals: dict[int, list[float]] = {}
    for tile_row in range(first // stride, (n - 1) // stride + 1):
        scores = []
        for tile in range(tile_row + 1):
            pairs = [(tile_row * stride + stride - 1 - a, tile * stride + a) for a in range(stride)]
            logits = [float(q[p] @ keys[i]) * scale for p, i in pairs if first <= p < n and i < n]
            scores.append(sum(logits) / len(logits) if logits else -math.inf)
        row = totals.setdefault(tile_row * stride // size, [0.0] * -(-n // size))
        if max(scores) == -math.inf:
            continue
        weights = torch.softmax(torch.tensor(scores, dtype=torch.float64), 0).tolist()
        for tile, weight in enumerate(weights):
            row[tile * stride // size] += weight
    return [[share / max(sum(row), 1e-30) for share in row] for _, row in sorted(totals.items())]


@pytest.mark.parametrize(("rows", "n"), [(256, 256), (100, 300), (65, 301), (3, 250), (1, 129), (1, 132)])
@pytest.mark.parametrize(("stride", "size"), [(8, 64), (16, 32)])
def test_shares_are_the_antidiagonal_sums_by_hand(rows, n, stride, size):
    q, k, view = chunk_of(rows, n, seed=n, noise=1.0)
    shares = antidiagonal_shares(q[:, n - rows :], view, Shape.suffix(4, 2, rows, n), stride, size, 32**-0.5)
    for head in range(4):
        expected = shares_by_hand(q[head].double(), k[head // 2].double(), n, rows, stride, size)
        torch.testing.assert_close(shares[head], torch.tensor(expected), atol=1e-5, rtol=1e-4)


def test_the_tiles_of_a_long_call_do_not_change_the_shares():
    """The loop that bounds memory: of 3000 tiles by 3000 for two heads, 2796 rows fit into one turn."""
    q, k, v = (torch.randn(heads, 24_000, 4, generator=torch.Generator().manual_seed(1)) for heads in (2, 1, 1))
    view = KVView.from_tensors(k, v)
    whole = antidiagonal_shares(q, view, Shape.suffix(2, 1, 24_000, 24_000), 8, 128, 0.5)
    tail = antidiagonal_shares(q[:, -128 * 3 - 64 :], view, Shape.suffix(2, 1, 128 * 3 + 64, 24_000), 8, 128, 0.5)
    torch.testing.assert_close(whole[:, -4:], tail, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("rows", [700, 204, 60])  # chunks that cut no tile of rows
@pytest.mark.parametrize("stride", [4, 8, 16])
def test_planted_columns_and_odd_slashes_are_found(rows, stride):
    """An antidiagonal crosses a line once in stride pairs, so the line must stand out; even distances it misses."""
    method, first = XAttention(threshold=0.9, stride=stride, block_size=64), 700 - rows
    for column in (207, 401):
        q, _, view = chunk_of(rows, 700, pattern=Planted(columns=(column,), slashes=(), blocks=(), strength=60.0))
        mask = run_method(method, "prefill", q, view, rows)[2].mask()
        assert mask[:, max(0, column - first) :, column].all()
    for slash in (131, 205):
        q, _, view = chunk_of(rows, 700, pattern=Planted(columns=(), slashes=(slash,), blocks=(), strength=80.0))
        mask = run_method(method, "prefill", q, view, rows)[2].mask()
        positions = torch.arange(max(slash, first), 700)
        found = mask[:, positions - first, positions - slash].float().mean()
        assert found > 0.85, (slash, found)  # the threshold lets a tenth of a query block go


@pytest.mark.parametrize("rows", [700, 130, 5, 1])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6, 0.9, 0.99])
def test_the_shares_reach_the_threshold_with_no_block_too_many(rows, threshold):
    q, _, view = chunk_of(rows, 700, seed=2)
    used = run_method(XAttention(threshold=threshold, block_size=64), "prefill", q, view, rows)[2]
    assert isinstance(used, Blocks)
    shape, mask = used.shape, used.block_mask()
    shares = antidiagonal_shares(q[:, -rows:], view, shape, 8, 64, 32**-0.5).double()
    for head in range(4):
        for j in range(used.q_blocks):
            diagonal, row = used.first_q_block + j, shares[head, j]
            chosen = mask[head, j].nonzero()[:, 0].tolist()
            assert {0, diagonal} <= set(chosen)
            assert row[chosen].sum() >= threshold - 1e-6 or len(chosen) == diagonal + 1
            others = [b for b in chosen if b not in (0, diagonal)]
            if others:  # without the least of them it falls short
                assert row[chosen].sum() - row[others].min() < threshold + 1e-6
                left = [b for b in range(diagonal + 1) if b not in chosen]
                assert not left or row[left].max() <= row[others].min()


@pytest.mark.parametrize("rows", [700, 260])
@pytest.mark.parametrize("threshold", [0.3, 0.9])
@pytest.mark.parametrize("window", [2, 3])
def test_the_last_blocks_count_towards_the_threshold(rows, threshold, window):
    q, _, view = chunk_of(rows, 700, seed=2)
    method = XAttention(threshold=threshold, block_size=64, window_blocks=window)
    used = run_method(method, "prefill", q, view, rows)[2]
    shares = antidiagonal_shares(q[:, -rows:], view, used.shape, 8, 64, 32**-0.5).double().tolist()
    mask = used.block_mask()
    for head in range(4):
        for j in range(used.q_blocks):
            diagonal, row = used.first_q_block + j, shares[head][j]
            expected = {0, *range(max(0, diagonal - window + 1), diagonal + 1)}
            have = sum(row[b] for b in expected)
            for block in sorted(set(range(diagonal + 1)) - expected, key=lambda b: (-row[b], b)):
                if have < threshold:
                    expected.add(block)
                    have += row[block]
            assert set(mask[head, j].nonzero()[:, 0].tolist()) == expected


@pytest.mark.parametrize("back", [1, 2, 3, 6])
@pytest.mark.parametrize("stride", [8, 1])
@pytest.mark.parametrize("sink", ["counted", "published"])
def test_a_head_that_looks_a_few_tokens_back_keeps_its_key_in_every_row(back, stride, sink):
    """With the paper's blocks alone the first rows of each query block lose it, however finely tiles are summed."""
    n, size, width = 512, 64, 512
    one_hot = 6 * torch.eye(n, width)  # a logit of 36 / sqrt(512) * 80 = 127 for the key asked for, 0 for others
    q = 80 * one_hot[(torch.arange(n) - back).clamp(min=0)].expand(2, n, width)
    k = one_hot.expand(2, n, width)

    def lost(**options) -> list[int]:
        found = XAttention(threshold=0.8, stride=stride, block_size=size, **options)
        found = found.select_prefill(Chunk.of(q, KVView.from_tensors(k, k)))
        return [row for row in range(back, n) if not bool(found.row_mask(0, row, row + 1)[0, row - back])]

    assert lost(window_blocks=2, sink=sink) == []
    if sink == "counted" and (stride == 1 or back % 2):  # at even distances larger tiles see noise alone
        assert lost() == [row for row in range(2 * size, n) if row % size < back]  # block 0 is always read


def published_blocks(row: list[float], diagonal: int, threshold: float, first_chunk: bool) -> set[int]:
    """The published code's selection for one query block, as the sums it keeps say it: what is forced is listed first,
    the sums lead with two zeros and what is forced, and what is not chosen stands for block 0. In the first chunk the
    diagonal overwrites the mark of block 0."""
    forced = {diagonal} if first_chunk else {0, diagonal}
    others = sorted((b for b in range(len(row)) if b not in forced), key=lambda b: (-row[b], b))
    listed = [*sorted(forced), *others]
    parts = [0.0, 0.0, sum(row[b] for b in forced), *(row[b] for b in others)]
    chosen = {b for j, b in enumerate(listed) if sum(parts[: j + 1]) < threshold * sum(row)}
    return {b for b in chosen | forced | {0} if b <= diagonal}


@pytest.mark.parametrize("rows", [700, 260])
@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.9])
def test_blocks_are_those_of_the_published_code_where_asked_for(rows, threshold, monkeypatch):
    """Its first chunk ends at row 512 here; behind it both forms are alike, and so is the printed rule."""
    monkeypatch.setattr(xattention, "PUBLISHED_ROWS", 512)
    q, _, view = chunk_of(rows, 700, seed=2)
    masks = {}
    for sink in ("counted", "published"):
        method = XAttention(threshold=threshold, block_size=64, sink=sink)
        used = run_method(method, "prefill", q, view, rows)[2]
        masks[sink] = used.block_mask()
    shares = antidiagonal_shares(q[:, -rows:], view, used.shape, 8, 64, 32**-0.5).double().tolist()
    for head in range(4):
        for j in range(used.q_blocks):
            diagonal, row = used.first_q_block + j, shares[head][j]
            chosen = set(masks["published"][head, j].nonzero()[:, 0].tolist())
            assert chosen == published_blocks(row, diagonal, threshold, diagonal < 8)
    behind = max(0, 8 - used.first_q_block)
    assert torch.equal(masks["published"][:, behind:], masks["counted"][:, behind:])
    more = int(masks["published"].sum() - masks["counted"].sum())
    assert more == 0 if threshold == 0 else more > 0 or threshold == 0.9  # at 0.9 nearly all are read


def test_monotone_in_the_threshold_and_one_is_dense():
    for rows in (700, 130):
        q, _, view = chunk_of(rows, 700, seed=3)
        before = None
        for threshold in (0.0, 0.2, 0.5, 0.8, 0.9, 0.99, 1.0):
            used = run_method(XAttention(threshold=threshold, block_size=64), "prefill", q, view, rows)[2]
            assert before is None or not (before & ~used.mask()).any(), threshold
            before = used.mask()
        assert isinstance(used, Dense)


@pytest.mark.parametrize(
    ("n", "window", "dense"), [(128, 1, True), (256, 1, True), (257, 1, False), (384, 2, True), (385, 2, False)]
)
def test_what_the_first_and_the_last_blocks_hold_is_dense(n, window, dense):
    q, _, view = chunk_of(n, n)
    method = XAttention(threshold=0.1, window_blocks=window)
    assert isinstance(method.select_prefill(Chunk.of(q, view)), Dense) == dense


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 1.5},
        {"threshold": "high"},
        {"block_size": 100},
        {"stride": 0},
        {"stride": 24},
        {"stride": 128, "block_size": 64},
        {"sink": "free"},
        {"products": "int8"},
        {"window_blocks": 0},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        XAttention(**options)


def rounded_by_hand(x: torch.Tensor, ahead: int, stride: int) -> torch.Tensor:
    """Tile by tile: the largest value becomes 448, and what is next in e4m3 stands for a value."""
    out = torch.empty(x.shape)
    for head in range(x.shape[0]):
        for start in range(-ahead, x.shape[1], stride):
            rows = slice(max(start, 0), start + stride)
            part = x[head, rows].float()
            scale = part.abs().max().clamp(min=1e-20) / 448
            out[head, rows] = (part / scale).to(torch.float8_e4m3fn).float() * scale
    return out


@pytest.mark.parametrize(("rows", "n"), [(300, 300), (100, 300), (67, 301), (3, 250)])
@pytest.mark.parametrize("stride", [8, 16])
@pytest.mark.parametrize("softcap", [None, 8.0])
def test_fp8_products_are_those_of_rounded_tiles(rows, n, stride, softcap):
    q, k, v = planted_heads(4, 2, n, seed=n, noise=1.0)
    k = k + 5.0
    view, shape = KVView.from_tensors(k, v), Shape.suffix(4, 2, rows, n)
    centre = k.mean(1, keepdim=True) if softcap is None else 0.0  # of fewer keys than it draws
    keys = rounded_by_hand(k - centre, 0, stride)
    queries = rounded_by_hand(q[:, -rows:], (n - rows) % stride, stride)
    at = shape, stride, 64, 32**-0.5, softcap
    found = antidiagonal_shares(q[:, -rows:], view, *at, fp8=True)
    wanted = antidiagonal_shares(queries, KVView.from_tensors(keys, keys), *at)
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-2)  # a value at a rounding edge
    assert (found - wanted).abs().mean() < 1e-4
    if n - rows < 256:  # otherwise there is one query block and little to round
        assert (found - antidiagonal_shares(q[:, -rows:], view, *at)).abs().max() > 1e-4


@pytest.mark.parametrize("n", [704, 711])  # whole tiles; seven rows of a query block of their own
def test_an_offset_that_all_keys_have_does_not_spoil_fp8(n):
    """As the bias of some models' key projections; without the centre the estimate would be far off."""
    q, k, v = planted_heads(4, 2, n, seed=1, pattern=PLANTED, noise=1.0)
    shape, at = Shape.suffix(4, 2, n, n), (8, 64, 32**-0.5)
    far = k + 300 * torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(2))
    plain, moved = (
        antidiagonal_shares(q, KVView.from_tensors(one, v), shape, *at, fp8=products)
        for one, products in ((k, False), (far, True))
    )
    assert (plain - moved).abs().max() < 0.06
    assert (plain - moved).abs().mean() < 2e-3
    rounded = rounded_by_hand(far, 0, 8)
    spoilt = antidiagonal_shares(q, KVView.from_tensors(rounded, v), shape, *at)
    assert (plain - spoilt).abs().max() > 0.3


def test_products_are_as_asked_for_and_said():
    assert XAttention() == XAttention(products="full")
    q, _, view = chunk_of(700, 700, noise=1.0)
    masks = {}
    for products in ("full", "fp8"):
        chunk = Chunk.of(q, view)
        masks[products] = XAttention(threshold=0.8, block_size=64, products=products).select_prefill(chunk).block_mask()
        assert (NOTE in chunk.cost.notes) == (products == "fp8")
    assert not torch.equal(masks["fp8"], masks["full"])
    assert (masks["fp8"] ^ masks["full"]).float().mean() < 0.05
