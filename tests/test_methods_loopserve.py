"""LoopServe's prefill: the greedy cover by hand, what alpha promises, tiny turns, reproducible samples."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from covering import covered
from helpers import Planted, generator, mass_of, planted_heads, run_method

from saccade.errors import ModelError, PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.loopserve import LoopServe
from saccade.methods.loopserve.line_cover import cover_lines
from saccade.selection import Dense, Lines

PLANTED = Planted(columns=(7, 301), slashes=(13, 190), blocks=(), strength=12.0)


def causal_rows(n: int, first: int, count: int, seed: int, sharpness: float = 2.0):
    """Random softmax rows at ``count`` sorted positions within ``first .. n - 1``: (weights [count, n], positions)."""
    rng = generator(seed)
    positions = first + torch.randperm(n - first, generator=rng)[:count].sort().values
    scores = sharpness * torch.randn(count, n, generator=rng)
    scores[:, ::7] += 2.0
    scores = scores.masked_fill(torch.arange(n) > positions[:, None], -torch.inf)
    return torch.softmax(scores, -1), positions


def union_mask(columns, distances, rows: torch.Tensor, n: int) -> torch.Tensor:
    keys = torch.arange(n)
    distance = rows[:, None] - keys
    on_line = torch.isin(keys, columns)[None, :] | torch.isin(distance, distances)
    return on_line & (distance >= 0)


def greedy_by_hand(weights, positions, first: int, share: float) -> list[tuple[str, int]]:
    """Every line's new weight and cells counted cell by cell, each time anew; slashes win ties, then lower lines."""
    n = weights.shape[1]
    weight = {(p, c): float(weights[j, c]) for j, p in enumerate(positions.tolist()) for c in range(p + 1)}
    cells = {
        **{("slash", o): {(p, p - o) for p in range(max(first, o), n)} for o in range(n)},
        **{("column", c): {(p, c) for p in range(max(first, c), n)} for c in range(n)},
    }
    order, read, total = [], set(), sum(weight.values())

    def new(line):
        return cells[line] - read

    def worth(line):
        return sum(weight.get(cell, 0.0) for cell in new(line)) / max(1, len(new(line)))

    todo = [("slash", 0), ("column", 0)]
    while todo or sum(weight.get(cell, 0.0) for cell in read) < share * total:
        if todo:
            line = todo.pop(0)
        else:
            free = [line for line in cells if line not in order]
            line = max(free, key=lambda line: (worth(line), line[0] == "slash", -line[1]))
        order.append(line)
        read |= cells[line]
    return order


@pytest.mark.parametrize(("n", "first", "count"), [(24, 0, 24), (24, 0, 7), (30, 18, 12), (30, 18, 4), (20, 19, 1)])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_exact_overlap_is_the_greedy_cover_by_hand(n, first, count, share):
    weights, positions = causal_rows(n, first, count, seed=n + count)
    cover = cover_lines(weights, positions, first, share)
    expected = greedy_by_hand(weights, positions, first, share)
    assert cover.distances.tolist() == [line for kind, line in expected if kind == "slash"]
    assert cover.columns.tolist() == [line for kind, line in expected if kind == "column"]


@pytest.mark.parametrize("count", [1, 16, 80])
@pytest.mark.parametrize("share", [0.0, 0.7, 0.955, 0.995, 0.99999])
def test_exact_overlap_recovers_the_mass_of_the_union(count, share):
    weights, positions = causal_rows(300, 220, count, seed=count)
    before = weights.clone()
    cover = cover_lines(weights, positions, 220, share)
    assert torch.equal(weights, before)
    mass = float(weights[union_mask(cover.columns, cover.distances, positions, 300)].double().sum())
    assert cover.recovered == pytest.approx(mass, abs=1e-5)
    assert mass >= share * count - 1e-4


def paper_by_hand(weights, positions, first: int, share: float) -> tuple[list[int], list[int], float]:
    """Alg. 2 with chosen lines removed and denominators of at least 1; diagonal 0 where the first row has no key."""
    n = weights.shape[1]
    entries = {("s", o): [0.0] for o in range(n)} | {("v", c): [0.0] for c in range(n)}
    for j, p in enumerate(positions.tolist()):
        for c in range(p + 1):
            entries["s", p - c].append(float(weights[j, c]))
            entries["v", c].append(float(weights[j, c]))
    queues = {kind: sorted(range(n), key=lambda line: (-sum(entries[kind, line]), line)) for kind in ("s", "v")}
    chosen: dict[str, list[int]] = {"s": [], "v": []}
    overlap, recovered = {"s": 0.0, "v": 0.0}, 0.0
    total = float(weights.double().sum())

    def gain(kind, other):
        line = queues[kind][0]
        new = sum(entries[kind, line]) - overlap[other]
        return new, new / max(1, min(n - first, n - line) - len(chosen[other]))

    while recovered < share * total and (queues["s"] or queues["v"]):
        if not queues["v"]:
            kind, other = "s", "v"
        elif not queues["s"] or gain("s", "v")[1] < gain("v", "s")[1]:
            kind, other = "v", "s"
        else:
            kind, other = "s", "v"
        recovered += gain(kind, other)[0]
        line = queues[kind].pop(0)
        overlap[kind] += max(entries[kind, line])
        chosen[kind].append(line)
    if min(chosen["s"] + chosen["v"], default=n) > first:
        chosen["s"].append(0)
    return chosen["v"], chosen["s"], recovered


@pytest.mark.parametrize(("n", "first", "count"), [(40, 0, 40), (40, 0, 9), (40, 30, 10), (12, 11, 1)])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_the_papers_bookkeeping_by_hand(n, first, count, share):
    weights, positions = causal_rows(n, first, count, seed=n + first + count, sharpness=3.0)
    cover = cover_lines(weights, positions, first, share, "paper")
    columns, distances, recovered = paper_by_hand(weights, positions, first, share)
    assert cover.columns.tolist() == columns
    assert cover.distances.tolist() == distances
    assert cover.recovered == pytest.approx(recovered, abs=1e-5)


def test_the_paper_forces_no_line():
    """Weight on two columns that every row sees: they are all that Alg. 2 takes. The exact cover takes the first column
    and the diagonal too. Without them a row that sees no chosen column would be left with nothing."""
    n = 60
    for first, column, distances in ((40, 20, []), (0, 20, [0])):
        positions = torch.arange(max(first, column + 1), n)
        weights = torch.zeros(positions.numel(), n)
        weights[:, column], weights[:, column - 9] = 0.7, 0.3
        cover = cover_lines(weights, positions, first, 0.99, "paper")
        assert sorted(cover.columns.tolist()) == [column - 9, column]
        assert cover.distances.tolist() == distances
        exact = cover_lines(weights, positions, first, 0.99)
        assert 0 in exact.columns.tolist()
        assert 0 in exact.distances.tolist()


@pytest.mark.parametrize("taken", ["overlap=exact", "overlap=paper", "take=round"])
def test_a_key_that_is_no_number_is_an_error(taken):
    """In every head's rows, and by chance in those of a sample: it chose the first column and the diagonal alone."""
    q, k, v = planted_heads(4, 2, 300, seed=3)
    k[1, 150, 4] = torch.nan
    method = LoopServe(alpha=0.9, **dict([taken.split("=")]))
    with pytest.raises(ModelError, match="attention weights are not finite"):
        method.select_prefill(Chunk.of(q[:, -150:], KVView.from_tensors(k, v)))
    decode = LoopServe(budget=40, first=0, n_d=4)
    view = KVView.from_tensors(k, v)
    state = decode.begin(Chunk.of(q[:, 290:299], view.upto(299)))
    with pytest.raises(ModelError, match="attention weights are not finite"):
        decode.select_decode(Query.of(q[:, 299:], view), state)


@pytest.mark.parametrize("count", [1, 30, 200])
@pytest.mark.parametrize("share", [0.9, 0.995])
def test_the_papers_bookkeeping_ends_and_never_claims_too_much(count, share):
    weights, positions = causal_rows(250, 50, count, seed=count)
    cover = cover_lines(weights, positions, 50, share, "paper")
    mass = float(weights[union_mask(cover.columns, cover.distances, positions, 250)].double().sum())
    assert cover.recovered <= mass + 1e-4
    assert mass >= share * count - 1e-4


@covered(
    {
        "taken": ["overlap=exact", "overlap=paper", "take=round"],
        "alpha": [0.5, 0.9, 0.955, 0.995],
        ("rows", "samples", "last"): [(700, 64, 0), (700, 40, 24), (200, 256, 64), (65, 30, 40), (1, 256, 0)],
    }
)
def test_alpha_of_the_sampled_rows_is_kept(taken, alpha, rows, samples, last):
    n = 700
    q, k, v = planted_heads(4, 2, n, seed=rows, pattern=PLANTED)
    view = KVView.from_tensors(k, v)
    method = LoopServe(alpha=alpha, samples=samples, last_rows=last, min_rows=1, **dict([taken.split("=")]))
    used = run_method(method, "prefill", q, view, rows)[2]
    looked_at = method.sample(Chunk.of(q[:, n - rows :], view))
    assert looked_at.numel() == min(rows, samples + last)
    assert (mass_of(q[:, -rows:], k, used.mask())[:, looked_at].mean(1) >= alpha - 1e-5).all()


@pytest.mark.parametrize("rows", [700, 200])
def test_planted_lines_are_found_and_little_else(rows):
    q, k, v = planted_heads(4, 2, 700, seed=1, pattern=PLANTED, noise=0.1)
    used = run_method(LoopServe(alpha=0.9), "prefill", q, KVView.from_tensors(k, v), rows)[2]
    assert isinstance(used, Lines)
    for head in range(4):
        columns, distances = used.unit_lines(head)
        assert {7, 301} <= set(columns.tolist())
        assert {13, 190} <= set(distances.tolist())
    assert used.density() < 0.1


def test_a_question_in_the_middle_is_seen():
    """Rows in the middle of the turn read a column that its last rows ignore: a sample over the turn finds it."""
    q, k, v = planted_heads(2, 1, 700, seed=2, pattern=Planted(columns=(), slashes=(), blocks=()))
    direction = torch.zeros(32)
    direction[2] = 30.0
    k[:, 333] = direction
    q[:, :, 2] = 0.0
    q[:, 400:600, 2] = 5.0
    method = LoopServe(alpha=0.9, samples=64, last_rows=0)
    used = run_method(method, "prefill", q, KVView.from_tensors(k, v), 350)[2]
    assert isinstance(used, Lines)
    assert all(333 in used.unit_lines(head)[0].tolist() for head in range(2))


def test_a_short_question_at_the_end_is_seen_by_the_last_rows_alone():
    """Three rows of 700 look for column 333; a uniform sample of 60 passes them over, and its cover may lose them."""
    q, k, v = planted_heads(2, 1, 700, seed=2, pattern=Planted(columns=(), slashes=(), blocks=()))
    k[:, 333], q[:, :, 2] = 0.0, 0.0
    k[:, 333, 2], q[:, 697:, 2] = 30.0, 5.0
    view, found = KVView.from_tensors(k, v), {}
    for last in (0, 8):
        method = LoopServe(alpha=0.9, samples=60, last_rows=last)
        looked_at = method.sample(Chunk.of(q, view)).tolist()
        assert {697, 698, 699}.isdisjoint(looked_at) == (last == 0)
        used = run_method(method, "prefill", q, view, 700)[2]
        assert isinstance(used, Lines)
        found[last] = mass_of(q, k, used.mask())[:, 697:].min()
    assert found[0] < 0.1
    assert found[8] > 0.9


@pytest.mark.parametrize("overlap", ["exact", "paper"])
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (1, 2), (1, 300), (2, 300), (70, 70)])
def test_tiny_turns_have_keys_in_every_row(overlap, rows, n):
    q, k, v = planted_heads(4, 2, n, seed=n)
    method = LoopServe(alpha=0.0, overlap=overlap, min_rows=1)
    used = run_method(method, "prefill", q, KVView.from_tensors(k, v), rows)[2]
    assert isinstance(used, Lines)
    for head in range(4):
        assert [part.tolist() for part in used.unit_lines(head)] == [[0] if overlap == "exact" else [], [0]]


def test_monotone_in_alpha():
    q, k, v = planted_heads(4, 2, 500, seed=3)
    for overlap in ("exact", "paper"):
        masks = [
            run_method(LoopServe(alpha=alpha, overlap=overlap), "prefill", q, KVView.from_tensors(k, v), 200)[2].mask()
            for alpha in (0.0, 0.3, 0.6, 0.9, 0.99, 1.0)
        ]
        if overlap == "paper":  # the diagonal joins only while a row has no key
            masks = [mask.tril(299) for mask in masks]  # rows 300 .. 499
        assert all(not (small & ~large).any() for small, large in pairwise(masks))


@pytest.mark.parametrize(("rows", "dense"), [(63, True), (64, False)])
def test_short_turns_are_dense(rows, dense):
    q, k, v = planted_heads(4, 2, 300)
    chunk = Chunk.of(q[:, -rows:], KVView.from_tensors(k, v))
    assert isinstance(LoopServe().select_prefill(chunk), Dense) == dense
    assert isinstance(LoopServe(alpha=1.0, min_rows=1).select_prefill(chunk), Dense)


def test_samples_depend_on_seed_layer_and_place_alone():
    q, k, v = planted_heads(4, 2, 600)
    view = KVView.from_tensors(k, v)
    method = LoopServe(samples=50, last_rows=0)

    def drawn(method=method, rows=400, upto=600, **options) -> list[int]:
        torch.manual_seed(len(options))
        np.random.seed(rows)  # no global state may matter
        return method.sample(Chunk.of(q[:, upto - rows : upto], view.upto(upto), **options)).tolist()

    first = drawn()
    assert first == drawn()
    assert first == sorted(set(first))
    assert len(first) == 50
    assert first[0] >= 0
    assert first[-1] < 400
    others = [drawn(layer=1), drawn(LoopServe(samples=50, last_rows=0, seed=1)), drawn(rows=399), drawn(upto=599)]
    assert all(other != first for other in others)
    assert drawn(LoopServe(samples=1000, last_rows=0)) == list(range(400))
    assert drawn(LoopServe(samples=390, last_rows=10)) == list(range(400))
    assert drawn(LoopServe(samples=50, last_rows=30))[50:] == list(range(370, 400))
    assert drawn(LoopServe(samples=1, last_rows=1000)) == list(range(400))


def test_samples_are_spread_over_the_turn():
    q, k, v = planted_heads(1, 1, 1000)
    view = KVView.from_tensors(k, v)
    counts = torch.zeros(1000)
    for seed in range(200):
        counts[LoopServe(samples=100, last_rows=0, seed=seed).sample(Chunk.of(q, view))] += 1
    tenths = counts.view(10, 100).sum(1)
    assert counts.sum() == 20_000
    assert tenths.min() > 1800
    assert tenths.max() < 2200


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 1.1},
        {"alpha": "most"},
        {"samples": 0},
        {"last_rows": -1},
        {"overlap": "none"},
        {"take": "all"},
        {"take": "round", "overlap": "paper"},
        {"min_rows": 0},
        {"seed": -1},
        {"seed": 0.5},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        LoopServe(**options)
