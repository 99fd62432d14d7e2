"""Quest's and ArkVale's pages against their definitions, page by page and channel by channel."""

from __future__ import annotations

import pytest
import torch
from helpers import planted_heads, run_method

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods.arkvale import ArkVale
from saccade.methods.base import Query
from saccade.methods.quest import Quest
from saccade.ops import attend
from saccade.selection import Blocks, Dense

HEADS, KV_HEADS = 4, 2
UNITS = {"q_head": [[0], [1], [2], [3]], "kv_head": [[0, 1], [2, 3]], "layer": [[0, 1, 2, 3]]}


def problem(n: int, seed: int = 1):
    q, k, v = planted_heads(HEADS, KV_HEADS, n, seed=seed)
    return q, k, KVView.from_tensors(k, v, shuffle_seed=seed)


def bound(q: torch.Tensor, page: torch.Tensor) -> float:
    """Quest: what the best imaginable key of a page would score, a channel at a time."""
    total = 0.0
    for d in range(page.shape[1]):
        column = page[:, d].tolist()
        total += max(float(q[d]) * min(column), float(q[d]) * max(column))
    return total


def cuboid(q: torch.Tensor, page: torch.Tensor) -> float:
    """ArkVale: the same over the interval of the middle plus and minus the mean distance from it."""
    total = 0.0
    for d in range(page.shape[1]):
        column = page[:, d].tolist()
        middle = (min(column) + max(column)) / 2
        spread = sum(abs(middle - x) for x in column) / len(column)
        total += max(float(q[d]) * (middle + spread), float(q[d]) * (middle - spread))
    return total


def expected(score, q, k, size: int, heads: list[int], forced: set[int], count: int) -> list[int]:
    """The forced pages and the best others, ``count`` in all."""
    n = k.shape[1]
    pages = range(-(-n // size))
    scores = {
        page: sum(score(q[h, -1], k[h // 2, page * size : (page + 1) * size]) for h in heads) / len(heads)
        for page in pages
        if page not in forced
    }
    best = sorted(scores, key=lambda page: (-scores[page], page))[: max(0, count - len(forced))]
    return sorted([*forced, *best])


def pages_of(blocks: Blocks) -> list[list[int]]:
    return [part.tolist() for part in blocks.indices.tensor_split(blocks.offsets[1:-1])]


@pytest.mark.parametrize("unit", list(UNITS))
@pytest.mark.parametrize("n", [160, 161, 175, 176])
def test_quest_reads_the_pages_of_highest_bound_and_the_current_one(unit, n):
    q, k, view = problem(n)
    method = Quest(budget=70, block_size=16, dense_layers=0, unit=unit)  # 4 pages: budgets are rounded down
    used = run_method(method, "decode", q, view, 1)[2]
    last = (n - 1) // 16
    assert pages_of(used) == [expected(bound, q, k, 16, heads, {last}, 4) for heads in UNITS[unit]]


@pytest.mark.parametrize(("budget", "count"), [(16, 3), (80, 5)])
@pytest.mark.parametrize("n", [165, 176])
def test_a_competing_current_page_is_scored_by_the_keys_it_has(budget, count, n):
    q, k, view = problem(n)
    method = Quest(budget=budget, dense_layers=0, current="competes")
    used = run_method(method, "decode", q, view, 1)[2]
    assert pages_of(used) == [expected(bound, q, k, 16, heads, set(), count) for heads in UNITS["kv_head"]]


def test_the_bound_holds_for_every_key():
    q, k, _ = problem(96)
    for head in range(HEADS):
        for page in range(6):
            keys = k[head // 2, page * 16 : (page + 1) * 16]
            assert float((keys @ q[head, -1]).max()) <= bound(q[head, -1], keys) + 1e-4


@pytest.mark.parametrize("unit", list(UNITS))
@pytest.mark.parametrize("n", [224, 225, 255])
def test_arkvale_reads_sinks_window_and_the_best_pages_between(unit, n):
    q, k, view = problem(n)
    method = ArkVale(budget=5 * 16, block_size=16, sinks=2, window=2, unit=unit)
    used = run_method(method, "decode", q, view, 1)[2]
    last = (n - 1) // 16
    assert pages_of(used) == [expected(cuboid, q, k, 16, heads, {0, 1, last - 1, last}, 5) for heads in UNITS[unit]]


def test_forced_pages_win_over_the_budget():
    q, _, view = problem(300)
    used = run_method(ArkVale(budget=32, block_size=32, sinks=2, window=2), "decode", q, view, 1)[2]
    assert pages_of(used) == [[0, 1, 8, 9]]
    used = run_method(Quest(budget=1, dense_layers=0), "decode", q, view, 1)[2]
    assert pages_of(used) == [[18], [18]]


@pytest.mark.parametrize("n", [129, 144, 160])
def test_all_pages_are_dense(n):
    q, _, view = problem(n)
    for method in (Quest(budget=160, dense_layers=0), ArkVale(budget=160)):
        assert isinstance(method.select_decode(Query.of(q[:, -1:], view), None), Dense)


def test_quest_leaves_its_first_layers_dense():
    q, _, view = problem(300)
    kinds = [Quest(budget=32).select_decode(Query.of(q[:, -1:], view, layer=layer), None) for layer in range(4)]
    assert [type(kind) for kind in kinds] == [Dense, Dense, Blocks, Blocks]


def test_costs_are_the_pages_that_were_scored():
    q, _, view = problem(300)
    for method, pages in ((Quest(budget=64, dense_layers=0), 18), (ArkVale(budget=160), 10 - 4)):
        query = Query.of(q[:, -1:], view)
        method.select_decode(query, None)
        assert (query.cost.scored, query.cost.estimated) == (0, pages)


@pytest.mark.parametrize("method", [Quest(budget=64, dense_layers=0), ArkVale(budget=160, unit="kv_head")])
def test_the_kernels_read_such_pages(method):
    """Sixteen-key pages on 32-key blocks of storage, a list per KV head: on the C++ kernels where there are any."""
    from saccade.ops import cpu

    q, _, view = problem(299)
    selection = method.select_decode(Query.of(q[:, -1:], view), None)
    if cpu.available():
        assert cpu.serves(q[:, -1:], view, selection) is None
    out, _ = attend(q[:, -1:], view, selection)
    exact, _ = attend(q[:, -1:], view, selection, backend="reference")
    torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Quest, {"budget": 0}),
        (Quest, {"block_size": 12}),
        (Quest, {"dense_layers": -1}),
        (Quest, {"unit": "head"}),
        (Quest, {"current": "never"}),
        (ArkVale, {"budget": 2.5}),
        (ArkVale, {"block_size": 16.0}),
        (ArkVale, {"sinks": -1}),
        (ArkVale, {"window": 0}),
        (ArkVale, {"unit": "all"}),
    ],
)
def test_bad_options(kind, options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        kind(**options)
