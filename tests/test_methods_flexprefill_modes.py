"""FlexPrefill's literal modes: the paper's token lines and the published code's blocks, each derived by hand."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Planted, mass_of, planted_heads, run_method

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.flexprefill import FlexPrefill
from saccade.selection import Blocks, Dense, Lines, Mixed

LINES = Planted(columns=(7, 301), slashes=(13, 190), blocks=())
FLAT = Planted(sink=1.0, columns=(), slashes=(), blocks=(3,), strength=1.0)


def setup(rows: int, n: int, pattern: Planted = LINES, seed: int = 0, noise: float = 0.3):
    q, k, v = planted_heads(4, 2, n, seed=seed, pattern=pattern, noise=noise)
    view = KVView.from_tensors(k, v)
    return q, k, view, Chunk.of(q[:, n - rows :], view)


def weights_of(q, k, head: int, rows: int) -> torch.Tensor:
    """Softmax of the last ``rows`` rows of a head, float64 [rows, n]."""
    n = k.shape[1]
    scores = q[head, n - rows :].double() @ k[head // 2].double().T / math.sqrt(q.shape[-1])
    for row in range(rows):
        scores[row, n - rows + row + 1 :] = -math.inf
    return torch.softmax(scores, -1)


def distance_sums(weights: torch.Tensor) -> list[float]:
    rows, n = weights.shape
    sums = [0.0] * n
    for row, entries in enumerate(weights.tolist()):
        for key in range(n - rows + row + 1):
            sums[n - rows + row - key] += entries[key]
    return sums


def fewest(sums: list[float], gamma: float) -> list[int]:
    """The fewest entries, heaviest first, whose share reaches gamma."""
    chosen, got = [], 0.0
    for at in sorted(range(len(sums)), key=lambda at: -sums[at]):
        if got >= gamma * sum(sums):
            break
        chosen.append(at)
        got += sums[at]
    return chosen


# --- mode="paper" -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.5, 0.9])
@pytest.mark.parametrize("rows", [450, 100, 20])
def test_paper_lines_are_algorithm_3_by_hand(gamma, rows):
    n, size = 450, 64
    q, k, view, _ = setup(rows, n, seed=rows, noise=0.6)
    method = FlexPrefill(gamma=gamma, tau=0.0, block_size=size, min_budget=0, mode="paper")
    used = run_method(method, "prefill", q, view, rows)[2]
    assert isinstance(used, Lines)
    for head in range(4):
        weights = weights_of(q, k, head, min(rows, size))
        near = set(range(size))
        columns, distances = used.unit_lines(head)
        assert set(columns.tolist()) == near | set(fewest(weights.sum(0).tolist(), gamma))
        assert set(distances.tolist()) == near | set(fewest(distance_sums(weights), gamma))


@pytest.mark.parametrize("gamma", [0.3, 0.8, 0.95])
@pytest.mark.parametrize("rows", [700, 130, 1])
def test_paper_lines_keep_gamma_and_find_planted_lines(gamma, rows):
    q, k, view, _ = setup(rows, 700)
    method = FlexPrefill(gamma=gamma, tau=0.0, min_budget=0, mode="paper", block_size=64)
    used = run_method(method, "prefill", q, view, rows)[2]
    assert isinstance(used, Lines)
    looked_at = min(rows, 64)
    assert (mass_of(q[:, -looked_at:], k, used.mask()[:, -looked_at:]).mean(1) >= gamma - 1e-5).all()
    if gamma == 0.95 and rows >= 64:
        for head in range(4):
            assert {7, 301} <= set(used.unit_lines(head)[0].tolist())
            assert {13, 190} <= set(used.unit_lines(head)[1].tolist())


@pytest.mark.parametrize(("least", "most"), [(0, 128), (200, None), (200, 200), (150, 300), (0, None)])
def test_paper_budgets_hold_for_the_lines_of_a_head_together(least, most):
    for gamma in (0.1, 0.99):
        q, _, view, _ = setup(300, 700, noise=0.8)
        method = FlexPrefill(gamma=gamma, tau=0.0, block_size=64, min_budget=least, max_budget=most, mode="paper")
        used = run_method(method, "prefill", q, view, 300)[2]
        assert isinstance(used, Lines)
        for head in range(4):
            count = sum(part.numel() for part in used.unit_lines(head))
            assert count >= max(least, 128)
            assert most is None or count <= max(most, 128)


def test_paper_lines_are_monotone_in_gamma():
    q, _, view, _ = setup(300, 700, noise=0.8)
    for tau in (0.0, 1.0):
        before = None
        for gamma in (0.0, 0.3, 0.6, 0.9, 0.99, 1.0):
            method = FlexPrefill(gamma=gamma, tau=tau, block_size=64, min_budget=200, mode="paper")
            mask = run_method(method, "prefill", q, view, 300)[2].mask()
            assert before is None or not (before & ~mask).any()
            before = mask


def test_the_fixed_mode_reads_the_paper_s_lines_and_knows_the_true_blocks_of_the_last_rows():
    """Query-aware heads as in Alg. 4 but for the query blocks of the representative rows: there the fewest key blocks
    that hold gamma of those rows' true weight."""
    q, k, view, _ = setup(300, 690, FLAT)
    options = {"gamma": 0.6, "block_size": 64, "min_budget": 0}
    paper, fixed = (
        run_method(FlexPrefill(**options, tau=1.0, mode=mode), "prefill", q, view, 300)[2]
        for mode in ("paper", "fixed")
    )
    assert isinstance(paper, Blocks)
    assert isinstance(fixed, Blocks)
    assert torch.equal(paper.block_mask()[:, :-2], fixed.block_mask()[:, :-2])  # rows 626 .. 689 lie in blocks 9 and 10
    for head in range(4):
        weights = weights_of(q, k, head, 64).sum(0)
        chosen = set(fewest([float(part.sum()) for part in weights.split(64)], 0.6))
        for block in (9, 10):
            row = fixed.block_mask()[head, block - fixed.first_q_block]
            assert set(row.nonzero()[:, 0].tolist()) == {c for c in chosen | {0, block} if c <= block}
    alike = [
        run_method(FlexPrefill(**options, tau=0.0, mode=mode), "prefill", q, view, 300)[2].mask()
        for mode in ("paper", "fixed")
    ]
    assert torch.equal(*alike)


def test_paper_heads_of_both_kinds_stand_side_by_side():
    q, k, v = planted_heads(4, 2, 700, pattern=LINES)
    flat = planted_heads(4, 2, 700, pattern=FLAT, noise=0.05)
    q[2:], k[1], v[1] = flat[0][2:], flat[1][1], flat[2][1]
    view = KVView.from_tensors(k, v)
    options = {"gamma": 0.8, "tau": 0.25, "block_size": 64, "min_budget": 0}
    kinds = FlexPrefill(**options).head_kinds(Chunk.of(q, view))
    assert kinds.tolist() == [False, False, True, True]
    used = run_method(FlexPrefill(**options, mode="paper"), "prefill", q, view, 700)[2]
    assert isinstance(used, Mixed)
    blocks = run_method(FlexPrefill(**{**options, "tau": 1.0}, mode="paper"), "prefill", q, view, 700)[2]
    lines = run_method(FlexPrefill(**{**options, "tau": 0.0}, mode="paper"), "prefill", q, view, 700)[2]
    assert isinstance(blocks, Blocks)
    assert torch.equal(used.mask()[2:], blocks.mask()[2:])
    assert torch.equal(used.mask()[:2], lines.mask()[:2])


# --- rows in the middle -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "n"), [(450, 450), (200, 450), (20, 450)])
def test_lines_come_from_the_middle_rows_and_what_they_do_not_see_is_not_chosen(rows, n):
    q, k, _, chunk = setup(rows, n)
    size, gamma = 64, 0.8
    options = {"gamma": gamma, "tau": 0.0, "block_size": size, "min_budget": 0, "mode": "paper"}
    lines = FlexPrefill(**options, index_rows="middle").select_prefill(chunk)
    assert isinstance(lines, Lines)
    stop = n - rows + min(rows, (rows + size) // 2)
    used = min(size, rows)
    for head in range(4):
        weights = weights_of(q[:, :stop], k[:, :stop], head, used)
        columns = {*fewest(weights.sum(0).tolist(), gamma), *range(size)}
        distances = {*fewest(distance_sums(weights), gamma), *range(size)}
        assert [set(part.tolist()) for part in lines.unit_lines(head)] == [columns, distances]
        assert max(columns) < max(stop, size)


def test_a_heads_kind_may_hang_on_other_rows_than_its_lines():
    """The last rows look at one key far from its block's mean; those in the middle look at nothing in particular."""
    torch.manual_seed(0)
    q, k = 0.01 * torch.randn(4, 512, 32), 0.01 * torch.randn(2, 512, 32)
    k[:, 40, 0], q[:, 448:, 0] = 40.0, 5.0
    chunk = Chunk.of(q, KVView.from_tensors(k, k))
    options = {"tau": 0.2, "block_size": 64, "min_budget": 0, "mode": "paper"}
    last, middle = (FlexPrefill(**options, pattern_rows=rows).select_prefill(chunk) for rows in ("last", "middle"))
    assert isinstance(last, Lines)
    assert isinstance(middle, Blocks)


# --- flatten=false ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fixed", "paper"])
def test_without_flatten_every_query_block_reaches_gamma(mode):
    """Keys and queries constant inside blocks: pooling is exact and the last row of a block sees its blocks whole."""
    rng = torch.Generator().manual_seed(1)
    q = 2 * torch.randn(4, 8, 1, 32, generator=rng).expand(4, 8, 64, 32).flatten(1, 2)
    k = 2 * torch.randn(2, 8, 1, 32, generator=rng).expand(2, 8, 64, 32).flatten(1, 2)
    view = KVView.from_tensors(k.contiguous(), torch.randn(2, 512, 32, generator=rng))
    least = {}
    for flatten in (True, False):
        method = FlexPrefill(gamma=0.8, tau=1.0, block_size=64, min_budget=0, flatten=flatten, mode=mode)
        used = run_method(method, "prefill", q, view, 512)[2]
        assert isinstance(used, Blocks)
        least[flatten] = float(mass_of(q, k, used.mask())[:, 63::64].min())
    assert least[False] >= 0.8 - 1e-5
    assert least[True] < 0.8  # the promise that the flat choice does not make


def test_without_flatten_query_blocks_choose_by_hand():
    q, k, view, _ = setup(300, 700, FLAT)
    method = FlexPrefill(gamma=0.6, tau=1.0, block_size=64, min_budget=0, flatten=False, mode="paper")
    used = run_method(method, "prefill", q, view, 300)[2]
    assert isinstance(used, Blocks)
    for head in range(4):
        for j in range(used.q_blocks):
            block = used.first_q_block + j
            mean = q[head, max(400, block * 64) : (block + 1) * 64].double().mean(0)
            keys = torch.stack([part.mean(0) for part in k[head // 2].double().split(64)])[: block + 1]
            shares = torch.softmax(keys @ mean / math.sqrt(32), 0).tolist()
            expected = {0, block} | set(fewest(shares, 0.6))
            assert set(used.block_mask()[head, j].nonzero()[:, 0].tolist()) == expected


# --- mode="reference" -------------------------------------------------------------------------------------------


def reference_by_hand(q, k, head: int, rows: int, gamma: float, tau: float, size: int, least: int, most: int):
    """What the published code would read, as a set of (query block, key block), worked out in loops."""
    n = k.shape[1]
    looked_at, blocks, first = min(rows, size), math.ceil(n / size), (n - rows) // size
    weights = weights_of(q, k, head, looked_at)
    vertical = [float(column) / looked_at for column in weights.sum(0)]
    slash = [mass / looked_at for mass in distance_sums(weights)]

    def granted(line: list[float]) -> int:
        cumulative, tokens = 0.0, 0
        for mass in sorted(line, reverse=True):
            cumulative += mass
            tokens += cumulative <= gamma
        return min(max((tokens + 1) // 128 + 1, least), most)

    column_mass = [sum(vertical[b * size : (b + 1) * size]) for b in range(blocks)]
    group_mass = [0.0] * blocks
    for distance in range(n):
        group_mass[(n - 1 - distance) // size] += slash[distance]

    keys = [part.double().mean(0) for part in k[head // 2].split(size)]
    last = q[head, n - looked_at :].double().mean(0)
    guess = torch.softmax(torch.stack([last @ key for key in keys]) / math.sqrt(q.shape[-1]), 0).tolist()
    divergence = 0.0
    for p, r in zip(guess, column_mass):
        divergence += 0.5 * (p * math.log(2 * p / (p + r)) + r * math.log(2 * r / (p + r)))
    aware = math.sqrt(divergence) < tau

    columns = sorted(range(blocks), key=lambda b: (b != 0, -column_mass[b]))
    groups = sorted(range(blocks), key=lambda g: (g != blocks - 1, -group_mass[g]))
    columns = columns[: least if aware else granted(vertical)]
    diagonals = {blocks - 1 - g for g in groups[: least if aware else granted(slash)]}
    chosen = {(i, j) for i in range(first, blocks) for j in range(i + 1) if j in columns or i - j in diagonals}
    if aware:
        pairs = []
        for i in range(first, blocks):
            mean = q[head, max(n - rows, i * size) : (i + 1) * size].double().mean(0)
            shares = torch.softmax(torch.stack([mean @ key for key in keys[: i + 1]]) / math.sqrt(q.shape[-1]), 0)
            pairs += [(float(share), i, j) for j, share in enumerate(shares)]
        cumulative = 0.0
        for share, i, j in sorted(pairs, reverse=True):
            cumulative += share
            if cumulative > gamma * (blocks - first):
                break
            chosen.add((i, j))
    return aware, chosen


@pytest.mark.parametrize(("rows", "n"), [(704, 704), (700, 700), (300, 700), (20, 500)])
@pytest.mark.parametrize(
    ("pattern", "tau", "gamma", "least", "most"),
    [
        (LINES, 0.0, 0.9, 0, None),
        (LINES, 0.1, 0.5, 130, None),
        (FLAT, 0.0, 0.95, 0, 192),
        (FLAT, 0.0, 0.97, 0, None),
        (FLAT, 0.8, 0.6, 0, None),
        (LINES, 0.8, 0.9, 200, 256),
    ],
)
def test_the_published_codes_selection_by_hand(rows, n, pattern, tau, gamma, least, most):
    for size in (64, 128):
        q, k, view, chunk = setup(rows, n, pattern, seed=n + rows)
        method = FlexPrefill(gamma=gamma, tau=tau, block_size=size, min_budget=least, max_budget=most, mode="reference")
        used = method.select_prefill(chunk)
        assert isinstance(used, Blocks)
        used.check()
        blocks = math.ceil(n / size)
        low = min(max(1, math.ceil(least / size)), blocks)
        high = blocks if most is None else min(math.ceil(most / size), blocks)
        for head in range(4):
            aware, expected = reference_by_hand(q, k, head, rows, gamma, tau, size, low, max(low, high))
            found = {(used.first_q_block + i, j) for i, j in used.block_mask()[head].nonzero().tolist()}
            assert found == expected, (head, aware, found ^ expected)
            assert view.length == n


def test_both_kinds_of_heads_were_tried():
    q, k, _, _ = setup(704, 704, FLAT)
    assert reference_by_hand(q, k, 0, 704, 0.6, 0.8, 64, 1, 11)[0]
    assert not reference_by_hand(q, k, 0, 704, 0.6, 0.0, 64, 1, 11)[0]


def test_the_published_code_may_miss_gamma_where_the_fixed_mode_does_not():
    """Columns that lie scattered, one a block: T tokens become T // 128 + 1 blocks, which hold few of them."""
    columns = tuple(range(40, 640, 64))
    q, k, view, _ = setup(700, 700, Planted(sink=0.0, columns=columns, slashes=(), blocks=(), strength=10.0))
    kept = {}
    for mode, lines in (("fixed", "block"), ("reference", "token")):
        method = FlexPrefill(gamma=0.9, tau=0.0, block_size=64, min_budget=0, mode=mode, lines=lines)
        mask = run_method(method, "prefill", q, view, 700)[2].mask()
        kept[mode] = mass_of(q[:, -64:], k, mask[:, -64:]).mean(1)
    assert (kept["fixed"] >= 0.9 - 1e-5).all()
    assert (kept["reference"] < 0.6).all()


def test_gamma_one_is_not_dense_in_the_published_code():
    """The constant 128: with blocks of 64 all columns become half of the blocks."""
    q, _, view, chunk = setup(1280, 1280, FLAT)
    options = {"gamma": 1.0, "tau": 0.0, "block_size": 64, "min_budget": 0}
    assert run_method(FlexPrefill(**options, mode="reference"), "prefill", q, view, 1280)[2].density() < 0.9
    for mode in ("fixed", "paper"):
        assert isinstance(FlexPrefill(**options, mode=mode).select_prefill(chunk), Dense)
    short = setup(128, 128, FLAT)[3]
    assert isinstance(FlexPrefill(**options, mode="reference").select_prefill(short), Dense)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "literal"},
        {"flatten": 1},
        {"flatten": False, "mode": "reference"},
        {"index_rows": "middle"},
        {"pattern_rows": "middle", "mode": "reference"},
        {"index_rows": "first", "mode": "paper"},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        FlexPrefill(**options)
