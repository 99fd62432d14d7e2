"""Lists that many programs search on a GPU: against a stable sort in float64, with inputs drawn anew at each run, in a
recorded graph whose lengths change, and the same from launch to launch."""

from __future__ import annotations

import os

import pytest
import torch

from saccade.ops.triton.batch import KeyLists, Pages
from saccade.ops.triton.batched_lists import choose_keys
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.batched_tokens import score_keys
from saccade.ops.triton.best_parts import BOUNDS

SEED = int.from_bytes(os.urandom(3), "big")


def scores_of(kind: str, rows: int, units: int, n: int, rng: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(rows, 2 * units, n, generator=rng, device="cuda")
    if kind == "ties":
        drawn = (4 * drawn).round() / 4
    elif kind == "equal":
        drawn = torch.full_like(drawn, 0.125)
    elif kind == "heavy":
        drawn = torch.full_like(drawn, float("-inf")).index_fill_(2, torch.tensor([n // 3], device="cuda"), 2.0)
    elif kind == "weights":
        drawn = torch.softmax(8 * drawn, -1)
    return drawn[:, ::2]


def expected(scores: torch.Tensor, bounds: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
    lists = []
    for row, (first, last, low, high, take) in enumerate(bounds.tolist()):
        for line in scores[row].double():
            keys = torch.arange(first, last, device="cuda")
            keys = keys[(keys < low) | (keys >= high)]
            best = keys[torch.sort(line[keys], descending=True, stable=True).indices[:take]].sort().values
            ends = torch.arange(first, device="cuda"), torch.arange(last, int(lengths[row]), device="cuda")
            lists.append(torch.cat([ends[0], best, ends[1]]).to(torch.int32))
    return lists


@pytest.mark.parametrize("kind", ["plain", "ties", "equal", "heavy", "weights"])
@pytest.mark.parametrize(("units", "n"), [(1, 131072), (8, 98304), (32, 20000), (8, 12000), (3, 700)])
def test_the_best_of_every_list(kind, units, n):
    rng = torch.Generator("cuda").manual_seed(SEED + n)
    scores = scores_of(kind, 3, units, n, rng)
    k = max(1, n // 40)
    bounds = [[4, n - 70, 0, 0, k], [16, n // 2, 100, n // 3, 3 * k], [0, n // 50, 0, 0, k // 3]]
    bounds = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    lengths = (bounds[:, 1] + 6).contiguous()
    counts = torch.empty(3 * units, dtype=torch.int32, device="cuda")
    indices = torch.full((3 * units, n), -1, dtype=torch.int32, device="cuda")
    wanted = expected(scores, bounds, lengths)
    for again in range(50):
        before = indices.clone()
        indices.fill_(-1)
        choose_keys(scores, bounds, lengths, counts, indices)
        assert not again or torch.equal(before, indices), SEED
    for entry, keys in enumerate(wanted):
        assert torch.equal(indices[entry, : counts[entry]], keys), (SEED, entry)


def test_a_recorded_search_reads_lengths_from_the_device():
    units, n, rng = 8, 60000, torch.Generator("cuda").manual_seed(SEED)
    scores, bounds = scores_of("plain", 2, units, n, rng), torch.zeros(2, BOUNDS, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(2, dtype=torch.int32, device="cuda")
    counts = torch.empty(2 * units, dtype=torch.int32, device="cuda")
    indices = torch.empty(2 * units, n, dtype=torch.int32, device="cuda")
    choose_keys(scores, bounds, lengths, counts, indices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose_keys(scores, bounds, lengths, counts, indices)
    for length, other, take in ((60000, 100, 50), (3000, 59999, 2000), (7, 0, 3)):
        lengths.copy_(torch.tensor([length, other]))
        rows = [[min(3, one), max(min(3, one), one - 9), 0, 0, take] for one in (length, other)]
        bounds.copy_(torch.tensor(rows))
        scores.copy_(scores_of("ties", 2, units, n, rng))
        graph.replay()
        for entry, keys in enumerate(expected(scores, bounds, lengths)):
            assert torch.equal(indices[entry, : counts[entry]], keys), (SEED, length, entry)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("units", [8, 2])
@pytest.mark.parametrize("listed", [False, True])
def test_scores_are_those_of_float64(units, listed, dtype):
    heads, kv_heads, d, size, lengths = 8, 2, 96, 16, [5000, 0, 77]
    rng = torch.Generator("cuda").manual_seed(SEED)
    slots = sum(-(-length // size) for length in lengths)
    k = torch.randn(slots, kv_heads, size, d, generator=rng, device="cuda").to(dtype)
    order, tables, used = torch.randperm(slots, generator=rng, device="cuda").to(torch.int32), [], 0
    for length in lengths:
        own = order[used : used + -(-length // size)]
        tables.append(torch.nn.functional.pad(own, (0, 400 - len(own))))
        used += len(own)
    table = torch.stack(tables)[:, None]
    q = torch.randn(heads, 3, d, generator=rng, device="cuda").to(dtype).transpose(0, 1)
    pages = Pages(k, k, table, torch.tensor(lengths, dtype=torch.int32, device="cuda"), 6400)
    none = torch.zeros(3, dtype=torch.int32, device="cuda")
    cones = torch.zeros(3, 4, dtype=torch.float64, device="cuda")
    rows = LayerRows(0, q, pages, none[:, None].long(), cones, cones, none, none, d**-0.5)
    lists, idle = None, None
    if listed:
        counts = torch.tensor([min(length, 300) for length in lengths], device="cuda").repeat_interleave(units)
        indices = torch.zeros(3 * units, 6400, dtype=torch.int32, device="cuda")
        for entry, count in enumerate(counts.tolist()):
            some = torch.randperm(lengths[entry // units], generator=rng, device="cuda")[:count].sort().values
            indices[entry, :count] = some.to(torch.int32)
        lists = KeyLists(None, counts.to(torch.int32), indices, units, 1, 6400)
        idle = (torch.arange(3 * heads, device="cuda") % 5 == 0).to(torch.int8)
    runs = [score_keys(rows, units, lists, idle) for _ in range(20)]
    for row in (0, 2):
        length = lengths[row]
        keys = k[table[row, 0].long()].transpose(1, 2).flatten(0, 1)[:length].double()  # [n, kv_heads, d]
        logits = torch.einsum("hd,nhd->hn", q[row].double(), keys.repeat_interleave(heads // kv_heads, 1)) * d**-0.5
        for unit in range(units):
            entry = row * units + unit
            which = torch.arange(length, device="cuda") if lists is None else lists.indices[entry, :300][:length].long()
            own = logits[unit * heads // units : (unit + 1) * heads // units, which]
            if units == heads:
                wanted = own[0] * 1.4426950408889634
            else:
                shares = own.softmax(1)
                if idle is not None:
                    at = row * heads + unit * heads // units
                    shares = shares * (idle[at : at + heads // units] == 0)[:, None]
                wanted = shares.mean(0)
            got = runs[0][row, unit, : len(which)].double()
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4 if units == heads else 1e-7)
            assert all(torch.equal(one[row, unit, : len(which)], runs[0][row, unit, : len(which)]) for one in runs)
