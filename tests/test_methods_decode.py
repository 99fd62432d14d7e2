"""Exact top-k, streaming and PSA against their definitions, key by key and block by block."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from helpers import Planted, planted_heads, run_method
from kv_helpers import poisoned_pool

from saccade.errors import PolicyError
from saccade.kv.sequence import SequenceKV
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.psa import PSA
from saccade.methods.streaming import Streaming
from saccade.methods.topk import TopK
from saccade.selection import Band, Dense, Ranking, Tokens


def view_of(heads: int, kv_heads: int, n: int, seed: int = 0, **options):
    q, k, v = planted_heads(heads, kv_heads, n, seed=seed, **options)
    return q, k, KVView.from_tensors(k, v, shuffle_seed=seed)


# --- top-k


def sorted_top(scores: list[float], count: int, forced: set[int]) -> list[int]:
    """The forced indices and the best of the others, ties to the lower index."""
    rest = sorted((i for i in range(len(scores)) if i not in forced), key=lambda i: (-scores[i], i))
    return sorted([*forced, *rest[: max(0, count - len(forced))]])


@pytest.mark.parametrize("unit", ["q_head", "kv_head"])
@pytest.mark.parametrize(
    ("k", "sinks", "local"), [(1, 0, 0), (20, 0, 0), (20, 4, 8), (6, 4, 8), (0.1, 3, 0), (0.5, 0, 9)]
)
def test_topk_is_the_sorted_list(unit, k, sinks, local):
    q, keys, view = view_of(4, 2, 150, seed=1)
    method = TopK(k=k, sinks=sinks, local=local, unit=unit, prefill=True)
    for phase, rows in (("prefill", 12), ("prefill", 150), ("decode", 1)):
        used = run_method(method, phase, q, view, rows)[2]
        assert isinstance(used, Tokens)
        assert used.units == (4 if unit == "q_head" else 2)
        lists = used.lists()
        for unit_id in range(used.units):
            for row in range(0, rows, 7):
                position = 150 - rows + row
                heads = [unit_id] if unit == "q_head" else [2 * unit_id, 2 * unit_id + 1]
                kv_head = heads[0] // 2
                logits = q[heads, position] @ keys[kv_head, : position + 1].T / math.sqrt(32)
                scores = logits[0] if unit == "q_head" else torch.softmax(logits, -1).mean(0)
                n = position + 1
                forced = {*range(min(sinks, n)), *range(max(0, n - local), n)}
                wanted = k if isinstance(k, int) else max(1, math.ceil(k * n - 1e-9))
                expected = sorted_top(scores.tolist(), min(n, wanted), forced)
                assert lists[unit_id * rows + row].tolist() == expected


def test_ties_go_to_the_lower_index():
    """Only four different keys, repeated: most logits tie exactly."""
    rng = torch.Generator().manual_seed(3)
    base = torch.randn(1, 4, 32, generator=rng)
    k = base[:, torch.arange(80) % 4].contiguous()
    q = torch.randn(2, 1, 32, generator=rng)
    view = KVView.from_tensors(k, torch.randn(1, 80, 32, generator=rng))
    for count in (3, 20, 21, 33):
        used = run_method(TopK(k=count), "decode", q, view, 1)[2]
        for head, chosen in enumerate(used.lists()):
            order = (q[head] @ base[0].T)[0].argsort(descending=True).tolist()
            ranked = [i for kind in order for i in range(kind, 80, 4)]
            assert chosen.tolist() == sorted(ranked[:count])


@pytest.mark.parametrize(
    ("k", "visible", "expected"), [(5, 3, 3), (5, 5, 5), (0.1, 30, 3), (0.07, 100, 7), (0.01, 5, 1)]
)
def test_a_fraction_of_the_visible_keys_rounds_up(k, visible, expected):
    assert TopK(k=k).budget(visible) == expected


@pytest.mark.parametrize(
    "options", [{"k": 0}, {"k": 1.5}, {"k": True}, {"k": -3}, {"k": "a"}, {"sinks": -1}, {"unit": "layer"}]
)
def test_bad_topk_options(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        TopK(**options)


# --- streaming


@pytest.mark.parametrize(("sinks", "window"), [(0, 1), (4, 1), (0, 16), (4, 60), (100, 3)])
def test_streaming_reads_sinks_and_window_and_nothing_else(sinks, window):
    q, _, view = view_of(2, 1, 130, seed=2)
    for phase, rows in (("prefill", 130), ("prefill", 7), ("decode", 1)):
        mask = run_method(Streaming(sinks, window), phase, q, view, rows)[2].mask()
        for row in range(rows):
            p = 130 - rows + row
            expected = [i <= p and (i < sinks or p - i < window) for i in range(130)]
            assert mask[0, row].tolist() == expected


@pytest.mark.parametrize(("n", "kind"), [(63, Dense), (64, Dense), (65, Band)])
def test_streaming_is_dense_within_its_budget(n, kind):
    q, _, view = view_of(2, 1, n)
    assert isinstance(Streaming(sinks=4, window=60).select_prefill(Chunk.of(q, view)), kind)


# --- PSA


def arkvale(q: torch.Tensor, keys: torch.Tensor, block: int, size: int) -> float:
    """sum_d max(q_d hi_d, q_d lo_d) with hi, lo = c +- u, channel by channel."""
    part, total = keys[block * size : (block + 1) * size], 0.0
    for d in range(q.shape[0]):
        column = part[:, d].tolist()
        center = (max(column) + min(column)) / 2
        spread = sum(abs(center - x) for x in column) / len(column)
        total += max(float(q[d]) * (center + spread), float(q[d]) * (center - spread))
    return total


@pytest.mark.parametrize("unit", ["kv_head", "layer"])
@pytest.mark.parametrize(("n", "size"), [(450, 32), (448, 32), (300, 16)])
def test_psa_ranks_by_arkvales_criticality(unit, n, size):
    q, keys, view = view_of(4, 2, n, seed=4, head_dim=8)
    method = PSA(block_size=size, unit=unit, microbatch=2, rank="cuboid")
    ranking = method.select_decode(Query.of(q[:, -1:], view), None)
    assert isinstance(ranking, Ranking)
    ranking.check()
    full, partial = divmod(n, size)
    fixed = [0, 1, full - 1, *([full] if partial else [])]
    for u in range(ranking.units):
        assert ranking.always[u].tolist() == fixed
        heads = range(4) if unit == "layer" else range(2 * u, 2 * u + 2)
        rest = [b for b in range(full) if b not in fixed]
        score = {b: sum(arkvale(q[h, -1], keys[h // 2], b, size) for h in heads) for b in rest}
        got = ranking.order[u].tolist()
        assert sorted(got) == rest
        assert all(score[a] >= score[b] - 1e-3 for a, b in pairwise(got))


@pytest.mark.parametrize("n", [*range(223, 227), 255, 256, 257, 258, 287, 288, 289, 320])
def test_psa_always_reads_sinks_last_and_partial_blocks(n):
    q, _, view = view_of(4, 2, n, seed=5)
    chosen = PSA(epsilon=0.0, microbatch=1, rank="cuboid").select_decode(Query.of(q[:, -1:], view), None)
    full, partial = divmod(n, 32)
    if n <= (3 + bool(partial) + 1) * 32:
        assert isinstance(chosen, Dense)
        return
    assert isinstance(chosen, Ranking)
    chosen.check()
    assert chosen.always[0].tolist() == [0, 1, full - 1, *([full] if partial else [])]
    assert not set(chosen.always[0].tolist()) & set(chosen.order[0].tolist())
    assert chosen.always.shape[1] + chosen.order.shape[1] == full + bool(partial)


@pytest.mark.parametrize(
    ("n", "microbatch", "dense"), [(224, 4, True), (225, 4, False), (256, 4, False), (128, 1, True)]
)
def test_psa_is_dense_where_little_could_be_skipped(n, microbatch, dense):
    """n <= (always blocks + microbatch) * block: 224 has 3 always blocks; 225 opens a partial one, 256 does not."""
    q, _, view = view_of(4, 2, n)
    chosen = PSA(microbatch=microbatch, rank="cuboid").select_decode(Query.of(q[:, -1:], view), None)
    expected = n <= (3 + bool(n % 32) + microbatch) * 32
    assert isinstance(chosen, Dense) == expected
    assert dense == expected or n == 225


def test_psa_equal_scores_go_to_the_lower_block():
    rng = torch.Generator().manual_seed(6)
    k = torch.randn(1, 32, 16, generator=rng).repeat(1, 14, 1)  # every block the same keys
    view = KVView.from_tensors(k, torch.randn(1, 448, 16, generator=rng))
    ranking = PSA(rank="cuboid").select_decode(Query.of(torch.randn(2, 1, 16, generator=rng), view), None)
    assert isinstance(ranking, Ranking)
    assert ranking.order[0].tolist() == list(range(2, 13))


def test_psa_reads_more_with_epsilon_and_finds_the_hot_block():
    q, _, view = view_of(4, 2, 900, seed=7, pattern=Planted(sink=2.0, columns=(), slashes=(), blocks=(9,)))
    before = None
    for epsilon in (0.0, 0.5, 0.9, 0.99, 1.0):
        mask = run_method(PSA(epsilon=epsilon, microbatch=1, rank="cuboid"), "decode", q, view, 1)[2].mask()
        assert mask[:, 0, 9 * 32 : 10 * 32].all()
        assert before is None or not (before & ~mask).any()
        before = mask
    assert before is not None
    assert before.all()


def test_psa_on_summaries_kept_along_the_way_equals_fresh_ones():
    """Ragged appends, a truncation and regrowth: the store's summaries rank as those of a store filled at once."""
    q, k, v = planted_heads(4, 2, 700, seed=8)
    pool = poisoned_pool(64, 2, 32)
    kv, at = SequenceKV(pool), 0
    kv.reserve(700)
    for step in (1, 30, 1, 33, 200, 64, 1, 90, 280):
        kv.append(0, k[:, at : at + step], v[:, at : at + step])
        at += step
        for size in (16, 32, 64):
            fresh = KVView.from_tensors(k[:, :at], v[:, :at]).summary("cuboid", size)
            torch.testing.assert_close(kv.view(0).summary("cuboid", size), fresh)
        if at == 329:
            kv.truncate(211)
            kv.reserve(700)
            kv.append(0, k[:, 211:329], v[:, 211:329])
    assert at == 700
    for options in ({"rank": "cuboid"}, {"block_size": 16, "unit": "layer", "rank": "cuboid"}):
        kept = PSA(**options).select_decode(Query.of(q[:, -1:], kv.view(0)), None)
        fresh = PSA(**options).select_decode(Query.of(q[:, -1:], KVView.from_tensors(k, v)), None)
        assert torch.equal(kept.order, fresh.order)


@pytest.mark.parametrize(
    "options",
    [
        {"epsilon": 1.01},
        {"epsilon": float("nan")},
        {"block_size": 12},
        {"block_size": 32.0},
        {"microbatch": 0},
        {"unit": "q_head"},
        {"rest": "max"},
        {"stop": "any"},
    ],
)
def test_bad_psa_options(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        PSA(**options)
