"""What selections are decided from, by the C++ kernels: sums of exact softmax rows against float64."""

import math

import pytest
import torch
from covering import covered
from cpu_helpers import problem

from saccade.methods.loopserve import cpu as loopserve_cpu
from saccade.methods.loopserve.line_cover import exact_cover
from saccade.ops import cpu, cpu_sums
from saccade.ops.scores import antidiagonal_shares
from saccade.selection import Shape

pytestmark = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable() or "-")

ISAS = cpu.supported_isas()
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _restore_isa():
    yield
    cpu.set_isa(None)


def weights_of(q, view, shape, scale, softcap=None):
    """Softmax rows in float64: [heads, q_len, k_len]."""
    k = view.keys(0, shape.k_len).double().repeat_interleave(shape.group, 0)
    scores = q.double() @ k.transpose(1, 2) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return torch.softmax(scores.masked_fill(~shape.causal_mask(), -math.inf), -1)


def sums_by_hand(weights, shape, rows):
    """Of the last ``rows`` rows by key and by distance, one row at a time: two [heads, k_len]."""
    last = weights[:, shape.q_len - rows :]
    slashes = torch.zeros(shape.heads, shape.k_len, dtype=torch.float64)
    for j in range(rows):
        position = shape.q_start + shape.q_len - rows + j
        slashes[:, : position + 1] += last[:, j, : position + 1].flip(-1)
    return last.sum(1), slashes


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 63, 64, 65, 128, 200])
def test_line_sums(isa, dtype, rows):
    cpu.set_isa(isa)
    for q_start, q_len, extra in ((0, 391, 0), (0, rows, 0), (140, 201, 7)):
        shape = Shape(4, 2, q_len, q_start + q_len + extra, q_start)
        q, view = problem(shape, 64, dtype, page=16, seed=rows)
        expected = sums_by_hand(weights_of(q, view, shape, 1 / 8), shape, rows)
        for sums, by_hand in zip(cpu_sums.line_sums(q, view, shape, rows, 1 / 8), expected):
            assert sums.shape == by_hand.shape
            assert float((sums - by_hand).abs().max()) < 2e-5 * max(1, rows / 8)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [16, 80, 96, 128, 256])
def test_line_sums_of_every_head_size(isa, head_dim):
    cpu.set_isa(isa)
    shape = Shape.suffix(4, 1, 70, 300)
    for dtype in DTYPES:
        q, view = problem(shape, head_dim, dtype)
        expected = sums_by_hand(weights_of(q, view, shape, 0.1, 15.0), shape, 70)
        for sums, by_hand in zip(cpu_sums.line_sums(q, view, shape, 70, 0.1, 15.0), expected):
            assert float((sums - by_hand).abs().max()) < 1e-4


def test_line_sums_do_not_depend_on_threads():
    shape = Shape.suffix(8, 2, 200, 700)
    q, view = problem(shape, 64, torch.bfloat16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = cpu_sums.line_sums(q, view, shape, 128, 0.1)
        torch.set_num_threads(3)
        many = cpu_sums.line_sums(q, view, shape, 128, 0.1)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, many))


def sampled_rows(n, first, count, seed, sharpness):
    """Random causal softmax rows at ``count`` positions within ``first .. n - 1``: (weights [count, n], positions)."""
    generator = torch.Generator().manual_seed(seed)
    positions = first + torch.randperm(n - first, generator=generator)[:count].sort().values
    scores = sharpness * torch.randn(count, n, generator=generator)
    scores[:, ::7] += 2.0
    scores = scores.masked_fill(torch.arange(n) > positions[:, None], -math.inf)
    return torch.softmax(scores, -1), positions


@covered(
    {
        "isa": ISAS,
        ("n", "first", "count"): [
            (1, 0, 1),
            (65, 0, 65),
            (300, 220, 80),
            (700, 699, 1),
            (1000, 0, 256),
            (2000, 1500, 130),
        ],
        "sharpness": [0.1, 2.0, 5.0],
    }
)
def test_greedy_covers_are_numpys_to_the_last_bit(isa, n, first, count, sharpness):
    cpu.set_isa(isa)
    weights, positions = sampled_rows(n, first, count, n + count, sharpness)
    for share in (0.0, 0.5, 0.9, 0.995, 0.99999):
        before = weights.clone()
        columns, distances, recovered = loopserve_cpu.cover(weights, positions, first, share)
        assert torch.equal(weights, before)
        expected = exact_cover(weights.numpy().copy(), positions.numpy(), first, share)
        assert (columns.tolist(), distances.tolist(), recovered) == expected


def test_greedy_covers_do_not_change_with_equal_lines():
    """Weights that tie everywhere: the lower line, and of two kinds the diagonal."""
    n = 200
    weights = torch.tril(torch.ones(n, n)) / torch.arange(1, n + 1)[:, None]
    same = torch.tril(torch.ones(n, n)) / 64
    for rows in (weights, same):
        columns, distances, recovered = loopserve_cpu.cover(rows, torch.arange(n), 0, 0.99)
        assert (columns.tolist(), distances.tolist(), recovered) == exact_cover(
            rows.numpy().copy(), torch.arange(n).numpy(), 0, 0.99
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_start", "q_len", "count"), [(0, 300, 40), (0, 300, 150), (180, 120, 120), (299, 1, 1)])
def test_covers_of_a_call_hold_their_share_and_are_the_greedy_ones(isa, dtype, q_start, q_len, count):
    cpu.set_isa(isa)
    shape = Shape.suffix(4, 2, q_len, q_start + q_len)
    q, view = problem(shape, 64, dtype, seed=count)
    q = (0.5 * q.float()).to(dtype)
    rows = torch.randperm(q_len, generator=torch.Generator().manual_seed(1))[:count].sort().values
    weights = weights_of(q, view, shape, 1 / 8)[:, rows]
    positions = q_start + rows
    for head, (columns, distances) in enumerate(loopserve_cpu.cover_rows(q, view, shape, rows, 1 / 8, None, 0.9)):
        expected = loopserve_cpu.cover(weights[head].float(), positions, q_start, 0.9)
        distance = positions[:, None] - torch.arange(shape.k_len)
        read = torch.isin(torch.arange(shape.k_len), columns)[None] | torch.isin(distance, distances)
        assert float(weights[head][read].sum()) >= 0.9 * count - 1e-4
        if dtype == torch.float32:  # rounding may swap lines that are nearly as good, no more
            for chosen, wanted in ((columns, expected[0]), (distances, expected[1])):
                apart = set(chosen.tolist()) ^ set(wanted.tolist())
                assert len(apart) <= 0.02 * wanted.numel()


@covered(
    {
        "isa": ISAS,
        "dtype": DTYPES,
        ("q_start", "q_len", "extra"): [(0, 7, 0), (3, 130, 5), (517, 1, 0), (1, 400, 0)],
        ("stride", "size"): [(8, 128), (16, 64), (2, 128), (32, 32)],
    }
)
def test_antidiagonal_shares_are_torchs(isa, dtype, q_start, q_len, extra, stride, size, monkeypatch):
    """Chunks and contexts that cut tiles at either end; logits with and without a cap."""
    cpu.set_isa(isa)
    shape = Shape(4, 2, q_len, q_start + q_len + extra, q_start)
    q, view = problem(shape, 32, dtype, seed=q_len)
    for softcap in (None, 5.0):
        assert cpu_sums.serves_tiles(q, view, stride, size) is None
        shares = antidiagonal_shares(q, view, shape, stride, size, 0.1, softcap)
        with monkeypatch.context() as patch:
            patch.setattr(cpu_sums, "serves_tiles", lambda *_: "patched")
            expected = antidiagonal_shares(q, view, shape, stride, size, 0.1, softcap)
        assert float((shares - expected).abs().max()) < 2e-6


def test_tiles_that_straddle_pages_have_no_kernel():
    shape = Shape.suffix(4, 2, 100, 300)
    q, view = problem(shape, 32, torch.float32, page=16)
    assert cpu_sums.serves_tiles(q, view, 16, 64) is None
    assert cpu_sums.serves_tiles(q, view, 32, 64) is not None
    assert cpu_sums.serves_tiles(q, view, 1, 128) is not None
