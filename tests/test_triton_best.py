"""The best of many lists, cut into parts, against a stable sort, under Triton's interpreter: ties, equal scores,
infinities, lists shorter than a part, empty ones and ragged ones. And LFPS's candidates, whose scan is cut too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)

from saccade.methods.device_state import Opening
from saccade.methods.lfps import LFPS
from saccade.methods.lfps import tables as score_tables
from saccade.methods.lfps import triton_row_candidates as kernels
from saccade.methods.lfps.method import LFPSState
from saccade.methods.lfps.recorded import RecordedTables
from saccade.methods.lfps.tables import ScoreTables, join_blocks
from saccade.ops.triton import batched_best
from saccade.ops.triton.batched_best import find_best
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.batched_tokens import choose_keys
from saccade.ops.triton.decode import Pages

INF = float("inf")


@pytest.fixture(autouse=True, params=[0, 8], ids=["by parts", "by one program"])
def _short_parts(monkeypatch, request):
    monkeypatch.setattr(batched_best, "SPAN", 128)
    monkeypatch.setattr(batched_best, "SHORT", request.param)


def scores_of(kind: str, units: int, n: int) -> torch.Tensor:
    """[2, units, n] where other heads' scores lie between those of two units."""
    rng = torch.Generator().manual_seed(len(kind))
    drawn = torch.randn(2, 2 * units, n, generator=rng)
    if kind == "ties":
        drawn = (2 * drawn).round() / 8
    elif kind == "equal":
        drawn = torch.full_like(drawn, -0.375)
    elif kind == "close":  # but for the last bits
        drawn = 1 + torch.randint(0, 9, drawn.shape, generator=rng) * 2.0**-23
    elif kind == "one heavy":
        drawn = torch.full_like(drawn, 0.0)
        drawn[..., n // 2] = 1.0
        drawn[..., ::3] = -0.0
    elif kind == "infinite":
        drawn[drawn < 0.5] = -INF
        drawn[..., 5] = INF
    elif kind == "weights":
        drawn = torch.softmax(30 * drawn, -1)
    return drawn[:, ::2]


def best_by_sorting(line, first, last, low, high, take):
    keys = [key for key in range(first, last) if not low <= key < high]
    order = torch.sort(line[keys], descending=True, stable=True).indices[: max(0, take)]
    return sorted(keys[at] for at in order.tolist())


@pytest.mark.parametrize("kind", ["plain", "ties", "equal", "close", "one heavy", "infinite", "weights"])
def test_the_best_of_every_list(kind):
    units, n = 2, 400
    scores = scores_of(kind, units, n)
    every = [
        [[3, 390, 0, 0, 77], [0, 400, 65, 220, 100]],
        [[2, 340, 100, 101, 1], [128, 256, 0, 0, 128]],
        [[10, 50, 0, 0, 20], [400, 400, 0, 0, 9]],  # shorter than a part; empty
        [[0, 300, 0, 300, 5], [5, 260, 4, 70, 0]],  # all hidden; none wanted
        [[1, 350, 340, 390, 338], [0, 129, 0, 0, 500]],  # all but one; more than there are
    ]
    for bounds in every if kind == "ties" else every[:2]:
        lengths = torch.tensor([min(400, last + 3) for _, last, *_ in bounds], dtype=torch.int32)
        active = torch.tensor([1, 1, 0, 1], dtype=torch.int8)
        counts, indices = torch.full((4,), -1, dtype=torch.int32), torch.full((4, 410), -1, dtype=torch.int32)
        lists = choose_keys(scores, torch.tensor(bounds, dtype=torch.int32), lengths, counts, indices, active)
        assert lists.counts[2] == -1
        for entry in (0, 1, 3):
            row, unit = divmod(entry, units)
            first, last, *others = bounds[row]
            wanted = [*range(first), *best_by_sorting(scores[row, unit], first, last, *others)]
            wanted += range(last, int(lengths[row]))
            assert indices[entry, : counts[entry]].tolist() == wanted, (kind, bounds)
            assert (indices[entry, counts[entry] :] == -1).all()


def test_a_list_has_bounds_of_its_own():
    scores = scores_of("ties", 2, 300)
    bounds = torch.tensor([[0, 300, 0, 0, 40], [9, 9, 0, 0, 3], [250, 290, 0, 0, 39], [1, 299, 0, 0, 1]])
    best = find_best(scores, bounds.to(torch.int32))
    assert (best.each, best.parts) == (1, 3)
    for entry in (0, 2, 3):
        first, last, *others = bounds[entry].tolist()
        line = scores[entry // 2, entry % 2]
        taken = best_by_sorting(line, first, last, *others)
        least = line[taken].min()
        bound, spare = best.words[entry, 2182:].tolist()
        assert (bound ^ (-1 if least < 0 else -(2**31))) == least.view(torch.int32)
        assert spare == int((line[taken] == least).sum())


OPTIONS = [
    {"k": 40, "before": 63, "after": 0, "blocks": 3, "block_size": 16},
    {"k": 300, "before": 1, "after": 40, "gate": "off", "a": 0.9, "unit": "kv_head"},
    {"k": 12, "gate": "off_for_c0", "a": None, "slash_shift_on_read": False, "read_local": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_candidates_over_parts_of_a_list(options, monkeypatch):
    """What spreads does so across the borders of parts."""
    monkeypatch.setattr(kernels, "SPAN", 256)
    monkeypatch.setattr(score_tables.cpu, "serves", lambda table: "patched")
    method = LFPS(**{"blocks": 0, "least": 1, "sinks": 4, "local": 6, **options})
    heads, kv_heads, lengths = 4, 2, [0, 77, 500]
    units = heads if method.unit == "q_head" else kv_heads
    rng = torch.Generator().manual_seed(1)
    words, reals = torch.zeros(3, 32, dtype=torch.int64), torch.zeros(3, 8, dtype=torch.float64)
    states: list = [None] * 3
    for row, length in enumerate(lengths):
        if length:
            vertical, slash = torch.rand(2, units, length - 5, generator=rng) ** 40
            tables = ScoreTables.of(vertical, slash, 4, length - 2)
            nothing = torch.zeros(kv_heads, 8)
            state = LFPSState(tables, nothing, nothing, 0, torch.zeros(heads), length - 1)
            spec = SimpleNamespace(kv_heads=kv_heads)
            kv = SimpleNamespace(pool=SimpleNamespace(storage=SimpleNamespace(device=torch.device("cpu"))))
            states[row] = RecordedTables(Opening([state], kv, spec, 0, length), method)
            words[row, : len(states[row].words(0))] = torch.tensor(states[row].words(0))
            reals[row, :4] = torch.tensor(states[row].reals(0), dtype=torch.float64)
    pool, none = torch.zeros(1, kv_heads, 16, 8), torch.zeros(3, dtype=torch.int32)
    pages = Pages(pool, pool, torch.zeros(3, 1, 32, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), 512)
    q = torch.zeros(3, heads, 8)
    rows = LayerRows(0, q, pages, words, reals, torch.zeros(3, 4, dtype=torch.float64), none, none, 1.0)
    idle = torch.zeros(3 * heads, dtype=torch.int8)
    idle[8:10], idle[11] = 1, 1  # of the last row two heads, or a whole KV head, and another head rest
    size = method.block_size if method.blocks else 0
    marked = (torch.rand(3 * units, 512 // size, generator=rng) < 0.05).to(torch.int8) if size else None
    found = kernels.candidates(rows, units, idle, marked, size)
    scores = (torch.rand(3, units, 512, generator=rng) * 12).round()
    lists = kernels.choose(rows, scores, found, idle, heads, 512)
    for row, length in enumerate(lengths):
        if not length:
            assert lists.counts[row * heads : (row + 1) * heads].tolist() == [0] * heads
            continue
        n, local = length - 4, 6 if method.read_local else 1
        base = torch.full((units,), length - 2 + method.slash_shift_on_read - 4)
        tables, offsets = states[row].states[0].tables, (method.before, method.after)
        expected = score_tables.candidates(tables, n, n - local, method.a, method.gate, offsets, base)
        for unit in range(units):
            entry, each = row * units + unit, heads // units
            wanted = expected[1][expected[0][unit] : expected[0][unit + 1]]
            if marked is not None:
                blocks = marked[entry, : length // size].nonzero().T.to(torch.int32)
                _, wanted = join_blocks(torch.tensor([0, len(wanted)]), wanted, blocks, size, 4, length - local)
            resting = idle[entry * each : (entry + 1) * each].bool()
            wanted = torch.arange(0) if resting.all() else wanted
            budget = method.budget(n)
            if n - (not method.read_local) > budget:
                assert (found.marks[entry, : n - local].nonzero()[:, 0] + 4).tolist() == wanted.tolist()
                assert found.lists.indices[entry, 4 : 4 + found.listed[entry]].tolist() == wanted.tolist()
                take = max(0, budget - local) if method.read_local else budget
                best = best_by_sorting(scores[row, unit], 4, 4 + len(wanted), 0, 0, take)
                taken = [*range(4), *(int(wanted[at - 4]) for at in best), *range(length - local, length)]
            else:
                taken = list(range(length))
            for head in range(entry * each, (entry + 1) * each):
                got = lists.indices[head, : lists.counts[head]].tolist()
                assert got == (list(range(4)) if idle[head] else taken)
