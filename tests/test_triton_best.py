"""The best of many lists, cut into parts, against a stable sort, under Triton's interpreter: ties, equal scores,
infinities, lists shorter than a part, empty ones and ragged ones."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from best_cases import best_by_sorting, scores_of

from saccade.ops.triton import batched_best, best_near
from saccade.ops.triton.batched_best import find_best
from saccade.ops.triton.batched_lists import choose_keys


@pytest.fixture(autouse=True, params=["by passes", "by one program", "by a sample", "by one that misleads"])
def _short_parts(monkeypatch, request):
    monkeypatch.setattr(batched_best, "SPAN", 128)
    monkeypatch.setattr(batched_best, "SHORT", 8 if "program" in request.param else 0)
    monkeypatch.setattr(batched_best, "NEAR", 8 if "sample" in request.param or "mis" in request.param else 0)
    monkeypatch.setattr(best_near, "SAMPLE", 64)
    if "mis" in request.param:
        monkeypatch.setattr(best_near, "ROOM", 8)
        monkeypatch.setattr(best_near, "SLACK", -0.5)


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
